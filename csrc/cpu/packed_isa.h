// The loops of packed.h for one instruction set; included by each_isa.h once for each, so without a guard.
#include "tiles_isa.h"

namespace fastgen {
namespace FASTGEN_ISA {

constexpr int64_t kRowsAtOnce = 6;
constexpr int64_t kVectorsAtOnce = FASTGEN_LANES == 16 ? 4 : 2; // with six rows: as much as the registers hold
constexpr int64_t kWidth = kVectorsAtOnce * kLanes;
constexpr int64_t kSummed = 256; // sums of so many, then of these: less is lost to rounding than in one long sum
constexpr int64_t kPanelAhead = 64; // steps, 16 KB: see skinny_isa.h

// `Rows` rows with the `kWidth` outputs of a panel that `panel` begins at; [Rows, kWidth].
template <int Rows, bool IsFirst>
FASTGEN_TARGET inline void panel_tile(const float* rows, int64_t size, const float* panel, float* output) {
  Floats totals[Rows][kVectorsAtOnce] = {};
  for (int64_t first = 0; first < size; first += kSummed) {
    const int64_t last = std::min(first + kSummed, size);
    Floats sums[Rows][kVectorsAtOnce] = {};
    for (int64_t k = first; k < last; ++k) {
      const float* const from = panel + k * kPanel;
      Floats w[kVectorsAtOnce];
#pragma GCC unroll 8
      for (int j = 0; j < kVectorsAtOnce; ++j) {
        w[j] = load(from + j * kLanes);
      }
      if (IsFirst) { // for the others the panel is in the cache
#pragma GCC unroll 8
        for (int line = 0; line < kPanel / 16; ++line) {
          __builtin_prefetch(from + kPanelAhead * kPanel + line * 16, 0, 2); // into the second-level cache
        }
      }
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        const Floats x = splat(rows[row * size + k]);
#pragma GCC unroll 8
        for (int j = 0; j < kVectorsAtOnce; ++j) {
          sums[row][j] += x * w[j];
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
      for (int j = 0; j < kVectorsAtOnce; ++j) {
        totals[row][j] += sums[row][j];
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectorsAtOnce; ++j) {
      store(output + row * kWidth + j * kLanes, totals[row][j]);
    }
  }
}

// One panel and one block of rows.
FASTGEN_TARGET void multiply_panel(const Packed& all, int64_t task) {
  float sums[kRowsAtOnce * kWidth];
  const int64_t panel = task % all.panels(), first_row = task / all.panels() * all.block();
  const int64_t rows = std::min(all.block(), all.count - first_row);
  const int64_t end = std::min(all.width, (panel + 1) * kPanel);
  for (int64_t i = panel * kPanel; i < end; i += kWidth) {
    const float* const weight = all.weight + panel * kPanel * all.size + i % kPanel;
    const int64_t outputs = std::min(kWidth, end - i);
    for_tiles<kRowsAtOnce>(rows, [&](auto number, int64_t row) FASTGEN_TARGET {
      constexpr int tile = decltype(number)::value;
      const float* const from = all.rows + (first_row + row) * all.size;
      if (row == 0 && i % kPanel == 0) {
        panel_tile<tile, true>(from, all.size, weight, sums);
      } else {
        panel_tile<tile, false>(from, all.size, weight, sums);
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
