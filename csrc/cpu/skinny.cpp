// fastgen::skinny_linear and fastgen::quantized_linear on the CPU: sums in float32; weights may be stored in 16 bits, or as
// codes of 8 bits.
#include "parallel.h"
#include "products.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <type_traits>
#include <vector>

#define FASTGEN_LOOPS "skinny_isa.h"
#include "each_isa.h"

namespace fastgen {
namespace {

constexpr int64_t kWorthMeasuring = 1 << 20; // numbers of a weight: with fewer, either way takes no time

// Whether one row of a weight after another is read faster here than several at once. On some processors it is, by up to
// a third; on others by as much the other way. Sums are added in the same order: products are the same, bit for bit.
bool is_faster_in_order() {
  // Two threads may measure at once. A static variable that one of them is about to initialise would never be, in a
  // process that is forked meanwhile.
  enum : int { kUnknown, kNo, kYes };
  static std::atomic<int> found{kUnknown};
  const int known = found.load(std::memory_order_relaxed);
  if (known != kUnknown) {
    return known == kYes;
  }
  const bool is_faster = [] {
    constexpr int64_t kWidth = 1 << 14, kSize = 512; // 32 MB: more than second-level caches hold
    const std::vector<float> weight(kWidth * kSize, 1.0f), row(kSize, 1.0f);
    std::vector<float> output(kWidth);
    const auto seconds = [&](bool in_order) {
      const Skinny<float> all{
          row.data(), weight.data(), nullptr, nullptr, output.data(), 1, kSize, kWidth, kWidth, in_order};
      const auto start = std::chrono::steady_clock::now();
      FASTGEN_CHOOSE(multiply<float>)(all, 0, kWidth / 4);
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    double in_order = seconds(true), at_once = seconds(false);
    for (int round = 0; round < 2; ++round) { // another process may have interrupted one
      in_order = std::min(in_order, seconds(true));
      at_once = std::min(at_once, seconds(false));
    }
    return in_order < at_once;
  }();
  found.store(is_faster ? kYes : kNo, std::memory_order_relaxed);
  return is_faster;
}

// Products with several weights, side by side. `scales`: of each weight's outputs, empty for all if there are none.
Tensor multiply_all(
    const Tensor& rows, TensorList weights, TensorList scales, const std::optional<Tensor>& bias) {
  int64_t width = 0;
  for (const Tensor& weight : weights) {
    width += weight.size(0);
  }
  const int64_t size = rows.size(-1);
  Tensor output = make(output_shape(rows, width), ScalarType::Float, rows);
  if (output.numel() == 0) {
    return output;
  }
  const Tensor x = dense(rows);
  const std::optional<Tensor> b = dense(bias);
  std::vector<Tensor> held; // copies of what is not dense
  std::vector<std::function<void(int64_t, int64_t)>> parts; // of each weight
  std::vector<int64_t> ends; // of each part, in groups of four outputs
  int64_t done = 0, groups = 0;
  const bool in_order = width * size >= kWorthMeasuring && is_faster_in_order();
  const auto add_part = [&](auto multiply, const auto* weight, const float* factors, int64_t outputs) {
    const Skinny<std::decay_t<decltype(*weight)>> part{
        data_of<float>(x), weight, factors, bias ? floats_of(b) + done : nullptr,
        mutable_data_of<float>(output) + done, output.numel() / width, size, outputs, width, in_order};
    parts.push_back([multiply, part](int64_t begin, int64_t end) { multiply(part, begin, end); });
  };
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor weight = dense(weights[i]);
    held.push_back(weight);
    const int64_t outputs = weight.size(0);
    if (dtype_of(weight) == ScalarType::Half) {
      add_part(FASTGEN_CHOOSE(multiply<c10::Half>), data_of<c10::Half>(weight), nullptr, outputs);
    } else if (dtype_of(weight) == ScalarType::BFloat16) {
      add_part(FASTGEN_CHOOSE(multiply<c10::BFloat16>), data_of<c10::BFloat16>(weight), nullptr, outputs);
    } else if (dtype_of(weight) == ScalarType::Char) {
      held.push_back(dense(scales[i]));
      const float* const factors = data_of<float>(held.back());
      add_part(FASTGEN_CHOOSE(multiply<int8_t>), data_of<int8_t>(weight), factors, outputs);
    } else {
      add_part(FASTGEN_CHOOSE(multiply<float>), data_of<float>(weight), nullptr, outputs);
    }
    done += outputs;
    groups += (outputs + 3) / 4;
    ends.push_back(groups);
  }
  const int64_t grain = grain_of(4 * size);
  parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t first = i == 0 ? 0 : ends[i - 1];
      const int64_t from = std::max(begin, first), to = std::min(end, ends[i]);
      if (from < to) {
        parts[i](from - first, to - first);
      }
    }
  });
  return output;
}

Tensor skinny_linear(const Tensor& rows, TensorList weights, const std::optional<Tensor>& bias) {
  check_skinny(rows, weights, bias);
  return multiply_all(rows, weights, {}, bias);
}

Tensor quantized_linear(
    const Tensor& rows, TensorList codes, TensorList scales, const std::optional<Tensor>& bias) {
  check_quantized(rows, codes, scales, bias);
  return multiply_all(rows, codes, scales, bias);
}

} // namespace

FASTGEN_LIBRARY(CPU, m) {
  m.impl("skinny_linear", FASTGEN_KERNEL(skinny_linear));
  m.impl("quantized_linear", FASTGEN_KERNEL(quantized_linear));
}

} // namespace fastgen
