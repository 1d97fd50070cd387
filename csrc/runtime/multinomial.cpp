// fastgen::multinomial on the CPU, in float32.
#include "../arguments.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/DistributionsHelper.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>

namespace fastgen {
namespace {

constexpr int64_t kNumbersPerTask = 1 << 16;
constexpr int64_t kMostCategories = 1 << 24; // torch refuses more
constexpr int64_t kFewNumbers = 64; // called one by one, to skip them is as fast

// What ATen's distributions ask for numbers: those that torch's generator would give.
struct Numbers {
  at::mt19937 engine;

  uint64_t random64() {
    const uint64_t high = engine(), low = engine();
    return high << 32 | low;
  }

  // The engine makes its numbers in blocks: inside of one, to skip is to count.
  void skip(int64_t count) {
    while (count > kFewNumbers) {
      at::mt19937_data_pod state = engine.data();
      const int64_t skipped = std::min<int64_t>(count, state.left_ - 1);
      state.left_ -= static_cast<int>(skipped);
      state.next_ += static_cast<uint32_t>(skipped);
      engine.set_data(state);
      count -= skipped;
      if (count > 0) {
        engine(); // the first one of the next block
        --count;
      }
    }
    for (; count > 0; --count) {
      engine();
    }
  }
};

// Whether torch would draw from these rows: numbers of 0 and more, one of each row above 0.
bool are_probabilities(const float* all, int64_t rows, int64_t vocabulary) {
  std::atomic<bool> valid{vocabulary > 0};
  const int64_t grain = std::max<int64_t>(1, kNumbersPerTask / std::max<int64_t>(1, vocabulary));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* const row_begin = all + row * vocabulary;
      bool is_valid = true, is_positive = false;
      for (int64_t token = 0; token < vocabulary; ++token) {
        const float x = row_begin[token];
        is_valid &= x >= 0 && x < std::numeric_limits<float>::infinity();
        is_positive |= x > 0;
      }
      if (!is_valid || !is_positive) {
        valid = false;
      }
    }
  });
  return valid;
}

// torch divides each probability by a number of the exponential distribution and takes the largest quotient, drawing
// for all, in order. Of 0 nothing comes: there the numbers are skipped and no logarithm is taken.
at::Tensor multinomial(const at::Tensor& probabilities, const std::optional<at::Generator>& generator) {
  check_probabilities(probabilities);
  const int64_t rows = probabilities.size(0), vocabulary = probabilities.size(1);
  const float* const all = probabilities.const_data_ptr<float>();
  // torch draws in the order in which they lie, and says what is wrong.
  const bool is_simple = rows > 0 && vocabulary <= kMostCategories && probabilities.is_contiguous();
  if (!is_simple || !are_probabilities(all, rows, vocabulary)) {
    return at::multinomial(probabilities, 1, false, generator).squeeze(1);
  }
  at::Tensor tokens = at::empty({rows}, probabilities.options().dtype(at::kLong));
  int64_t* const chosen = tokens.mutable_data_ptr<int64_t>();
  auto* const source = at::get_generator_or_default<at::CPUGeneratorImpl>(generator, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(source->mutex_);
  Numbers numbers{source->engine()};
  at::exponential_distribution<double> exponential(1);
  int64_t to_skip = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const float* const row_begin = all + row * vocabulary;
    float largest = 0;
    chosen[row] = 0;
    for (int64_t token = 0; token < vocabulary; ++token) {
      if (row_begin[token] == 0) {
        to_skip += 2; // of 32 bits
        continue;
      }
      numbers.skip(to_skip);
      to_skip = 0;
      const float quotient = row_begin[token] / static_cast<float>(exponential(&numbers));
      if (quotient > largest) {
        largest = quotient;
        chosen[row] = token;
      }
    }
  }
  numbers.skip(to_skip);
  source->set_engine(numbers.engine);
  return tokens;
}

} // namespace

TORCH_LIBRARY_IMPL(fastgen, CPU, m) {
  m.impl("multinomial", &multinomial);
}

} // namespace fastgen
