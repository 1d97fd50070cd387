// What the kernels need beside CUDA's language. A host compiler builds the same sources for the tests: there
// FASTGEN_EMULATE_CUDA is defined, and tests/kit/cuda_on_cpu/ runs the threads of a kernel on the CPU.
#pragma once

#include <torch/library.h>

#ifdef FASTGEN_EMULATE_CUDA

#include "cuda_on_cpu.h"

#else

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

// Runs the kernel on the device, and checks the launch. Names of templates with a comma stand in parentheses.
#define FASTGEN_LAUNCH(KERNEL, GRID, BLOCK, SHARED, STREAM, ...)      \
  do {                                                                \
    auto* const fastgen_kernel = KERNEL;                              \
    fastgen_kernel<<<GRID, BLOCK, SHARED, STREAM>>>(__VA_ARGS__);     \
    C10_CUDA_KERNEL_LAUNCH_CHECK();                                   \
  } while (false)

namespace fastgen {
template <typename Type>
using SharedType = Type; // lets `Key[8]` stand before a name
} // namespace fastgen

// Declares a variable in the block's shared memory: FASTGEN_SHARED(float[8], sums).
#define FASTGEN_SHARED(TYPE, NAME) __shared__ ::fastgen::SharedType<TYPE> NAME

// Declares the shared memory whose size the launch gives, as bytes.
#define FASTGEN_DYNAMIC_SHARED(NAME) extern __shared__ __align__(16) unsigned char NAME[]

// Registers the kernels' operators: FASTGEN_CUDA_LIBRARY(m) { m.impl(...); }
#define FASTGEN_CUDA_LIBRARY(M) TORCH_LIBRARY_IMPL(fastgen, CUDA, M)

#endif
