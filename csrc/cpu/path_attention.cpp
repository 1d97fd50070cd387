// fastgen::path_attention on the CPU, in float32.
#include "../arguments.h"
#include "attention_tensors.h"
#include "parallel.h"
#include "path_attention.h"

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
  parallel_for(0, all.pairs() * parts, grain, [&](int64_t begin, int64_t end) {
    Rows rows(std::min(of_task, all.rows()), all.size, all.value_size);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % parts * of_task;
      attend(all, task / parts, first, std::min(of_task, all.rows() - first), rows);
    }
  });
}

void check_paths(
    const Tensor& query, const Tensor& key, const Tensor& paths, const std::optional<Tensor>& bias,
    int64_t shared) {
  FASTGEN_CHECK(
      value, shared >= 0 && shared <= key.size(2), "shared must be 0 to ", key.size(2), ", not ", shared, ".");
  FASTGEN_CHECK(
      value, paths.dim() == 2 && paths.size(0) == query.size(0), "paths must be [", query.size(0),
      ", depth], not of shape ", shape_of(paths), ".");
  FASTGEN_CHECK(type, dtype_of(paths) == ScalarType::Int, "paths must be int32, not ", type_of(paths), ".");
  FASTGEN_CHECK(
      value, are_together(paths, query),
      "query is on ", device_name(query), " and paths on ", device_name(paths), ".");
  check_fits_scores(bias, {key.size(0), query.size(1), query.size(0) / key.size(0), shared + paths.size(1)});
  if (bias) {
    check_float("bias", *bias, query, "query is");
  }
}

Tensor path_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& paths,
    const std::optional<Tensor>& bias, double scale, int64_t shared) {
  check_attention(query, key, value, std::nullopt);
  check_paths(query, key, paths, bias, shared);
  const int64_t depth = paths.size(1), slots = key.size(2);
  Tensor output = make({query.size(0), 1, query.size(1), value.size(3)}, ScalarType::Float, query);
  if (output.numel() == 0) {
    return output;
  }
  const Tensor q = with_dense_last(query), k = with_dense_last(key), v = with_dense_last(value);
  const Tensor p = with_dense_last(paths);
  PathAttention all{};
  describe(q, k, v, output, scale, &all);
  all.keys = shared;
  all.paths = data_of<int32_t>(p);
  all.paths_row = p.stride(0), all.depth = depth;
  for (int64_t row = 0; row < q.size(0); ++row) {
    const int32_t* const path = all.paths + row * all.paths_row;
    const int64_t length = all.length_of(path);
    const auto beyond = std::find_if(path, path + length, [slots](int32_t slot) { return slot >= slots; });
    FASTGEN_CHECK(
        index, beyond == path + length, "paths must hold slots below ", slots, ", not ", *beyond, ".");
  }
  const std::optional<Tensor> b = describe_bias(bias, shared + depth, &all);
  run(all);
  return output;
}

} // namespace

FASTGEN_LIBRARY(CPU, m) {
  m.impl("path_attention", FASTGEN_KERNEL(path_attention));
}

} // namespace fastgen
