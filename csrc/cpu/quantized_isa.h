// The loops around products of 8-bit integers for one instruction set; included by each_isa.h once for each, so without a
// guard.
#include "dots_isa.h"

#include <algorithm>

namespace fastgen {
namespace FASTGEN_ISA {

typedef int32_t Ints __attribute__((vector_size(4 * FASTGEN_LANES)));
typedef int16_t Shorts __attribute__((vector_size(4 * FASTGEN_LANES)));
typedef int32_t FourInts __attribute__((vector_size(16)));

// Rounds rows `begin` up to `end`, [count, size], to codes from -127 to 127; a row is about its codes times its scale.
// Codes are [count, stride], with zeros from `size` on.
template <typename Code>
FASTGEN_TARGET void quantize_rows(
    const float* rows, int64_t size, int64_t stride, int64_t begin, int64_t end, Code* codes, float* scales) {
  typedef Code Codes __attribute__((vector_size(sizeof(Code) * FASTGEN_LANES)));
  for (int64_t row = begin; row < end; ++row) {
    const float* const from = rows + row * size;
    Code* const into = codes + row * stride;
    Floats most = {}, zeros = {}; // `zeros` becomes NaN where a number is not finite, and so do the row's outputs
    const auto look_at = [&](Floats x) FASTGEN_TARGET {
      most = larger(larger(x, -x), most);
      zeros += x * 0.0f;
    };
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      look_at(load(from + i));
    }
    if (i < size) {
      look_at(load_part(from + i, size - i));
    }
    float not_finite = 0.0f;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      not_finite += zeros[lane];
    }
    const float scale = std::max(largest(most) / 127.0f, 1.17549435e-38f); // the smallest normal number
    scales[row] = scale + not_finite;
    // Divided as `quantize_weight` does: a reciprocal of the scale may be infinite, and rounds once more.
    const Floats divisor = splat(scale);
    const auto round = [&](Floats x) FASTGEN_TARGET {
      // Adding 1.5 * 2^23 rounds to an integer, to even if it lies half-way, and leaves it in the lowest bits.
      const Floats shifted = x / divisor + 12582912.0f;
      // The rest of them goes: 8 bits are kept, or 16.
      return __builtin_convertvector((Ints)shifted, Codes);
    };
    for (i = 0; i + kLanes <= size; i += kLanes) {
      const Codes rounded = round(load(from + i));
      __builtin_memcpy(into + i, &rounded, sizeof rounded);
    }
    if (i < size) {
      const Codes rounded = round(load_part(from + i, size - i));
      __builtin_memcpy(into + i, &rounded, (size - i) * sizeof(Code));
    }
    std::fill(into + size, into + stride, Code(0));
  }
}

// `output[row][i] = products[row][i] * row_scales[row] * scales[i] + bias[i]`, rows of `width`; `bias` may be null.
FASTGEN_TARGET void dequantize(
    const int32_t* products, const float* row_scales, const float* scales, const float* bias, int64_t width,
    int64_t begin, int64_t end, float* output) {
  for (int64_t row = begin; row < end; ++row) {
    const int32_t* const from = products + row * width;
    float* const into = output + row * width;
    const Floats scale = splat(row_scales[row]);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      Ints product;
      __builtin_memcpy(&product, from + i, sizeof product);
      const Floats x = __builtin_convertvector(product, Floats) * scale * load(scales + i);
      store(into + i, bias == nullptr ? x : x + load(bias + i));
    }
    for (; i < width; ++i) {
      const float x = static_cast<float>(from[i]) * row_scales[row] * scales[i];
      into[i] = bias == nullptr ? x : x + bias[i];
    }
  }
}

// ---------------------------------------------------------------------------------------------- products of codes
constexpr int64_t kCodes = 2 * FASTGEN_LANES; // of a vector of 16-bit numbers
constexpr int64_t kCodeRows = FASTGEN_LANES == 16 ? 6 : 3; // of a tile: as many as the registers hold

FASTGEN_TARGET inline Shorts widened(const int8_t* from) {
#if FASTGEN_LANES == 16
  return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif FASTGEN_LANES == 8
  return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Shorts x;
  for (int64_t lane = 0; lane < kCodes; ++lane) {
    x[lane] = from[lane];
  }
  return x;
#endif
}

// Products of 16-bit numbers, added in pairs: exact, where a sum of two products of 8 bits does not fit 16.
FASTGEN_TARGET inline Ints pairs(Shorts a, Shorts b) {
#if FASTGEN_LANES == 16
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif FASTGEN_LANES == 8
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  Ints x;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    x[lane] = a[2 * lane] * b[2 * lane] + a[2 * lane + 1] * b[2 * lane + 1];
  }
  return x;
#endif
}

// Sums of products of `Rows` rows with four vectors, `[Rows, 4]`.
template <int Rows>
FASTGEN_TARGET inline void code_tile(
    const int16_t* rows, int64_t stride, const int8_t* const* vectors, int64_t size, FourInts* output) {
  Ints sums[Rows][kDots] = {};
  const auto add = [&](int64_t i, const int8_t* const* from, int64_t offset) FASTGEN_TARGET {
    Shorts x[Rows];
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      __builtin_memcpy(&x[row], rows + row * stride + i, sizeof x[row]);
    }
#pragma GCC unroll 8
    for (int dot = 0; dot < kDots; ++dot) {
      const Shorts y = widened(from[dot] + offset);
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        sums[row][dot] += pairs(x[row], y);
      }
    }
  };
  int64_t i = 0;
  for (; i + kCodes <= size; i += kCodes) {
    add(i, vectors, i);
  }
  if (i < size) {
    int8_t last[kDots][kCodes] = {};
    const int8_t* from[kDots];
    for (int dot = 0; dot < kDots; ++dot) {
      __builtin_memcpy(last[dot], vectors[dot] + i, size - i);
      from[dot] = last[dot];
    }
    add(i, from, 0);
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
    output[row] = sums_of_lanes<FourInts>(sums[row][0], sums[row][1], sums[row][2], sums[row][3]);
  }
}

// Outputs `begin * 4` up to `end * 4`, but for those beyond the last.
FASTGEN_TARGET void multiply_codes(const Coded& all, int64_t begin, int64_t end) {
  // So many rows stay in the first-level cache while all weights pass.
  const int64_t block = std::max<int64_t>(kCodeRows, (1 << 13) / all.stride / kCodeRows * kCodeRows);
  for (int64_t first = 0; first < all.count; first += block) {
    for (int64_t i = begin * kDots; i < std::min(end * kDots, all.width); i += kDots) {
      const int64_t outputs = std::min<int64_t>(kDots, all.width - i);
      const int8_t* vectors[kDots];
      point_at(all.weight, i, all.width, all.size, vectors);
      Four scales = {}, bias = {};
      __builtin_memcpy(&scales, all.scales + i, outputs * sizeof(float));
      if (all.bias != nullptr) {
        __builtin_memcpy(&bias, all.bias + i, outputs * sizeof(float));
      }
      for_tiles<kCodeRows>(std::min(block, all.count - first), [&](auto number, int64_t in_block) FASTGEN_TARGET {
        constexpr int tile = decltype(number)::value;
        const int64_t row = first + in_block;
        FourInts sums[tile];
        code_tile<tile>(all.rows + row * all.stride, all.stride, vectors, all.size, sums);
        for (int64_t r = 0; r < tile; ++r) {
          const Four x = __builtin_convertvector(sums[r], Four) * (all.row_scales[row + r] - Four{}) * scales + bias;
          __builtin_memcpy(all.output + (row + r) * all.width + i, &x, outputs * sizeof(float));
        }
      });
    }
  }
}

} // namespace FASTGEN_ISA
} // namespace fastgen
