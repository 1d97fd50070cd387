"""The host's logits processors, those that only ban tokens done in place.

The host's own copy all scores to ban a token or two: on a CPU that is a fifth of a short step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

Bans = Callable[[Any, int], "Tensor | None"]  # (processor, length) -> token ids int64 [n], or nothing at this length


def _min_length(processor: Any, length: int) -> Tensor | None:
    return processor.eos_token_id if length < processor.min_length else None


def _min_new_tokens(processor: Any, length: int) -> Tensor | None:
    new = length - processor.prompt_length_to_skip
    return processor.eos_token_id if new < processor.min_new_tokens else None


def _suppressed(processor: Any, length: int) -> Tensor | None:
    return processor.suppress_tokens


def _suppressed_at_begin(processor: Any, length: int) -> Tensor | None:
    return processor.begin_suppress_tokens if length == processor.begin_index else None


# By exact type: a user's subclass may do anything.
_BANS: dict[type, Bans] = {
    logits_process.MinLengthLogitsProcessor: _min_length,
    logits_process.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    logits_process.SuppressTokensLogitsProcessor: _suppressed,
    logits_process.SuppressTokensAtBeginLogitsProcessor: _suppressed_at_begin,
}


class Processing:
    """The processors of one request, from logits to the scores that beams are chosen by."""

    def __init__(self) -> None:
        self._valid: dict[int, Tensor] = {}  # id of a processor -> the tokens it bans, looked up once
        self._buffer: Tensor | None = None

    def __call__(self, processors: Any, input_ids: Tensor, logits: Tensor) -> Tensor:
        """What `processors`, a LogitsProcessorList, returns for the log-probabilities.

        Args: tokens int64 `[rows, length]`, logits float32 `[rows, V]`. Returns `[rows, V]`, good until the next call.
        """
        kind = type(processors)
        if kind is not logits_process.LogitsProcessorList:
            scores: Tensor = processors(input_ids, logits.log_softmax(-1))
            return scores
        if all(type(processor) in _BANS for processor in processors):
            # Nobody else sees the scores, so the last step's memory serves again: fresh pages cost as much as the sums.
            if self._buffer is None:
                self._buffer = torch.empty_like(logits)
            scores = torch.log_softmax(logits, -1, out=self._buffer[: logits.shape[0]])
        else:
            scores = logits.log_softmax(-1)
        ours = True  # nobody else holds `scores`
        for processor in processors:
            bans = _BANS.get(type(processor))
            if bans is None:
                scores = kind([processor])(input_ids, scores)
                ours = False
            elif (tokens := bans(processor, input_ids.shape[1])) is not None:
                if not ours:
                    scores, ours = scores.clone(), True
                scores.index_fill_(1, self._tokens(processor, tokens, scores), -float("inf"))
        return scores

    def _tokens(self, processor: Any, tokens: Tensor, scores: Tensor) -> Tensor:
        valid = self._valid.get(id(processor))
        if valid is None:
            tokens = tokens.to(scores.device, torch.int64).flatten()  # an empty list has made a float tensor
            # The host ignores ids that are no token, such as the -1 of a model without an end of sentence.
            valid = self._valid[id(processor)] = tokens[(tokens >= 0) & (tokens < scores.shape[1])]
        return valid
