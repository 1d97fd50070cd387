// A product of a few rows with weights, which are read from where they are, once.
#pragma once

#include <cstdint>

namespace fastgen {

// The part of one weight: `output[row][i] = sum_k rows[row][k] * weight[i][k] + bias[i]`.
struct Skinny {
  const float *rows, *weight, *bias; // [count, size], [width, size], [width] or null
  float* output; // rows of `output_stride` floats
  int64_t count, size, width, output_stride;
};

} // namespace fastgen
