// fastgen::topk_log_softmax on the CPU.
#include "topk_rows.h"

#include "parallel.h"
#include "topk_scan.h"

#include <tuple>

#define FASTGEN_LOOPS "topk_scan_isa.h"
#include "each_isa.h"

namespace fastgen {
namespace {

template <typename Logit>
struct Functions {
  void (*scan_part)(const Part<Logit>&, Scan&);
  std::vector<Candidate> (*sorted)(Scan&);
};

template <typename Logit>
Functions<Logit> functions() {
  return {FASTGEN_CHOOSE(scan_part<Logit>), FASTGEN_CHOOSE(sorted)};
}

// The banned tokens of each row that count: ascending, no repetitions, inside the vocabulary.
class Banned {
 public:
  Banned(const std::optional<Tensor>& banned, int64_t vocabulary) {
    if (!banned || banned->numel() == 0) {
      return;
    }
    const Tensor all = dense(*banned);
    const int64_t width = all.size(-1);
    rows_.resize(all.dim() == 2 ? all.size(0) : 1);
    const int64_t* from = data_of<int64_t>(all);
    for (auto& row : rows_) {
      std::copy_if(from, from + width, std::back_inserter(row), [vocabulary](int64_t token) {
        return token >= 0 && token < vocabulary;
      });
      from += width;
      std::sort(row.begin(), row.end());
      row.erase(std::unique(row.begin(), row.end()), row.end());
    }
  }

  template <typename Logit>
  Part<Logit> part(const Logit* logits, int64_t row, int64_t begin, int64_t end) const {
    if (rows_.empty()) {
      return {logits, begin, end, nullptr, nullptr};
    }
    const auto& banned = rows_.size() == 1 ? rows_[0] : rows_[row];
    const int64_t* const first = banned.data();
    const int64_t* const last = first + banned.size();
    return {logits, begin, end, std::lower_bound(first, last, begin), std::lower_bound(first, last, end)};
  }

 private:
  std::vector<std::vector<int64_t>> rows_; // one for all rows, or one for each
};

// `best`, the best first. The places they leave free go to the lowest other tokens: their logits rank as -inf.
void write(std::vector<Candidate> best, const Scan& scan, int64_t row, const TopK& outputs) {
  const int64_t k = scan.k();
  const double maximum = scan.maximum(), log_sum = scan.log_sum();
  outputs.log_sum_exp[row] = static_cast<float>(scan.log_sum_exp());
  if (static_cast<int64_t>(best.size()) < k) {
    std::vector<int32_t> taken;
    for (const Candidate& candidate : best) {
      taken.push_back(candidate.token);
    }
    std::sort(taken.begin(), taken.end());
    auto next = taken.begin();
    for (int32_t token = 0; static_cast<int64_t>(best.size()) < k; ++token) {
      if (next != taken.end() && *next == token) {
        ++next;
      } else {
        best.push_back({kNone, token});
      }
    }
  }
  for (int64_t i = 0; i < k; ++i) {
    // In this order, as in log_softmax: beside a large maximum the sum's logarithm would be lost.
    outputs.log_probs[row * k + i] = static_cast<float>((best[i].logit - maximum) - log_sum);
    outputs.tokens[row * k + i] = best[i].token;
  }
}

constexpr int64_t kLogitsPerTask = 1 << 15; // below that another thread costs more than it saves

template <typename Logit>
void scan_rows(const Tensor& logits, int64_t k, const Banned& banned, const TopK& outputs) {
  const auto [scan_part, sorted] = functions<Logit>();
  const Logit* const data = data_of<Logit>(logits);
  const int64_t rows = logits.size(0), vocabulary = logits.size(1), stride = logits.stride(0);
  const int64_t count = threads();
  const int64_t blocks = (vocabulary + kBlock - 1) / kBlock;

  // Fewer rows than threads: several threads share a row.
  const int64_t wanted = std::min((count + rows - 1) / rows, vocabulary / kLogitsPerTask);
  if (rows >= count || wanted < 2) {
    const int64_t grain = std::max<int64_t>(1, kLogitsPerTask / vocabulary);
    parallel_for(0, rows, grain, [&, scan_part = scan_part, sorted = sorted](int64_t begin, int64_t end) {
      Scan scan(k);
      for (int64_t row = begin; row < end; ++row) {
        scan.reset();
        scan_part(banned.part(data + row * stride, row, 0, vocabulary), scan);
        write(sorted(scan), scan, row, outputs);
      }
    });
    return;
  }
  const int64_t size = (blocks + wanted - 1) / wanted * kBlock; // of a part
  const int64_t parts = (vocabulary + size - 1) / size;
  std::vector<Scan> scans(rows * parts, Scan(k));
  parallel_for(0, rows * parts, 1, [&, scan_part = scan_part](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / parts, begin = i % parts * size;
      scans[i].reset();
      scan_part(banned.part(data + row * stride, row, begin, std::min(begin + size, vocabulary)), scans[i]);
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    Scan& whole = scans[row * parts];
    for (int64_t i = 1; i < parts; ++i) {
      whole.merge(scans[row * parts + i]);
    }
    write(sorted(whole), whole, row, outputs);
  }
}

std::tuple<Tensor, Tensor, Tensor> topk_log_softmax(
    const Tensor& logits, int64_t k, const std::optional<Tensor>& banned) {
  check_topk(logits, k, banned);
  const int64_t rows = logits.size(0);
  Tensor log_probs = make({rows, k}, ScalarType::Float, logits);
  Tensor tokens = make({rows, k}, ScalarType::Long, logits);
  Tensor log_sum_exp = make({rows}, ScalarType::Float, logits);
  if (rows > 0) {
    topk_rows(
        logits, k, banned,
        {mutable_data_of<float>(log_probs), mutable_data_of<int64_t>(tokens), mutable_data_of<float>(log_sum_exp)});
  }
  return {log_probs, tokens, log_sum_exp};
}

} // namespace

void topk_rows(const Tensor& logits, int64_t k, const std::optional<Tensor>& banned, const TopK& outputs) {
  const Tensor x = with_dense_rows(logits);
  const Banned of_rows(banned, logits.size(1));
  FASTGEN_DISPATCH_SCORES(dtype_of(x), [&] { scan_rows<scalar_t>(x, k, of_rows, outputs); });
}

FASTGEN_LIBRARY(CPU, m) {
  m.impl("topk_log_softmax", FASTGEN_KERNEL(topk_log_softmax));
}

} // namespace fastgen
