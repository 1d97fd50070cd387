// The loops of path_attention.h for one instruction set; included by each_isa.h once for each, so without a guard.
#include "attention_rows_isa.h"

namespace fastgen {
namespace FASTGEN_ISA {

// Values in these slots.
struct Listed {
  const float* values;
  const int32_t* slots;
  int64_t slot;
  const float* operator[](int64_t k) const { return values + slots[k] * slot; }
  Listed from(int64_t i) const { return {values + i, slots, slot}; }
};

// The `group` rows of one beam, from `row` of the block on, see the keys on the beam's path.
FASTGEN_TARGET inline void see_path(const PathAttention& all, int64_t pair, int64_t begin, int64_t row, Rows& rows) {
  const int64_t sentence = pair / all.key_heads, head = pair % all.key_heads;
  const int64_t query_stride = rows.query_stride(), output_stride = rows.output_stride();
  const float* const keys = all.key + sentence * all.key_batch + head * all.key_head;
  const float* const values = all.value + sentence * all.value_batch + head * all.value_head;
  const int32_t* const path = all.path_of(sentence, (begin + row) / all.group);
  const int64_t length = all.length_of(path);
  for (int64_t first = 0; first < length; first += kSlots) {
    const int32_t* const slots = path + first;
    const int64_t count = std::min(kSlots, length - first);
    for (int64_t k = 0; k < count; k += kDots) {
      const float* four[kDots];
      for (int64_t i = 0; i < kDots; ++i) { // the last key again where there are no more
        const int64_t slot = slots[std::min(k + i, count - 1)];
        four[i] = keys + slot * all.key_slot;
        prefetch(values + slot * all.value_slot, all.value_size);
      }
      for_tiles<kTileRows>(all.group, [&](auto number, int64_t of_beam) FASTGEN_TARGET {
        dot_tile<decltype(number)::value>(
            rows.queries + (row + of_beam) * query_stride, query_stride, four, all.size,
            rows.scores + (row + of_beam) * kSlots + k, kSlots);
      });
    }
    for (int64_t of_beam = row; of_beam < row + all.group; ++of_beam) {
      const float* const bias = bias_of(all, pair, begin + of_beam);
      weigh(
          rows.scores + of_beam * kSlots, bias == nullptr ? nullptr : bias + all.keys + first, all.scale, count,
          &rows.maxima[of_beam], &rows.sums[of_beam], rows.outputs + of_beam * output_stride, output_stride);
    }
    for_tiles<kTileRows>(all.group, [&](auto number, int64_t of_beam) FASTGEN_TARGET {
      add_values<decltype(number)::value>(
          rows.scores + (row + of_beam) * kSlots, Listed{values, slots, all.value_slot}, count, all.value_size,
          rows.outputs + (row + of_beam) * output_stride, output_stride);
    });
  }
}

// `count` rows, from `begin` on, all rows of some beams, of one pair of a sentence and a key head.
FASTGEN_TARGET inline void attend_to_paths(
    const PathAttention& all, int64_t pair, int64_t begin, int64_t count, Rows& rows) {
  begin_rows(all, pair, begin, count, rows);
  see_keys(all, pair, begin, count, rows);
  for (int64_t row = 0; row < count; row += all.group) {
    see_path(all, pair, begin, row, rows);
  }
  end_rows(all, pair, begin, count, rows);
}

} // namespace FASTGEN_ISA
} // namespace fastgen
