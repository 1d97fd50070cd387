// fastgen::skinny_linear on the CPU, in float32.
#include "products.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#define FASTGEN_LOOPS "skinny_isa.h"
#include "each_isa.h"

namespace fastgen {
namespace {

at::Tensor skinny_linear(const at::Tensor& rows, at::TensorList weights, const std::optional<at::Tensor>& bias) {
  check_skinny(rows, weights, bias);
  int64_t width = 0;
  for (const at::Tensor& weight : weights) {
    width += weight.size(0);
  }
  const int64_t size = rows.size(-1);
  at::Tensor output = at::empty(output_shape(rows, width), rows.options());
  if (output.numel() == 0) {
    return output;
  }
  const at::Tensor x = rows.contiguous();
  const at::Tensor b = bias ? bias->contiguous() : at::Tensor();
  std::vector<at::Tensor> held; // copies of weights that are not dense
  std::vector<Skinny> parts;
  std::vector<int64_t> ends; // of each part, in groups of four outputs
  int64_t done = 0, groups = 0;
  for (const at::Tensor& weight : weights) {
    held.push_back(weight.contiguous());
    const float* const bias_part = bias ? b.const_data_ptr<float>() + done : nullptr;
    parts.push_back(
        {x.const_data_ptr<float>(), held.back().const_data_ptr<float>(), bias_part,
         output.mutable_data_ptr<float>() + done, output.numel() / width, size, weight.size(0), width});
    done += weight.size(0);
    groups += (weight.size(0) + 3) / 4;
    ends.push_back(groups);
  }
  const auto multiply = FASTGEN_CHOOSE(multiply);
  const int64_t grain = std::max<int64_t>(1, kFloatsPerTask / std::max<int64_t>(1, 4 * size));
  at::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t first = i == 0 ? 0 : ends[i - 1];
      const int64_t from = std::max(begin, first), to = std::min(end, ends[i]);
      if (from < to) {
        multiply(parts[i], from - first, to - first);
      }
    }
  });
  return output;
}

} // namespace

TORCH_LIBRARY_IMPL(fastgen, CPU, m) {
  m.impl("skinny_linear", &skinny_linear);
}

} // namespace fastgen
