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

inline void check_float(
    const char* name, const at::Tensor& tensor, const at::Tensor& like, const char* whose = "rows are",
    bool or_half = false) {
  TORCH_CHECK_TYPE(
      or_half ? is_score_type(tensor.scalar_type()) : tensor.scalar_type() == at::kFloat, name, " must be float32",
      or_half ? ", float16 or bfloat16" : "", ", not ", tensor.dtype().name(), ".");
  TORCH_CHECK_VALUE(
      tensor.device() == like.device(), whose, " on ", like.device(), " and ", name, " on ", tensor.device(), ".");
}

inline void check_width(const char* name, const at::Tensor& tensor, int64_t width) {
  TORCH_CHECK_VALUE(
      tensor.dim() == 1 && tensor.size(0) == width, name, " must be [", width, "], not of shape ", tensor.sizes(), ".");
}

inline void check_linear_bias(
    const std::optional<at::Tensor>& bias, int64_t width, const at::Tensor& like, const char* whose = "rows are") {
  if (bias) {
    check_width("bias", *bias, width);
    check_float("bias", *bias, like, whose);
  }
}

inline void check_fits_scores(const std::optional<at::Tensor>& bias, at::IntArrayRef sizes) {
  bool fits = !bias || bias->dim() == 4;
  for (size_t i = 0; fits && bias && i < 4; ++i) {
    fits = bias->size(i) == 1 || bias->size(i) == sizes[i];
  }
  TORCH_CHECK_VALUE(
      fits, "bias must be broadcastable to ", sizes, ", not of shape ", bias ? bias->sizes() : at::IntArrayRef(), ".");
}

inline void check_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias) {
  const int64_t batch = key.dim() == 4 ? key.size(0) : 0, key_heads = key.dim() == 4 ? key.size(1) : 0;
  TORCH_CHECK_VALUE(batch > 0 && key_heads > 0, "key must be [batch, key heads, keys, size], not of shape ", key.sizes(), ".");
  TORCH_CHECK_VALUE(
      query.dim() == 4 && query.size(0) % batch == 0 && query.size(1) % key_heads == 0 && query.size(2) == 1 &&
          query.size(3) == key.size(3),
      "query must be [", batch, " * beams, heads, 1, ", key.size(3), "], heads a multiple of ", key_heads,
      ", not of shape ", query.sizes(), ".");
  TORCH_CHECK_VALUE(
      value.dim() == 4 && value.size(0) == batch && value.size(1) == key_heads && value.size(2) == key.size(2),
      "value must be [", batch, ", ", key_heads, ", ", key.size(2), ", size], not of shape ", value.sizes(), ".");
  check_fits_scores(bias, {batch, query.size(1), query.size(0) / batch, key.size(2)});
  check_float("query", query, query, "query is");
  check_float("key", key, query, "query is");
  check_float("value", value, query, "query is");
  if (bias) {
    check_float("bias", *bias, query, "query is");
  }
}

inline void check_skinny(const at::Tensor& rows, at::TensorList weights, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(rows.dim() >= 1, "rows must be [..., size], not of shape ", rows.sizes(), ".");
  TORCH_CHECK_VALUE(!weights.empty(), "weights must be one tensor or more.");
  check_float("rows", rows, rows);
  int64_t width = 0;
  for (const at::Tensor& weight : weights) {
    TORCH_CHECK_VALUE(
        weight.dim() == 2 && weight.size(1) == rows.size(-1), "weights must be [width, ", rows.size(-1),
        "], not of shape ", weight.sizes(), ".");
    check_float("weights", weight, rows, "rows are", /*or_half=*/true);
    width += weight.size(0);
  }
  check_linear_bias(bias, width, rows);
}

inline void check_codes(const at::Tensor& codes, const at::Tensor& rows) {
  TORCH_CHECK_TYPE(codes.scalar_type() == at::kChar, "codes must be int8, not ", codes.dtype().name(), ".");
  TORCH_CHECK_VALUE(
      codes.device() == rows.device(), "rows are on ", rows.device(), " and codes on ", codes.device(), ".");
}

inline void check_quantized(
    const at::Tensor& rows, at::TensorList codes, at::TensorList scales, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(rows.dim() >= 1, "rows must be [..., size], not of shape ", rows.sizes(), ".");
  TORCH_CHECK_VALUE(!codes.empty(), "codes must be one tensor or more.");
  TORCH_CHECK_VALUE(
      codes.size() == scales.size(), "scales must be as many as codes: ", codes.size(), ", not ", scales.size(), ".");
  check_float("rows", rows, rows);
  int64_t width = 0;
  for (size_t i = 0; i < codes.size(); ++i) {
    TORCH_CHECK_VALUE(
        codes[i].dim() == 2 && codes[i].size(1) == rows.size(-1), "codes must be [width, ", rows.size(-1),
        "], not of shape ", codes[i].sizes(), ".");
    check_codes(codes[i], rows);
    check_width("scales", scales[i], codes[i].size(0));
    check_float("scales", scales[i], rows);
    width += codes[i].size(0);
  }
  check_linear_bias(bias, width, rows);
}

constexpr int64_t kLongestSum = (int64_t{1} << 31) / (127 * 127); // of products of codes, in 32 bits

inline void check_dynamic(
    const at::Tensor& rows, const at::Tensor& codes, const at::Tensor& scales, const std::optional<at::Tensor>& bias) {
  check_quantized(rows, codes, scales, bias);
  TORCH_CHECK_VALUE(
      codes.size(1) <= kLongestSum, "codes must be [width, size] with a size of at most ", kLongestSum, ", not ",
      codes.size(1), ".");
}

inline void check_rows(const at::Tensor& rows) {
  TORCH_CHECK_VALUE(rows.dim() == 2, "rows must be [count, size], not of shape ", rows.sizes(), ".");
  check_float("rows", rows, rows);
}

inline void check_products(
    const at::Tensor& products, const at::Tensor& row_scales, const at::Tensor& scales,
    const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(products.dim() == 2, "products must be [count, width], not of shape ", products.sizes(), ".");
  TORCH_CHECK_TYPE(products.scalar_type() == at::kInt, "products must be int32, not ", products.dtype().name(), ".");
  check_width("row_scales", row_scales, products.size(0));
  check_width("scales", scales, products.size(1));
  check_float("row_scales", row_scales, products, "products are");
  check_float("scales", scales, products, "products are");
  check_linear_bias(bias, products.size(1), products, "products are");
}

inline void check_screened(
    const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& codes, const at::Tensor& scales,
    const at::Tensor& errors, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(rows.dim() >= 1, "rows must be [..., size], not of shape ", rows.sizes(), ".");
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && weight.size(1) == rows.size(-1), "weight must be [width, ", rows.size(-1),
      "], not of shape ", weight.sizes(), ".");
  TORCH_CHECK_VALUE(
      codes.sizes() == weight.sizes(), "codes must be ", weight.sizes(), ", not of shape ", codes.sizes(), ".");
  check_codes(codes, rows);
  check_width("scales", scales, weight.size(0));
  check_width("errors", errors, weight.size(0));
  check_float("rows", rows, rows);
  check_float("weight", weight, rows);
  check_float("scales", scales, rows);
  check_float("errors", errors, rows);
  check_linear_bias(bias, weight.size(0), rows);
}

inline void check_probabilities(const at::Tensor& probabilities) {
  TORCH_CHECK_VALUE(
      probabilities.dim() == 2, "probabilities must be [rows, vocabulary], not of shape ", probabilities.sizes(), ".");
  TORCH_CHECK_TYPE(
      probabilities.scalar_type() == at::kFloat, "probabilities must be float32, not ", probabilities.dtype().name(), ".");
}

inline void check_fingerprint(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.dim() == 2, "tensor must be [rows, size], not of shape ", tensor.sizes(), ".");
}

constexpr int64_t kPanel = 64; // outputs side by side in a packed weight

inline int64_t panels_of(int64_t width) {
  return (width + kPanel - 1) / kPanel;
}

inline void check_packed(
    const at::Tensor& rows, const at::Tensor& packed, int64_t width, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(rows.dim() >= 1, "rows must be [..., size], not of shape ", rows.sizes(), ".");
  TORCH_CHECK_VALUE(
      width >= 0 && packed.dim() == 3 && packed.size(0) == panels_of(width) && packed.size(1) == rows.size(-1) &&
          packed.size(2) == kPanel,
      "packed must be [", panels_of(width), ", ", rows.size(-1), ", ", kPanel, "], not of shape ", packed.sizes(), ".");
  check_float("rows", rows, rows);
  check_float("packed", packed, rows);
  check_linear_bias(bias, width, rows);
}

inline std::vector<int64_t> output_shape(const at::Tensor& rows, int64_t width) {
  std::vector<int64_t> shape = rows.sizes().vec();
  shape.back() = width;
  return shape;
}

// Rows may lie anywhere; inside a row the kernels walk with stride one.
inline at::Tensor with_dense_rows(const at::Tensor& tensor) {
  return tensor.size(1) <= 1 || tensor.stride(1) == 1 ? tensor : tensor.contiguous();
}

} // namespace fastgen
