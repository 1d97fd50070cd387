// Calls the operators of a library with recorded inputs, on torch for Windows: see README.md.
//
//     replay.exe LIBRARY CALLS
//
// Prints for each operator in how many calls all results were the recorded ones. Exit code 1: a result differs by more
// than kNear, or an operator was not called.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <windows.h>

#define FASTGEN_LOOPS <iso646.h> // none: it is empty in C++
#include "cpu/each_isa.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using torch::stable::Tensor;
namespace stable = torch::stable::detail;

constexpr double kNear = 1e-5; // of the largest number of a tensor
constexpr double kOther = std::numeric_limits<double>::infinity(); // other tokens, another shape, another type
constexpr int kFloat = 0; // in recorder.py's TYPES
enum Kind { kNone, kTensor, kInteger, kReal, kBoolean, kTensors, kOptional = 0x80 };

std::ifstream file;

template <typename Number>
Number next() {
  Number x{};
  if (!file.read(reinterpret_cast<char*>(&x), sizeof x)) {
    throw std::runtime_error("the file ends too soon");
  }
  return x;
}

std::string next_text() {
  std::string words(next<uint32_t>(), '\0');
  file.read(words.data(), static_cast<std::streamsize>(words.size()));
  return words;
}

struct Saved {
  int32_t type = 0;
  std::vector<int64_t> sizes, strides;
  std::vector<char> bytes; // from the first number to the last
};

Saved next_saved() {
  Saved saved;
  saved.type = next<int32_t>();
  saved.sizes.resize(next<uint32_t>());
  saved.strides.resize(saved.sizes.size());
  for (std::vector<int64_t>* const shape : {&saved.sizes, &saved.strides}) {
    std::generate(shape->begin(), shape->end(), next<int64_t>);
  }
  saved.bytes.resize(next<uint64_t>());
  file.read(saved.bytes.data(), static_cast<std::streamsize>(saved.bytes.size()));
  return saved;
}

int32_t number_of(int32_t type) {
  using Asks = int32_t (*)();
  const Asks asks[] = {
      aoti_torch_dtype_float32,  aoti_torch_dtype_int64, aoti_torch_dtype_int32,   aoti_torch_dtype_int8,
      aoti_torch_dtype_bfloat16, aoti_torch_dtype_bool,  aoti_torch_dtype_float16,
  };
  return asks[type]();
}

void need(AOTITorchError code, const std::string& what) {
  if (code != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("torch refuses " + what);
  }
}

Tensor tensor_of(const Saved& saved) {
  const int32_t type = number_of(saved.type);
  const auto count = static_cast<int64_t>(saved.bytes.size() / aoti_torch_dtype_element_size(type));
  const int64_t one = 1;
  AtenTensorHandle flat = nullptr, view = nullptr;
  need(aoti_torch_empty_strided(1, &count, &one, type, aoti_torch_device_type_cpu(), 0, &flat), "a tensor");
  const Tensor whole(flat);
  if (count > 0) {
    std::memcpy(whole.mutable_data_ptr(), saved.bytes.data(), saved.bytes.size());
  }
  const auto dimensions = static_cast<int64_t>(saved.sizes.size());
  need(
      aoti_torch__reinterpret_tensor(flat, dimensions, saved.sizes.data(), saved.strides.data(), 0, &view), "a view");
  return Tensor(view);
}

// The largest difference as a part of the largest number; 0 for the same bytes.
double difference(const Tensor& found, const Saved& wanted) {
  int32_t type = 0;
  need(aoti_torch_get_dtype(found.get(), &type), "the type");
  const size_t dimensions = wanted.sizes.size();
  if (type != number_of(wanted.type) || found.dim() != static_cast<int64_t>(dimensions)) {
    return kOther;
  }
  int64_t count = 1;
  for (size_t d = 0; d < dimensions; ++d) {
    if (found.size(d) != wanted.sizes[d]) {
      return kOther;
    }
    count *= wanted.sizes[d];
  }
  const auto* const data = static_cast<const char*>(found.const_data_ptr());
  const size_t width = aoti_torch_dtype_element_size(type);
  std::vector<int64_t> place(dimensions, 0);
  double worst = 0, largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t here = 0, there = 0;
    for (size_t d = 0; d < dimensions; ++d) {
      here += place[d] * found.stride(d);
      there += place[d] * wanted.strides[d];
    }
    const char* const one = data + here * width;
    const char* const other = wanted.bytes.data() + there * width;
    float a = 0, b = 0;
    if (wanted.type == kFloat) {
      std::memcpy(&a, one, sizeof a);
      std::memcpy(&b, other, sizeof b);
      largest = std::isfinite(b) ? std::max(largest, std::abs(static_cast<double>(b))) : largest;
    }
    if (std::memcmp(one, other, width) != 0 && !(std::isnan(a) && std::isnan(b))) {
      const bool are_numbers = wanted.type == kFloat && std::isfinite(a) && std::isfinite(b);
      worst = are_numbers ? std::max(worst, std::abs(static_cast<double>(a) - b)) : kOther;
    }
    for (size_t d = dimensions; d-- > 0 && ++place[d] == wanted.sizes[d];) {
      place[d] = 0;
    }
  }
  return worst == 0 ? 0 : worst / largest;
}

// Makes the call that comes next in the file; returns the largest difference of its results.
double replay(const std::string& name) {
  std::vector<StableIValue> stack(next<uint32_t>());
  std::vector<std::pair<Tensor, Saved>> changed;
  for (StableIValue& value : stack) {
    const auto kind = next<uint8_t>();
    switch (kind & ~kOptional) {
      case kNone:
        value = stable::from(std::optional<Tensor>());
        break;
      case kTensor: {
        const Tensor tensor = tensor_of(next_saved());
        if (next<uint8_t>() != 0) {
          changed.emplace_back(tensor, next_saved());
        }
        value = kind & kOptional ? stable::from(std::optional<Tensor>(tensor)) : stable::from(tensor);
        break;
      }
      case kInteger:
        value = stable::from(next<int64_t>());
        break;
      case kReal:
        value = stable::from(next<double>());
        break;
      case kBoolean:
        value = stable::from(next<uint8_t>() != 0);
        break;
      case kTensors: {
        std::vector<Tensor> tensors;
        for (auto left = next<uint32_t>(); left > 0; --left) {
          tensors.push_back(tensor_of(next_saved()));
        }
        value = stable::from(tensors);
        break;
      }
      default:
        throw std::runtime_error("an argument of no known kind");
    }
  }
  const auto results = next<uint32_t>();
  stack.resize(std::max<size_t>(stack.size(), results));
  need(torch_call_dispatcher(name.c_str(), "", stack.data(), TORCH_ABI_VERSION), name);
  double worst = 0;
  for (uint32_t i = 0; i < results; ++i) {
    const auto kind = next<uint8_t>();
    if (kind == kTensor) {
      worst = std::max(worst, difference(stable::to<Tensor>(stack[i]), next_saved()));
    } else {
      const int64_t found = kind == kBoolean ? stable::to<bool>(stack[i]) : stable::to<int64_t>(stack[i]);
      worst = found == next<int64_t>() ? worst : kOther;
    }
  }
  for (const auto& [tensor, wanted] : changed) {
    worst = std::max(worst, difference(tensor, wanted));
  }
  return worst;
}

struct Count {
  int64_t equal = 0, near_ = 0, other = 0; // <windows.h> takes the name without a line
  double worst = 0; // of those that are near
};

int run(const char* library, const char* calls) {
  file.open(calls, std::ios::binary);
  TorchLibraryHandle names = nullptr;
  need(aoti_torch_library_init_def("fastgen", __FILE__, __LINE__, &names), "a library");
  const auto operators = next<uint32_t>();
  for (uint32_t i = 0; i < operators; ++i) {
    need(aoti_torch_library_def(names, next_text().c_str()), "a schema");
  }
  if (LoadLibraryA(library) == nullptr) {
    throw std::runtime_error(std::string(library) + " is not loaded: error " + std::to_string(GetLastError()));
  }
  std::map<std::string, Count> counts;
  while (file.peek() != EOF) {
    const std::string name = next_text();
    const double worst = replay("fastgen::" + name);
    Count& count = counts[name];
    ++(worst == 0 ? count.equal : worst < kNear ? count.near_ : count.other);
    count.worst = worst < kNear ? std::max(count.worst, worst) : count.worst;
  }
  const char* const sets[] = {"baseline", "AVX2", "AVX-512"};
  std::printf("instructions: %s\n", sets[static_cast<int>(fastgen::instruction_set())]);
  bool is_right = counts.size() == operators;
  for (const auto& [name, count] : counts) {
    std::printf(
        "%-26s %4lld equal, %4lld near (within %.1e), %lld other\n", name.c_str(), static_cast<long long>(count.equal),
        static_cast<long long>(count.near_), count.worst, static_cast<long long>(count.other));
    is_right = is_right && count.other == 0;
  }
  return is_right ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return argc == 3 ? run(argv[1], argv[2]) : 2;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}
