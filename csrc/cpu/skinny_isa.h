// The loops of fastgen::skinny_linear for one instruction set; included by each_isa.h once for each, so without a guard.
#include "dots_isa.h"

namespace fastgen {
namespace FASTGEN_ISA {

// With up to so many rows, a weight may be read in memory's order, if that is faster. With more, it counts for more that
// each load serves several products. Codes of 8 bits come four times as fast as floats: then a single sum, which waits
// for each addition, is what takes the time.
constexpr int64_t kInOrder = 6;

// So many rows leave registers for eight outputs at once, and memory is faster the more places it is asked for.
constexpr int64_t kEightAtOnce = FASTGEN_LANES == 16 ? 2 : 1;

// Outputs `from` up to `to`, `Dots` at a time.
template <int Dots, typename Weight>
FASTGEN_TARGET inline void multiply_by(const Skinny<Weight>& all, int64_t from, int64_t to) {
  constexpr int64_t most = Dots == kDots ? kTileRows : kEightAtOnce; // rows of a tile
  float sums[kTileRows * kDots];
  const int64_t at_once = Dots * all.size; // rows beside one another: what is ahead of one must not be the next
  const int64_t ahead = (kAhead / std::max<int64_t>(1, at_once) + 1) * at_once;
  for (int64_t i = from; i < to; i += Dots) {
    const int64_t outputs = std::min<int64_t>(Dots, to - i);
    const Weight* vectors[Dots];
    point_at<Dots>(all.weight, i, all.width, all.size, vectors);
    for_tiles<most>(all.count, [&](auto number, int64_t row) FASTGEN_TARGET {
      constexpr int tile = decltype(number)::value;
      const float* const rows = all.rows + row * all.size;
      if (Dots == kDots && all.in_order && all.count <= kInOrder && !std::is_same_v<Weight, int8_t>) {
        if (row == 0) { // for the others these weights are in the cache
          in_order<tile, true>(rows, vectors[0], all.size, outputs, sums);
        } else {
          in_order<tile, false>(rows, vectors[0], all.size, outputs, sums);
        }
      } else if (row == 0) {
        dot_tile<tile, true, Dots>(rows, all.size, vectors, all.size, sums, Dots, ahead);
      } else {
        dot_tile<tile, false, Dots>(rows, all.size, vectors, all.size, sums, Dots);
      }
      for (int64_t r = 0; r < tile; ++r) {
        float* const into = all.output + (row + r) * all.output_stride + i;
        for (int64_t j = 0; j < outputs; ++j) {
          const float sum = sums[r * Dots + j] * (all.scales == nullptr ? 1.0f : all.scales[i + j]);
          into[j] = sum + (all.bias == nullptr ? 0.0f : all.bias[i + j]);
        }
      }
    });
  }
}

// Outputs `begin * 4` up to `end * 4`, but for those beyond the last.
template <typename Weight>
FASTGEN_TARGET void multiply(const Skinny<Weight>& all, int64_t begin, int64_t end) {
  const int64_t from = begin * kDots, to = std::min(end * kDots, all.width);
  if (all.count <= kEightAtOnce && (!all.in_order || std::is_same_v<Weight, int8_t>)) {
    multiply_by<2 * kDots>(all, from, to);
  } else {
    multiply_by<kDots>(all, from, to);
  }
}

} // namespace FASTGEN_ISA
} // namespace fastgen
