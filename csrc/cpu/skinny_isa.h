// The loops of fastgen::skinny_linear for one instruction set; included by each_isa.h once for each, so without a guard.
#include "dots_isa.h"

namespace fastgen {
namespace FASTGEN_ISA {

// With up to so many rows, a weight is read in memory's order: for one to four of them, reading four of its rows at once,
// which lie 2 KB apart or so, is 3/4 as fast. With more, it counts for more that each load serves several products. Codes
// of 8 bits come four times as fast as floats: then a single sum, which waits for each addition, is what takes the time.
constexpr int64_t kInOrder = 6;

// Outputs `begin * 4` up to `end * 4`, but for those beyond the last.
template <typename Weight>
FASTGEN_TARGET void multiply(const Skinny<Weight>& all, int64_t begin, int64_t end) {
  float sums[kTileRows * kDots];
  const int64_t four_rows = kDots * all.size; // rows beside one another: what is ahead of one must not be the next
  const int64_t ahead = (kAhead / std::max<int64_t>(1, four_rows) + 1) * four_rows;
  for (int64_t i = begin * kDots; i < std::min(end * kDots, all.width); i += kDots) {
    const int64_t outputs = std::min(kDots, all.width - i);
    const Weight* four[kDots];
    point_at(all.weight, i, all.width, all.size, four);
    for_tiles<kTileRows>(all.count, [&](auto number, int64_t row) FASTGEN_TARGET {
      constexpr int tile = decltype(number)::value;
      const float* const rows = all.rows + row * all.size;
      if (all.count <= kInOrder && !std::is_same_v<Weight, int8_t>) {
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
          const float sum = sums[r * kDots + j] * (all.scales == nullptr ? 1.0f : all.scales[i + j]);
          into[j] = sum + (all.bias == nullptr ? 0.0f : all.bias[i + j]);
        }
      }
    });
  }
}

} // namespace FASTGEN_ISA
} // namespace fastgen
