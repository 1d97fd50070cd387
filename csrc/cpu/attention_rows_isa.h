// The loops of attention_rows.h for one instruction set; included by each_isa.h once for each, so without a guard.
#include "dots_isa.h"

namespace fastgen {
namespace FASTGEN_ISA {

constexpr int64_t kTileVectors = 4;
constexpr int64_t kValuesAtOnce = 32; // they stay in the first-level cache from one tile to the next

template <int Rows, typename Values>
FASTGEN_TARGET inline void add_values(
    const float* weights, Values values, int64_t count, int64_t size, float* outputs, int64_t stride) {
  int64_t i = 0;
  for (; i + kTileVectors * kLanes <= size; i += kTileVectors * kLanes) {
    value_tile<Rows, kTileVectors>(weights, kSlots, values.from(i), count, outputs + i, stride);
  }
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    value_tile<Rows, 2>(weights, kSlots, values.from(i), count, outputs + i, stride);
  }
  for (; i + kLanes <= size; i += kLanes) {
    value_tile<Rows, 1>(weights, kSlots, values.from(i), count, outputs + i, stride);
  }
  if (i < size) {
    value_tile<Rows, 1, true>(weights, kSlots, values.from(i), count, outputs + i, stride, size - i);
  }
}

// Scores of `count` keys become e^(score - maximum); the row's sum and outputs so far move to the new maximum.
FASTGEN_TARGET inline void weigh(
    float* scores, const float* bias, float scale, int64_t count, float* maximum, float* sum, float* outputs,
    int64_t size) {
  Bits lane = {};
  for (int64_t i = 0; i < kLanes; ++i) {
    lane[i] = static_cast<uint32_t>(i);
  }
  Floats highest = splat(kHidden);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t rest = count - i;
    Floats score = load(scores + i) * scale;
    if (bias != nullptr) {
      score += rest >= kLanes ? load(bias + i) : load_part(bias + i, rest);
    }
    if (rest < kLanes) {
      score = lane < (Bits{} + static_cast<uint32_t>(rest)) ? score : splat(kHidden);
    }
    store(scores + i, score);
    highest = larger(score, highest);
  }
  const float before = *maximum;
  *maximum = std::max(before, largest(highest));
  const float base = base_of(*maximum);
  Floats total = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats x = load(scores + i) - base;
    const Floats weight = x < splat(-86.0f) ? Floats{} : exponential(x); // what is hidden counts for nothing
    store(scores + i, weight);
    total += weight;
  }
  if (before != *maximum && before != kHidden) {
    const float factor = std::exp(before - base);
    *sum *= factor;
    for (int64_t i = 0; i < size; i += kLanes) {
      store(outputs + i, load(outputs + i) * factor);
    }
  }
  *sum += sums_of_lanes(total, total, total, total)[0];
}

// Asks for what comes next: the arithmetic hides the time that it needs to come.
FASTGEN_TARGET inline void prefetch(const float* from, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) {
    __builtin_prefetch(from + i, 0, 2); // into the second-level cache
  }
}

// Begins `count` rows, from `begin` on, of one pair of a sentence and a key head: nothing is seen yet.
FASTGEN_TARGET inline void begin_rows(const Attention& all, int64_t pair, int64_t begin, int64_t count, Rows& rows) {
  const int64_t sentence = pair / all.key_heads, head = pair % all.key_heads;
  rows.reset();
  for (int64_t row = 0; row < count; ++row) {
    const int64_t beam = (begin + row) / all.group, query_head = head * all.group + (begin + row) % all.group;
    const float* const from = all.query + (sentence * all.beams + beam) * all.query_row + query_head * all.query_head;
    std::copy(from, from + all.size, rows.queries + row * rows.query_stride());
  }
}

// The bias of a row's first key, or null.
inline const float* bias_of(const Attention& all, int64_t pair, int64_t row) {
  const int64_t query_head = pair % all.key_heads * all.group + row % all.group;
  return all.bias == nullptr ? nullptr
                             : all.bias + pair / all.key_heads * all.bias_batch + query_head * all.bias_head +
          row / all.group * all.bias_beam;
}

// These rows see all keys of the pair, and those that follow one another in memory.
FASTGEN_TARGET inline void see_keys(const Attention& all, int64_t pair, int64_t begin, int64_t count, Rows& rows) {
  const int64_t sentence = pair / all.key_heads, head = pair % all.key_heads;
  const int64_t query_stride = rows.query_stride(), output_stride = rows.output_stride();
  const float* const keys = all.key + sentence * all.key_batch + head * all.key_head;
  const float* const values = all.value + sentence * all.value_batch + head * all.value_head;
  for (int64_t first = 0; first < all.keys; first += kSlots) {
    const int64_t slots = std::min(kSlots, all.keys - first);
    for (int64_t k = 0; k < slots; k += kDots) {
      const float* four[kDots];
      for (int64_t i = 0; i < kDots; ++i) { // the last key again where there are no more
        const int64_t slot = first + std::min(k + i, slots - 1);
        four[i] = keys + slot * all.key_slot;
        prefetch(values + slot * all.value_slot, all.value_size);
      }
      for_tiles<kTileRows>(count, [&](auto number, int64_t row) FASTGEN_TARGET {
        dot_tile<decltype(number)::value>(
            rows.queries + row * query_stride, query_stride, four, all.size, rows.scores + row * kSlots + k, kSlots);
      });
    }
    for (int64_t row = 0; row < count; ++row) {
      const float* const bias = bias_of(all, pair, begin + row);
      weigh(
          rows.scores + row * kSlots, bias == nullptr ? nullptr : bias + first, all.scale, slots, &rows.maxima[row],
          &rows.sums[row], rows.outputs + row * output_stride, output_stride);
    }
    const float* next = keys + (first + slots) * all.key_slot;
    int64_t coming = std::min(kSlots, all.keys - first - slots);
    if (coming == 0 && pair + 1 < all.pairs()) {
      next = all.key + (pair + 1) / all.key_heads * all.key_batch + (pair + 1) % all.key_heads * all.key_head;
      coming = std::min(kSlots, all.keys);
    }
    for (int64_t k = 0; k < slots; k += kValuesAtOnce) {
      for (int64_t i = k; i < std::min(k + kValuesAtOnce, coming); ++i) {
        prefetch(next + i * all.key_slot, all.size);
      }
      for_tiles<kTileRows>(count, [&](auto number, int64_t row) FASTGEN_TARGET {
        add_values<decltype(number)::value>(
            rows.scores + row * kSlots + k, Spaced{values + (first + k) * all.value_slot, all.value_slot},
            std::min(kValuesAtOnce, slots - k), all.value_size, rows.outputs + row * output_stride, output_stride);
      });
    }
  }
}

// Writes the outputs of these rows.
FASTGEN_TARGET inline void end_rows(const Attention& all, int64_t pair, int64_t begin, int64_t count, Rows& rows) {
  const int64_t sentence = pair / all.key_heads, head = pair % all.key_heads;
  for (int64_t row = 0; row < count; ++row) {
    const int64_t beam = sentence * all.beams + (begin + row) / all.group;
    const int64_t query_head = head * all.group + (begin + row) % all.group;
    float* const from = rows.outputs + row * rows.output_stride();
    const Floats sum = splat(rows.sums[row]);
    for (int64_t i = 0; i < all.value_size; i += kLanes) {
      store(from + i, load(from + i) / sum); // 0 / 0 where all is hidden
    }
    std::copy(from, from + all.value_size, all.output + (beam * all.heads() + query_head) * all.value_size);
  }
}

FASTGEN_TARGET inline void attend(const Attention& all, int64_t pair, int64_t begin, int64_t count, Rows& rows) {
  begin_rows(all, pair, begin, count, rows);
  see_keys(all, pair, begin, count, rows);
  end_rows(all, pair, begin, count, rows);
}

} // namespace FASTGEN_ISA
} // namespace fastgen
