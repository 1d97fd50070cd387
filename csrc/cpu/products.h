// Products of rows with weights: with those where they are, or with packed ones.
#pragma once

#include "../arguments.h"

#include <algorithm>
#include <cstdint>

namespace fastgen {

constexpr int64_t kFloatsPerTask = 1 << 15; // of weights: below that another thread costs more than it saves

// How many parts, of so many floats each, a task has at least.
inline int64_t grain_of(int64_t floats) {
  return std::max<int64_t>(1, kFloatsPerTask / std::max<int64_t>(1, floats));
}

// The part of one weight: `output[row][i] = sum_k rows[row][k] * weight[i][k] * scales[i] + bias[i]`.
template <typename Weight>
struct Skinny {
  const float* rows; // [count, size]
  const Weight* weight; // [width, size]
  const float* scales; // [width], by which outputs are multiplied before the bias is added, or null
  const float* bias; // [width] or null
  float* output; // rows of `output_stride` floats
  int64_t count, size, width, output_stride;
  bool in_order; // one row of the weight after another, where that may pay; else four or eight at once
};

// With a weight whose rows have codes: `weight[i]` is about `codes[i] * scales[i]`, and a row `x` times what is left of
// it is no more than `errors[i]` times the length of `x`.
struct Screened {
  const float *rows, *weight; // [count, size], [width, size]
  const int8_t* codes; // [width, size]
  const float *scales, *errors, *bias; // [width] each; bias may be null
  const float* norms; // [count], the lengths of the rows
  float* output; // [count, width]
  int64_t count, size, width;
  float tiny; // what a product may lose to numbers too small for float32
};

// Of codes with codes: `output[row][i] = sum_k rows[row][k] * weight[i][k] * row_scales[row] * scales[i] + bias[i]`, with a
// sum of integers.
struct Coded {
  const int16_t* rows; // [count, stride], -127 to 127, zeros from `size` on
  const int8_t* weight; // [width, size], -127 to 127
  const float *row_scales, *scales, *bias; // [count], [width], [width] or null
  float* output; // [count, width]
  int64_t count, size, stride, width;
};

// With a weight in panels: the numbers that one step of the loops needs lie side by side, in its order.
// `output[row][i] = sum_k rows[row][k] * weight[i / 64][k][i % 64] + bias[i]`
struct Packed {
  const float *rows, *weight, *bias; // [count, size], [panels, size, 64], [width] or null
  float* output; // [count, width]
  int64_t count, size, width;
  int64_t block; // rows that meet a panel together

  int64_t panels() const { return panels_of(width); }
  int64_t tasks() const { return (count + block - 1) / block * panels(); } // a panel and a block of rows each
};

// Rows of a block: few enough to stay in the second-level cache from one panel to the next, and so many blocks, but no
// more, that the thread with the most has the least to do.
inline int64_t rows_of_a_block(int64_t count, int64_t size, int64_t panels, int64_t threads) {
  constexpr int64_t kFewest = 24; // with fewer rows a panel is read too often for too little
  const int64_t most = std::max<int64_t>(48, (1 << 17) / std::max<int64_t>(1, size));
  const int64_t least_blocks = (count + most - 1) / most;
  int64_t best = 0, longest = 0;
  for (int64_t blocks = least_blocks; blocks < least_blocks + 2 * threads; ++blocks) {
    const int64_t rows = (count + blocks - 1) / blocks;
    if (best != 0 && rows < kFewest) {
      break;
    }
    const int64_t tasks = (count + rows - 1) / rows * panels;
    const int64_t work = (tasks + threads - 1) / threads * rows; // of that thread
    if (best == 0 || work < longest) {
      best = rows;
      longest = work;
    }
  }
  return best;
}

} // namespace fastgen
