// fastgen::packed_linear on the CPU, in float32.
#include "products.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#define FASTGEN_LOOPS "packed_isa.h"
#include "each_isa.h"

namespace fastgen {
namespace {

void multiply_into(
    const at::Tensor& output, const at::Tensor& rows, const at::Tensor& packed, int64_t width,
    const std::optional<at::Tensor>& bias) {
  if (output.numel() == 0) {
    return;
  }
  const at::Tensor x = rows.contiguous(), w = packed.contiguous();
  const at::Tensor b = bias ? bias->contiguous() : at::Tensor();
  const Packed all{
      x.const_data_ptr<float>(),
      w.const_data_ptr<float>(),
      bias ? b.const_data_ptr<float>() : nullptr,
      output.mutable_data_ptr<float>(),
      output.numel() / width,
      rows.size(-1),
      width};
  const auto multiply = FASTGEN_CHOOSE(multiply_panel);
  const int64_t grain = std::max<int64_t>(1, kFloatsPerTask / std::max<int64_t>(1, kPanel * all.size));
  at::parallel_for(0, all.tasks(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      multiply(all, task);
    }
  });
}

at::Tensor packed_linear(
    const at::Tensor& rows, const at::Tensor& packed, int64_t width, const std::optional<at::Tensor>& bias) {
  check_packed(rows, packed, width, bias);
  at::Tensor output = at::empty(output_shape(rows, width), rows.options());
  multiply_into(output, rows, packed, width, bias);
  return output;
}

at::Tensor& packed_linear_out(
    const at::Tensor& rows, const at::Tensor& packed, int64_t width, const std::optional<at::Tensor>& bias,
    at::Tensor& output) {
  check_packed(rows, packed, width, bias);
  check_output(output, rows, width);
  multiply_into(output, rows, packed, width, bias);
  return output;
}

} // namespace

TORCH_LIBRARY_IMPL(fastgen, CPU, m) {
  m.impl("packed_linear", &packed_linear);
  m.impl("packed_linear.out", &packed_linear_out);
}

} // namespace fastgen
