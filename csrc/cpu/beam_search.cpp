// fastgen::beam_candidates and fastgen::advance_beams_ on the CPU.
#include "parallel.h"
#include "topk_rows.h"

#include <atomic>
#include <cmath>
#include <limits>
#include <queue>
#include <tuple>

namespace fastgen {
namespace {

constexpr int64_t kCandidatesPerTask = 1 << 10; // below that another thread costs more than it saves
constexpr int64_t kTokensPerTask = 1 << 13;

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
        best.log_probs[i] = given[row * stride + best.tokens[i] * step];
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
  const int64_t* sentence; // [batch]
  const int64_t *candidate_tokens, *candidate_parents; // [batch, candidates]
  const int64_t *going_on, *places; // [batch, beams]
  int64_t length, step;
};

// Room for one sentence's hypotheses while they change places.
struct Room {
  std::vector<int64_t> tokens;
  std::vector<int32_t> rows;
};

template <typename Number>
void copy_row(const Number* from, int64_t row, int64_t width, int64_t count, Number* to) {
  std::copy(from + row * width, from + row * width + count, to);
}

// Puts each finished hypothesis in its place: an old one, or a beam with a candidate's token.
void finish(const Beams& all, int64_t b, Room& room) {
  const int64_t first = b * all.beams;
  for (int64_t m = 0; m < all.beams; ++m) {
    const int64_t place = all.places[first + m];
    int64_t* const tokens = room.tokens.data() + m * all.longest;
    int32_t* const rows = room.rows.data() + m * all.steps;
    if (place < all.beams) {
      copy_row(all.finished_tokens, first + place, all.longest, all.longest, tokens);
      copy_row(all.finished_rows, first + place, all.steps, all.steps, rows);
    } else {
      const int64_t c = b * all.candidates + place - all.beams, parent = all.candidate_parents[c];
      copy_row(all.tokens, first + parent, all.longest, all.longest, tokens);
      copy_row(all.rows, first + parent, all.steps, all.steps, rows);
      tokens[all.length] = all.candidate_tokens[c];
      rows[all.step] = static_cast<int32_t>(parent + all.sentence[b] * all.beams);
    }
  }
  std::copy(room.tokens.begin(), room.tokens.end(), all.finished_tokens + first * all.longest);
  std::copy(room.rows.begin(), room.rows.end(), all.finished_rows + first * all.steps);
}

void go_on(const Beams& all, int64_t b, Room& room, int64_t* parents) {
  const int64_t first = b * all.beams;
  for (int64_t m = 0; m < all.beams; ++m) {
    const int64_t parent = all.candidate_parents[b * all.candidates + all.going_on[first + m]];
    copy_row(all.tokens, first + parent, all.longest, all.length, room.tokens.data() + m * all.length);
    copy_row(all.rows, first + parent, all.steps, all.step, room.rows.data() + m * all.step);
  }
  for (int64_t m = 0; m < all.beams; ++m) {
    const int64_t c = b * all.candidates + all.going_on[first + m], parent = all.candidate_parents[c];
    int64_t* const tokens = all.tokens + (first + m) * all.longest;
    int32_t* const rows = all.rows + (first + m) * all.steps;
    copy_row(room.tokens.data(), m, all.length, all.length, tokens);
    copy_row(room.rows.data(), m, all.step, all.step, rows);
    tokens[all.length] = all.candidate_tokens[c];
    rows[all.step] = static_cast<int32_t>(parent + all.sentence[b] * all.beams);
    parents[first + m] = first + parent;
  }
}

bool are_old(const int64_t* places, int64_t beams) {
  for (int64_t m = 0; m < beams; ++m) {
    if (places[m] != m) {
      return false;
    }
  }
  return true;
}

void check_range(const char* name, const Tensor& numbers, int64_t end) {
  const int64_t* const from = data_of<int64_t>(numbers);
  for (int64_t i = 0; i < numbers.numel(); ++i) {
    FASTGEN_CHECK(index, from[i] >= 0 && from[i] < end, name, " must be 0 to ", end - 1, ", not ", from[i], ".");
  }
}

Tensor advance_beams_(
    const Tensor& tokens, const Tensor& rows, const Tensor& finished_tokens, const Tensor& finished_rows,
    const Tensor& sentence, const Tensor& candidate_tokens, const Tensor& candidate_parents, const Tensor& going_on,
    const Tensor& places, int64_t length, int64_t prompt_length) {
  FASTGEN_CHECK(
      value, tokens.dim() == 3 && candidate_tokens.dim() == 2, "tokens must be [batch, beams, length] and ",
      "candidate_tokens [batch, candidates], not of shapes ", shape_of(tokens), " and ", shape_of(candidate_tokens), ".");
  const int64_t batch = tokens.size(0), beams = tokens.size(1), longest = tokens.size(2);
  const int64_t steps = longest - prompt_length, candidates = candidate_tokens.size(1);
  FASTGEN_CHECK(
      value, 0 <= prompt_length && prompt_length <= length && length < longest,
      "length must be ", prompt_length, " to ", longest - 1, ", not ", length, ".");
  for (const Named& each : {
           Named{"tokens", tokens, {batch, beams, longest}, ScalarType::Long},
           Named{"rows", rows, {batch, beams, steps}, ScalarType::Int},
           Named{"finished_tokens", finished_tokens, {batch, beams, longest}, ScalarType::Long},
           Named{"finished_rows", finished_rows, {batch, beams, steps}, ScalarType::Int},
           Named{"sentence", sentence, {batch}, ScalarType::Long},
           Named{"candidate_tokens", candidate_tokens, {batch, candidates}, ScalarType::Long},
           Named{"candidate_parents", candidate_parents, {batch, candidates}, ScalarType::Long},
           Named{"going_on", going_on, {batch, beams}, ScalarType::Long},
           Named{"places", places, {batch, beams}, ScalarType::Long},
       }) {
    check_named(each);
  }
  check_range("candidate_parents", candidate_parents, beams);
  check_range("going_on", going_on, candidates);
  check_range("places", places, beams + candidates);
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
      data_of<int64_t>(sentence),
      data_of<int64_t>(candidate_tokens),
      data_of<int64_t>(candidate_parents),
      data_of<int64_t>(going_on),
      data_of<int64_t>(places),
      length,
      length - prompt_length,
  };
  Tensor parents = make({batch * beams}, ScalarType::Long, tokens);
  const int64_t grain = std::max<int64_t>(1, kTokensPerTask / std::max<int64_t>(1, beams * longest));
  parallel_for(0, batch, grain, [&](int64_t begin, int64_t end) {
    Room room{std::vector<int64_t>(beams * longest), std::vector<int32_t>(beams * steps)};
    for (int64_t b = begin; b < end; ++b) {
      if (!are_old(all.places + b * beams, beams)) {
        finish(all, b, room);
      }
      go_on(all, b, room, mutable_data_of<int64_t>(parents));
    }
  });
  return parents;
}

} // namespace

FASTGEN_LIBRARY(CPU, m) {
  m.impl("beam_candidates", FASTGEN_KERNEL(beam_candidates));
  m.impl("advance_beams_", FASTGEN_KERNEL(advance_beams_));
}

} // namespace fastgen
