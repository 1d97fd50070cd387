// The loops of fastgen::packed_linear for one instruction set; included by each_isa.h once for each, so without a guard.
#include "tiles_isa.h"

namespace fastgen {
namespace FASTGEN_ISA {

constexpr int64_t kRowsAtOnce = 6;
constexpr int64_t kVectorsAtOnce = FASTGEN_LANES == 16 ? 4 : 2; // with six rows: as much as the registers hold
constexpr int64_t kWidth = kVectorsAtOnce * kLanes;
constexpr int64_t kSummed = 128; // sums of so many, then of these: less is lost to rounding than in one long sum
constexpr int64_t kPanelAhead = 64; // steps, 16 KB: see skinny_isa.h

// `Rows` rows with the `kWidth` outputs of a panel that `panel` begins at; [Rows, kWidth].
template <int Rows, int LinesAhead>
FASTGEN_TARGET inline void panel_tile(const float* rows, int64_t size, const float* panel, float* output) {
  std::fill(output, output + Rows * kWidth, 0.0f);
  for (int64_t first = 0; first < size; first += kSummed) {
    value_tile<Rows, kVectorsAtOnce, false, LinesAhead>(
        rows + first, size, Spaced{panel + first * kPanel, kPanel}, std::min(kSummed, size - first), output, kWidth, 0,
        kPanelAhead * kPanel);
  }
}

// One panel and one block of rows.
FASTGEN_TARGET void multiply_panel(const Packed& all, int64_t task) {
  float sums[kRowsAtOnce * kWidth];
  const int64_t panel = task % all.panels(), first_row = task / all.panels() * all.block;
  const int64_t rows = std::min(all.block, all.count - first_row);
  const int64_t end = std::min(all.width, (panel + 1) * kPanel);
  for (int64_t i = panel * kPanel; i < end; i += kWidth) {
    const float* const weight = all.weight + panel * kPanel * all.size + i % kPanel;
    const int64_t outputs = std::min(kWidth, end - i);
    for_tiles<kRowsAtOnce>(rows, [&](auto number, int64_t row) FASTGEN_TARGET {
      constexpr int tile = decltype(number)::value;
      const float* const from = all.rows + (first_row + row) * all.size;
      if (row == 0 && i % kPanel == 0) {
        panel_tile<tile, kPanel / 16>(from, all.size, weight, sums);
      } else { // for these the panel is in the cache
        panel_tile<tile, 0>(from, all.size, weight, sums);
      }
      for (int64_t r = 0; r < tile; ++r) {
        float* const into = all.output + (first_row + row + r) * all.width + i;
        for (int64_t j = 0; j < outputs; ++j) {
          into[j] = sums[r * kWidth + j] + (all.bias == nullptr ? 0.0f : all.bias[i + j]);
        }
      }
    });
  }
}

} // namespace FASTGEN_ISA
} // namespace fastgen
