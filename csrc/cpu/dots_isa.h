// Products of a few rows with vectors, four at a time, for one instruction set; included by the loops that each_isa.h
// includes, once for each set, so without a guard.
#include "tiles_isa.h"

#include <algorithm>

namespace fastgen {
namespace FASTGEN_ISA {

// Tiles are as large as the registers hold, so that each load serves several products.
constexpr int64_t kTileRows = FASTGEN_LANES == 16 ? 6 : 2; // AVX-512 has 32 registers, the others 16
constexpr int64_t kDots = 4;

// The rows of a weight are short for the processor's own prefetching, which starts anew at each page. Weights ahead, at
// least: 16 KB are as fast as the memory is (8 to 32 KB: the same); the first-level cache is too small for that.
constexpr int64_t kAhead = 4096;

// Sums of products of `Rows` rows with `Dots` vectors, a multiple of four, `[Rows, Dots]`. `IsAhead`: memory `ahead` floats
// further is asked for.
template <int Rows, bool IsAhead = false, int Dots = kDots, typename Vector = float>
FASTGEN_TARGET inline void dot_tile(
    const float* rows, int64_t stride, const Vector* const* vectors, int64_t size, float* output,
    int64_t output_stride, int64_t ahead = 0) {
  constexpr int64_t kLine = 64 / sizeof(Vector);
  const Vector* from[Dots];
  std::copy(vectors, vectors + Dots, from);
  Floats sums[Rows][Dots] = {};
  const auto add = [&](int64_t i, auto part) FASTGEN_TARGET {
    const auto take = [&](const auto* numbers) FASTGEN_TARGET {
      if constexpr (decltype(part)::value) {
        return load_part(numbers + i, size - i);
      } else {
        return load(numbers + i);
      }
    };
    Floats of_vectors[Dots];
#pragma GCC unroll 8
    for (int dot = 0; dot < Dots; ++dot) {
      of_vectors[dot] = take(from[dot]);
      if (IsAhead && (kLanes == kLine || i % kLine == 0)) { // once a cache line
        __builtin_prefetch(from[dot] + i + ahead, 0, 2); // into the second-level cache
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      const Floats x = take(rows + row * stride);
#pragma GCC unroll 8
      for (int dot = 0; dot < Dots; ++dot) {
        sums[row][dot] += x * of_vectors[dot];
      }
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    add(i, std::false_type());
  }
  if (i < size) {
    add(i, std::true_type());
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 2
    for (int dot = 0; dot < Dots; dot += 4) {
      const Floats* const of = sums[row] + dot;
      const Four four = sums_of_lanes(of[0], of[1], of[2], of[3]);
      __builtin_memcpy(output + row * output_stride + dot, &four, sizeof four);
    }
  }
}

// Has `vectors` point at rows `i` and so on of a weight `[width, size]`, the last one again where there are no more.
template <int Dots = kDots, typename Weight>
inline void point_at(const Weight* weight, int64_t i, int64_t width, int64_t size, const Weight** vectors) {
  for (int64_t j = 0; j < Dots; ++j) {
    vectors[j] = weight + std::min(i + j, width - 1) * size;
  }
}

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
      const char* const here = reinterpret_cast<const char*>(vector + i);
      __builtin_prefetch(here + kAhead * sizeof(float), 0, 2); // into the second-level cache
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

} // namespace FASTGEN_ISA
} // namespace fastgen
