// Attention of the query rows of one key head over its keys, a block of them after the other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace fastgen {

constexpr int64_t kSlots = 256; // keys whose scores are looked at together: they stay in the first-level cache
constexpr int64_t kPad = 16; // floats: rows of intermediate values start at multiples, a cache line
constexpr float kHidden = -std::numeric_limits<float>::infinity();

inline int64_t padded(int64_t floats) {
  return (floats + kPad - 1) / kPad * kPad;
}

// Where things are; strides in floats. Row `r` of a key head is beam r / group of its query head r % group.
struct Attention {
  const float *query, *key, *value, *bias; // bias may be null
  float* output; // [batch * beams, heads, value_size]
  int64_t batch, beams, key_heads, group, keys, size, value_size;
  int64_t query_row, query_head;
  int64_t key_batch, key_head, key_slot;
  int64_t value_batch, value_head, value_slot;
  int64_t bias_batch, bias_head, bias_beam;
  float scale;

  int64_t heads() const { return key_heads * group; } // of the query
  int64_t rows() const { return group * beams; }
  int64_t pairs() const { return batch * key_heads; } // of a sentence and a key head
};

// What is known of the rows after some of the keys.
class Rows {
 public:
  Rows(int64_t rows, int64_t size, int64_t value_size)
      : size_(padded(size)),
        value_size_(padded(value_size)),
        memory_(rows * (size_ + kSlots + value_size_) + kPad),
        maxima(rows),
        sums(rows) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    queries = memory_.data() + (64 - address % 64) % 64 / sizeof(float);
    scores = queries + rows * size_;
    outputs = scores + rows * kSlots;
  }
  Rows(const Rows&) = delete;

  void reset() {
    std::fill(maxima.begin(), maxima.end(), kHidden);
    std::fill(sums.begin(), sums.end(), 0.0f);
    std::fill(outputs, outputs + static_cast<int64_t>(sums.size()) * value_size_, 0.0f);
  }

  int64_t query_stride() const { return size_; } // rows begin at cache lines
  int64_t output_stride() const { return value_size_; }

 private:
  int64_t size_, value_size_;
  std::vector<float> memory_;

 public:
  float *queries, *scores, *outputs; // outputs: sums of value * e^(score - maximum)
  std::vector<float> maxima; // of the scores
  std::vector<float> sums; // of e^(score - maximum)
};

// What is subtracted from scores: a row that is all hidden so far has no maximum, and -inf - -inf would be NaN.
inline float base_of(float maximum) {
  return maximum == kHidden ? 0.0f : maximum;
}

} // namespace fastgen
