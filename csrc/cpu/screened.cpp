// fastgen::screened_linear on the CPU, in float32.
#include "products.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#define FASTGEN_LOOPS "screened_isa.h"
#include "each_isa.h"

namespace fastgen {
namespace {

// With rows or weights longer than this, sums may overflow: then all is computed.
constexpr double kLongest = 1e18;

// The length of each row, rounded up.
std::vector<float> norms_of(const float* rows, int64_t count, int64_t size) {
  std::vector<float> norms;
  for (int64_t row = 0; row < count; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) {
      const double x = rows[row * size + i];
      sum += x * x;
    }
    const double norm = std::sqrt(sum) * 1.000001;
    norms.push_back(norm < kLongest ? static_cast<float>(norm) : std::numeric_limits<float>::infinity());
  }
  return norms;
}

at::Tensor screened_linear(
    const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& codes, const at::Tensor& scales,
    const at::Tensor& errors, const std::optional<at::Tensor>& bias) {
  check_screened(rows, weight, codes, scales, errors, bias);
  const int64_t width = weight.size(0), size = weight.size(1);
  at::Tensor output = at::empty(output_shape(rows, width), rows.options());
  if (output.numel() == 0) {
    return output;
  }
  const int64_t count = output.numel() / width;
  const at::Tensor x = rows.contiguous(), w = weight.contiguous(), c = codes.contiguous();
  const at::Tensor s = scales.contiguous(), e = errors.contiguous(), b = bias ? bias->contiguous() : at::Tensor();
  const std::vector<float> norms = norms_of(x.const_data_ptr<float>(), count, size);
  const Screened all{
      x.const_data_ptr<float>(), w.const_data_ptr<float>(), c.const_data_ptr<int8_t>(), s.const_data_ptr<float>(),
      e.const_data_ptr<float>(), bias ? b.const_data_ptr<float>() : nullptr, norms.data(),
      output.mutable_data_ptr<float>(), count, size, width, 4 * (size + 1) * std::numeric_limits<float>::min()};

  const int64_t groups = (width + 3) / 4;
  const int64_t grain = grain_of(4 * size);
  const auto approximate = FASTGEN_CHOOSE(approximate);
  const auto refine = FASTGEN_CHOOSE(refine);
  std::vector<float> least(count, -std::numeric_limits<float>::infinity());
  std::mutex mutex;
  at::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> mine(count, -std::numeric_limits<float>::infinity());
    approximate(all, begin, end, mine.data());
    const std::lock_guard<std::mutex> lock(mutex);
    for (int64_t row = 0; row < count; ++row) {
      least[row] = std::max(least[row], mine[row]);
    }
  });
  at::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) { refine(all, begin, end, least.data()); });
  return output;
}

} // namespace

TORCH_LIBRARY_IMPL(fastgen, CPU, m) {
  m.impl("screened_linear", &screened_linear);
}

} // namespace fastgen
