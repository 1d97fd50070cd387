// The loops of fastgen::fingerprint for one instruction set; included by each_isa.h once for each, so without a guard.
#include "fingerprint.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace fastgen {
namespace FASTGEN_ISA {

constexpr int64_t kWords = FASTGEN_LANES; // of 32 bits, in a register
constexpr int64_t kWordBytes = 4, kReadAhead = 1024; // words; as far as memory is away

// A sum of products, modulo 2^64, of signed words and 64-bit multipliers.
//
// With vectors, products are of 32 bits by 32: with either half of a multiplier, the lower one signed. They are of every
// other word, so a block of multipliers has those of even words first, and the upper half makes up for the sign.
#if FASTGEN_LANES == 16
struct Sum {
  __m512i low, high;
  FASTGEN_TARGET Sum() : low(_mm512_setzero_si512()), high(low) {}
  FASTGEN_TARGET void add(const void* words, const uint64_t* by) {
    const __m512i even = _mm512_loadu_si512(words), odd = _mm512_srli_epi64(even, 32);
    const __m512i of_even = _mm512_loadu_si512(by), of_odd = _mm512_loadu_si512(by + kWords / 2);
    low = _mm512_add_epi64(low, _mm512_mul_epi32(even, of_even));
    high = _mm512_add_epi64(high, _mm512_mul_epi32(even, _mm512_srli_epi64(of_even, 32)));
    low = _mm512_add_epi64(low, _mm512_mul_epi32(odd, of_odd));
    high = _mm512_add_epi64(high, _mm512_mul_epi32(odd, _mm512_srli_epi64(of_odd, 32)));
  }
  FASTGEN_TARGET uint64_t total() const {
    return _mm512_reduce_add_epi64(_mm512_add_epi64(low, _mm512_slli_epi64(high, 32)));
  }
};
#elif FASTGEN_LANES == 8
struct Sum {
  __m256i low, high;
  FASTGEN_TARGET Sum() : low(_mm256_setzero_si256()), high(low) {}
  FASTGEN_TARGET void add(const void* words, const uint64_t* by) {
    const __m256i even = _mm256_loadu_si256(static_cast<const __m256i*>(words)), odd = _mm256_srli_epi64(even, 32);
    const __m256i of_even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(by));
    const __m256i of_odd = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(by + kWords / 2));
    low = _mm256_add_epi64(low, _mm256_mul_epi32(even, of_even));
    high = _mm256_add_epi64(high, _mm256_mul_epi32(even, _mm256_srli_epi64(of_even, 32)));
    low = _mm256_add_epi64(low, _mm256_mul_epi32(odd, of_odd));
    high = _mm256_add_epi64(high, _mm256_mul_epi32(odd, _mm256_srli_epi64(of_odd, 32)));
  }
  FASTGEN_TARGET uint64_t total() const {
    uint64_t parts[4];
    const __m256i sums = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), sums);
    return parts[0] + parts[1] + parts[2] + parts[3];
  }
};
#else
struct Sum {
  uint64_t sum = 0;
  void add(const void* words, const uint64_t* by) {
    int32_t block[kWords];
    std::memcpy(block, words, sizeof(block));
    for (int64_t k = 0; k < kWords; ++k) {
      sum += static_cast<uint64_t>(int64_t{block[k]}) * by[k];
    }
  }
  uint64_t total() const {
    return sum;
  }
};
#endif

// The multipliers of so many words, in whole blocks, as `Sum` wants them.
inline std::vector<uint64_t> multipliers(int64_t words) {
  std::vector<uint64_t> found((words + kWords - 1) / kWords * kWords);
  for (int64_t j = 0; j < static_cast<int64_t>(found.size()); ++j) {
    const uint64_t by = multiplier(j);
    if (FASTGEN_LANES == 4) {
      found[j] = by;
    } else {
      const int64_t k = j % kWords;
      found[j - k + k % 2 * (kWords / 2) + k / 2] = by + ((by & 0x80000000u) << 1);
    }
  }
  return found;
}

// Of `Rows` rows of so many bytes, `stride` bytes apart, whose last words are filled up with zeros. Several at once: the
// multipliers are loaded once for all, and memory is asked for in several places.
template <int Rows>
FASTGEN_TARGET inline void row_sums(
    const char* rows, int64_t stride, int64_t bytes, const uint64_t* by, uint64_t* sums) {
  constexpr int64_t block = kWords * kWordBytes;
  const int64_t ahead = std::max<int64_t>(Rows * stride, kReadAhead * kWordBytes);
  Sum each[Rows];
  int64_t i = 0;
  for (; i + block <= bytes; i += block, by += kWords) {
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      __builtin_prefetch(rows + row * stride + i + ahead);
      each[row].add(rows + row * stride + i, by);
    }
  }
  for (int row = 0; row < Rows; ++row) {
    if (i < bytes) {
      char last[block] = {};
      std::memcpy(last, rows + row * stride + i, bytes - i);
      each[row].add(last, by);
    }
    sums[row] = each[row].total();
  }
}

} // namespace FASTGEN_ISA
} // namespace fastgen
