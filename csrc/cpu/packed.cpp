// fastgen::packed_linear on the CPU, in float32.
#include "parallel.h"
#include "products.h"

#include <vector>

#define FASTGEN_LOOPS "packed_isa.h"
#include "each_isa.h"

namespace fastgen {
namespace {

constexpr int64_t kRowsPerRead = 8; // whose arithmetic takes about as long as reading a panel

Tensor packed_linear(
    const Tensor& rows, const Tensor& packed, int64_t width, const std::optional<Tensor>& bias) {
  check_packed(rows, packed, width, bias);
  Tensor output = make(output_shape(rows, width), ScalarType::Float, rows);
  if (output.numel() == 0) {
    return output;
  }
  const Tensor x = dense(rows), w = dense(packed);
  const std::optional<Tensor> b = dense(bias);
  const int64_t count = output.numel() / width, size = rows.size(-1);
  const Packed all{
      data_of<float>(x),
      data_of<float>(w),
      floats_of(b),
      mutable_data_of<float>(output),
      count,
      size,
      width,
      rows_of_a_block(count, size, panels_of(width), threads())};
  const auto multiply = FASTGEN_CHOOSE(multiply_panel);
  // Few rows wait for the weights, many for the arithmetic.
  const int64_t grain = grain_of(kPanel * all.size * std::max<int64_t>(1, all.block / kRowsPerRead));
  parallel_for(0, all.tasks(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      multiply(all, task);
    }
  });
  return output;
}

} // namespace

FASTGEN_LIBRARY(CPU, m) {
  m.impl("packed_linear", FASTGEN_KERNEL(packed_linear));
}

} // namespace fastgen
