// fastgen::ban_repeated_ngrams_ and fastgen::ban_source_ngrams_ on the CPU.
#include "../arguments.h"
#include "parallel.h"

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
    const Tensor& source, int64_t source_length, const Tensor& tokens, const Tensor& scores,
    int64_t ngram_size, int64_t length, int64_t beams) {
  const int64_t vocabulary = scores.size(1);
  const int64_t grain = std::max<int64_t>(1, kComparisonsPerTask / std::max<int64_t>(1, source_length));
  FASTGEN_DISPATCH_SCORES(dtype_of(scores), [&] {
    scalar_t* const all_scores = mutable_data_of<scalar_t>(scores);
    const Token* const all_tokens = data_of<Token>(tokens);
    const Token* const all_sources = data_of<Token>(source);
    const int64_t token_stride = tokens.stride(0), source_stride = source.stride(0);
    const int64_t row_stride = scores.stride(0), stride = scores.stride(1);
    parallel_for(0, tokens.size(0), grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        ban_continuations(
            all_sources + row / beams * source_stride, source_length, all_tokens + row * token_stride + length,
            ngram_size, all_scores + row * row_stride, stride, vocabulary);
      }
    });
  });
}

void ban(
    const Tensor& source, int64_t source_length, const Tensor& tokens, const Tensor& scores,
    int64_t ngram_size, int64_t length, int64_t beams) {
  // Fewer than n-1 tokens complete no n-gram; a shorter source holds none.
  if (length < ngram_size - 1 || source_length < ngram_size || scores.numel() == 0) {
    return;
  }
  if (dtype_of(tokens) == ScalarType::Long) {
    ban_in_rows<int64_t>(source, source_length, tokens, scores, ngram_size, length, beams);
  } else {
    ban_in_rows<int32_t>(source, source_length, tokens, scores, ngram_size, length, beams);
  }
}

void ban_repeated_ngrams_(const Tensor& tokens, const Tensor& scores, int64_t ngram_size, int64_t length) {
  check_ngrams(tokens, scores, ngram_size, length);
  will_change(scores);
  const Tensor rows = with_dense_rows(tokens);
  ban(rows, length, rows, scores, ngram_size, length, 1);
}

void ban_source_ngrams_(
    const Tensor& source, const Tensor& tokens, const Tensor& scores, int64_t ngram_size, int64_t length,
    int64_t beams) {
  check_ngrams(tokens, scores, ngram_size, length);
  check_source(source, tokens, beams);
  will_change(scores);
  const bool are_alike = dtype_of(source) == dtype_of(tokens);
  const ScalarType type = are_alike ? dtype_of(tokens) : ScalarType::Long; // the wider, lest one is cut off
  const Tensor sources = with_dense_rows(as_type(source, type));
  ban(sources, source.size(1), with_dense_rows(as_type(tokens, type)), scores, ngram_size, length, beams);
}

} // namespace

FASTGEN_LIBRARY(CPU, m) {
  m.impl("ban_repeated_ngrams_", FASTGEN_KERNEL(ban_repeated_ngrams_));
  m.impl("ban_source_ngrams_", FASTGEN_KERNEL(ban_source_ngrams_));
}

} // namespace fastgen
