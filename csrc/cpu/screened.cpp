// fastgen::screened_linear on the CPU, in float32.
#include "parallel.h"
#include "products.h"

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

Tensor screened_linear(
    const Tensor& rows, const Tensor& weight, const Tensor& codes, const Tensor& scales,
    const Tensor& errors, const std::optional<Tensor>& bias) {
  check_screened(rows, weight, codes, scales, errors, bias);
  const int64_t width = weight.size(0), size = weight.size(1);
  Tensor output = make(output_shape(rows, width), ScalarType::Float, rows);
  if (output.numel() == 0) {
    return output;
  }
  const int64_t count = output.numel() / width;
  const Tensor x = dense(rows), w = dense(weight), c = dense(codes);
  const Tensor s = dense(scales), e = dense(errors);
  const std::optional<Tensor> b = dense(bias);
  const std::vector<float> norms = norms_of(data_of<float>(x), count, size);
  const Screened all{
      data_of<float>(x), data_of<float>(w), data_of<int8_t>(c), data_of<float>(s),
      data_of<float>(e), floats_of(b), norms.data(),
      mutable_data_of<float>(output), count, size, width, 4 * (size + 1) * std::numeric_limits<float>::min()};

  const int64_t groups = (width + 3) / 4;
  const int64_t grain = grain_of(4 * size);
  const auto approximate = FASTGEN_CHOOSE(approximate);
  const auto refine = FASTGEN_CHOOSE(refine);
  std::vector<float> least(count, -std::numeric_limits<float>::infinity());
  std::mutex mutex;
  parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> mine(count, -std::numeric_limits<float>::infinity());
    approximate(all, begin, end, mine.data());
    const std::lock_guard<std::mutex> lock(mutex);
    for (int64_t row = 0; row < count; ++row) {
      least[row] = std::max(least[row], mine[row]);
    }
  });
  parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) { refine(all, begin, end, least.data()); });
  return output;
}

} // namespace

FASTGEN_LIBRARY(CPU, m) {
  m.impl("screened_linear", FASTGEN_KERNEL(screened_linear));
}

} // namespace fastgen
