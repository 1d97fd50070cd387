// fastgen::dynamic_quantized_linear on the CPU, and fastgen::quantize_rows and fastgen::dequantize: what is before and after
// a product of 8-bit integers that is torch's.
#include "products.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
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
  const auto quantize = FASTGEN_CHOOSE(quantize_rows<int8_t>);
  at::parallel_for(0, count, grain_of(size), [&](int64_t begin, int64_t end) {
    quantize(from, size, size, begin, end, into, factors);
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

constexpr int64_t kProductsPerTask = 1 << 18; // below that another thread costs more than it saves

at::Tensor dynamic_quantized_linear(
    const at::Tensor& rows, const at::Tensor& codes, const at::Tensor& scales, const std::optional<at::Tensor>& bias) {
  check_dynamic(rows, codes, scales, bias);
  const int64_t size = codes.size(1), width = codes.size(0);
  const int64_t stride = (std::max<int64_t>(size, 1) + 31) / 32 * 32; // of whole vectors
  at::Tensor output = at::empty(output_shape(rows, width), rows.options());
  if (output.numel() == 0) {
    return output;
  }
  const int64_t count = output.numel() / width;
  const at::Tensor x = rows.contiguous(), c = codes.contiguous(), s = scales.contiguous();
  const at::Tensor b = bias ? bias->contiguous() : at::Tensor();
  at::Tensor row_codes = at::empty({count, stride}, rows.options().dtype(at::kShort));
  at::Tensor row_scales = at::empty({count}, rows.options());
  const float* const from = x.const_data_ptr<float>();
  int16_t* const into = row_codes.mutable_data_ptr<int16_t>();
  float* const factors = row_scales.mutable_data_ptr<float>();
  const auto quantize = FASTGEN_CHOOSE(quantize_rows<int16_t>);
  at::parallel_for(0, count, grain_of(size), [&](int64_t begin, int64_t end) {
    quantize(from, size, stride, begin, end, into, factors);
  });
  const Coded all{into, c.const_data_ptr<int8_t>(), factors, s.const_data_ptr<float>(),
                  bias ? b.const_data_ptr<float>() : nullptr, output.mutable_data_ptr<float>(),
                  count, size, stride, width};
  const int64_t groups = (width + 3) / 4, grain = kProductsPerTask / std::max<int64_t>(1, 4 * size * count) + 1;
  const auto multiply = FASTGEN_CHOOSE(multiply_codes);
  at::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) { multiply(all, begin, end); });
  return output;
}

} // namespace

TORCH_LIBRARY_IMPL(fastgen, CPU, m) {
  m.impl("quantize_rows", &quantize_rows);
  m.impl("dequantize", &dequantize);
  m.impl("dynamic_quantized_linear", &dynamic_quantized_linear);
}

} // namespace fastgen
