// fastgen::path_attention on the CPU, in float32.
#include "../arguments.h"
#include "path_attention.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <type_traits>

#define FASTGEN_LOOPS "path_attention_isa.h"
#include "each_isa.h"

namespace fastgen {
namespace {

constexpr int64_t kProductsPerTask = 1 << 16; // below that another thread costs more than it saves
constexpr int64_t kRowsOfTask = 48; // they stay in the second-level cache, and read the shared keys together

void run(const PathAttention& all) {
  const auto attend = FASTGEN_CHOOSE(attend_to_paths);
  const int64_t of_task = std::max<int64_t>(1, kRowsOfTask / all.group) * all.group; // all rows of some beams
  const int64_t parts = (all.rows() + of_task - 1) / of_task;
  const int64_t products = of_task * (all.keys + all.depth) * (all.size + all.value_size);
  const int64_t grain = std::max<int64_t>(1, kProductsPerTask / std::max<int64_t>(1, products));
  at::parallel_for(0, all.pairs() * parts, grain, [&](int64_t begin, int64_t end) {
    Rows rows(std::min(of_task, all.rows()), all.size, all.value_size);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % parts * of_task;
      attend(all, task / parts, first, std::min(of_task, all.rows() - first), rows);
    }
  });
}

void check_paths(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& paths, const std::optional<at::Tensor>& bias,
    int64_t shared) {
  TORCH_CHECK_VALUE(
      shared >= 0 && shared <= key.size(2), "shared must be 0 to ", key.size(2), ", not ", shared, ".");
  TORCH_CHECK_VALUE(
      paths.dim() == 2 && paths.size(0) == query.size(0), "paths must be [", query.size(0), ", depth], not of shape ",
      paths.sizes(), ".");
  TORCH_CHECK_TYPE(paths.scalar_type() == at::kInt, "paths must be int32, not ", paths.dtype().name(), ".");
  TORCH_CHECK_VALUE(
      paths.device() == query.device(), "query is on ", query.device(), " and paths on ", paths.device(), ".");
  const int64_t sizes[] = {
      key.size(0), query.size(1), query.size(0) / key.size(0), shared + paths.size(1)};
  bool fits = !bias || bias->dim() == 4;
  for (int64_t i = 0; fits && bias && i < 4; ++i) {
    fits = bias->size(i) == 1 || bias->size(i) == sizes[i];
  }
  TORCH_CHECK_VALUE(
      fits, "bias must be broadcastable to ", at::IntArrayRef(sizes), ", not of shape ",
      bias ? bias->sizes() : at::IntArrayRef(), ".");
  if (bias) {
    check_float("bias", *bias, query, "query is");
  }
}

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

at::Tensor path_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& paths,
    const std::optional<at::Tensor>& bias, double scale, int64_t shared) {
  check_attention(query, key, value, std::nullopt);
  check_paths(query, key, paths, bias, shared);
  const int64_t heads = query.size(1), depth = paths.size(1), slots = key.size(2);
  at::Tensor output = at::empty({query.size(0), 1, heads, value.size(3)}, query.options());
  if (output.numel() == 0) {
    return output;
  }
  const at::Tensor q = dense(query), k = dense(key), v = dense(value), p = dense(paths);
  PathAttention all{};
  all.query = q.const_data_ptr<float>();
  all.key = k.const_data_ptr<float>();
  all.value = v.const_data_ptr<float>();
  all.output = output.mutable_data_ptr<float>();
  all.paths = p.const_data_ptr<int32_t>();
  all.paths_row = p.stride(0), all.depth = depth;
  all.batch = k.size(0), all.beams = q.size(0) / k.size(0);
  all.key_heads = k.size(1), all.group = heads / k.size(1);
  all.keys = shared, all.size = k.size(3), all.value_size = v.size(3);
  all.query_row = q.stride(0), all.query_head = q.stride(1);
  all.key_batch = k.stride(0), all.key_head = k.stride(1), all.key_slot = k.stride(2);
  all.value_batch = v.stride(0), all.value_head = v.stride(1), all.value_slot = v.stride(2);
  all.scale = static_cast<float>(scale);
  for (int64_t row = 0; row < q.size(0); ++row) {
    const int32_t* const path = all.paths + row * all.paths_row;
    const int64_t length = all.length_of(path);
    const auto beyond = std::find_if(path, path + length, [slots](int32_t slot) { return slot >= slots; });
    TORCH_CHECK_INDEX(
        beyond == path + length, "paths must hold slots below ", slots, ", not ", beyond == path + length ? 0 : *beyond,
        ".");
  }
  at::Tensor b;
  if (bias) {
    const int64_t width = shared + depth;
    b = bias->size(3) == width ? dense(*bias) : bias->expand({-1, -1, -1, width}).contiguous();
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
  m.impl("path_attention", &path_attention);
}

} // namespace fastgen
