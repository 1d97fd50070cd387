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

at::Tensor packed_linear(
    const at::Tensor& rows, const at::Tensor& packed, int64_t width, const std::optional<at::Tensor>& bias) {
  check_packed(rows, packed, width, bias);
  at::Tensor output = at::empty(output_shape(rows, width), rows.options());
  if (output.numel() == 0) {
    return output;
  }
  const at::Tensor x = rows.contiguous(), w = packed.contiguous();
  const at::Tensor b = bias ? bias->contiguous() : at::Tensor();
  const int64_t count = output.numel() / width, size = rows.size(-1);
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const Packed all{
      x.const_data_ptr<float>(),
      w.const_data_ptr<float>(),
      bias ? b.const_data_ptr<float>() : nullptr,
      output.mutable_data_ptr<float>(),
      count,
      size,
      width,
      rows_of_a_block(count, size, panels_of(width), threads)};
  const auto multiply = FASTGEN_CHOOSE(multiply_panel);
  const int64_t grain = grain_of(kPanel * all.size);
  at::parallel_for(0, all.tasks(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      multiply(all, task);
    }
  });
  return output;
}

} // namespace

TORCH_LIBRARY_IMPL(fastgen, CPU, m) {
  m.impl("packed_linear", &packed_linear);
}

} // namespace fastgen
