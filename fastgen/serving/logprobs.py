"""Log-probabilities of tokens, by a pass of the model over what a search has found, or over each part of it.

They are the model's own, of float32 `log_softmax(logits)`: before temperature, penalties and bans.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from fastgen.optimizer.transformers import versions
from fastgen.pipeline import offline

LEAST = -9999.0  # what is less, as -infinity, which JSON can't say
_AT_ONCE = 256  # positions whose probabilities are computed together
_CONTEXT = 5  # tokens before one that are decoded with it: some tokenizers drop a space at the beginning


class Scored(NamedTuple):
    """A token with its log-probability, and the most likely tokens in its place, best first."""

    token: int
    logprob: float | None  # None: nothing comes before it
    top: list[tuple[int, float]]


class Scorer:
    """Finds the log-probabilities of a hypothesis, without the start token of a decoder with an encoder.

    While the hypothesis grows, and no longer, the model's own cache is kept, so that it reads each token once. Only
    models whose sentences can be at different positions have results that grow, and those keep nothing but keys and
    values.
    """

    def __init__(self, source: Sequence[int], top: int, *, whole: bool = False) -> None:
        """Of a hypothesis for an input.

        Args:
            source: the input's tokens.
            top: how many of the most likely tokens are named.
            whole: of a decoder-only model, the input's tokens, too.
        """
        self._source, self._top, self._whole = list(source), top, whole
        self._done = 0  # tokens that calls have had
        self._kept: dict[str, Any] = {}  # arguments of the next pass

    def __call__(self, model: Any, row: Sequence[int], *, grows: bool = False) -> list[Scored]:
        """The tokens of `row` that no call before had.

        Args:
            model: in the thread where it is at work.
            row: the hypothesis so far; of a decoder-only model without the input.
            grows: whether another call follows.
        """
        is_answer, found = model.config.is_encoder_decoder, list[Scored]()
        tokens = list(row) if is_answer else [*self._source, *row]
        if self._whole and not self._done:
            found, self._done = [Scored(tokens[0], None, [])], 1
        begun = self._done or (1 if is_answer else len(self._source))
        if len(tokens) <= begun:
            if not grows:
                self._kept = {}
            return found
        targets = tokens[begun:]
        ids = torch.tensor([tokens[begun - 1 if self._kept else 0 : -1]], device=model.device)
        if is_answer:
            given = self._kept or offline.padded(model, [self._source], {})
            given = {**given, "decoder_input_ids": ids}
        else:
            few = {"logits_to_keep": len(targets)} if _keeps_few(model) else {}
            mask = torch.ones(1, len(tokens) - 1, dtype=torch.int64, device=model.device)
            given = {**self._kept, "input_ids": ids, "attention_mask": mask, **few}
        output = model(**given, use_cache=grows or bool(self._kept))
        self._kept = {versions.CACHE: output[versions.CACHE]} if grows else {}
        if grows and is_answer:
            states = BaseModelOutput(output.encoder_last_hidden_state)
            self._kept |= {"attention_mask": given["attention_mask"], "encoder_outputs": states}
        self._done = len(tokens)
        return found + _of(output.logits[0, -len(targets) :], targets, self._top)


def _keeps_few(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _of(logits: Tensor, targets: list[int], top: int) -> list[Scored]:
    """The log-probability of each target, by logits `[T, V]`."""
    found: list[Scored] = []
    for begin in range(0, len(targets), _AT_ONCE):
        part = logits[begin : begin + _AT_ONCE].float().log_softmax(-1)  # [t, V]
        chosen = targets[begin : begin + _AT_ONCE]
        own = part.gather(-1, torch.tensor(chosen, device=part.device)[:, None])[:, 0]
        best = part.topk(min(top, part.shape[-1]), dim=-1)
        for token, logprob, ids, values in zip(
            chosen, own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
        ):
            pairs = [(i, _shown(value)) for i, value in zip(ids, values, strict=True)]
            found.append(Scored(token, _shown(logprob), pairs))
    return found


def _shown(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST


def texts_of(
    decode: Callable[[list[list[int]]], list[str]],
    before: Sequence[int],
    found: Sequence[Scored],
    special: Set[int] = frozenset(),
) -> list[dict[int, str]]:
    """How each token, and each of the most likely ones in its place, reads where it stands.

    A token that is a part of a character reads as the character for what is unknown, U+FFFD.

    Args:
        decode: returns the texts of rows of tokens, special tokens among them.
        before: the tokens before the first one.
        special: tokens that are not in a text.
    """
    rows: list[list[int]] = []
    places: list[dict[int, int]] = []  # where a token's text, alone and with the context, is in `rows`
    sequence = [*before]
    for one in found:
        context = [token for token in sequence[-_CONTEXT:] if token not in special]
        rows.append(context)
        place = {}
        for token in dict.fromkeys([one.token, *(token for token, _ in one.top)]):
            place[token] = len(rows)
            rows += [[*context, token], [token]]
        places.append(place)
        sequence.append(one.token)
    texts = decode(rows)
    return [{token: _new(texts, place, min(each.values()) - 1) for token, place in each.items()} for each in places]


def _new(texts: list[str], place: int, context: int) -> str:
    base, text, alone = texts[context], texts[place], texts[place + 1]
    return text[len(base) :] if text.startswith(base) and len(text) > len(base) else alone
