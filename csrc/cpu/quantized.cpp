// fastgen::quantize_rows and fastgen::dequantize on the CPU: before and after a product of 8-bit integers, which is torch's.
#include "products.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#define FASTGEN_LOOPS "quantized_isa.h"
#include "each_isa.h"

namespace fastgen {
namespace {

std::tuple<at::Tensor, at::Tensor> quantize_rows(const at::Tensor& rows) {
  check_rows(rows);
  const int64_t count = rows.size(0), size = rows.size(1);
  at::Tensor codes = at::empty({count, size}, rows.options().dtype(at::kChar));
  at::Tensor scales = at::empty({count}, rows.options());
  const at::Tensor x = rows.contiguous();
  const float* const from = x.const_data_ptr<float>();
  int8_t* const into = codes.mutable_data_ptr<int8_t>();
  float* const factors = scales.mutable_data_ptr<float>();
  const auto quantize = FASTGEN_CHOOSE(quantize_rows);
  at::parallel_for(0, count, grain_of(size), [&](int64_t begin, int64_t end) {
    quantize(from, size, begin, end, into, factors);
  });
  return {codes, scales};
}

at::Tensor dequantize(
    const at::Tensor& products, const at::Tensor& row_scales, const at::Tensor& scales,
    const std::optional<at::Tensor>& bias) {
  check_products(products, row_scales, scales, bias);
  const int64_t count = products.size(0), width = products.size(1);
  at::Tensor output = at::empty({count, width}, row_scales.options());
  const at::Tensor p = products.contiguous(), r = row_scales.contiguous(), s = scales.contiguous();
  const at::Tensor b = bias ? bias->contiguous() : at::Tensor();
  const int32_t* const from = p.const_data_ptr<int32_t>();
  const float *const of_rows = r.const_data_ptr<float>(), *const of_outputs = s.const_data_ptr<float>();
  const float* const added = bias ? b.const_data_ptr<float>() : nullptr;
  float* const into = output.mutable_data_ptr<float>();
  const auto scale = FASTGEN_CHOOSE(dequantize);
  at::parallel_for(0, count, grain_of(width), [&](int64_t begin, int64_t end) {
    scale(from, of_rows, of_outputs, added, width, begin, end, into);
  });
  return output;
}

} // namespace

TORCH_LIBRARY_IMPL(fastgen, CPU, m) {
  m.impl("quantize_rows", &quantize_rows);
  m.impl("dequantize", &dequantize);
}

} // namespace fastgen
