"""The n-gram ban of UniLM's published decoder."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import LogitsProcessor

from fastgen import ops


class NoRepeatNGramExceptLogitsProcessor(LogitsProcessor):
    """No n-gram twice in a target, but for n-grams that hold an ignored word.

    As `forbid_duplicate_ngrams` and `forbid_ignore_word` of microsoft/unilm's decoder: the source's n-grams don't
    count, nothing is banned after n-1 tokens of which one is ignored, and no ignored word is. A full stop, or the
    separator between sentences, may thus come as often as it likes.

    Args:
        ngram_size: n, 1 or more.
        prompt_length: P, the width of the `input_ids` that `generate` was given; what follows is the target.
        ignored_ids: the tokens to be ignored.

    Raises:
        ValueError: if `ngram_size` is less than 1 or `prompt_length` negative.
    """

    def __init__(self, ngram_size: int, prompt_length: int, ignored_ids: Iterable[int] = ()) -> None:
        if ngram_size < 1 or prompt_length < 0:
            raise ValueError(f"ngram_size={ngram_size} must be 1 or more, prompt_length={prompt_length} 0 or more.")
        self.ngram_size, self.prompt_length = ngram_size, prompt_length
        self.ignored_ids = torch.tensor(sorted(set(ignored_ids)), dtype=torch.int64)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[rows, V]` of what may follow int64 `input_ids` `[rows, P + T]`: a copy, -inf where banned."""
        target = input_ids[:, self.prompt_length :]
        length = target.shape[1]
        if length < self.ngram_size:
            return scores
        banned = scores.clone(memory_format=torch.contiguous_format)
        ops.ban_repeated_ngrams_(target, banned, self.ngram_size)
        if not self.ignored_ids.numel():
            return banned
        ignored = self.ignored_ids = self.ignored_ids.to(scores.device)
        banned[:, ignored] = scores[:, ignored]
        begun = target[:, length + 1 - self.ngram_size :]  # the n-1 tokens that the next one would complete
        return torch.where(torch.isin(begun, ignored).any(-1, keepdim=True), scores, banned)
