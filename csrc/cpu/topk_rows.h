// The k best logits of each row of a matrix, several threads at a time.
#pragma once

#include "../arguments.h"

namespace fastgen {

// Where the k best of each row go.
struct TopK {
  float* log_probs; // [rows, k]
  int64_t* tokens; // [rows, k]
  float* log_sum_exp; // [rows]
};

void topk_rows(const Tensor& logits, int64_t k, const std::optional<Tensor>& banned, const TopK& outputs);

} // namespace fastgen
