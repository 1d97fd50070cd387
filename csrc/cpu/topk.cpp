// fastgen::topk_log_softmax on the CPU.
#include "topk_rows.h"

#include <tuple>

namespace fastgen {
namespace {

std::tuple<Tensor, Tensor, Tensor> topk_log_softmax(
    const Tensor& logits, int64_t k, const std::optional<Tensor>& banned) {
  check_topk(logits, k, banned);
  const int64_t rows = logits.size(0);
  Tensor log_probs = make({rows, k}, ScalarType::Float, logits);
  Tensor tokens = make({rows, k}, ScalarType::Long, logits);
  Tensor log_sum_exp = make({rows}, ScalarType::Float, logits);
  if (rows > 0) {
    topk_rows(
        logits, k, banned,
        {mutable_data_of<float>(log_probs), mutable_data_of<int64_t>(tokens), mutable_data_of<float>(log_sum_exp)});
  }
  return {log_probs, tokens, log_sum_exp};
}

} // namespace

FASTGEN_LIBRARY(CPU, m) {
  m.impl("topk_log_softmax", FASTGEN_KERNEL(topk_log_softmax));
}

} // namespace fastgen
