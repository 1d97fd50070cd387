// Part of a row in one pass: its k best logits and its sum of exponentials.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace fastgen {

constexpr int64_t kBlock = 4096; // floats: 16 KiB, read again while they are in the first-level cache
constexpr int64_t kStrip = 128; // floats that are looked through together
constexpr int64_t kRanked = 256; // as many candidates are ranked by counting, more by std::nth_element
constexpr int64_t kBoundByBlock = 128; // the largest k for which a block has four groups of logits, or more, each
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Candidate {
  float logit;
  int32_t token;
};

inline bool is_better(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// A number that is larger for a better candidate.
inline uint64_t key_of(const Candidate& candidate) {
  const float logit = candidate.logit + 0.0f; // -0.0 equals 0.0
  uint32_t bits;
  std::memcpy(&bits, &logit, sizeof bits);
  bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u; // which sort like the logits
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(candidate.token));
}

inline Candidate of_key(uint64_t key) {
  uint32_t bits = key >> 32;
  bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
  Candidate candidate;
  std::memcpy(&candidate.logit, &bits, sizeof bits);
  candidate.token = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key));
  return candidate;
}

// What is known of the tokens seen so far. Tokens come in ascending order, and the candidates stay in it.
class Scan {
 public:
  explicit Scan(int64_t k) : k_(k), logits_(2 * k + 2 * kStrip), tokens_(logits_.size()) {}

  void reset() {
    size_ = 0;
    at_least_ = -FLT_MAX; // -inf, NaN and banned tokens are no candidates: they fill up what is left
    maximum_ = kNone;
    sum_ = 0;
    has_nan_ = false;
  }

  int64_t k() const { return k_; }
  float at_least() const { return at_least_; } // what a candidate must reach
  float maximum() const { return maximum_; }

  int64_t size() const { return size_; } // of the candidates
  float* logits() { return logits_.data(); } // theirs, with room for kStrip behind
  int32_t* tokens() { return tokens_.data(); }
  bool is_full() const { return size_ + 2 * kStrip > static_cast<int64_t>(logits_.size()); } // for one more strip
  void add(float logit, int32_t token) {
    logits_[size_] = logit;
    tokens_[size_++] = token;
  }

  void saw_nan() { has_nan_ = true; }
  void raise(float at_least) { at_least_ = std::max(at_least_, at_least); }
  void add_sum(double sum) { sum_ += sum; } // of e^(x - maximum())

  void raise_maximum(float maximum) {
    if (maximum > maximum_) {
      sum_ *= std::exp(static_cast<double>(maximum_) - maximum);
      maximum_ = maximum;
    }
  }

  // Of the candidates only the k best are left, the worst of them with this logit. Later tokens must be better,
  // as ties go to the lower token.
  void kept(float worst) {
    size_ = k_;
    raise(std::nextafter(worst, std::numeric_limits<float>::infinity()));
  }

  std::vector<Candidate> candidates() const {
    std::vector<Candidate> all(size_);
    for (int64_t i = 0; i < size_; ++i) {
      all[i] = {logits_[i], tokens_[i]};
    }
    return all;
  }

  // The k best of many, or all if they are fewer, the best first.
  std::vector<Candidate> sorted() const {
    std::vector<uint64_t> keys(size_); // numbers sort in half the time that candidates take
    for (int64_t i = 0; i < size_; ++i) {
      keys[i] = key_of({logits_[i], tokens_[i]});
    }
    if (size_ > k_) {
      std::nth_element(keys.begin(), keys.begin() + (k_ - 1), keys.end(), std::greater<uint64_t>());
      keys.resize(k_);
    }
    std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
    std::vector<Candidate> best(keys.size());
    std::transform(keys.begin(), keys.end(), best.begin(), of_key);
    return best;
  }

  // Keep the k best of many.
  void select() {
    std::vector<Candidate> all = candidates();
    std::nth_element(all.begin(), all.begin() + (k_ - 1), all.end(), is_better);
    const float worst = all[k_ - 1].logit;
    all.resize(k_);
    std::sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
    size_ = 0;
    for (const Candidate& candidate : all) {
      add(candidate.logit, candidate.token);
    }
    kept(worst);
  }

  // Take in a scan of later tokens of the same row.
  void merge(const Scan& later) {
    has_nan_ |= later.has_nan_;
    const float maximum = std::max(maximum_, later.maximum_);
    if (std::isfinite(maximum)) {
      raise_maximum(maximum);
      if (later.maximum_ != kNone) {
        sum_ += later.sum_ * std::exp(static_cast<double>(later.maximum_) - maximum);
      }
    } else {
      has_nan_ |= std::isnan(sum_) || std::isnan(later.sum_);
      maximum_ = maximum;
    }
    if (size_ + later.size_ + 2 * kStrip > static_cast<int64_t>(logits_.size())) {
      logits_.resize(size_ + later.size_ + 2 * kStrip);
      tokens_.resize(logits_.size());
    }
    for (int64_t i = 0; i < later.size_; ++i) {
      add(later.logits_[i], later.tokens_[i]);
    }
    if (size_ > k_) {
      select();
    }
  }

  // Of e^(x - maximum()).
  double log_sum() const {
    if (has_nan_ || std::isnan(sum_)) {
      return std::numeric_limits<double>::quiet_NaN();
    }
    return std::isfinite(maximum_) ? std::log(sum_) : 0;
  }

  double log_sum_exp() const { return maximum_ + log_sum(); }

 private:
  int64_t k_;
  std::vector<float> logits_; // longer than size_, and so is tokens_
  std::vector<int32_t> tokens_;
  int64_t size_ = 0;
  float at_least_ = -FLT_MAX;
  float maximum_ = kNone;
  double sum_ = 0;
  bool has_nan_ = false;
};

// A part of a row of logits: tokens `begin` (a multiple of kBlock) to `end`.
template <typename Logit>
struct Part {
  const Logit* row;
  int64_t begin, end;
  const int64_t* banned; // ascending, without repetitions
  const int64_t* banned_end;
};

} // namespace fastgen
