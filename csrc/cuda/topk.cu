// fastgen::topk_log_softmax on CUDA devices.
//
// Two kernels. The first gives each block one segment of a row, held in registers: it reads every logit once, and
// writes the segment's k best, its maximum and its sum of exponentials. The second merges a row's segments.
#include "../arguments.h"
#include "launch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cstdint>
#include <limits>
#include <tuple>

namespace fastgen {
namespace {

constexpr int kThreads = 256; // also the number of groups whose maxima give the bound
constexpr int kPerThread = 32; // logits in registers
constexpr int64_t kSegment = kThreads * kPerThread;
constexpr int kMostK = 128;
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int kCandidates = 2048; // keys in shared memory: 16 KiB

using Key = unsigned long long; // sorts as the logit, then as the token, the lowest first; 0: none

__device__ Key make_key(float logit, int64_t token) {
  const unsigned bits = __float_as_uint(logit + 0.0f); // -0.0 equals 0.0
  const unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(ordered) << 32 | (0xffffffffu - static_cast<unsigned>(token));
}

__device__ float logit_of(Key key) {
  const unsigned ordered = static_cast<unsigned>(key >> 32);
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

__device__ int64_t token_of(Key key) {
  return 0xffffffffu - static_cast<unsigned>(key);
}

// Sort `keys`, the largest first, by the whole block; `size` is a power of two.
template <typename Value>
__device__ void sort_descending(Value* keys, int size) {
  for (int run = 2; run <= size; run *= 2) { // a bitonic network
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size; i += kThreads) {
        const int other = i ^ distance;
        const bool descending = (i & run) == 0;
        if (other > i && (keys[i] < keys[other]) == descending) {
          const Value key = keys[i];
          keys[i] = keys[other];
          keys[other] = key;
        }
      }
    }
  }
  __syncthreads();
}

// The block's sum or maximum, for all threads. `scratch`: kThreads values.
template <typename Value, typename Combine>
__device__ Value reduce(Value value, Value* scratch, Combine combine) {
  __syncthreads();
  scratch[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      scratch[threadIdx.x] = combine(scratch[threadIdx.x], scratch[threadIdx.x + half]);
    }
  }
  __syncthreads();
  const Value result = scratch[0];
  __syncthreads();
  return result;
}

// e^(x - maximum), where inf - inf counts as equal and NaN stays NaN.
__device__ float share(float x, float maximum) {
  return x == maximum ? (isinf(x) && x < 0 ? 0.0f : 1.0f) : expf(x - maximum);
}

struct Largest {
  template <typename Value>
  __device__ Value operator()(Value a, Value b) const {
    return b > a ? b : a;
  }
};

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};

// Grid: segments x rows. `keys` [rows, segments, k], `maxima` and `sums` [rows, segments].
template <typename Logit>
__global__ void __launch_bounds__(kThreads) scan_segment(
    const Logit* logits, int64_t stride, int64_t vocabulary, int k, const int64_t* banned, int64_t banned_stride,
    int64_t banned_width, Key* keys, float* maxima, float* sums) {
  FASTGEN_SHARED(Key[kCandidates], candidates);
  FASTGEN_SHARED(float[kThreads], scratch);
  FASTGEN_SHARED(unsigned[kSegment / 32], is_banned);
  FASTGEN_SHARED(int, found);

  const int64_t row = blockIdx.y;
  const int64_t first = blockIdx.x * kSegment;
  const int64_t part = row * gridDim.x + blockIdx.x;

  float x[kPerThread]; // x[i]: the token first + i * kThreads + threadIdx.x
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t token = first + i * kThreads + threadIdx.x;
    x[i] = token < vocabulary ? static_cast<float>(logits[row * stride + token]) : kNone;
  }

  // The sum of exponentials, banned tokens included.
  float maximum = kNone; // of the numbers: a NaN makes no comparison true
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    maximum = x[i] > maximum ? x[i] : maximum;
  }
  const float largest = reduce(maximum, scratch, Largest());
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    sum += share(x[i], largest);
  }
  sum = reduce(sum, scratch, Sum());
  if (threadIdx.x == 0) {
    maxima[part] = largest;
    sums[part] = sum;
    found = 0;
  }

  // NaN and banned tokens rank as -inf; places past the end get no key.
  if (banned_width > 0) {
    for (int i = threadIdx.x; i < kSegment / 32; i += kThreads) {
      is_banned[i] = 0;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < banned_width; i += kThreads) {
      const int64_t place = banned[row * banned_stride + i] - first;
      if (place >= 0 && place < kSegment) {
        atomicOr(&is_banned[place / 32], 1u << (place % 32));
      }
    }
    __syncthreads();
  }
  maximum = kNone;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int place = i * kThreads + threadIdx.x;
    if (isnan(x[i]) || (banned_width > 0 && (is_banned[place / 32] >> (place % 32) & 1))) {
      x[i] = kNone;
    }
    maximum = x[i] > maximum ? x[i] : maximum;
  }

  // The threads' maxima belong to disjoint groups: k logits or more reach the k-th largest of them.
  scratch[threadIdx.x] = maximum;
  sort_descending(scratch, kThreads);
  const float bound = scratch[k - 1];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t token = first + i * kThreads + threadIdx.x;
    if (x[i] >= bound && token < vocabulary) {
      const int place = atomicAdd(&found, 1);
      if (place < kCandidates) {
        candidates[place] = make_key(x[i], token);
      }
    }
  }
  __syncthreads();
  Key* const best = keys + part * k;
  if (found <= kCandidates) {
    int size = 1;
    while (size < found || size < k) {
      size *= 2;
    }
    for (int i = found + threadIdx.x; i < size; i += kThreads) {
      candidates[i] = 0;
    }
    sort_descending(candidates, size);
    for (int i = threadIdx.x; i < k; i += kThreads) {
      best[i] = candidates[i];
    }
    return;
  }
  // Too many equal logits: take the best one k times.
  Key last = ~0ull;
  for (int i = 0; i < k; ++i) {
    Key mine = 0;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t token = first + j * kThreads + threadIdx.x;
      const Key key = token < vocabulary ? make_key(x[j], token) : 0;
      mine = key < last && key > mine ? key : mine;
    }
    last = reduce(mine, candidates, Largest());
    if (threadIdx.x == 0) {
      best[i] = last;
    }
  }
}

// Grid: rows. The k best keys of a row's segments, and its log-sum-exp.
__global__ void __launch_bounds__(kThreads) merge_segments(
    const Key* keys, const float* maxima, const float* sums, int64_t segments, int k, float* log_probs,
    int64_t* tokens, float* log_sum_exps) {
  FASTGEN_SHARED(Key[kCandidates], best);
  FASTGEN_SHARED(float, maximum);
  FASTGEN_SHARED(double, log_sum);
  const int64_t row = blockIdx.x;
  if (threadIdx.x == 0) {
    maximum = kNone;
    for (int64_t i = 0; i < segments; ++i) {
      maximum = fmaxf(maximum, maxima[row * segments + i]);
    }
    double sum = 0;
    for (int64_t i = 0; i < segments; ++i) {
      sum += static_cast<double>(sums[row * segments + i]) * share(maxima[row * segments + i], maximum);
    }
    log_sum = log(sum);
    log_sum_exps[row] = static_cast<float>(maximum + log_sum);
  }
  // As many as fit beside the k best so far, again and again.
  const Key* const all = keys + row * segments * k;
  const int64_t count = segments * k;
  int kept = 0;
  for (int64_t next = 0; next < count;) {
    const int64_t left = count - next;
    const int taken = left < kCandidates - kept ? static_cast<int>(left) : kCandidates - kept;
    int size = 1;
    while (size < kept + taken) {
      size *= 2;
    }
    for (int i = threadIdx.x; i < size - kept; i += kThreads) {
      best[kept + i] = i < taken ? all[next + i] : 0;
    }
    sort_descending(best, size);
    next += taken;
    kept = k;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < k; i += kThreads) {
    // In this order, as in log_softmax: beside a large maximum the sum's logarithm would be lost.
    log_probs[row * k + i] = static_cast<float>((static_cast<double>(logit_of(best[i])) - maximum) - log_sum);
    tokens[row * k + i] = token_of(best[i]);
  }
}

// For k beyond what the kernels keep in shared memory: torch's own top-k over keys that are all different.
std::tuple<at::Tensor, at::Tensor> topk_by_keys(
    const at::Tensor& logits, int64_t k, const std::optional<at::Tensor>& banned) {
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  const double none = -std::numeric_limits<double>::infinity();
  at::Tensor allowed = logits.masked_fill(logits.isnan(), none);
  if (banned && banned->numel() > 0) {
    at::Tensor mask = at::full({rows, vocabulary + 1}, false, logits.options().dtype(at::kBool));
    const at::Tensor is_no_token = banned->lt(0).logical_or(banned->ge(vocabulary));
    mask.scatter_(1, banned->masked_fill(is_no_token, vocabulary).expand({rows, -1}), true);
    allowed = allowed.masked_fill(mask.narrow(1, 0, vocabulary), none);
  }
  const at::Tensor bits = allowed.add(0.0).view(at::kInt);
  const at::Tensor ordered = bits.bitwise_xor(bits.lt(0).to(at::kInt).mul(0x7fffffff)).to(at::kLong);
  const at::Tensor from_the_end = at::arange(vocabulary - 1, -1, -1, logits.options().dtype(at::kLong));
  const at::Tensor keys = std::get<0>(ordered.mul(int64_t{1} << 32).bitwise_or(from_the_end).topk(k));
  const at::Tensor tokens = keys.bitwise_and(int64_t{0xffffffff}).neg().add(vocabulary - 1);
  return {allowed.gather(1, tokens), tokens};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> topk_log_softmax(
    const at::Tensor& logits, int64_t k, const std::optional<at::Tensor>& banned) {
  check_topk(logits, k, banned);
  const c10::cuda::CUDAGuard guard(logits.device());
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  if (k > kMostK || rows > 65535) { // 65535: the most rows of a grid's second dimension
    const at::Tensor floats = logits.to(at::kFloat);
    at::Tensor maximum = floats.amax(1, /*keepdim=*/true);
    maximum = maximum.masked_fill(maximum.isfinite().logical_not(), 0); // inf - inf would be NaN
    const at::Tensor log_sum = floats.sub(maximum).logsumexp(1, /*keepdim=*/true);
    auto [best, tokens] = topk_by_keys(floats, k, banned);
    return {best.sub(maximum).sub(log_sum), tokens, log_sum.add(maximum).squeeze(1)};
  }
  const auto floats = logits.options().dtype(at::kFloat);
  const auto integers = logits.options().dtype(at::kLong);
  at::Tensor log_probs = at::empty({rows, k}, floats);
  at::Tensor tokens = at::empty({rows, k}, integers);
  at::Tensor log_sum_exp = at::empty({rows}, floats);
  if (rows == 0) {
    return {log_probs, tokens, log_sum_exp};
  }
  const at::Tensor dense = with_dense_rows(logits);
  const at::Tensor no_tokens = banned ? banned->contiguous() : at::Tensor();
  const int64_t width = banned ? no_tokens.size(-1) : 0;
  const int64_t segments = (vocabulary + kSegment - 1) / kSegment;
  const at::Tensor keys = at::empty({rows, segments, k}, integers);
  const at::Tensor maxima = at::empty({rows, segments}, floats);
  const at::Tensor sums = at::empty({rows, segments}, floats);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  Key* const key_data = reinterpret_cast<Key*>(keys.mutable_data_ptr<int64_t>());
  const dim3 grid(static_cast<unsigned>(segments), static_cast<unsigned>(rows));
  FASTGEN_DISPATCH_SCORES(dense.scalar_type(), [&] {
    FASTGEN_LAUNCH(
        scan_segment<scalar_t>, grid, kThreads, 0, stream, dense.const_data_ptr<scalar_t>(), dense.stride(0),
        vocabulary, static_cast<int>(k), width > 0 ? no_tokens.const_data_ptr<int64_t>() : nullptr,
        width > 0 && no_tokens.dim() == 2 ? no_tokens.stride(0) : 0, width, key_data,
        maxima.mutable_data_ptr<float>(), sums.mutable_data_ptr<float>());
  });
  FASTGEN_LAUNCH(
      merge_segments, static_cast<unsigned>(rows), kThreads, 0, stream, key_data, maxima.const_data_ptr<float>(),
      sums.const_data_ptr<float>(), segments, static_cast<int>(k), log_probs.mutable_data_ptr<float>(),
      tokens.mutable_data_ptr<int64_t>(), log_sum_exp.mutable_data_ptr<float>());
  return {log_probs, tokens, log_sum_exp};
}

} // namespace

FASTGEN_CUDA_LIBRARY(m) {
  m.impl("topk_log_softmax", &topk_log_softmax);
}

} // namespace fastgen
