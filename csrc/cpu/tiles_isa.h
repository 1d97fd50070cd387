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
    if constexpr (Most > 2) {
      switch (in_tile) {
        case 3: tile(std::integral_constant<int, 3>(), row); break;
        case 4: tile(std::integral_constant<int, 4>(), row); break;
        case 5: tile(std::integral_constant<int, 5>(), row); break;
        case 6: tile(std::integral_constant<int, 6>(), row); break;
      }
    }
    switch (in_tile) {
      case 1: tile(std::integral_constant<int, 1>(), row); break;
      case 2: tile(std::integral_constant<int, 2>(), row); break;
    }
    row += in_tile;
  }
}

} // namespace FASTGEN_ISA
} // namespace fastgen
