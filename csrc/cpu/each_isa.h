// Includes the file FASTGEN_LOOPS once for each instruction set that may be used here; so without a guard.
//
// Each time there are FASTGEN_ISA (a namespace), FASTGEN_TARGET (a function attribute that allows the instructions),
// FASTGEN_LANES (floats in a register), FASTGEN_FUSED (whether products are added unrounded) and
// FASTGEN_REACHED(a, b) (bit i: a[i] >= b[i]).
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
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

inline bool has_all(uint32_t word, uint32_t bits) {
  return (word & bits) == bits;
}

// By Intel's manual, volume 1, 14.5 and 15.3, from register c of cpuid's leaf 1, register b of leaf 7, and XCR0: which
// registers the system keeps when threads change (bits 1 and 2: those of AVX; 5 to 7: the rest of AVX-512).
inline InstructionSet newest_of(uint32_t leaf1, uint32_t leaf7, uint32_t kept) {
  constexpr uint32_t kAvx512 = bit_AVX512F | bit_AVX512VL | bit_AVX512BW | bit_AVX512DQ;
  if (!has_all(leaf1, bit_AVX | bit_FMA | bit_F16C | bit_POPCNT) || !has_all(leaf7, bit_AVX2) || !has_all(kept, 0x6)) {
    return InstructionSet::baseline;
  }
  return has_all(leaf7, kAvx512) && has_all(kept, 0xe6) ? InstructionSet::avx512 : InstructionSet::avx2;
}

// Not by __builtin_cpu_supports, which Clang has in no library that it links on Windows.
inline InstructionSet newest() {
  uint32_t a = 0, b = 0, leaf1 = 0, leaf7 = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &leaf1, &d) || !has_all(leaf1, bit_OSXSAVE) ||
      !__get_cpuid_count(7, 0, &a, &leaf7, &c, &d)) {
    return InstructionSet::baseline;
  }
  uint32_t kept = 0, above = 0;
  __asm__ volatile("xgetbv" : "=a"(kept), "=d"(above) : "c"(0)); // without OSXSAVE there is no such instruction
  return newest_of(leaf1, leaf7, kept);
}

// What `at::get_cpu_capability` says, which is not in torch's stable ABI.
inline InstructionSet instruction_set() {
  static const InstructionSet best = [] {
    const char* const variable = std::getenv("ATEN_CPU_CAPABILITY");
    const std::string most = variable == nullptr ? "" : variable;
    const InstructionSet allowed = most == "default" ? InstructionSet::baseline
        : most == "avx2"                             ? InstructionSet::avx2
                                                     : InstructionSet::avx512;
    return std::min(allowed, newest());
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
