// fastgen::beam_attention on the CPU, in float32.
#include "../arguments.h"
#include "attention_rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <type_traits>

#define FASTGEN_LOOPS "attention_rows_isa.h"
#include "each_isa.h"

namespace fastgen {
namespace {

constexpr int64_t kProductsPerTask = 1 << 16; // below that another thread costs more than it saves
constexpr int64_t kRowsToShare = 8; // fewer are bound by the keys that they read, and would read them twice

void run(const Attention& all) {
  const auto attend = FASTGEN_CHOOSE(attend);
  // A key head's rows read its keys together, unless threads would be left without any.
  const int64_t threads = at::get_num_threads(), pairs = std::max<int64_t>(1, all.pairs());
  const int64_t wanted = std::min((threads + pairs - 1) / pairs, all.rows() / kRowsToShare);
  const int64_t parts = std::max<int64_t>(1, wanted), of_part = (all.rows() + parts - 1) / parts;
  const int64_t products = of_part * all.keys * (all.size + all.value_size);
  const int64_t grain = std::max<int64_t>(1, kProductsPerTask / std::max<int64_t>(1, products));
  at::parallel_for(0, all.pairs() * parts, grain, [&](int64_t begin, int64_t end) {
    Rows rows(of_part, all.size, all.value_size);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % parts * of_part;
      if (first < all.rows()) {
        attend(all, task / parts, first, std::min(of_part, all.rows() - first), rows);
      }
    }
  });
}

at::Tensor with_dense_last(const at::Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

at::Tensor beam_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias,
    double scale) {
  check_attention(query, key, value, bias);
  const int64_t heads = query.size(1);
  at::Tensor output = at::empty({query.size(0), 1, heads, value.size(3)}, query.options());
  if (output.numel() == 0 || key.size(2) == 0) {
    return output.zero_();
  }
  const at::Tensor q = with_dense_last(query), k = with_dense_last(key), v = with_dense_last(value);
  const int64_t batch = k.size(0), beams = q.size(0) / batch, key_heads = k.size(1), keys = k.size(2);
  Attention all{};
  all.query = q.const_data_ptr<float>();
  all.key = k.const_data_ptr<float>();
  all.value = v.const_data_ptr<float>();
  all.output = output.mutable_data_ptr<float>();
  all.batch = batch, all.beams = beams, all.key_heads = key_heads, all.group = heads / key_heads;
  all.keys = keys, all.size = k.size(3), all.value_size = v.size(3);
  all.query_row = q.stride(0), all.query_head = q.stride(1);
  all.key_batch = k.stride(0), all.key_head = k.stride(1), all.key_slot = k.stride(2);
  all.value_batch = v.stride(0), all.value_head = v.stride(1), all.value_slot = v.stride(2);
  all.scale = static_cast<float>(scale);
  at::Tensor b;
  if (bias) {
    b = bias->size(3) == keys ? with_dense_last(*bias) : bias->expand({-1, -1, -1, keys}).contiguous();
    all.bias = b.const_data_ptr<float>();
    all.bias_batch = b.size(0) == 1 ? 0 : b.stride(0);
    all.bias_head = b.size(1) == 1 ? 0 : b.stride(1);
    all.bias_beam = b.size(2) == 1 ? 0 : b.stride(2);
  }
  run(all);
  return output;
}

} // namespace

TORCH_LIBRARY_IMPL(fastgen, CPU, m) {
  m.impl("beam_attention", &beam_attention);
}

} // namespace fastgen
