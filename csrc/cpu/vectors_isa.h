// Vectors of floats for one instruction set: the compiler's own (GCC's vector extensions, also in Clang), of the
// target's width. Included by the loops that each_isa.h includes, once for each set, so without a guard.
//
// Every function carries the target attribute itself, so the files need no flags of their own and nothing compiled
// for a newer processor can be linked into code for an older one.

namespace fastgen {
namespace FASTGEN_ISA {

typedef float Floats __attribute__((vector_size(4 * FASTGEN_LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * FASTGEN_LANES)));
typedef float Four __attribute__((vector_size(16)));
constexpr int64_t kLanes = FASTGEN_LANES;

FASTGEN_TARGET inline Floats load(const float* from) {
  Floats x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

// Numbers that no instruction of this set converts.
template <typename Number>
FASTGEN_TARGET inline Floats lane_by_lane(const Number* from) {
  Floats x;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    x[lane] = static_cast<float>(from[lane]);
  }
  return x;
}

// Half precision, exactly, as floats.
FASTGEN_TARGET inline Floats load(const c10::Half* from) {
#if FASTGEN_LANES == 16
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif FASTGEN_LANES == 8
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  return lane_by_lane(from);
#endif
}

// bfloat16, exactly: the upper halves of floats.
FASTGEN_TARGET inline Floats load(const c10::BFloat16* from) {
#if FASTGEN_LANES == 16
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#elif FASTGEN_LANES == 8
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
  return lane_by_lane(from);
#endif
}

FASTGEN_TARGET inline Floats load(const int8_t* from) {
#if FASTGEN_LANES == 16
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif FASTGEN_LANES == 8
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return lane_by_lane(from);
#endif
}

FASTGEN_TARGET inline void store(float* into, Floats x) {
  __builtin_memcpy(into, &x, sizeof x);
}

FASTGEN_TARGET inline Floats splat(float value) {
  return value - Floats{};
}

FASTGEN_TARGET inline Floats larger(Floats a, Floats b) { // b where a is NaN
  return a > b ? a : b;
}

FASTGEN_TARGET inline float largest(Floats x) {
  float result = x[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) {
    result = x[lane] > result ? x[lane] : result;
  }
  return result;
}

// The first `count` lanes, fewer than all, with zeros behind; no more is read.
FASTGEN_TARGET inline Floats load_part(const float* from, int64_t count) {
#if FASTGEN_LANES == 16
  return (Floats)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#elif FASTGEN_LANES == 8
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return (Floats)_mm256_maskload_ps(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes));
#else
  Floats x = {};
  for (int64_t lane = 0; lane < count; ++lane) {
    x[lane] = from[lane];
  }
  return x;
#endif
}

template <typename Number>
FASTGEN_TARGET inline Floats load_part(const Number* from, int64_t count) {
  Number whole[kLanes] = {};
  for (int64_t lane = 0; lane < count; ++lane) {
    whole[lane] = from[lane];
  }
  return load(whole);
}

#if defined(__clang__) || __GNUC__ >= 12
#define FASTGEN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FASTGEN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Bits){__VA_ARGS__})
#endif
// Lanes of each 128 bits alike; those of the second vector count from FASTGEN_LANES on.
#if FASTGEN_LANES == 16
#define FASTGEN_EACH(i, j, k, l) \
  i, j, k, l, i + 4, j + 4, k + 4, l + 4, i + 8, j + 8, k + 8, l + 8, i + 12, j + 12, k + 12, l + 12
#elif FASTGEN_LANES == 8
#define FASTGEN_EACH(i, j, k, l) i, j, k, l, i + 4, j + 4, k + 4, l + 4
#else
#define FASTGEN_EACH(i, j, k, l) i, j, k, l
#endif
#define FASTGEN_N FASTGEN_LANES

// The sums of the lanes of a, b, c and d, floats or integers. First inside each 128 bits, where shuffles are cheap.
template <typename Quad = Four, typename Vector>
FASTGEN_TARGET inline Quad sums_of_lanes(Vector a, Vector b, Vector c, Vector d) {
  const Vector ab = FASTGEN_SHUFFLE(a, b, FASTGEN_EACH(0, FASTGEN_N, 1, FASTGEN_N + 1)) +
      FASTGEN_SHUFFLE(a, b, FASTGEN_EACH(2, FASTGEN_N + 2, 3, FASTGEN_N + 3));
  const Vector cd = FASTGEN_SHUFFLE(c, d, FASTGEN_EACH(0, FASTGEN_N, 1, FASTGEN_N + 1)) +
      FASTGEN_SHUFFLE(c, d, FASTGEN_EACH(2, FASTGEN_N + 2, 3, FASTGEN_N + 3));
  Vector sums = FASTGEN_SHUFFLE(ab, cd, FASTGEN_EACH(0, 1, FASTGEN_N, FASTGEN_N + 1)) +
      FASTGEN_SHUFFLE(ab, cd, FASTGEN_EACH(2, 3, FASTGEN_N + 2, FASTGEN_N + 3));
#if FASTGEN_LANES == 16
  sums += FASTGEN_SHUFFLE(sums, sums, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
#endif
#if FASTGEN_LANES >= 8
  sums += FASTGEN_SHUFFLE(sums, sums, FASTGEN_EACH(4, 5, 6, 7)); // beyond the end the second one follows: the same
#endif
  Quad first;
  __builtin_memcpy(&first, &sums, sizeof first);
  return first;
}
#undef FASTGEN_SHUFFLE
#undef FASTGEN_EACH
#undef FASTGEN_N

// e^x for x <= 0 within 3 ulp; e^-86 below -86, too little to count beside the e^0 of the maximum; NaN for NaN.
FASTGEN_TARGET inline Floats exponential(Floats x) {
  const Floats lowest = splat(-86.0f);
  x = lowest > x ? lowest : x;
  // x = n ln 2 + r with |r| <= ln 2 / 2: adding 1.5 * 2^23 rounds to the integer n and leaves it in the low bits.
  const Floats shifted = x * 1.44269504f + 12582912.0f;
  const Floats n = shifted - 12582912.0f;
#if FASTGEN_FUSED
  const Floats r = x - n * 0.693147182f; // the product is not rounded
#else
  const Floats r = x - n * 0.693145752f - n * 1.42860677e-6f; // ln 2 in two parts: the first times n is exact
#endif
  // The polynomial of degree 5 with the least relative error (1.05e-7) on that interval.
  Floats p = r * 0.00831250101f + 0.0418903306f;
  p = p * r + 0.166671157f;
  p = p * r + 0.499992311f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Bits power = ((Bits)shifted << 23) + 0x3f800000u; // the bits of 2^n
  return p * (Floats)power;
}

} // namespace FASTGEN_ISA
} // namespace fastgen
