// What the operators need of torch, in two ways.
//
// Where TORCH_TARGET_VERSION is defined, by torch's stable ABI: one library then serves that torch and every later one.
// Else by ATen, for one torch alone: what csrc/runtime and csrc/cuda are made of, and all of it before torch 2.10.
#pragma once

#ifdef TORCH_TARGET_VERSION
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#ifndef STABLE_TORCH_ERROR_CODE_CHECK // a newer name, which the headers of torch 2.10 don't have
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif
#else
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
#endif

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// Registers operators: FASTGEN_LIBRARY(CPU, m) { m.impl("name", FASTGEN_KERNEL(function)); }
#ifdef TORCH_TARGET_VERSION
#define FASTGEN_LIBRARY(KEY, M) STABLE_TORCH_LIBRARY_IMPL(fastgen, KEY, M)
#define FASTGEN_KERNEL(FUNCTION) TORCH_BOX(&FUNCTION)
#else
#define FASTGEN_LIBRARY(KEY, M) TORCH_LIBRARY_IMPL(fastgen, KEY, M)
#define FASTGEN_KERNEL(FUNCTION) &FUNCTION
#endif

// Refuses arguments: FASTGEN_CHECK(value, k >= 1, "k must be 1 or more, not ", k, "."). Nothing is made of the words
// where the condition holds.
#define FASTGEN_CHECK(ERROR, CONDITION, ...)                     \
  do {                                                           \
    if (!(CONDITION)) {                                          \
      ::fastgen::refuse(::fastgen::Error::ERROR, __VA_ARGS__);   \
    }                                                            \
  } while (false)

namespace fastgen {

#ifdef TORCH_TARGET_VERSION
using Tensor = torch::stable::Tensor;
using TensorList = torch::headeronly::HeaderOnlyArrayRef<Tensor>;
using torch::headeronly::ScalarType;
#else
using at::ScalarType;
using at::Tensor;
using at::TensorList;
#endif

enum class Error { value, type, index };

// Through the stable ABI all exceptions are RuntimeErrors in Python: there ops/operator.py raises what is named.
[[noreturn]] inline void refuse_with(Error error, const std::string& sentence) {
#ifdef TORCH_TARGET_VERSION
  const char* const names[] = {"ValueError: ", "TypeError: ", "IndexError: "};
  throw std::runtime_error(names[static_cast<int>(error)] + sentence);
#else
  if (error == Error::value) {
    C10_THROW_ERROR(ValueError, sentence);
  }
  if (error == Error::type) {
    C10_THROW_ERROR(TypeError, sentence);
  }
  C10_THROW_ERROR(IndexError, sentence);
#endif
}

template <typename... Words>
[[noreturn]] __attribute__((noinline, cold)) void refuse(Error error, const Words&... words) {
  std::ostringstream sentence;
  (sentence << ... << words);
  refuse_with(error, sentence.str());
}

// In words, for FASTGEN_CHECK.
template <typename Numbers>
inline std::string list_of(const Numbers& numbers) {
  std::string list = "[";
  for (const int64_t number : numbers) {
    list += (list.size() > 1 ? ", " : "") + std::to_string(number);
  }
  return list + "]";
}

inline std::string shape_of(const Tensor& tensor) {
  return list_of(tensor.sizes());
}

inline ScalarType dtype_of(const Tensor& tensor) {
#ifdef TORCH_TARGET_VERSION
  // Tensor::scalar_type asks torch for the number of one type after the other, at every call.
  static const struct {
    int32_t float32 = aoti_torch_dtype_float32(), int64 = aoti_torch_dtype_int64(), int32 = aoti_torch_dtype_int32();
    int32_t int8 = aoti_torch_dtype_int8(), bfloat16 = aoti_torch_dtype_bfloat16(), boolean = aoti_torch_dtype_bool();
  } numbers;
  int32_t number = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &number));
  return number == numbers.float32 ? ScalarType::Float
      : number == numbers.int64    ? ScalarType::Long
      : number == numbers.int32    ? ScalarType::Int
      : number == numbers.int8     ? ScalarType::Char
      : number == numbers.bfloat16 ? ScalarType::BFloat16
      : number == numbers.boolean  ? ScalarType::Bool
                                   : tensor.scalar_type();
#else
  return tensor.scalar_type();
#endif
}

// Where the numbers of a tensor lie, whose type has been checked.
template <typename Number>
inline const Number* data_of(const Tensor& tensor) {
#ifdef TORCH_TARGET_VERSION
  return static_cast<const Number*>(tensor.const_data_ptr());
#else
  return tensor.const_data_ptr<Number>();
#endif
}

template <typename Number>
inline Number* mutable_data_of(const Tensor& tensor) {
#ifdef TORCH_TARGET_VERSION
  return static_cast<Number*>(tensor.mutable_data_ptr());
#else
  return tensor.mutable_data_ptr<Number>();
#endif
}

inline bool are_together(const Tensor& one, const Tensor& other) {
#ifdef TORCH_TARGET_VERSION
  int32_t types[2] = {};
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(one.get(), &types[0]));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(other.get(), &types[1]));
  return types[0] == types[1] && one.get_device_index() == other.get_device_index();
#else
  return one.device() == other.device();
#endif
}

inline std::string type_of(const Tensor& tensor) {
#ifdef TORCH_TARGET_VERSION
  std::string name = torch::headeronly::toString(tensor.scalar_type());
#else
  std::string name = c10::toString(tensor.scalar_type());
#endif
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char letter) { return std::tolower(letter); });
  return name;
}

inline std::string device_name(const Tensor& tensor) {
#ifdef TORCH_TARGET_VERSION
  return tensor.is_cpu() ? "cpu" : "another device"; // whose name the stable ABI doesn't tell
#else
  return tensor.device().str();
#endif
}

// A new tensor on the device of `like`, of dense rows.
inline Tensor make(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like) {
#ifdef TORCH_TARGET_VERSION
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i > 1; --i) {
    strides[i - 2] = strides[i - 1] * std::max<int64_t>(1, sizes[i - 1]);
  }
  int32_t device = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  const auto number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle made = nullptr; // unlike torch::stable::empty, which looks the operator up by its name at every call
  const auto count = static_cast<int64_t>(sizes.size());
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      count, sizes.data(), strides.data(), number, device, like.get_device_index(), &made));
  return Tensor(made);
#else
  return at::empty(sizes, like.options().dtype(type));
#endif
}

// The tensor, or a copy that is contiguous.
inline Tensor dense(const Tensor& tensor) {
#ifdef TORCH_TARGET_VERSION
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
#else
  return tensor.contiguous();
#endif
}

inline std::optional<Tensor> dense(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Tensor>(dense(*tensor)) : std::nullopt;
}

inline const float* floats_of(const std::optional<Tensor>& tensor) {
  return tensor ? data_of<float>(*tensor) : nullptr;
}

// The tensor, or a copy, as numbers of this type.
inline Tensor as_type(const Tensor& tensor, ScalarType type) {
#ifdef TORCH_TARGET_VERSION
  return dtype_of(tensor) == type ? tensor : torch::stable::to(tensor, type);
#else
  return tensor.to(type);
#endif
}

// A view of so many rows, from `first` on.
inline Tensor some_rows(const Tensor& tensor, int64_t first, int64_t count) {
#ifdef TORCH_TARGET_VERSION
  Tensor all = tensor; // which `narrow` takes as if it changed that
  return torch::stable::narrow(all, 0, first, count);
#else
  return tensor.narrow(0, first, count);
#endif
}

// A view with as many dimensions, from the same number on.
inline Tensor with_strides(
    const Tensor& tensor, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
#ifdef TORCH_TARGET_VERSION
  AtenTensorHandle view = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_as_strided(tensor.get(), sizes.data(), strides.data(), &view));
  return Tensor(view);
#else
  return tensor.as_strided(sizes, strides);
#endif
}

// Tells autograd, which would otherwise use changed numbers in a backward pass, that a matrix is about to change.
inline void will_change(const Tensor& matrix) {
#ifdef TORCH_TARGET_VERSION
  const Tensor nothing = with_strides(matrix, {0, 0}, {1, 1}); // a change of no number counts, too
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(nothing.get()));
#else
  matrix.unsafeGetTensorImpl()->bump_version();
#endif
}

} // namespace fastgen
