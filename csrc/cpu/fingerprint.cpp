// fastgen::fingerprint on the CPU, of numbers of any type.
#include "parallel.h"
#include "products.h"

#include <algorithm>
#include <atomic>
#include <vector>

#define FASTGEN_LOOPS "fingerprint_isa.h"
#include "each_isa.h"

namespace fastgen {
namespace {

constexpr uint64_t kOfRows = uint64_t{1} << 32; // where the multipliers of rows begin
constexpr int64_t kCopied = 1 << 16; // numbers at a time, of a tensor whose rows are not dense

// What these rows, `[count, size]`, which are dense and the tensor's from row `first` on, add to its fingerprint.
uint64_t of_rows(const Tensor& rows, int64_t first, const std::vector<uint64_t>& by) {
  constexpr int64_t kAtOnce = 8;
  const auto one = FASTGEN_CHOOSE(row_sums<1>), several = FASTGEN_CHOOSE(row_sums<kAtOnce>);
  const char* const data = static_cast<const char*>(rows.const_data_ptr());
  const int64_t width = rows.element_size(), bytes = rows.size(1) * width, stride = rows.stride(0) * width;
  std::atomic<uint64_t> total{0}; // modulo 2^64: the order of the threads changes nothing
  parallel_for(0, rows.size(0), grain_of(bytes / 4), [&](int64_t begin, int64_t end) {
    uint64_t sums[kAtOnce], part = 0;
    for (int64_t i = begin, count; i < end; i += count) {
      count = end - i >= kAtOnce ? kAtOnce : 1;
      (count == 1 ? one : several)(data + i * stride, stride, bytes, by.data(), sums);
      for (int64_t row = 0; row < count; ++row) {
        part += mixed(sums[row]) * multiplier(kOfRows + first + i + row);
      }
    }
    total += part;
  });
  return total;
}

uint64_t of_all(const Tensor& tensor) {
  const int64_t count = tensor.size(0), size = tensor.size(1);
  const std::vector<uint64_t> by = FASTGEN_CHOOSE(multipliers)((size * tensor.element_size() + 3) / 4);
  if (tensor.stride(1) == 1 || size == 1) {
    return of_rows(tensor, 0, by);
  }
  uint64_t total = 0;
  const int64_t step = std::max<int64_t>(1, kCopied / size);
  for (int64_t i = 0; i < count; i += step) {
    total += of_rows(dense(some_rows(tensor, i, std::min(step, count - i))), i, by);
  }
  return total;
}

Tensor fingerprint(const Tensor& tensor) {
  check_fingerprint(tensor);
  Tensor result = make({}, ScalarType::Long, tensor);
  *mutable_data_of<int64_t>(result) = tensor.numel() == 0 ? 0 : static_cast<int64_t>(of_all(tensor));
  return result;
}

} // namespace

FASTGEN_LIBRARY(CPU, m) {
  m.impl("fingerprint", FASTGEN_KERNEL(fingerprint));
}

} // namespace fastgen
