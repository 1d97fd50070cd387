// fastgen::beam_candidates and fastgen::advance_beams_ on the CPU.
#include "parallel.h"
#include "topk_rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <queue>
#include <tuple>

namespace fastgen {
namespace {

constexpr int64_t kCandidatesPerTask = 1 << 10; // below that another thread costs more than it saves
constexpr int64_t kTokensPerTask = 1 << 13;
constexpr float kDead = -1.0e9f; // the host's mark of a beam that must not be chosen
constexpr float kReal = 0.1f * kDead; // what is worth less was marked
constexpr float kNone = -std::numeric_limits<float>::infinity();

// --- beam_candidates ---

struct RowsBest {
  int64_t width; // of each row
  std::vector<float> log_probs, log_sum_exp;
  std::vector<int64_t> tokens;
};

RowsBest best_of_rows(const Tensor& logits, int64_t width, const std::optional<Tensor>& banned, bool are_log_probs) {
  const int64_t rows = logits.size(0), stride = logits.stride(0), step = logits.stride(1);
  RowsBest best{
      width, std::vector<float>(rows * width), std::vector<float>(rows), std::vector<int64_t>(rows * width)};
  topk_rows(logits, width, banned, {best.log_probs.data(), best.tokens.data(), best.log_sum_exp.data()});
  if (are_log_probs) {
    const float* const given = data_of<float>(logits);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = row * width; i < (row + 1) * width; ++i) {
        if (best.log_probs[i] != kNone) { // that of what is banned, whatever its own is
          best.log_probs[i] = given[row * stride + best.tokens[i] * step];
        }
      }
    }
  }
  return best;
}

// Where a sentence's candidates are written, k of each.
struct Candidates {
  float* scores;
  int64_t *tokens, *parents;
};

// The best of one sentence's beams together; returns whether each is better than the next, and the last than the best
// of those left out: else `torch.topk` has to order them.
bool merge_beams(const RowsBest& best, const float* scores, int64_t sentence, int64_t beams, int64_t k, Candidates out) {
  struct Next {
    float total;
    int64_t beam, place;
    bool operator<(const Next& other) const { return total < other.total; }
  };
  bool is_clear = true;
  const auto total = [&](int64_t beam, int64_t place) {
    return best.log_probs[(sentence * beams + beam) * best.width + place] + scores[sentence * beams + beam];
  };
  std::priority_queue<Next> queue;
  for (int64_t beam = 0; beam < beams; ++beam) {
    is_clear = is_clear && std::abs(best.log_sum_exp[sentence * beams + beam]) < std::numeric_limits<float>::infinity();
    is_clear = is_clear && !std::isnan(total(beam, 0)); // which no queue can order
    queue.push({total(beam, 0), beam, 0});
  }
  float before = 0;
  for (int64_t i = 0; i <= k && !queue.empty(); ++i) {
    const Next next = queue.top();
    queue.pop();
    is_clear = is_clear && (i == 0 || before > next.total);
    before = next.total;
    if (i < k) {
      out.scores[i] = next.total;
      out.tokens[i] = best.tokens[(sentence * beams + next.beam) * best.width + next.place];
      out.parents[i] = next.beam;
    }
    if (next.place + 1 < best.width) {
      queue.push({total(next.beam, next.place + 1), next.beam, next.place + 1});
    }
  }
  return is_clear;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> beam_candidates(
    const Tensor& logits, const Tensor& scores, int64_t k, const std::optional<Tensor>& banned, bool are_log_probs) {
  check_candidates(logits, scores, k, banned);
  const int64_t batch = scores.size(0), beams = scores.size(1);
  Tensor best_scores = make({batch, k}, ScalarType::Float, logits);
  Tensor tokens = make({batch, k}, ScalarType::Long, logits);
  Tensor parents = make({batch, k}, ScalarType::Long, logits);
  Tensor is_clear = make({1}, ScalarType::Long, logits);
  std::atomic<bool> are_clear{true};
  if (batch > 0) {
    const Tensor sums = dense(scores);
    const RowsBest best = best_of_rows(logits, k + 1, banned, are_log_probs);
    const Candidates out{
        mutable_data_of<float>(best_scores), mutable_data_of<int64_t>(tokens), mutable_data_of<int64_t>(parents)};
    const float* const so_far = data_of<float>(sums);
    const int64_t grain = std::max<int64_t>(1, kCandidatesPerTask / k);
    parallel_for(0, batch, grain, [&](int64_t begin, int64_t end) {
      for (int64_t sentence = begin; sentence < end; ++sentence) {
        const int64_t first = sentence * k;
        if (!merge_beams(best, so_far, sentence, beams, k, {out.scores + first, out.tokens + first, out.parents + first})) {
          are_clear = false;
        }
      }
    });
  }
  *mutable_data_of<int64_t>(is_clear) = are_clear ? 1 : 0;
  return {best_scores, tokens, parents, is_clear};
}

// --- advance_beams_ ---

// All sentences' beams and finished hypotheses: what the tensors of the same names hold.
struct Beams {
  int64_t batch, beams, candidates, longest, steps;
  int64_t *tokens, *finished_tokens; // [batch, beams, longest]
  int32_t *rows, *finished_rows; // [batch, beams, steps]
  float *scores, *finished_scores; // [batch, beams]
  bool* is_finished; // [batch, beams]
  bool* improvable; // [batch]
  const int64_t* sentence; // [batch]
  const float* candidate_scores; // [batch, candidates], as the following
  const int64_t *candidate_tokens, *candidate_parents;
  const bool* stopped;
  int64_t length, step;
  float divisor, best_divisor;
  bool early_stopping;
};

// What is decided of one sentence.
struct Choice {
  std::vector<int64_t> next; // the candidates that go on, the best first
  std::vector<int64_t> finished; // places of the finished hypotheses; from `beams` on, the candidates
  std::vector<float> finished_scores;
  bool has_new;
};

// Decides how a sentence goes on, without a change; returns false where equal or marked scores leave the order to torch.
bool choose(const Beams& all, int64_t b, Choice& choice) {
  const float* const scores = all.candidate_scores + b * all.candidates;
  const bool* const stopped = all.stopped + b * all.candidates;
  const int64_t* const parents = all.candidate_parents + b * all.candidates;
  const float* const finished = all.finished_scores + b * all.beams;
  choice.next.clear();
  choice.finished.clear();
  choice.finished_scores.clear();
  for (int64_t c = 0; c < all.candidates; ++c) {
    if ((c > 0 && !(scores[c - 1] > scores[c])) || parents[c] < 0 || parents[c] >= all.beams) {
      return false;
    }
    if (!stopped[c] && static_cast<int64_t>(choice.next.size()) < all.beams) {
      if (!(scores[c] > kReal)) {
        return false;
      }
      choice.next.push_back(c);
    }
  }
  if (static_cast<int64_t>(choice.next.size()) < all.beams || scores[0] > 0) {
    return false;
  }
  const bool* const is_finished = all.is_finished + b * all.beams;
  for (int64_t m = 0; m < all.beams; ++m) {
    // A dead beam has ended: its score is that of the places that none has taken, and torch puts them in an order.
    if (is_finished[m] && !(finished[m] > kReal)) {
      return false;
    }
  }
  const bool are_all = std::all_of(is_finished, is_finished + all.beams, [](bool each) { return each; });
  const bool accepts = all.improvable[b] && !(all.early_stopping && are_all);
  // Two sorted lists become one: the finished hypotheses and, of the best candidates, those that end here.
  choice.has_new = false;
  float before = std::numeric_limits<float>::infinity();
  for (int64_t old = 0, candidate = accepts ? 0 : all.beams;;) {
    while (candidate < all.beams && !stopped[candidate]) {
      ++candidate;
    }
    if (old == all.beams && candidate == all.beams) {
      return true;
    }
    const float score = candidate < all.beams ? scores[candidate] / all.divisor : kDead;
    if (candidate < all.beams && !(score > kReal)) {
      return false;
    }
    const bool is_new = candidate < all.beams && (old == all.beams || score > finished[old]);
    const float best = is_new ? score : finished[old];
    if (best == before && best > kReal) {
      return false;
    }
    before = best;
    if (static_cast<int64_t>(choice.finished.size()) < all.beams) {
      choice.finished.push_back(is_new ? all.beams + candidate : old);
      choice.finished_scores.push_back(best);
      choice.has_new = choice.has_new || is_new;
    }
    ++(is_new ? candidate : old);
  }
}

// Room for one sentence's hypotheses while they change places.
struct Room {
  std::vector<int64_t> tokens;
  std::vector<int32_t> rows;
  std::vector<uint8_t> flags;
};

template <typename Number>
void copy_row(const Number* from, int64_t row, int64_t width, int64_t count, Number* to) {
  std::copy(from + row * width, from + row * width + count, to);
}

// Puts each finished hypothesis in its place: an old one, or a beam with a candidate's token.
void finish(const Beams& all, int64_t b, const Choice& choice, Room& room) {
  const int64_t first = b * all.beams;
  for (int64_t m = 0; m < all.beams; ++m) {
    const int64_t place = choice.finished[m];
    int64_t* const tokens = room.tokens.data() + m * all.longest;
    int32_t* const rows = room.rows.data() + m * all.steps;
    if (place < all.beams) {
      copy_row(all.finished_tokens, first + place, all.longest, all.longest, tokens);
      copy_row(all.finished_rows, first + place, all.steps, all.steps, rows);
      room.flags[m] = all.is_finished[first + place];
    } else {
      const int64_t c = b * all.candidates + place - all.beams, parent = all.candidate_parents[c];
      copy_row(all.tokens, first + parent, all.longest, all.longest, tokens);
      copy_row(all.rows, first + parent, all.steps, all.steps, rows);
      tokens[all.length] = all.candidate_tokens[c];
      rows[all.step] = static_cast<int32_t>(parent + all.sentence[b] * all.beams);
      room.flags[m] = 1;
    }
  }
  std::copy(room.tokens.begin(), room.tokens.end(), all.finished_tokens + first * all.longest);
  std::copy(room.rows.begin(), room.rows.end(), all.finished_rows + first * all.steps);
  std::copy(choice.finished_scores.begin(), choice.finished_scores.end(), all.finished_scores + first);
  std::transform(room.flags.begin(), room.flags.end(), all.is_finished + first, [](uint8_t flag) { return flag != 0; });
}

void go_on(const Beams& all, int64_t b, const Choice& choice, Room& room, int64_t* parents) {
  const int64_t first = b * all.beams;
  for (int64_t m = 0; m < all.beams; ++m) {
    const int64_t parent = all.candidate_parents[b * all.candidates + choice.next[m]];
    copy_row(all.tokens, first + parent, all.longest, all.length, room.tokens.data() + m * all.length);
    copy_row(all.rows, first + parent, all.steps, all.step, room.rows.data() + m * all.step);
  }
  for (int64_t m = 0; m < all.beams; ++m) {
    const int64_t c = b * all.candidates + choice.next[m], parent = all.candidate_parents[c];
    int64_t* const tokens = all.tokens + (first + m) * all.longest;
    int32_t* const rows = all.rows + (first + m) * all.steps;
    copy_row(room.tokens.data(), m, all.length, all.length, tokens);
    copy_row(room.rows.data(), m, all.step, all.step, rows);
    tokens[all.length] = all.candidate_tokens[c];
    rows[all.step] = static_cast<int32_t>(parent + all.sentence[b] * all.beams);
    all.scores[first + m] = all.candidate_scores[c];
    parents[first + m] = first + parent;
  }
}

// Whether the best beam may still beat the worst finished hypothesis, by the host's rule.
bool may_improve(const Beams& all, int64_t b) {
  const float* const finished = all.finished_scores + b * all.beams;
  const bool* const is_finished = all.is_finished + b * all.beams;
  const float best = all.scores[b * all.beams] / all.best_divisor;
  const float lowest = *std::min_element(finished, finished + all.beams);
  for (int64_t m = 0; m < all.beams; ++m) {
    if (best > (is_finished[m] ? lowest : kDead)) {
      return true;
    }
  }
  return false;
}

// Whether nothing can change a sentence's finished hypotheses any more.
bool has_finished(const Beams& all, int64_t b) {
  for (int64_t i = b * all.beams; i < (b + 1) * all.beams; ++i) {
    if (!all.is_finished[i] || !(all.finished_scores[i] > kReal)) {
      return false;
    }
  }
  return all.early_stopping || !all.improvable[b];
}

void check_columns(
    const Tensor& tokens, const Tensor& scores, const Tensor& candidates, int64_t length, int64_t prompt_length) {
  FASTGEN_CHECK(
      value, tokens.dim() == 3 && scores.dim() == 2 && scores.size(0) > 0 && scores.size(1) > 0,
      "tokens must be [batch, beams, length] and scores [batch, beams], not of shapes ", shape_of(tokens), " and ",
      shape_of(scores), ".");
  FASTGEN_CHECK(
      value, candidates.dim() == 2, "candidate_scores must be [batch, candidates], not of shape ", shape_of(candidates),
      ".");
  FASTGEN_CHECK(
      value, 0 <= prompt_length && prompt_length <= length && length < tokens.size(2),
      "length must be ", prompt_length, " to ", tokens.size(2) - 1, ", not ", length, ".");
}

std::tuple<Tensor, Tensor> advance_beams_(
    const Tensor& tokens, const Tensor& rows, const Tensor& scores, const Tensor& finished_tokens,
    const Tensor& finished_rows, const Tensor& finished_scores, const Tensor& is_finished, const Tensor& improvable,
    const Tensor& sentence, const Tensor& candidate_scores, const Tensor& candidate_tokens,
    const Tensor& candidate_parents, const Tensor& stopped, int64_t length, int64_t prompt_length, double divisor,
    double best_divisor, bool early_stopping) {
  check_columns(tokens, scores, candidate_scores, length, prompt_length);
  const int64_t batch = scores.size(0), beams = scores.size(1), longest = tokens.size(2);
  const int64_t steps = longest - prompt_length, candidates = candidate_scores.size(1);
  FASTGEN_CHECK(value, candidates >= beams, "candidates must be ", beams, " or more, not ", candidates, ".");
  for (const Named& each : {
           Named{"tokens", tokens, {batch, beams, longest}, ScalarType::Long},
           Named{"rows", rows, {batch, beams, steps}, ScalarType::Int},
           Named{"scores", scores, {batch, beams}, ScalarType::Float},
           Named{"finished_tokens", finished_tokens, {batch, beams, longest}, ScalarType::Long},
           Named{"finished_rows", finished_rows, {batch, beams, steps}, ScalarType::Int},
           Named{"finished_scores", finished_scores, {batch, beams}, ScalarType::Float},
           Named{"is_finished", is_finished, {batch, beams}, ScalarType::Bool},
           Named{"improvable", improvable, {batch, 1}, ScalarType::Bool},
           Named{"sentence", sentence, {batch}, ScalarType::Long},
           Named{"candidate_scores", candidate_scores, {batch, candidates}, ScalarType::Float},
           Named{"candidate_tokens", candidate_tokens, {batch, candidates}, ScalarType::Long},
           Named{"candidate_parents", candidate_parents, {batch, candidates}, ScalarType::Long},
           Named{"stopped", stopped, {batch, candidates}, ScalarType::Bool},
       }) {
    check_named(each);
  }
  const Beams all{
      batch,
      beams,
      candidates,
      longest,
      steps,
      mutable_data_of<int64_t>(tokens),
      mutable_data_of<int64_t>(finished_tokens),
      mutable_data_of<int32_t>(rows),
      mutable_data_of<int32_t>(finished_rows),
      mutable_data_of<float>(scores),
      mutable_data_of<float>(finished_scores),
      mutable_data_of<bool>(is_finished),
      mutable_data_of<bool>(improvable),
      data_of<int64_t>(sentence),
      data_of<float>(candidate_scores),
      data_of<int64_t>(candidate_tokens),
      data_of<int64_t>(candidate_parents),
      data_of<bool>(stopped),
      length,
      length - prompt_length,
      static_cast<float>(divisor),
      static_cast<float>(best_divisor),
      early_stopping,
  };
  Tensor parents = make({all.batch * all.beams}, ScalarType::Long, tokens);
  Tensor state = make({4}, ScalarType::Long, tokens);
  int64_t* const known = mutable_data_of<int64_t>(state);
  std::fill_n(known, 4, 0);
  std::fill_n(mutable_data_of<int64_t>(parents), all.batch * all.beams, 0);

  // First all is decided, then all is changed: nothing is, where torch has to decide for one sentence.
  std::vector<Choice> choices(all.batch);
  // Of other divisors a quotient might be NaN.
  std::atomic<bool> are_clear{std::isnormal(all.divisor) && std::isnormal(all.best_divisor)};
  const int64_t few = std::max<int64_t>(1, kCandidatesPerTask / all.candidates);
  parallel_for(0, all.batch, few, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      if (!choose(all, b, choices[b])) {
        are_clear = false;
      }
    }
  });
  if (!are_clear) {
    return {parents, state};
  }
  std::atomic<bool> goes_on{false};
  std::atomic<int64_t> num_places{0}, num_finished{0};
  const int64_t grain = std::max<int64_t>(1, kTokensPerTask / (all.beams * all.longest));
  parallel_for(0, all.batch, grain, [&](int64_t begin, int64_t end) {
    Room room{
        std::vector<int64_t>(beams * longest), std::vector<int32_t>(beams * steps), std::vector<uint8_t>(beams)};
    for (int64_t b = begin; b < end; ++b) {
      if (choices[b].has_new) {
        finish(all, b, choices[b], room);
      }
      go_on(all, b, choices[b], room, mutable_data_of<int64_t>(parents));
      all.improvable[b] = all.improvable[b] && may_improve(all, b);
      if (all.improvable[b]) {
        goes_on = true;
      }
      const bool* const flags = all.is_finished + b * all.beams;
      num_places += std::count(flags, flags + all.beams, false);
      num_finished += has_finished(all, b) ? 1 : 0;
    }
  });
  known[0] = 1;
  known[1] = goes_on && !(early_stopping && num_places == 0) ? 1 : 0;
  known[2] = num_finished;
  known[3] = num_places;
  return {parents, state};
}

} // namespace

FASTGEN_LIBRARY(CPU, m) {
  m.impl("beam_candidates", FASTGEN_KERNEL(beam_candidates));
  m.impl("advance_beams_", FASTGEN_KERNEL(advance_beams_));
}

} // namespace fastgen
