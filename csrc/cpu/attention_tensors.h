// What the loops of attention have to know of tensors. These must outlive it.
#pragma once

#include "attention_rows.h"

#include <ATen/core/Tensor.h>

namespace fastgen {

inline at::Tensor with_dense_last(const at::Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

// The last strides of the tensors are 1. All slots of `key` are keys; there is no bias.
inline void describe(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& output, double scale,
    Attention* all) {
  all->query = query.const_data_ptr<float>();
  all->key = key.const_data_ptr<float>();
  all->value = value.const_data_ptr<float>();
  all->output = output.mutable_data_ptr<float>();
  all->batch = key.size(0), all->beams = query.size(0) / key.size(0);
  all->key_heads = key.size(1), all->group = query.size(1) / key.size(1);
  all->keys = key.size(2), all->size = key.size(3), all->value_size = value.size(3);
  all->query_row = query.stride(0), all->query_head = query.stride(1);
  all->key_batch = key.stride(0), all->key_head = key.stride(1), all->key_slot = key.stride(2);
  all->value_batch = value.stride(0), all->value_head = value.stride(1), all->value_slot = value.stride(2);
  all->scale = static_cast<float>(scale);
}

// Returns the bias that is described: with `width` scores in each row, and a last stride of 1.
inline at::Tensor describe_bias(const at::Tensor& bias, int64_t width, Attention* all) {
  const at::Tensor b =
      bias.size(3) == width ? with_dense_last(bias) : bias.expand({-1, -1, -1, width}).contiguous();
  all->bias = b.const_data_ptr<float>();
  all->bias_batch = b.size(0) == 1 ? 0 : b.stride(0);
  all->bias_head = b.size(1) == 1 ? 0 : b.stride(1);
  all->bias_beam = b.size(2) == 1 ? 0 : b.stride(2);
  return b;
}

} // namespace fastgen
