// What the loops of attention have to know of tensors. These must outlive it.
#pragma once

#include "../tensors.h"
#include "attention_rows.h"

namespace fastgen {

inline Tensor with_dense_last(const Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : dense(tensor);
}

// The last strides of the tensors are 1. All slots of `key` are keys; there is no bias.
inline void describe(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output, double scale,
    Attention* all) {
  all->query = data_of<float>(query);
  all->key = data_of<float>(key);
  all->value = data_of<float>(value);
  all->output = mutable_data_of<float>(output);
  all->batch = key.size(0), all->beams = query.size(0) / key.size(0);
  all->key_heads = key.size(1), all->group = query.size(1) / key.size(1);
  all->keys = key.size(2), all->size = key.size(3), all->value_size = value.size(3);
  all->query_row = query.stride(0), all->query_head = query.stride(1);
  all->key_batch = key.stride(0), all->key_head = key.stride(1), all->key_slot = key.stride(2);
  all->value_batch = value.stride(0), all->value_head = value.stride(1), all->value_slot = value.stride(2);
  all->scale = static_cast<float>(scale);
}

// Returns the bias that is described, if there is one: with `width` scores in each row, and a last stride of 1.
inline std::optional<Tensor> describe_bias(const std::optional<Tensor>& bias, int64_t width, Attention* all) {
  if (!bias) {
    return std::nullopt;
  }
  const std::vector<int64_t> sizes{bias->size(0), bias->size(1), bias->size(2), width};
  const Tensor b = bias->size(3) == width
      ? with_dense_last(*bias)
      : dense(with_strides(*bias, sizes, {bias->stride(0), bias->stride(1), bias->stride(2), 0}));
  all->bias = data_of<float>(b);
  all->bias_batch = b.size(0) == 1 ? 0 : b.stride(0);
  all->bias_head = b.size(1) == 1 ? 0 : b.stride(1);
  all->bias_beam = b.size(2) == 1 ? 0 : b.stride(2);
  return b;
}

} // namespace fastgen
