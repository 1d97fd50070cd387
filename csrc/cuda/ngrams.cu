// fastgen::ban_repeated_ngrams_ and fastgen::ban_source_ngrams_ on CUDA devices.
#include "../arguments.h"
#include "launch.h"

#include <algorithm>
#include <limits>

namespace fastgen {
namespace {

constexpr int kThreads = 256;
constexpr float kBanned = -std::numeric_limits<float>::infinity();
constexpr int64_t kTile = 2048; // tokens of the text in shared memory: at most 16 KiB
constexpr int64_t kPrefix = 64; // last tokens of the row in shared memory: 512 bytes

// One block for each row. In its text every occurrence of the row's last n-1 tokens bans the token after it.
// Windows that begin before the tile, and prefixes longer than kPrefix, read what is missing from global memory.
template <typename Token, typename Score>
__global__ void __launch_bounds__(kThreads) ban_continuations(
    const Token* texts, int64_t text_stride, int64_t text_length, int64_t beams, const Token* ends,
    int64_t end_stride, int64_t ngram_size, Score* all_scores, int64_t row_stride, int64_t stride,
    int64_t vocabulary) {
  FASTGEN_DYNAMIC_SHARED(shared);
  Token* const tile = reinterpret_cast<Token*>(shared);
  Token* const last = tile + (text_length < kTile ? text_length : kTile); // last[i]: the token i + 1 from the end

  const int64_t row = blockIdx.x;
  const Token* const text = texts + row / beams * text_stride;
  const Token* const end = ends + row * end_stride;
  Score* const scores = all_scores + row * row_stride;
  const int64_t prefix = ngram_size - 1;
  const int64_t kept = prefix < kPrefix ? prefix : kPrefix;
  for (int64_t i = threadIdx.x; i < kept; i += kThreads) {
    last[i] = end[-1 - i];
  }
  for (int64_t first = 0; first < text_length; first += kTile) {
    const int64_t count = text_length - first < kTile ? text_length - first : kTile;
    __syncthreads(); // all are done with the tile before
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
      tile[i] = text[first + i];
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
      if (first + i < prefix) {
        continue; // no whole n-gram ends here
      }
      bool is_same = true;
      for (int64_t back = 0; is_same && back < prefix; ++back) {
        const int64_t place = i - 1 - back;
        const Token token = place >= 0 ? tile[place] : text[first + place];
        is_same = token == (back < kept ? last[back] : end[-1 - back]);
      }
      const int64_t token = tile[i];
      if (is_same && token >= 0 && token < vocabulary) {
        scores[token * stride] = kBanned; // all who write here write the same
      }
    }
  }
}

template <typename Token>
void launch(
    const at::Tensor& source, int64_t source_length, const at::Tensor& tokens, const at::Tensor& scores,
    int64_t ngram_size, int64_t length, int64_t beams) {
  const size_t shared = (std::min(source_length, kTile) + std::min(ngram_size - 1, kPrefix)) * sizeof(Token);
  FASTGEN_DISPATCH_SCORES(scores.scalar_type(), [&] {
    FASTGEN_LAUNCH(
        (ban_continuations<Token, scalar_t>), static_cast<unsigned>(tokens.size(0)), kThreads, shared,
        c10::cuda::getCurrentCUDAStream(), source.const_data_ptr<Token>(), source.stride(0), source_length, beams,
        tokens.const_data_ptr<Token>() + length, tokens.stride(0), ngram_size,
        scores.mutable_data_ptr<scalar_t>(), scores.stride(0), scores.stride(1), scores.size(1));
  });
}

void ban(
    const at::Tensor& source, int64_t source_length, const at::Tensor& tokens, const at::Tensor& scores,
    int64_t ngram_size, int64_t length, int64_t beams) {
  // Fewer than n-1 tokens complete no n-gram; a shorter source holds none.
  if (length < ngram_size - 1 || source_length < ngram_size || scores.numel() == 0) {
    return;
  }
  if (tokens.scalar_type() == at::kLong) {
    launch<int64_t>(source, source_length, tokens, scores, ngram_size, length, beams);
  } else {
    launch<int32_t>(source, source_length, tokens, scores, ngram_size, length, beams);
  }
}

void ban_repeated_ngrams_(const at::Tensor& tokens, const at::Tensor& scores, int64_t ngram_size, int64_t length) {
  check_ngrams(tokens, scores, ngram_size, length);
  will_change(scores);
  const c10::cuda::CUDAGuard guard(scores.device());
  const at::Tensor rows = with_dense_rows(tokens);
  ban(rows, length, rows, scores, ngram_size, length, 1);
}

void ban_source_ngrams_(
    const at::Tensor& source, const at::Tensor& tokens, const at::Tensor& scores, int64_t ngram_size, int64_t length,
    int64_t beams) {
  check_ngrams(tokens, scores, ngram_size, length);
  check_source(source, tokens, beams);
  will_change(scores);
  const c10::cuda::CUDAGuard guard(scores.device());
  const auto type = c10::promoteTypes(source.scalar_type(), tokens.scalar_type()); // the wider, lest one is cut off
  const at::Tensor sources = with_dense_rows(source.to(type));
  ban(sources, source.size(1), with_dense_rows(tokens.to(type)), scores, ngram_size, length, beams);
}

} // namespace

FASTGEN_CUDA_LIBRARY(m) {
  m.impl("ban_repeated_ngrams_", &ban_repeated_ngrams_);
  m.impl("ban_source_ngrams_", &ban_source_ngrams_);
}

} // namespace fastgen
