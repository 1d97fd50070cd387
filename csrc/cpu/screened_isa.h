// The loops of fastgen::screened_linear for one instruction set; included by each_isa.h once for each, so without a guard.
#include "dots_isa.h"

#include <cmath>
#include <limits>

namespace fastgen {
namespace FASTGEN_ISA {

// How far an output may be from what was computed for it with the codes; `norm`: of the row.
FASTGEN_TARGET inline float reach(float output, float norm, float error, float tiny) {
  return norm * error + std::fabs(output) * 2.4e-7f + tiny; // the scale and the bias are rounded too
}

// Approximates outputs `begin * 4` up to `end * 4`, and finds what the largest of each row is at least: `least[row]`.
FASTGEN_TARGET inline void approximate(const Screened& all, int64_t begin, int64_t end, float* least) {
  float sums[kTileRows * kDots];
  for (int64_t i = begin * kDots; i < std::min(end * kDots, all.width); i += kDots) {
    const int64_t outputs = std::min(kDots, all.width - i);
    const int8_t* four[kDots];
    point_at(all.codes, i, all.width, all.size, four);
    for_tiles<kTileRows>(all.count, [&](auto number, int64_t row) FASTGEN_TARGET {
      constexpr int tile = decltype(number)::value;
      dot_tile<tile, true>(all.rows + row * all.size, all.size, four, all.size, sums, kDots, 4 * kAhead);
      for (int64_t r = 0; r < tile; ++r) {
        float* const into = all.output + (row + r) * all.width + i;
        for (int64_t j = 0; j < outputs; ++j) {
          const float output = sums[r * kDots + j] * all.scales[i + j] + (all.bias == nullptr ? 0.0f : all.bias[i + j]);
          into[j] = output;
          const float lower = output - reach(output, all.norms[row + r], all.errors[i + j], all.tiny);
          least[row + r] = lower > least[row + r] ? lower : least[row + r];
        }
      }
    });
  }
}

// Computes those of the same outputs that may be the largest of their row, and puts -inf in place of the others.
FASTGEN_TARGET inline void refine(const Screened& all, int64_t begin, int64_t end, const float* least) {
  for (int64_t row = 0; row < all.count; ++row) {
    float* const outputs = all.output + row * all.width;
    for (int64_t i = begin * kDots; i < std::min(end * kDots, all.width); ++i) {
      if (outputs[i] + reach(outputs[i], all.norms[row], all.errors[i], all.tiny) < least[row]) { // false where one is NaN
        outputs[i] = -std::numeric_limits<float>::infinity();
        continue;
      }
      float sums[kDots];
      in_order<1, false>(all.rows + row * all.size, all.weight + i * all.size, all.size, 1, sums);
      outputs[i] = sums[0] + (all.bias == nullptr ? 0.0f : all.bias[i]);
    }
  }
}

} // namespace FASTGEN_ISA
} // namespace fastgen
