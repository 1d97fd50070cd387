// fastgen::dynamic_quantized_linear on the CPU, and fastgen::quantize_rows and fastgen::dequantize: what is before and after
// a product of 8-bit integers that is torch's.
#include "parallel.h"
#include "products.h"

#include <algorithm>
#include <tuple>

#define FASTGEN_LOOPS "quantized_isa.h"
#include "each_isa.h"

namespace fastgen {
namespace {

std::tuple<Tensor, Tensor> quantize_rows(const Tensor& rows) {
  check_rows(rows);
  const int64_t count = rows.size(0), size = rows.size(1);
  Tensor codes = make({count, size}, ScalarType::Char, rows);
  Tensor scales = make({count}, ScalarType::Float, rows);
  const Tensor x = dense(rows);
  const float* const from = data_of<float>(x);
  int8_t* const into = mutable_data_of<int8_t>(codes);
  float* const factors = mutable_data_of<float>(scales);
  const auto quantize = FASTGEN_CHOOSE(quantize_rows<int8_t>);
  parallel_for(0, count, grain_of(size), [&](int64_t begin, int64_t end) {
    quantize(from, size, size, begin, end, into, factors);
  });
  return {codes, scales};
}

Tensor dequantize(
    const Tensor& products, const Tensor& row_scales, const Tensor& scales,
    const std::optional<Tensor>& bias) {
  check_products(products, row_scales, scales, bias);
  const int64_t count = products.size(0), width = products.size(1);
  Tensor output = make({count, width}, ScalarType::Float, row_scales);
  const Tensor p = dense(products), r = dense(row_scales), s = dense(scales);
  const std::optional<Tensor> b = dense(bias);
  const int32_t* const from = data_of<int32_t>(p);
  const float *const of_rows = data_of<float>(r), *const of_outputs = data_of<float>(s);
  const float* const added = floats_of(b);
  float* const into = mutable_data_of<float>(output);
  const auto scale = FASTGEN_CHOOSE(dequantize);
  parallel_for(0, count, grain_of(width), [&](int64_t begin, int64_t end) {
    scale(from, of_rows, of_outputs, added, width, begin, end, into);
  });
  return output;
}

constexpr int64_t kProductsPerTask = 1 << 18; // below that another thread costs more than it saves

Tensor dynamic_quantized_linear(
    const Tensor& rows, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& bias) {
  check_dynamic(rows, codes, scales, bias);
  const int64_t size = codes.size(1), width = codes.size(0);
  const int64_t stride = (std::max<int64_t>(size, 1) + 31) / 32 * 32; // of whole vectors
  Tensor output = make(output_shape(rows, width), ScalarType::Float, rows);
  if (output.numel() == 0) {
    return output;
  }
  const int64_t count = output.numel() / width;
  const Tensor x = dense(rows), c = dense(codes), s = dense(scales);
  const std::optional<Tensor> b = dense(bias);
  Tensor row_codes = make({count, stride}, ScalarType::Short, rows), row_scales = make({count}, ScalarType::Float, rows);
  const float* const from = data_of<float>(x);
  int16_t* const into = mutable_data_of<int16_t>(row_codes);
  float* const factors = mutable_data_of<float>(row_scales);
  const auto quantize = FASTGEN_CHOOSE(quantize_rows<int16_t>);
  parallel_for(0, count, grain_of(size), [&](int64_t begin, int64_t end) {
    quantize(from, size, stride, begin, end, into, factors);
  });
  const Coded all{
      into, data_of<int8_t>(c), factors, data_of<float>(s), floats_of(b), mutable_data_of<float>(output),
      count, size, stride, width};
  const int64_t groups = (width + 3) / 4, grain = kProductsPerTask / std::max<int64_t>(1, 4 * size * count) + 1;
  const auto multiply = FASTGEN_CHOOSE(multiply_codes);
  parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) { multiply(all, begin, end); });
  return output;
}

} // namespace

FASTGEN_LIBRARY(CPU, m) {
  m.impl("quantize_rows", FASTGEN_KERNEL(quantize_rows));
  m.impl("dequantize", FASTGEN_KERNEL(dequantize));
  m.impl("dynamic_quantized_linear", FASTGEN_KERNEL(dynamic_quantized_linear));
}

} // namespace fastgen
