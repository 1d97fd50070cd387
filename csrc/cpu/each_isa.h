// Includes the file FASTGEN_LOOPS once for each instruction set that may be used here; so without a guard.
//
// Each time there are FASTGEN_ISA (a namespace), FASTGEN_TARGET (a function attribute that allows the instructions),
// FASTGEN_LANES (floats in a register), FASTGEN_FUSED (whether products are added unrounded) and
// FASTGEN_REACHED(a, b) (bit i: a[i] >= b[i]).
#include <cstdint>
#include <cstdlib>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>

#define FASTGEN_ISA avx512
#define FASTGEN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt")))
#define FASTGEN_LANES 16
#define FASTGEN_FUSED 1
#define FASTGEN_REACHED(a, b) static_cast<uint32_t>(_mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_GE_OQ))
#include FASTGEN_LOOPS
#undef FASTGEN_ISA
#undef FASTGEN_TARGET
#undef FASTGEN_LANES
#undef FASTGEN_FUSED
#undef FASTGEN_REACHED

#define FASTGEN_ISA avx2
#define FASTGEN_TARGET __attribute__((target("avx2,fma,f16c,popcnt")))
#define FASTGEN_LANES 8
#define FASTGEN_FUSED 1
#define FASTGEN_REACHED(a, b) \
  static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)(a), (__m256)(b), _CMP_GE_OQ)))
#include FASTGEN_LOOPS
#undef FASTGEN_ISA
#undef FASTGEN_TARGET
#undef FASTGEN_LANES
#undef FASTGEN_FUSED
#undef FASTGEN_REACHED

#define FASTGEN_REACHED(a, b) static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpge_ps((__m128)(a), (__m128)(b))))
#else
#define FASTGEN_REACHED(a, b) fastgen::reached((a), (b))

namespace fastgen {
template <typename Vector>
inline uint32_t reached(const Vector& a, const Vector& b) {
  const auto comparison = a >= b; // a lane is -1 where it holds
  uint32_t bits = 0;
  for (uint32_t lane = 0; lane < sizeof(Vector) / sizeof(float); ++lane) {
    bits |= static_cast<uint32_t>(comparison[lane] != 0) << lane;
  }
  return bits;
}
} // namespace fastgen
#endif

#define FASTGEN_ISA baseline // what the compiler may use anyway: SSE2, NEON
#define FASTGEN_TARGET
#define FASTGEN_LANES 4
#define FASTGEN_FUSED 0
#include FASTGEN_LOOPS

namespace fastgen {

// One of three functions by torch's rule, so that ATEN_CPU_CAPABILITY holds here too.
#if defined(__x86_64__)
#define FASTGEN_CHOOSE(function) fastgen::chosen(&avx512::function, &avx2::function, &baseline::function)

enum class InstructionSet { baseline, avx2, avx512 };

// What `at::get_cpu_capability` says, which is not in torch's stable ABI.
inline InstructionSet instruction_set() {
  static const InstructionSet best = [] {
    __builtin_cpu_init();
    const char* const variable = std::getenv("ATEN_CPU_CAPABILITY");
    const std::string most = variable == nullptr ? "" : variable;
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    if (most == "default" || !has_avx2) {
      return InstructionSet::baseline;
    }
    return most == "avx2" || !has_avx512 ? InstructionSet::avx2 : InstructionSet::avx512;
  }();
  return best;
}

template <typename Function>
inline Function chosen(Function avx512, Function avx2, Function baseline) {
  const InstructionSet set = instruction_set();
  return set == InstructionSet::avx512 ? avx512 : set == InstructionSet::avx2 ? avx2 : baseline;
}
#else
#define FASTGEN_CHOOSE(function) (&baseline::function)
#endif

} // namespace fastgen
