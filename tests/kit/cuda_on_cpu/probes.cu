// Kernels that show what the emulation does, and what it finds: test_emulated_cuda.py calls them.
#include "launch.h"

#include <ATen/ops/zeros.h>

#include <cstdint>

namespace fastgen {
namespace {

using Number = int64_t;

__global__ void coordinates(Number* out) { // the order in which threads run, and their places
  const Number block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const Number thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const Number turn = atomicAdd(out, Number{1});
  out[1 + turn] = block * blockDim.x * blockDim.y * blockDim.z + thread;
}

__global__ void reverse(Number* out, int absent) { // `absent`: the thread that leaves before the barrier
  FASTGEN_SHARED(Number[64], values);
  values[threadIdx.x] = threadIdx.x;
  if (static_cast<int>(threadIdx.x) == absent) {
    return;
  }
  __syncthreads();
  out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

__global__ void without_barrier(Number* out) {
  FASTGEN_SHARED(Number[64], values);
  values[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = values[threadIdx.x / 2];
}

__global__ void diverging(Number* out) { // as many barriers for each, but not the same ones
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

__global__ void beside(Number* out, int place) { // writes values[place] of 64
  FASTGEN_SHARED(Number[64], values);
  FASTGEN_DYNAMIC_SHARED(bytes);
  if (threadIdx.x == 0) {
    volatile Number* const start = values; // hides the bounds from the compiler
    start[place] = 7;
    bytes[0] = 1;
  }
  __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void unwritten(Number* out) {
  FASTGEN_SHARED(Number[64], values);
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void too_much(Number* out) {
  FASTGEN_SHARED(Number[4096], values);
  FASTGEN_SHARED(Number[4096], others);
  values[threadIdx.x] = others[threadIdx.x] = 1;
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void counting(Number* out) { // by atomic operations on shared and on global memory
  FASTGEN_SHARED(int, count);
  FASTGEN_SHARED(unsigned, bits);
  if (threadIdx.x == 0) {
    count = 0;
    bits = 0;
  }
  __syncthreads();
  atomicAdd(&count, 1);
  atomicOr(&bits, 1u << threadIdx.x % 32);
  atomicMax(out + 2, static_cast<Number>(threadIdx.x));
  atomicCAS(out + 3, Number{0}, static_cast<Number>(threadIdx.x) + 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    out[0] = count;
    out[1] = bits;
  }
}

__global__ void shuffles(Number* out) { // six rows of a value for each thread
  const unsigned all = 0xffffffffu;
  const Number own = threadIdx.x * 10;
  const Number rows[] = {
      __shfl_sync(all, own, 3),
      __shfl_xor_sync(all, own, 5),
      __shfl_up_sync(all, own, 2u, 16),
      __shfl_down_sync(all, own, 2u, 16),
      static_cast<Number>(__ballot_sync(all, threadIdx.x % 3 == 0)),
      __any_sync(all, threadIdx.x == 33) * 2 + __all_sync(all, threadIdx.x < 32),
  };
  for (int i = 0; i < 6; ++i) {
    out[i * blockDim.x + threadIdx.x] = rows[i];
  }
}

__global__ void warp_sum(Number* out, int barriers) { // by halves, in shared memory
  FASTGEN_SHARED(Number[32], values);
  values[threadIdx.x] = threadIdx.x;
  for (unsigned half = 16; half > 0; half /= 2) {
    __syncwarp();
    const Number sum = values[threadIdx.x] + values[(threadIdx.x + half) % 32];
    if (barriers == 2) {
      __syncwarp();
    }
    values[threadIdx.x] = sum;
  }
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void lonely(Number* out) { // half of the lanes that the mask names
  if (threadIdx.x < 16) {
    __syncwarp();
  }
  out[threadIdx.x] = 1;
}

__global__ void outside(Number* out) {
  out[threadIdx.x] = __shfl_sync(0xffffu, Number{1}, 20);
}

// Runs the kernel on a grid and a block of three numbers each; returns what it wrote.
at::Tensor probe(
    c10::string_view name, at::IntArrayRef grid_size, at::IntArrayRef block_size, int64_t count, int64_t extra) {
  const at::Tensor out = at::zeros({count}, at::kLong);
  auto* const data = out.mutable_data_ptr<Number>();
  const auto size = [](at::IntArrayRef each) {
    return dim3(static_cast<unsigned>(each[0]), static_cast<unsigned>(each[1]), static_cast<unsigned>(each[2]));
  };
  const dim3 grid = size(grid_size), block = size(block_size);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto number = static_cast<int>(extra);
#define FASTGEN_PROBE(KERNEL, BYTES, ...)                               \
  if (name == #KERNEL) {                                                \
    FASTGEN_LAUNCH(KERNEL, grid, block, BYTES, stream, ##__VA_ARGS__);  \
  }
  FASTGEN_PROBE(coordinates, 0, data)
  FASTGEN_PROBE(reverse, 0, data, number)
  FASTGEN_PROBE(without_barrier, 0, data)
  FASTGEN_PROBE(diverging, 0, data)
  FASTGEN_PROBE(beside, 16, data, number)
  FASTGEN_PROBE(unwritten, 0, data)
  FASTGEN_PROBE(too_much, 0, data)
  FASTGEN_PROBE(counting, static_cast<size_t>(number), data)
  FASTGEN_PROBE(shuffles, 0, data)
  FASTGEN_PROBE(warp_sum, 0, data, number)
  FASTGEN_PROBE(lonely, 0, data)
  FASTGEN_PROBE(outside, 0, data)
#undef FASTGEN_PROBE
  return out;
}

} // namespace

TORCH_LIBRARY(fastgen_probes, m) {
  m.def("probe(str name, int[] grid, int[] block, int count, int extra=0) -> Tensor", &probe);
}

} // namespace fastgen
