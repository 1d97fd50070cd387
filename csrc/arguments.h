// What both the CPU and the CUDA operators ask of their arguments; the messages are those of fastgen/ops/checks.py.
#pragma once

#include "tensors.h"

#include <array>
#include <limits>

// Runs the lambda with `scalar_t` as the type of scores or logits, which has been checked.
#define FASTGEN_DISPATCH_SCORES(TYPE, ...)                \
  [&] {                                                   \
    switch (TYPE) {                                       \
      case ::fastgen::ScalarType::Half: {                 \
        using scalar_t = c10::Half;                       \
        return __VA_ARGS__();                             \
      }                                                   \
      case ::fastgen::ScalarType::BFloat16: {             \
        using scalar_t = c10::BFloat16;                   \
        return __VA_ARGS__();                             \
      }                                                   \
      default: {                                          \
        using scalar_t = float;                           \
        return __VA_ARGS__();                             \
      }                                                   \
    }                                                     \
  }()

namespace fastgen {

inline bool is_token_type(ScalarType type) {
  return type == ScalarType::Long || type == ScalarType::Int;
}

inline bool is_score_type(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}

inline void check_ngrams(const Tensor& tokens, const Tensor& scores, int64_t ngram_size, int64_t length) {
  FASTGEN_CHECK(value, tokens.dim() == 2, "tokens must be [rows, length], not of shape ", shape_of(tokens), ".");
  FASTGEN_CHECK(
      value, scores.dim() == 2 && scores.size(0) == tokens.size(0),
      "scores must be [", tokens.size(0), ", vocabulary], not of shape ", shape_of(scores), ".");
  FASTGEN_CHECK(type, is_token_type(dtype_of(tokens)), "tokens must be int64 or int32, not ", type_of(tokens), ".");
  FASTGEN_CHECK(
      type, is_score_type(dtype_of(scores)),
      "scores must be float32, float16 or bfloat16, not ", type_of(scores), ".");
  FASTGEN_CHECK(
      value, are_together(tokens, scores),
      "tokens are on ", device_name(tokens), " and scores on ", device_name(scores), ".");
  FASTGEN_CHECK(value, ngram_size >= 1, "ngram_size must be 1 or more, not ", ngram_size, ".");
  FASTGEN_CHECK(
      value, length >= 0 && length <= tokens.size(1), "length must be 0 to ", tokens.size(1), ", not ", length, ".");
  for (int64_t i = 0; i < 2; ++i) {
    FASTGEN_CHECK(
        value, scores.stride(i) != 0 || scores.size(i) <= 1,
        "scores must not be expanded: several of them share a place in memory.");
  }
}

inline void check_source(const Tensor& source, const Tensor& tokens, int64_t beams) {
  FASTGEN_CHECK(value, beams >= 1, "beams must be 1 or more, not ", beams, ".");
  FASTGEN_CHECK(
      value, source.dim() == 2 && source.size(0) * beams == tokens.size(0),
      "source must be [rows / beams, length], not of shape ", shape_of(source), " for ", tokens.size(0), " rows of ",
      beams, " beams.");
  FASTGEN_CHECK(type, is_token_type(dtype_of(source)), "source must be int64 or int32, not ", type_of(source), ".");
  FASTGEN_CHECK(
      value, are_together(source, tokens),
      "source is on ", device_name(source), " and tokens on ", device_name(tokens), ".");
}

inline void check_topk(const Tensor& logits, int64_t k, const std::optional<Tensor>& banned) {
  FASTGEN_CHECK(value, logits.dim() == 2, "logits must be [rows, vocabulary], not of shape ", shape_of(logits), ".");
  FASTGEN_CHECK(
      type, is_score_type(dtype_of(logits)),
      "logits must be float32, float16 or bfloat16, not ", type_of(logits), ".");
  FASTGEN_CHECK(
      value, logits.size(1) <= std::numeric_limits<int32_t>::max(),
      "the vocabulary is too large: ", logits.size(1), ".");
  FASTGEN_CHECK(value, k >= 1 && k <= logits.size(1), "k must be 1 to ", logits.size(1), ", not ", k, ".");
  if (!banned) {
    return;
  }
  FASTGEN_CHECK(
      value, banned->dim() == 1 || (banned->dim() == 2 && banned->size(0) == logits.size(0)),
      "banned must be [width] or [", logits.size(0), ", width], not of shape ", shape_of(*banned), ".");
  FASTGEN_CHECK(type, dtype_of(*banned) == ScalarType::Long, "banned must be int64, not ", type_of(*banned), ".");
  FASTGEN_CHECK(
      value, are_together(*banned, logits),
      "banned is on ", device_name(*banned), " and logits on ", device_name(logits), ".");
}

inline void check_candidates(
    const Tensor& logits, const Tensor& scores, int64_t k, const std::optional<Tensor>& banned) {
  check_topk(logits, 1, banned);
  FASTGEN_CHECK(
      type, dtype_of(logits) == ScalarType::Float, "logits must be float32, not ", type_of(logits), ".");
  FASTGEN_CHECK(
      value, scores.dim() == 2 && scores.size(1) > 0 && scores.size(0) * scores.size(1) == logits.size(0),
      "scores must be [batch, beams], ", logits.size(0), " in all, not of shape ", shape_of(scores), ".");
  FASTGEN_CHECK(type, dtype_of(scores) == ScalarType::Float, "scores must be float32, not ", type_of(scores), ".");
  FASTGEN_CHECK(
      value, are_together(scores, logits),
      "scores are on ", device_name(scores), " and logits on ", device_name(logits), ".");
  FASTGEN_CHECK(
      value, k >= 1 && k < logits.size(1), "k must be 1 to ", logits.size(1) - 1, ", not ", k, ".");
}

// A tensor that an operator changes, or reads beside those.
struct Named {
  const char* name;
  const Tensor& tensor;
  std::vector<int64_t> shape;
  ScalarType type;
};

inline void check_named(const Named& each) {
  FASTGEN_CHECK(
      value, each.tensor.dim() == static_cast<int64_t>(each.shape.size()) &&
          std::equal(each.shape.begin(), each.shape.end(), each.tensor.sizes().begin()),
      each.name, " must be ", list_of(each.shape), ", not of shape ", shape_of(each.tensor), ".");
  FASTGEN_CHECK(
      type, dtype_of(each.tensor) == each.type, each.name, " has another dtype: ", type_of(each.tensor), ".");
  FASTGEN_CHECK(value, each.tensor.is_contiguous(), each.name, " must be contiguous.");
}

inline void check_float(
    const char* name, const Tensor& tensor, const Tensor& like, const char* whose = "rows are",
    bool or_half = false) {
  FASTGEN_CHECK(
      type, or_half ? is_score_type(dtype_of(tensor)) : dtype_of(tensor) == ScalarType::Float,
      name, " must be float32",
      or_half ? ", float16 or bfloat16" : "", ", not ", type_of(tensor), ".");
  FASTGEN_CHECK(
      value, are_together(tensor, like),
      whose, " on ", device_name(like), " and ", name, " on ", device_name(tensor), ".");
}

inline void check_width(const char* name, const Tensor& tensor, int64_t width) {
  FASTGEN_CHECK(
      value, tensor.dim() == 1 && tensor.size(0) == width,
      name, " must be [", width, "], not of shape ", shape_of(tensor), ".");
}

inline void check_linear_bias(
    const std::optional<Tensor>& bias, int64_t width, const Tensor& like, const char* whose = "rows are") {
  if (bias) {
    check_width("bias", *bias, width);
    check_float("bias", *bias, like, whose);
  }
}

inline void check_fits_scores(const std::optional<Tensor>& bias, const std::array<int64_t, 4>& sizes) {
  bool fits = !bias || bias->dim() == 4;
  for (size_t i = 0; fits && bias && i < 4; ++i) {
    fits = bias->size(i) == 1 || bias->size(i) == sizes[i];
  }
  FASTGEN_CHECK(
      value, fits, "bias must be broadcastable to ", list_of(sizes), ", not of shape ", shape_of(*bias), ".");
}

inline void check_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias) {
  const int64_t batch = key.dim() == 4 ? key.size(0) : 0, key_heads = key.dim() == 4 ? key.size(1) : 0;
  FASTGEN_CHECK(
      value, batch > 0 && key_heads > 0,
      "key must be [batch, key heads, keys, size], not of shape ", shape_of(key), ".");
  FASTGEN_CHECK(
      value, query.dim() == 4 && query.size(0) % batch == 0 && query.size(1) % key_heads == 0 && query.size(2) == 1 &&
          query.size(3) == key.size(3),
      "query must be [", batch, " * beams, heads, 1, ", key.size(3), "], heads a multiple of ", key_heads,
      ", not of shape ", shape_of(query), ".");
  FASTGEN_CHECK(
      value, value.dim() == 4 && value.size(0) == batch && value.size(1) == key_heads && value.size(2) == key.size(2),
      "value must be [", batch, ", ", key_heads, ", ", key.size(2), ", size], not of shape ", shape_of(value), ".");
  check_fits_scores(bias, {batch, query.size(1), query.size(0) / batch, key.size(2)});
  check_float("query", query, query, "query is");
  check_float("key", key, query, "query is");
  check_float("value", value, query, "query is");
  if (bias) {
    check_float("bias", *bias, query, "query is");
  }
}

inline void check_skinny(const Tensor& rows, TensorList weights, const std::optional<Tensor>& bias) {
  FASTGEN_CHECK(value, rows.dim() >= 1, "rows must be [..., size], not of shape ", shape_of(rows), ".");
  FASTGEN_CHECK(value, !weights.empty(), "weights must be one tensor or more.");
  check_float("rows", rows, rows);
  int64_t width = 0;
  for (const Tensor& weight : weights) {
    FASTGEN_CHECK(
        value, weight.dim() == 2 && weight.size(1) == rows.size(-1), "weights must be [width, ", rows.size(-1),
        "], not of shape ", shape_of(weight), ".");
    check_float("weights", weight, rows, "rows are", /*or_half=*/true);
    width += weight.size(0);
  }
  check_linear_bias(bias, width, rows);
}

inline void check_codes(const Tensor& codes, const Tensor& rows) {
  FASTGEN_CHECK(type, dtype_of(codes) == ScalarType::Char, "codes must be int8, not ", type_of(codes), ".");
  FASTGEN_CHECK(
      value, are_together(codes, rows), "rows are on ", device_name(rows), " and codes on ", device_name(codes), ".");
}

inline void check_quantized(
    const Tensor& rows, TensorList codes, TensorList scales, const std::optional<Tensor>& bias) {
  FASTGEN_CHECK(value, rows.dim() >= 1, "rows must be [..., size], not of shape ", shape_of(rows), ".");
  FASTGEN_CHECK(value, !codes.empty(), "codes must be one tensor or more.");
  FASTGEN_CHECK(
      value, codes.size() == scales.size(),
      "scales must be as many as codes: ", codes.size(), ", not ", scales.size(), ".");
  check_float("rows", rows, rows);
  int64_t width = 0;
  for (size_t i = 0; i < codes.size(); ++i) {
    FASTGEN_CHECK(
        value, codes[i].dim() == 2 && codes[i].size(1) == rows.size(-1), "codes must be [width, ", rows.size(-1),
        "], not of shape ", shape_of(codes[i]), ".");
    check_codes(codes[i], rows);
    check_width("scales", scales[i], codes[i].size(0));
    check_float("scales", scales[i], rows);
    width += codes[i].size(0);
  }
  check_linear_bias(bias, width, rows);
}

constexpr int64_t kLongestSum = ((int64_t{1} << 31) - 1) / (127 * 128); // of products of codes, in 32 bits

inline void check_dynamic(
    const Tensor& rows, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& bias) {
  check_quantized(rows, TensorList(&codes, 1), TensorList(&scales, 1), bias);
  FASTGEN_CHECK(
      value, codes.size(1) <= kLongestSum, "codes must be [width, size] with a size of at most ", kLongestSum, ", not ",
      codes.size(1), ".");
}

inline void check_rows(const Tensor& rows) {
  FASTGEN_CHECK(value, rows.dim() == 2, "rows must be [count, size], not of shape ", shape_of(rows), ".");
  check_float("rows", rows, rows);
}

inline void check_products(
    const Tensor& products, const Tensor& row_scales, const Tensor& scales,
    const std::optional<Tensor>& bias) {
  FASTGEN_CHECK(value, products.dim() == 2, "products must be [count, width], not of shape ", shape_of(products), ".");
  FASTGEN_CHECK(
      type, dtype_of(products) == ScalarType::Int, "products must be int32, not ", type_of(products), ".");
  check_width("row_scales", row_scales, products.size(0));
  check_width("scales", scales, products.size(1));
  check_float("row_scales", row_scales, products, "products are");
  check_float("scales", scales, products, "products are");
  check_linear_bias(bias, products.size(1), products, "products are");
}

inline void check_screened(
    const Tensor& rows, const Tensor& weight, const Tensor& codes, const Tensor& scales,
    const Tensor& errors, const std::optional<Tensor>& bias) {
  FASTGEN_CHECK(value, rows.dim() >= 1, "rows must be [..., size], not of shape ", shape_of(rows), ".");
  FASTGEN_CHECK(
      value, weight.dim() == 2 && weight.size(1) == rows.size(-1), "weight must be [width, ", rows.size(-1),
      "], not of shape ", shape_of(weight), ".");
  FASTGEN_CHECK(
      value, codes.sizes().equals(weight.sizes()),
      "codes must be ", shape_of(weight), ", not of shape ", shape_of(codes), ".");
  check_codes(codes, rows);
  check_width("scales", scales, weight.size(0));
  check_width("errors", errors, weight.size(0));
  check_float("rows", rows, rows);
  check_float("weight", weight, rows);
  check_float("scales", scales, rows);
  check_float("errors", errors, rows);
  check_linear_bias(bias, weight.size(0), rows);
}

inline void check_probabilities(const Tensor& probabilities) {
  FASTGEN_CHECK(
      value, probabilities.dim() == 2,
      "probabilities must be [rows, vocabulary], not of shape ", shape_of(probabilities), ".");
  FASTGEN_CHECK(
      type, dtype_of(probabilities) == ScalarType::Float,
      "probabilities must be float32, not ", type_of(probabilities), ".");
}

inline void check_fingerprint(const Tensor& tensor) {
  FASTGEN_CHECK(value, tensor.dim() == 2, "tensor must be [rows, size], not of shape ", shape_of(tensor), ".");
}

constexpr int64_t kPanel = 64; // outputs side by side in a packed weight

inline int64_t panels_of(int64_t width) {
  return (width + kPanel - 1) / kPanel;
}

inline void check_packed(
    const Tensor& rows, const Tensor& packed, int64_t width, const std::optional<Tensor>& bias) {
  FASTGEN_CHECK(value, rows.dim() >= 1, "rows must be [..., size], not of shape ", shape_of(rows), ".");
  FASTGEN_CHECK(
      value, width >= 0 && packed.dim() == 3 && packed.size(0) == panels_of(width) && packed.size(1) == rows.size(-1) &&
          packed.size(2) == kPanel,
      "packed must be [", panels_of(width),
      ", ", rows.size(-1), ", ", kPanel, "], not of shape ", shape_of(packed), ".");
  check_float("rows", rows, rows);
  check_float("packed", packed, rows);
  check_linear_bias(bias, width, rows);
}

inline std::vector<int64_t> output_shape(const Tensor& rows, int64_t width) {
  std::vector<int64_t> shape = rows.sizes().vec();
  shape.back() = width;
  return shape;
}

// Rows may lie anywhere; inside a row the kernels walk with stride one.
inline Tensor with_dense_rows(const Tensor& tensor) {
  return tensor.size(1) <= 1 || tensor.stride(1) == 1 ? tensor : dense(tensor);
}

} // namespace fastgen
