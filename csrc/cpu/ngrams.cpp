// fastgen::ban_repeated_ngrams_ and fastgen::ban_source_ngrams_ on the CPU.
#include "../arguments.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

namespace fastgen {
namespace {

constexpr int64_t kComparisonsPerTask = 1 << 15; // below that another thread costs more than it saves

// In `text`, of `text_length` tokens, every occurrence of the n-1 tokens that end at `end` bans the token after it.
template <typename Token, typename Score>
void ban_continuations(
    const Token* text, int64_t text_length, const Token* end, int64_t ngram_size, Score* scores, int64_t stride,
    int64_t vocabulary) {
  const int64_t prefix = ngram_size - 1;
  for (int64_t place = prefix; place < text_length; ++place) {
    int64_t same = 0; // backwards from the last token, which rules out most places
    while (same < prefix && text[place - 1 - same] == end[-1 - same]) {
      ++same;
    }
    const int64_t token = text[place];
    if (same == prefix && token >= 0 && token < vocabulary) {
      scores[token * stride] = -std::numeric_limits<float>::infinity();
    }
  }
}

// `source` has rows / beams rows and the token type of `tokens`.
template <typename Token>
void ban_in_rows(
    const at::Tensor& source, int64_t source_length, const at::Tensor& tokens, const at::Tensor& scores,
    int64_t ngram_size, int64_t length, int64_t beams) {
  const int64_t vocabulary = scores.size(1);
  const int64_t grain = std::max<int64_t>(1, kComparisonsPerTask / std::max<int64_t>(1, source_length));
  FASTGEN_DISPATCH_SCORES(scores.scalar_type(), "ban_ngrams", [&] {
    scalar_t* const all_scores = scores.mutable_data_ptr<scalar_t>();
    const Token* const all_tokens = tokens.const_data_ptr<Token>();
    const Token* const all_sources = source.const_data_ptr<Token>();
    const int64_t token_stride = tokens.stride(0), source_stride = source.stride(0);
    const int64_t row_stride = scores.stride(0), stride = scores.stride(1);
    at::parallel_for(0, tokens.size(0), grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        ban_continuations(
            all_sources + row / beams * source_stride, source_length, all_tokens + row * token_stride + length,
            ngram_size, all_scores + row * row_stride, stride, vocabulary);
      }
    });
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
    ban_in_rows<int64_t>(source, source_length, tokens, scores, ngram_size, length, beams);
  } else {
    ban_in_rows<int32_t>(source, source_length, tokens, scores, ngram_size, length, beams);
  }
}

void ban_repeated_ngrams_(const at::Tensor& tokens, const at::Tensor& scores, int64_t ngram_size, int64_t length) {
  check_ngrams(tokens, scores, ngram_size, length);
  will_change(scores);
  const at::Tensor rows = with_dense_rows(tokens);
  ban(rows, length, rows, scores, ngram_size, length, 1);
}

void ban_source_ngrams_(
    const at::Tensor& source, const at::Tensor& tokens, const at::Tensor& scores, int64_t ngram_size, int64_t length,
    int64_t beams) {
  check_ngrams(tokens, scores, ngram_size, length);
  check_source(source, tokens, beams);
  will_change(scores);
  const auto type = c10::promoteTypes(source.scalar_type(), tokens.scalar_type()); // the wider, lest one is cut off
  const at::Tensor sources = with_dense_rows(source.to(type));
  ban(sources, source.size(1), with_dense_rows(tokens.to(type)), scores, ngram_size, length, beams);
}

} // namespace

TORCH_LIBRARY_IMPL(fastgen, CPU, m) {
  m.impl("ban_repeated_ngrams_", &ban_repeated_ngrams_);
  m.impl("ban_source_ngrams_", &ban_source_ngrams_);
}

} // namespace fastgen
