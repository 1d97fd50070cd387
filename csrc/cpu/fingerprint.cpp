// fastgen::fingerprint on the CPU, of numbers of any type.
#include "products.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#define FASTGEN_LOOPS "fingerprint_isa.h"
#include "each_isa.h"

namespace fastgen {
namespace {

constexpr uint64_t kOfRows = uint64_t{1} << 32; // where the multipliers of rows begin
constexpr int64_t kCopied = 1 << 16; // numbers at a time, of a tensor whose rows are not dense

// What these rows, `[count, size]`, which are dense and the tensor's from row `first` on, add to its fingerprint.
uint64_t of_rows(const at::Tensor& rows, int64_t first, const std::vector<uint64_t>& by) {
  constexpr int64_t kAtOnce = 8;
  const auto one = FASTGEN_CHOOSE(row_sums<1>), several = FASTGEN_CHOOSE(row_sums<kAtOnce>);
  const char* const data = static_cast<const char*>(rows.const_data_ptr());
  const int64_t bytes = rows.size(1) * rows.element_size(), stride = rows.stride(0) * rows.element_size();
  return at::parallel_reduce(
      0, rows.size(0), grain_of(bytes / 4), uint64_t{0},
      [&](int64_t begin, int64_t end, uint64_t total) {
        uint64_t sums[kAtOnce];
        for (int64_t i = begin, count; i < end; i += count) {
          count = end - i >= kAtOnce ? kAtOnce : 1;
          (count == 1 ? one : several)(data + i * stride, stride, bytes, by.data(), sums);
          for (int64_t row = 0; row < count; ++row) {
            total += mixed(sums[row]) * multiplier(kOfRows + first + i + row);
          }
        }
        return total;
      },
      [](uint64_t one, uint64_t other) { return one + other; });
}

uint64_t of_all(const at::Tensor& tensor) {
  const int64_t count = tensor.size(0), size = tensor.size(1);
  const std::vector<uint64_t> by = FASTGEN_CHOOSE(multipliers)((size * tensor.element_size() + 3) / 4);
  if (tensor.stride(1) == 1 || size == 1) {
    return of_rows(tensor, 0, by);
  }
  uint64_t total = 0;
  const int64_t step = std::max<int64_t>(1, kCopied / size);
  for (int64_t i = 0; i < count; i += step) {
    total += of_rows(tensor.narrow(0, i, std::min(step, count - i)).contiguous(), i, by);
  }
  return total;
}

at::Tensor fingerprint(const at::Tensor& tensor) {
  check_fingerprint(tensor);
  at::Tensor result = at::empty({}, tensor.options().dtype(at::kLong));
  *result.mutable_data_ptr<int64_t>() = tensor.numel() == 0 ? 0 : static_cast<int64_t>(of_all(tensor));
  return result;
}

} // namespace

TORCH_LIBRARY_IMPL(fastgen, CPU, m) {
  m.impl("fingerprint", &fingerprint);
}

} // namespace fastgen
