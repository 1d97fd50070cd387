"""The host's logits processors, those that only ban tokens done in place, and top-k with top-p at once.

The host's own copy all scores to ban a token or two: on a CPU that is a fifth of a short step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from fastgen import phases
from fastgen.memory.buffers import Buffers
from fastgen.ops.checks import SCORES
from fastgen.optimizer.transformers.generate import top_k_top_p, tries

__phase__ = phases.LOOP

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


# By exact type: a user's subclass may do anything. These ban the same tokens in all rows.
_BANS: dict[type, Bans] = {
    logits_process.MinLengthLogitsProcessor: _min_length,
    logits_process.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    logits_process.SuppressTokensLogitsProcessor: _suppressed,
    logits_process.SuppressTokensAtBeginLogitsProcessor: _suppressed_at_begin,
}


def bans_everywhere(processor: Any) -> bool:
    """Whether this is one of the host's that does nothing but ban the same tokens in all rows."""
    return type(processor) in _BANS


def _bans_ngrams(processor: Any, scores: Tensor) -> bool:
    """Whether this is one of the host's that bans what each row's own tokens rule out, in scores that we can write."""
    if scores.dtype not in SCORES:
        return False  # a processor before it has changed them
    if type(processor) is logits_process.EncoderNoRepeatNGramLogitsProcessor:
        return scores.shape[0] % processor.batch_size == 0  # any other batch is the host's to refuse
    return type(processor) is logits_process.NoRepeatNGramLogitsProcessor


class Processing:
    """The processors of one request, from logits to the scores that beams are chosen by."""

    def __init__(self, buffers: Buffers | None = None) -> None:
        """`buffers`: where its memory comes from."""
        self.constraint = tries.Constraint()
        self._buffers = Buffers(None) if buffers is None else buffers
        self._tensors: dict[Any, Tensor] = {}  # processor -> the tokens it bans, or its source; looked up once
        self._buffer: Tensor | None = None

    def __call__(self, processors: Any, input_ids: Tensor, logits: Tensor) -> Tensor:
        """What `processors`, a LogitsProcessorList, returns for the log-probabilities.

        Args: tokens int64 `[rows, length]`, logits float32 `[rows, V]`. Returns `[rows, V]`, good until the next call.
        """
        kind = type(processors)
        if kind is not logits_process.LogitsProcessorList:
            scores: Tensor = processors(input_ids, logits.log_softmax(-1))
            return scores
        rows = logits.shape[0]
        if all(type(processor) in _BANS or _bans_ngrams(processor, logits) for processor in processors):
            # Nobody else sees the scores, so the last step's memory serves again: fresh pages cost as much as the sums.
            if self._buffer is None:
                self._buffer = self._buffers.empty(logits.shape, logits.dtype, logits.device)
            scores = torch.log_softmax(logits, -1, out=self._buffer[:rows])
        else:
            scores = logits.log_softmax(-1)
        return self.apply(processors, input_ids, scores, ours=True)

    def banned(self, processors: Any, length: int, logits: Tensor) -> Tensor | None:
        """The tokens, int64 `[n]`, that `processors` ban in all rows of `[rows, V]`; None if they do anything else."""
        if type(processors) is not logits_process.LogitsProcessorList or any(
            type(one) not in _BANS for one in processors
        ):
            return None
        found = [self._tokens(one, length, logits) for one in processors]
        return torch.cat(
            [torch.empty(0, dtype=torch.int64, device=logits.device), *(x for x in found if x is not None)]
        )

    def apply(self, processors: Any, input_ids: Tensor, scores: Tensor, ours: bool = False) -> Tensor:
        """What `processors`, a LogitsProcessorList and no subclass, returns for `scores` `[rows, V]`.

        They are written to only if they are `ours`.
        """
        kind = logits_process.LogitsProcessorList
        following = iter(zip(processors, [*processors, None][1:], strict=True))
        for processor, after in following:
            if top_k_top_p.are_joined(processor, after, scores):
                found = top_k_top_p.joined(processor, after, scores)
                if found is not None:
                    scores, ours = found, True
                    next(following)
                    continue
            if (trie := tries.trie_of(processor)) is not None:
                scores, ours = self.constraint.apply(processor, trie, input_ids, scores), True
                continue
            if type(processor) not in _BANS and not _bans_ngrams(processor, scores):
                scores = kind([processor])(input_ids, scores)
                ours = False
                continue
            tokens = self._tokens(processor, input_ids.shape[1], scores)
            if tokens is None and type(processor) in _BANS:
                continue
            if not ours:
                scores, ours = scores.clone(), True
            if tokens is not None:
                scores.index_fill_(1, tokens, -float("inf"))
            else:
                self._ban_ngrams(processor, input_ids, scores)
        return scores

    def _tokens(self, processor: Any, length: int, scores: Tensor) -> Tensor | None:
        """What the processor bans in all rows, int64 `[n]`; None if nothing, or if it is not of that kind."""
        tokens = _BANS[type(processor)](processor, length) if type(processor) in _BANS else None
        if tokens is None:
            return None
        valid = self._tensors.get(processor)
        if valid is None:
            tokens = tokens.to(scores.device, torch.int64).flatten()  # an empty list has made a float tensor
            # The host ignores ids that are no token, such as the -1 of a model without an end of sentence.
            valid = self._tensors[processor] = tokens[(tokens >= 0) & (tokens < scores.shape[1])]
        return valid

    def _ban_ngrams(self, processor: Any, input_ids: Tensor, scores: Tensor) -> None:
        from fastgen import ops  # loads or even compiles them, so not before a request needs them

        if type(processor) is logits_process.NoRepeatNGramLogitsProcessor:
            ops.ban_repeated_ngrams_(input_ids, scores, processor.ngram_size)
            return
        source = self._tensors.get(processor)
        if source is None:
            source = self._tensors[processor] = _source(processor, scores.device)
        beams = scores.shape[0] // source.shape[0]
        ops.ban_source_ngrams_(source, input_ids, scores, processor.ngram_size, beams=beams)


class Banning(logits_process.LogitsProcessorList):
    """The processors of a list, for the host's own loop."""

    def __init__(self, processors: logits_process.LogitsProcessorList, draws: bool = False) -> None:
        """`draws`: nobody but the loop sees the scores, and it draws from them."""
        super().__init__(processors)
        self._processing, self._draws = Processing(), draws

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        found = self._processing.apply(self, input_ids, scores)
        if not (self._draws and type(found) is Tensor and found.device.type == "cpu" and found.dtype == torch.float32):
            return found
        from fastgen.optimizer.transformers.generate import (
            multinomial,  # needs our operators, which may have to be compiled first
        )

        return found.as_subclass(multinomial.Scores) if multinomial.draws_as_torch() else found


def _source(processor: Any, device: torch.device) -> Tensor:
    """A text for each sentence with exactly the n-grams that the host kept, int64 `[B, N]`: its own text is gone.

    -1, which is no token, stands between them, so that no others arise.
    """
    rows = [
        [token for prefix, nexts in ngrams.items() for last in dict.fromkeys(nexts) for token in (*prefix, last, -1)]
        for ngrams in processor.generated_ngrams
    ]
    longest = max(map(len, rows), default=0)
    padded = [row + [-1] * (longest - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(rows), longest)
