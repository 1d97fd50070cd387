// The loops of topk_scan.h for one instruction set; included by each_isa.h once for each, so without a guard.
#include "vectors_isa.h"

namespace fastgen {
namespace FASTGEN_ISA {

constexpr int64_t kStrips = kBlock / kStrip;

// The maxima of each strip's lanes; returns the block's. `count`: floats, a multiple of kStrip.
FASTGEN_TARGET inline float maxima_of_lanes(const float* x, int64_t count, Floats* maxima) {
  Floats all = splat(kNone);
  for (int64_t strip = 0; strip * kStrip < count; ++strip) {
    const float* const from = x + strip * kStrip;
    Floats a = splat(kNone), b = a;
    for (int64_t i = 0; i < kStrip; i += 2 * kLanes) {
      a = larger(load(from + i), a);
      b = larger(load(from + i + kLanes), b);
    }
    maxima[strip] = larger(a, b);
    all = larger(maxima[strip], all);
  }
  return largest(all);
}

// Sum of e^(x - maximum). Meanwhile asks for the memory at `next`, `step` bytes for each strip: the arithmetic
// here hides the time that the next block needs to come.
FASTGEN_TARGET inline double sum_of_exponentials(
    const float* x, int64_t count, float maximum, const char* next, int64_t step) {
  Floats a = splat(0.0f), b = a, c = a, d = a;
  for (int64_t strip = 0; strip < count; strip += kStrip) {
    for (int64_t line = 0; line < step; line += 64) {
      __builtin_prefetch(next + line);
    }
    next += step;
    const float* const from = x + strip;
    for (int64_t i = 0; i < kStrip; i += 4 * kLanes) {
      a += exponential(load(from + i) - maximum);
      b += exponential(load(from + i + kLanes) - maximum);
      c += exponential(load(from + i + 2 * kLanes) - maximum);
      d += exponential(load(from + i + 3 * kLanes) - maximum);
    }
  }
  const Floats total = (a + b) + (c + d);
  double sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    sum += total[lane];
  }
  return sum;
}

// How many of the `count` values are better than the one at `i`: larger, or equal and before it. `count` is a multiple
// of kLanes. Counting takes no branch, so for few values it is faster than sorting.
FASTGEN_TARGET inline int64_t rank(const float* values, int64_t count, int64_t i) {
  const Floats mine = splat(values[i]);
  constexpr uint32_t every = (1u << kLanes) - 1;
  const int64_t own = i / kLanes * kLanes;
  int64_t better = 0;
  for (int64_t j = 0; j < own; j += kLanes) {
    better += __builtin_popcount(FASTGEN_REACHED(load(values + j), mine));
  }
  const uint32_t before = (1u << (i - own)) - 1;
  const Floats there = load(values + own);
  better += __builtin_popcount((FASTGEN_REACHED(there, mine) & before) | (~FASTGEN_REACHED(mine, there) & every));
  for (int64_t j = own + kLanes; j < count; j += kLanes) {
    better += __builtin_popcount(~FASTGEN_REACHED(mine, load(values + j)) & every);
  }
  return better;
}

// The candidates' logits, filled up with -inf to a multiple of kLanes; returns that.
FASTGEN_TARGET inline int64_t filled(Scan& scan) {
  const int64_t count = (scan.size() + kLanes - 1) / kLanes * kLanes;
  std::fill(scan.logits() + scan.size(), scan.logits() + count, kNone);
  return count;
}

FASTGEN_TARGET inline void keep_best(Scan& scan) {
  const int64_t k = scan.k();
  if (scan.size() <= k) {
    return;
  }
  if (scan.size() > kRanked) {
    scan.select();
    return;
  }
  const int64_t count = filled(scan);
  int64_t ranks[kRanked];
  for (int64_t i = 0; i < scan.size(); ++i) {
    ranks[i] = rank(scan.logits(), count, i);
  }
  float worst = kNone;
  for (int64_t i = 0, kept = 0; i < scan.size(); ++i) {
    const float logit = scan.logits()[i];
    worst = ranks[i] == k - 1 ? logit : worst;
    scan.logits()[kept] = logit;
    scan.tokens()[kept] = scan.tokens()[i];
    kept += ranks[i] < k;
  }
  scan.kept(worst);
}

// The k best candidates, or all if they are fewer, the best first.
FASTGEN_TARGET inline std::vector<Candidate> sorted(Scan& scan) {
  if (scan.size() > kRanked) {
    return scan.sorted();
  }
  keep_best(scan);
  std::vector<Candidate> best = scan.candidates();
  const int64_t count = filled(scan);
  for (int64_t i = 0; i < scan.size(); ++i) {
    best[rank(scan.logits(), count, i)] = {scan.logits()[i], scan.tokens()[i]};
  }
  return best;
}

// The lower bound R of the k-th best logit: the lanes' maxima belong to disjoint groups of logits, so the k-th
// largest of any k or more of them is reached by k logits at least (LightSeq, section 2.2). -inf if there are fewer.
FASTGEN_TARGET inline float bound(const Floats* maxima, int64_t strips, int64_t k) {
  int64_t vectors = 1; // about four groups for each of the k: more would be slow to select from, fewer a loose bound
  while (vectors < strips && vectors * kLanes < 4 * k) {
    vectors *= 2;
  }
  vectors = std::min(vectors, strips);
  if (vectors * kLanes < k) {
    return kNone;
  }
  Floats folded[kStrips];
  __builtin_memcpy(folded, maxima, vectors * sizeof(Floats));
  for (int64_t strip = vectors; strip < strips; ++strip) {
    Floats& into = folded[strip % vectors];
    into = larger(maxima[strip], into);
  }
  const int64_t count = vectors * kLanes;
  float values[kStrips * kLanes];
  __builtin_memcpy(values, folded, vectors * sizeof(Floats));
  if (count > kRanked) {
    std::nth_element(values, values + (k - 1), values + count, std::greater<float>());
    return values[k - 1];
  }
  for (int64_t i = 0;; ++i) {
    if (rank(values, count, i) == k - 1) {
      return values[i];
    }
  }
}

// Look through the strips that hold a candidate. The hits are first gathered as bits: a branch for each vector would
// often be mispredicted.
FASTGEN_TARGET inline void collect(const float* x, int64_t strips, const Floats* maxima, int64_t first, Scan& scan) {
  const Floats bound_of_block = splat(scan.at_least());
  uint32_t promising = 0;
  for (int64_t strip = 0; strip < strips; ++strip) {
    promising |= static_cast<uint32_t>(FASTGEN_REACHED(maxima[strip], bound_of_block) != 0) << strip;
  }
  for (; promising != 0; promising &= promising - 1) {
    if (scan.is_full()) {
      keep_best(scan);
    }
    const Floats at_least = splat(scan.at_least());
    const int64_t begin = __builtin_ctz(promising) * kStrip;
    for (int64_t half = begin; half < begin + kStrip; half += 64) {
      uint64_t hits = 0;
      for (int64_t i = 0; i < 64; i += kLanes) {
        hits |= static_cast<uint64_t>(FASTGEN_REACHED(load(x + half + i), at_least)) << i;
      }
      for (; hits != 0; hits &= hits - 1) {
        const int64_t place = half + __builtin_ctzll(hits);
        scan.add(x[place], static_cast<int32_t>(first + place));
      }
    }
  }
}

FASTGEN_TARGET inline bool contains_nan(const float* x, int64_t count) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) {
    found |= x[i] != x[i];
  }
  return found;
}

FASTGEN_TARGET inline const float* as_floats(const float* from, int64_t, float*) {
  return from;
}

template <typename Half>
FASTGEN_TARGET inline const float* as_floats(const Half* from, int64_t count, float* into) {
  for (int64_t i = 0; i < count; ++i) {
    into[i] = static_cast<float>(from[i]);
  }
  return into;
}

// A block of logits as floats, filled up with -inf to whole strips: where they are, or in `values`.
template <typename Logit>
FASTGEN_TARGET inline const float* block_of(const Logit* from, int64_t count, float* values) {
  const int64_t whole = (count + kStrip - 1) / kStrip * kStrip;
  const float* x = as_floats(from, count, values);
  if (count < whole) {
    if (x != values) {
      std::copy(x, x + count, values);
      x = values;
    }
    std::fill(values + count, values + whole, kNone);
  }
  return x;
}

// `bound` for a large k, from groups of the whole part; a pass of its own, as a block has too few groups. A banned token
// may be the maximum of one group, so as many more groups have to reach the bound. -inf if there are too few.
template <typename Logit>
FASTGEN_TARGET inline float bound_of_part(const Part<Logit>& part, int64_t k) {
  alignas(64) float values[kBlock];
  const int64_t least = k + (part.banned_end - part.banned), size = part.end - part.begin;
  const int64_t vectors = std::min((2 * least + kLanes - 1) / kLanes, size / kLanes); // about two groups for each
  if (vectors * kLanes < least) {
    return kNone;
  }
  std::vector<float> maxima(vectors * kLanes, kNone);
  int64_t into = 0;
  for (int64_t begin = part.begin; begin < part.end; begin += kBlock) {
    const int64_t count = std::min(kBlock, part.end - begin);
    const float* const x = block_of(part.row + begin, count, values);
    for (int64_t i = 0; i < count; i += kLanes) {
      store(&maxima[into], larger(load(x + i), load(&maxima[into])));
      into = into + kLanes == vectors * kLanes ? 0 : into + kLanes;
    }
  }
  std::nth_element(maxima.begin(), maxima.begin() + (least - 1), maxima.end(), std::greater<float>());
  return maxima[least - 1];
}

template <typename Logit>
FASTGEN_TARGET void scan_part(const Part<Logit>& part, Scan& scan) {
  alignas(64) float values[kBlock];
  alignas(64) float allowed[kBlock];
  Floats maxima[kStrips];
  const int64_t* banned = part.banned;
  const bool is_large = scan.k() > kBoundByBlock && part.end - part.begin > kBlock;
  if (is_large) {
    scan.raise(bound_of_part(part, scan.k()));
  }
  for (int64_t begin = part.begin; begin < part.end; begin += kBlock) {
    const Logit* const from = part.row + begin;
    const int64_t count = std::min(kBlock, part.end - begin);
    const int64_t strips = (count + kStrip - 1) / kStrip;
    const float* const x = block_of(from, count, values);
    const float maximum = maxima_of_lanes(x, strips * kStrip, maxima);

    // Banned tokens count in the sum, not among the candidates.
    const float* candidates = x;
    if (banned != part.banned_end && *banned < begin + count) {
      std::copy(x, x + strips * kStrip, allowed);
      for (; banned != part.banned_end && *banned < begin + count; ++banned) {
        allowed[*banned - begin] = kNone;
      }
      candidates = allowed;
      maxima_of_lanes(candidates, strips * kStrip, maxima);
    }
    if (scan.size() == 0 && !is_large) {
      scan.raise(bound(maxima, strips, scan.k()));
    }
    collect(candidates, strips, maxima, begin, scan);
    if (4 * scan.size() >= 5 * scan.k() && !is_large) {
      keep_best(scan); // a tighter bound spares later strips
    }

    if (std::isfinite(std::max(maximum, scan.maximum()))) {
      scan.raise_maximum(maximum);
      const char* const next = reinterpret_cast<const char*>(from + kBlock); // only prefetched, maybe past the end
      scan.add_sum(sum_of_exponentials(x, strips * kStrip, scan.maximum(), next, kStrip * sizeof(Logit)));
    } else { // x - maximum is NaN for logits that are not
      scan.raise_maximum(maximum);
      if (contains_nan(x, count)) {
        scan.saw_nan();
      }
    }
  }
}

} // namespace FASTGEN_ISA
} // namespace fastgen
