"""The n-gram ban of UniLM's published decoder."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import LogitsProcessor

from fastgen import ops


class NoRepeatNGramExceptLogitsProcessor(LogitsProcessor):
    """Bans an n-gram from coming twice in a target, except n-grams that hold an ignored word.

    Does what `forbid_duplicate_ngrams` and `forbid_ignore_word` of microsoft/unilm's decoder do: the source's n-grams
    don't count, nothing is banned after n-1 tokens of which one is ignored, and ignored words are never banned. So a
    full stop, or the separator between sentences, may come any number of times.

    Args:
        ngram_size: n, 1 or more.
        prompt_length: P, the width of the `input_ids` that `generate` was given; the target follows.
        ignored_ids: the tokens to be ignored.

    Raises:
        ValueError: if `ngram_size` is less than 1 or `prompt_length` negative.
    """

    def __init__(self, ngram_size: int, prompt_length: int, ignored_ids: Iterable[int] = ()) -> None:
        if ngram_size < 1 or prompt_length < 0:
            raise ValueError(f"ngram_size={ngram_size} must be 1 or more, prompt_length={prompt_length} 0 or more.")
        self.ngram_size, self.prompt_length = ngram_size, prompt_length
        self.ignored_ids = torch.tensor(sorted(set(ignored_ids)), dtype=torch.int64, device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """A copy of `scores`, `[rows, V]`, of tokens after `input_ids`, int64 `[rows, P + T]`, -inf where banned."""
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
        begun = target[:, length + 1 - self.ngram_size :]  # the last n-1 tokens, which the next token would complete
        return torch.where(torch.isin(begun, ignored).any(-1, keepdim=True), scores, banned)
