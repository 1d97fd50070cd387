// Threads of torch's own, as many as torch.set_num_threads says.
#pragma once

#include "../tensors.h"

#ifndef TORCH_TARGET_VERSION
#include <ATen/Parallel.h>
#endif

namespace fastgen {

// Calls `work(begin, end)` for parts of a range, of `grain` or more each, side by side.
template <typename Work>
inline void parallel_for(int64_t begin, int64_t end, int64_t grain, const Work& work) {
#ifdef TORCH_TARGET_VERSION
  torch::stable::parallel_for(begin, end, grain, work);
#else
  at::parallel_for(begin, end, grain, work);
#endif
}

inline int64_t threads() {
#ifdef TORCH_TARGET_VERSION
  return torch::stable::get_num_threads();
#else
  return at::get_num_threads();
#endif
}

} // namespace fastgen
