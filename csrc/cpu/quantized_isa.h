// The loops around products of 8-bit integers for one instruction set; included by each_isa.h once for each, so without a
// guard.
#include "vectors_isa.h"

#include <algorithm>

namespace fastgen {
namespace FASTGEN_ISA {

typedef int32_t Ints __attribute__((vector_size(4 * FASTGEN_LANES)));
typedef int8_t Bytes __attribute__((vector_size(FASTGEN_LANES)));

// Rounds rows `begin` up to `end`, [count, size], to codes from -127 to 127; a row is about its codes times its scale.
FASTGEN_TARGET void quantize_rows(
    const float* rows, int64_t size, int64_t begin, int64_t end, int8_t* codes, float* scales) {
  for (int64_t row = begin; row < end; ++row) {
    const float* const from = rows + row * size;
    int8_t* const into = codes + row * size;
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
      return __builtin_convertvector((Ints)shifted, Bytes);
    };
    for (i = 0; i + kLanes <= size; i += kLanes) {
      const Bytes rounded = round(load(from + i));
      __builtin_memcpy(into + i, &rounded, sizeof rounded);
    }
    if (i < size) {
      const Bytes rounded = round(load_part(from + i, size - i));
      __builtin_memcpy(into + i, &rounded, size - i);
    }
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

} // namespace FASTGEN_ISA
} // namespace fastgen
