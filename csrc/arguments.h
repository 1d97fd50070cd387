// What both the CPU and the CUDA operators ask of their arguments; the messages are those of fastgen/ops/checks.py.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <limits>
#include <optional>

// Runs the lambda with `scalar_t` as the type of scores or logits.
#define FASTGEN_DISPATCH_SCORES(TYPE, NAME, ...)                        \
  AT_DISPATCH_SWITCH(                                                   \
      TYPE, NAME,                                                       \
      AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__)                         \
      AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__)                          \
      AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__))

namespace fastgen {

inline bool is_token_type(at::ScalarType type) {
  return type == at::kLong || type == at::kInt;
}

inline bool is_score_type(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

inline void check_ngrams(const at::Tensor& tokens, const at::Tensor& scores, int64_t ngram_size, int64_t length) {
  TORCH_CHECK_VALUE(tokens.dim() == 2, "tokens must be [rows, length], not of shape ", tokens.sizes(), ".");
  TORCH_CHECK_VALUE(
      scores.dim() == 2 && scores.size(0) == tokens.size(0),
      "scores must be [", tokens.size(0), ", vocabulary], not of shape ", scores.sizes(), ".");
  TORCH_CHECK_TYPE(is_token_type(tokens.scalar_type()), "tokens must be int64 or int32, not ", tokens.dtype().name(), ".");
  TORCH_CHECK_TYPE(
      is_score_type(scores.scalar_type()), "scores must be float32, float16 or bfloat16, not ", scores.dtype().name(), ".");
  TORCH_CHECK_VALUE(
      tokens.device() == scores.device(), "tokens are on ", tokens.device(), " and scores on ", scores.device(), ".");
  TORCH_CHECK_VALUE(ngram_size >= 1, "ngram_size must be 1 or more, not ", ngram_size, ".");
  TORCH_CHECK_VALUE(
      length >= 0 && length <= tokens.size(1), "length must be 0 to ", tokens.size(1), ", not ", length, ".");
  TORCH_CHECK_VALUE(
      at::has_internal_overlap(scores) != at::MemOverlap::Yes,
      "scores must not be expanded: several of them share a place in memory.");
  TORCH_CHECK(
      !(scores.requires_grad() && c10::GradMode::is_enabled()),
      "scores that require a gradient can't be changed in place: call this under torch.no_grad().");
}

// Tells autograd, which would otherwise use changed scores in a backward pass, that they are about to change.
inline void will_change(const at::Tensor& scores) {
  scores.unsafeGetTensorImpl()->bump_version();
}

inline void check_source(const at::Tensor& source, const at::Tensor& tokens, int64_t beams) {
  TORCH_CHECK_VALUE(beams >= 1, "beams must be 1 or more, not ", beams, ".");
  TORCH_CHECK_VALUE(
      source.dim() == 2 && source.size(0) * beams == tokens.size(0),
      "source must be [rows / beams, length], not of shape ", source.sizes(), " for ", tokens.size(0), " rows of ",
      beams, " beams.");
  TORCH_CHECK_TYPE(is_token_type(source.scalar_type()), "source must be int64 or int32, not ", source.dtype().name(), ".");
  TORCH_CHECK_VALUE(
      source.device() == tokens.device(), "source is on ", source.device(), " and tokens on ", tokens.device(), ".");
}

inline void check_topk(const at::Tensor& logits, int64_t k, const std::optional<at::Tensor>& banned) {
  TORCH_CHECK_VALUE(logits.dim() == 2, "logits must be [rows, vocabulary], not of shape ", logits.sizes(), ".");
  TORCH_CHECK_TYPE(
      is_score_type(logits.scalar_type()), "logits must be float32, float16 or bfloat16, not ", logits.dtype().name(), ".");
  TORCH_CHECK_VALUE(
      logits.size(1) <= std::numeric_limits<int32_t>::max(), "the vocabulary is too large: ", logits.size(1), ".");
  TORCH_CHECK_VALUE(k >= 1 && k <= logits.size(1), "k must be 1 to ", logits.size(1), ", not ", k, ".");
  if (!banned) {
    return;
  }
  TORCH_CHECK_VALUE(
      banned->dim() == 1 || (banned->dim() == 2 && banned->size(0) == logits.size(0)),
      "banned must be [width] or [", logits.size(0), ", width], not of shape ", banned->sizes(), ".");
  TORCH_CHECK_TYPE(banned->scalar_type() == at::kLong, "banned must be int64, not ", banned->dtype().name(), ".");
  TORCH_CHECK_VALUE(
      banned->device() == logits.device(), "banned is on ", banned->device(), " and logits on ", logits.device(), ".");
}

// Rows may lie anywhere; inside a row the kernels walk with stride one.
inline at::Tensor with_dense_rows(const at::Tensor& tensor) {
  return tensor.size(1) <= 1 || tensor.stride(1) == 1 ? tensor : tensor.contiguous();
}

} // namespace fastgen
