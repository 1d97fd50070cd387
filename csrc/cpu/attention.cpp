// fastgen::beam_attention on the CPU, in float32.
#include "../arguments.h"
#include "attention_tensors.h"
#include "parallel.h"

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
  const int64_t pairs = std::max<int64_t>(1, all.pairs());
  const int64_t wanted = std::min((threads() + pairs - 1) / pairs, all.rows() / kRowsToShare);
  const int64_t parts = std::max<int64_t>(1, wanted), of_part = (all.rows() + parts - 1) / parts;
  const int64_t products = of_part * all.keys * (all.size + all.value_size);
  const int64_t grain = std::max<int64_t>(1, kProductsPerTask / std::max<int64_t>(1, products));
  parallel_for(0, all.pairs() * parts, grain, [&](int64_t begin, int64_t end) {
    Rows rows(of_part, all.size, all.value_size);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % parts * of_part;
      if (first < all.rows()) {
        attend(all, task / parts, first, std::min(of_part, all.rows() - first), rows);
      }
    }
  });
}

Tensor beam_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias,
    double scale) {
  check_attention(query, key, value, bias);
  Tensor output = make({query.size(0), 1, query.size(1), value.size(3)}, ScalarType::Float, query);
  if (output.numel() == 0 || key.size(2) == 0) {
    std::fill_n(mutable_data_of<float>(output), output.numel(), 0.0f);
    return output;
  }
  const Tensor q = with_dense_last(query), k = with_dense_last(key), v = with_dense_last(value);
  Attention all{};
  describe(q, k, v, output, scale, &all);
  const std::optional<Tensor> b = describe_bias(bias, all.keys, &all);
  run(all);
  return output;
}

} // namespace

FASTGEN_LIBRARY(CPU, m) {
  m.impl("beam_attention", FASTGEN_KERNEL(beam_attention));
}

} // namespace fastgen
