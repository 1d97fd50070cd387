// CUDA's language on a CPU, for tests of csrc/cuda: launch.h there includes this file where FASTGEN_EMULATE_CUDA is
// defined.
//
// Blocks run one after the other, and so do the threads of a block, each on a stack of its own up to the next barrier.
// The order of both can be chosen. What a real device leaves undefined is an error here: a barrier that a thread never
// comes to, shared memory that is read before it is written or beside its ends, and two threads that use the same
// shared memory without a barrier between them, one of them to write (that needs the compiler's `-fsanitize=thread`,
// whose calls emulator.cpp answers).
#pragma once

#include <c10/core/Device.h>

#include <math.h> // not <cmath>: kernels name its functions without std

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __align__(BYTES) alignas(BYTES)
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Of the thread that is running.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

extern int fault; // the number of the seeded fault that is switched on, 0: none

// Runs `call(state)` as every thread of the grid.
// Throws std::runtime_error, which names the kernel, the block and the thread that did what no kernel may.
void run(const char* kernel, dim3 grid, dim3 block, std::size_t dynamic_bytes, void (*call)(void*), void* state);

void block_barrier(int line);
void warp_barrier(unsigned mask);
unsigned lane();
std::uint64_t& slot(unsigned lane); // of the running thread's warp, for values that lanes exchange
void* shared(const char* name, int line, std::size_t size, std::size_t alignment);
unsigned char* dynamic_shared();
void uses_atomically(const void* address, std::size_t size);
[[noreturn]] void fail(const char* what);

template <typename... Parameters, typename... Arguments>
void launch(
    const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t dynamic_bytes,
    int /*stream*/, Arguments... arguments) {
  // As on a device, parameters are copied, and no kernel can change those of another thread.
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  } call{kernel, std::tuple<Parameters...>(arguments...)};
  run(
      name, grid, block, dynamic_bytes,
      [](void* state) {
        const Call& own = *static_cast<Call*>(state);
        std::apply(own.kernel, own.parameters);
      },
      &call);
}

template <typename Type>
Type& shared_variable(const char* name, int line) {
  return *static_cast<Type*>(shared(name, line, sizeof(Type), alignof(Type)));
}

// The value of another lane: that which `value` is in `source`, if both are in the mask.
template <typename Type>
Type exchange(unsigned mask, Type value, unsigned source) {
  static_assert(sizeof(Type) <= sizeof(std::uint64_t));
  if ((mask >> source & 1) == 0) {
    fail("a shuffle asks for a lane that is not in the mask");
  }
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(Type));
  slot(lane()) = bits;
  warp_barrier(mask);
  bits = slot(source);
  warp_barrier(mask); // before the next exchange
  std::memcpy(&value, &bits, sizeof(Type));
  return value;
}

// Not instrumented: to the race detector an atomic operation is one access, not a read and a write.
template <typename Type, typename Change>
__attribute__((noinline, no_sanitize("thread"))) Type atomically(Type* address, Change change) {
  uses_atomically(address, sizeof(Type));
  const Type before = *address;
  *address = change(before);
  return before;
}

} // namespace cuda_on_cpu

#define __syncthreads() ::cuda_on_cpu::block_barrier(__LINE__)

#define FASTGEN_LAUNCH(KERNEL, GRID, BLOCK, SHARED, STREAM, ...) \
  ::cuda_on_cpu::launch(#KERNEL, KERNEL, GRID, BLOCK, SHARED, STREAM, __VA_ARGS__)
#define FASTGEN_SHARED(TYPE, NAME) auto& NAME = ::cuda_on_cpu::shared_variable<TYPE>(#NAME, __LINE__)
#define FASTGEN_DYNAMIC_SHARED(NAME) unsigned char* const NAME = ::cuda_on_cpu::dynamic_shared()

#ifndef FASTGEN_EMULATED_NAMESPACE
#define FASTGEN_EMULATED_NAMESPACE fastgen_emulated
#endif
#define FASTGEN_LIBRARY_IMPL(NAMESPACE, KEY, M) TORCH_LIBRARY_IMPL(NAMESPACE, KEY, M) // expands its arguments
#define FASTGEN_CUDA_LIBRARY(M) FASTGEN_LIBRARY_IMPL(FASTGEN_EMULATED_NAMESPACE, CPU, M)

// The functions of CUDA that kernels use.
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  cuda_on_cpu::warp_barrier(mask);
}

template <typename Type>
Type __shfl_sync(unsigned mask, Type value, int source, int width = 32) {
  const unsigned own = cuda_on_cpu::lane();
  return cuda_on_cpu::exchange(mask, value, (own & ~(width - 1u)) | (static_cast<unsigned>(source) & (width - 1u)));
}

template <typename Type>
Type __shfl_xor_sync(unsigned mask, Type value, int lanes, int width = 32) {
  const unsigned own = cuda_on_cpu::lane(), other = own ^ static_cast<unsigned>(lanes);
  return cuda_on_cpu::exchange(mask, value, other / width > own / width ? own : other);
}

template <typename Type>
Type __shfl_up_sync(unsigned mask, Type value, unsigned distance, int width = 32) {
  const unsigned own = cuda_on_cpu::lane();
  return cuda_on_cpu::exchange(mask, value, own % width < distance ? own : own - distance);
}

template <typename Type>
Type __shfl_down_sync(unsigned mask, Type value, unsigned distance, int width = 32) {
  const unsigned own = cuda_on_cpu::lane();
  const bool is_within = own % width + distance < static_cast<unsigned>(width);
  return cuda_on_cpu::exchange(mask, value, is_within ? own + distance : own);
}

inline unsigned __ballot_sync(unsigned mask, bool holds) {
  cuda_on_cpu::slot(cuda_on_cpu::lane()) = holds;
  cuda_on_cpu::warp_barrier(mask);
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; ++i) {
    votes |= (mask >> i & 1) != 0 && cuda_on_cpu::slot(i) != 0 ? 1u << i : 0;
  }
  cuda_on_cpu::warp_barrier(mask);
  return votes;
}

inline bool __any_sync(unsigned mask, bool holds) {
  return __ballot_sync(mask, holds) != 0;
}

inline bool __all_sync(unsigned mask, bool holds) {
  return __ballot_sync(mask, holds) == mask;
}

template <typename Type>
Type atomicAdd(Type* address, Type value) {
  return cuda_on_cpu::atomically(address, [=](Type old) { return old + value; });
}

template <typename Type>
Type atomicOr(Type* address, Type value) {
  return cuda_on_cpu::atomically(address, [=](Type old) { return old | value; });
}

template <typename Type>
Type atomicMax(Type* address, Type value) {
  return cuda_on_cpu::atomically(address, [=](Type old) { return old < value ? value : old; });
}

template <typename Type>
Type atomicCAS(Type* address, Type expected, Type value) {
  return cuda_on_cpu::atomically(address, [=](Type old) { return old == expected ? value : old; });
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

namespace c10::cuda {

struct CUDAGuard {
  explicit CUDAGuard(c10::Device) {}
};

// Kernels run when they are launched, which is an order that every stream allows.
inline int getCurrentCUDAStream() {
  return 0;
}

} // namespace c10::cuda
