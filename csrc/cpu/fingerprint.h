// The numbers that fastgen::fingerprint multiplies by; fastgen/ops/fingerprint.py says the same in torch.
#pragma once

#include <cstdint>

namespace fastgen {

// Odd, and pseudo-random otherwise: SplitMix64 (Steele, Lea and Flood 2014) of the index.
inline uint64_t multiplier(uint64_t index) {
  uint64_t z = (index + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) | 1;
}

// One to one: what two rows' sums have in common in their low bits is gone.
inline uint64_t mixed(uint64_t sum) {
  sum = (sum ^ (sum >> 32)) * 0xd6e8feb86659fd93u;
  return sum ^ (sum >> 32);
}

} // namespace fastgen
