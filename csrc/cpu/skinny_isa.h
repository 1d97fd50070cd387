// The loops of fastgen::skinny_linear for one instruction set; included by each_isa.h once for each, so without a guard.
#include "dots_isa.h"

namespace fastgen {
namespace FASTGEN_ISA {

// The rows of a weight are short for the processor's own prefetching, which starts anew at each page. Weights ahead, at
// least: 16 KB are as fast as the memory is (8 to 32 KB: the same); the first-level cache is too small for that.
constexpr int64_t kAhead = 4096;

// With up to so many rows, a weight is read in memory's order: for one to four of them, reading four of its rows at once,
// which lie 2 KB apart or so, is 3/4 as fast. With more, it counts for more that each load serves several products.
constexpr int64_t kInOrder = 6;

// Sums of products of `Rows` rows with one vector, with their lanes yet to be summed, into `sums[row * kDots]`; added in
// the same order as `dot_tile` does. `IsAhead`: memory `kAhead` floats further is asked for.
template <int Rows, bool IsAhead, typename Weight>
FASTGEN_TARGET inline void dots_with(const float* rows, int64_t size, const Weight* vector, Floats* sums) {
  constexpr int64_t kLine = 64 / sizeof(Weight);
  Floats totals[Rows] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats v = load(vector + i);
    if (IsAhead && (kLanes == kLine || i % kLine == 0)) {
      __builtin_prefetch(vector + i + kAhead, 0, 2); // into the second-level cache
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      totals[row] += load(rows + row * size + i) * v;
    }
  }
  if (i < size) {
    const Floats v = load_part(vector + i, size - i);
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      totals[row] += load_part(rows + row * size + i, size - i) * v;
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
    sums[row * kDots] = totals[row];
  }
}

// Products of `Rows` rows with `outputs` rows of a weight, four at most, into `sums` `[Rows, 4]`.
template <int Rows, bool IsAhead, typename Weight>
FASTGEN_TARGET inline void in_order(
    const float* rows, const Weight* weight, int64_t size, int64_t outputs, float* sums) {
  Floats lanes[Rows * kDots] = {};
  for (int64_t j = 0; j < outputs; ++j) {
    dots_with<Rows, IsAhead>(rows, size, weight + j * size, lanes + j);
  }
  for (int row = 0; row < Rows; ++row) {
    const Floats* const of = lanes + row * kDots;
    const Four four = sums_of_lanes(of[0], of[1], of[2], of[3]);
    __builtin_memcpy(sums + row * kDots, &four, sizeof four);
  }
}

// Outputs `begin * 4` up to `end * 4`, but for those beyond the last.
template <typename Weight>
FASTGEN_TARGET void multiply(const Skinny<Weight>& all, int64_t begin, int64_t end) {
  float sums[kTileRows * kDots];
  const int64_t four_rows = kDots * all.size; // rows beside one another: what is ahead of one must not be the next
  const int64_t ahead = (kAhead / std::max<int64_t>(1, four_rows) + 1) * four_rows;
  for (int64_t i = begin * kDots; i < std::min(end * kDots, all.width); i += kDots) {
    const int64_t outputs = std::min(kDots, all.width - i);
    const Weight* four[kDots];
    for (int64_t j = 0; j < kDots; ++j) { // the last one again where there are no more
      four[j] = all.weight + std::min(i + j, all.width - 1) * all.size;
    }
    for_tiles<kTileRows>(all.count, [&](auto number, int64_t row) FASTGEN_TARGET {
      constexpr int tile = decltype(number)::value;
      const float* const rows = all.rows + row * all.size;
      if (all.count <= kInOrder) {
        if (row == 0) { // for the others these weights are in the cache
          in_order<tile, true>(rows, four[0], all.size, outputs, sums);
        } else {
          in_order<tile, false>(rows, four[0], all.size, outputs, sums);
        }
      } else if (row == 0) {
        dot_tile<tile, true>(rows, all.size, four, all.size, sums, kDots, ahead);
      } else {
        dot_tile<tile>(rows, all.size, four, all.size, sums, kDots);
      }
      for (int64_t r = 0; r < tile; ++r) {
        float* const into = all.output + (row + r) * all.output_stride + i;
        for (int64_t j = 0; j < outputs; ++j) {
          into[j] = sums[r * kDots + j] + (all.bias == nullptr ? 0.0f : all.bias[i + j]);
        }
      }
    });
  }
}

} // namespace FASTGEN_ISA
} // namespace fastgen
