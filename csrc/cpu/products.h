// Products of rows with weights: with those where they are, or with packed ones.
#pragma once

#include "../arguments.h"

#include <algorithm>
#include <cstdint>

namespace fastgen {

constexpr int64_t kFloatsPerTask = 1 << 15; // of weights: below that another thread costs more than it saves

// The part of one weight: `output[row][i] = sum_k rows[row][k] * weight[i][k] + bias[i]`.
struct Skinny {
  const float *rows, *weight, *bias; // [count, size], [width, size], [width] or null
  float* output; // rows of `output_stride` floats
  int64_t count, size, width, output_stride;
};

// With a weight in panels: the numbers that one step of the loops needs lie side by side, in its order.
// `output[row][i] = sum_k rows[row][k] * weight[i / 64][k][i % 64] + bias[i]`
struct Packed {
  const float *rows, *weight, *bias; // [count, size], [panels, size, 64], [width] or null
  float* output; // [count, width]
  int64_t count, size, width;

  int64_t panels() const { return panels_of(width); }
  // Rows that meet a panel together: they stay in the second-level cache from one panel to the next. As even as can be.
  int64_t blocks() const { return (count + most() - 1) / most(); }
  int64_t block() const { return (count + blocks() - 1) / blocks(); }
  int64_t tasks() const { return blocks() * panels(); } // a panel and a block of rows each

 private:
  int64_t most() const { return std::max<int64_t>(48, (1 << 17) / std::max<int64_t>(1, size)); }
};

} // namespace fastgen
