// Rows in tiles, for one instruction set; included by the loops that each_isa.h includes, once for each set, so without a
// guard.
#include "vectors_isa.h"

#include <type_traits>

namespace fastgen {
namespace FASTGEN_ISA {

// Calls `tile(std::integral_constant<int, rows>, first row)` over all rows, in tiles of at most `Most`, as even as can be.
template <int64_t Most, typename Tile>
FASTGEN_TARGET inline void for_tiles(int64_t rows, const Tile& tile) {
  static_assert(Most <= 6, "a tile for each number of rows");
  const int64_t tiles = (rows + Most - 1) / Most;
  for (int64_t i = 0, row = 0; i < tiles; ++i) {
    const int64_t in_tile = rows / tiles + (i < rows % tiles);
    if constexpr (Most > 3) {
      switch (in_tile) {
        case 4: tile(std::integral_constant<int, 4>(), row); break;
        case 5: tile(std::integral_constant<int, 5>(), row); break;
        case 6: tile(std::integral_constant<int, 6>(), row); break;
      }
    }
    if constexpr (Most > 2) {
      if (in_tile == 3) {
        tile(std::integral_constant<int, 3>(), row);
      }
    }
    switch (in_tile) {
      case 1: tile(std::integral_constant<int, 1>(), row); break;
      case 2: tile(std::integral_constant<int, 2>(), row); break;
    }
    row += in_tile;
  }
}

// Values at every `slot` floats.
struct Spaced {
  const float* values;
  int64_t slot;
  const float* operator[](int64_t k) const { return values + k * slot; }
  Spaced from(int64_t i) const { return {values + i, slot}; } // without the first `i` floats of each
};

// Adds `count` values, weighted, to `Vectors` vectors of `Rows` rows; `part`: floats of a last vector, if not all.
// `LinesAhead`: cache lines that are asked for, from `ahead` floats further on.
template <int Rows, int Vectors, bool IsPart = false, int LinesAhead = 0, typename Values>
FASTGEN_TARGET inline void value_tile(
    const float* weights, int64_t weights_stride, Values values, int64_t count, float* outputs, int64_t stride,
    int64_t part = 0, int64_t ahead = 0) {
  Floats sums[Rows][Vectors] = {}; // sums of few, then of these: less is lost to rounding than in one long sum
  for (int64_t k = 0; k < count; ++k) {
    const float* const value = values[k];
    Floats v[Vectors];
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      v[j] = IsPart ? load_part(value, part) : load(value + j * kLanes);
    }
#pragma GCC unroll 8
    for (int line = 0; line < LinesAhead; ++line) {
      __builtin_prefetch(value + ahead + line * 16, 0, 2); // into the second-level cache
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      const Floats weight = splat(weights[row * weights_stride + k]);
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; ++j) {
        sums[row][j] += weight * v[j];
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; ++j) {
      float* const into = outputs + row * stride + j * kLanes;
      store(into, load(into) + sums[row][j]);
    }
  }
}

} // namespace FASTGEN_ISA
} // namespace fastgen
