"""Log-probabilities of tokens, by one pass of the model over what a search has found.

They are the model's own, of float32 `log_softmax(logits)`: before temperature, penalties and bans.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.pipeline import offline

LEAST = -9999.0  # what is less, as -infinity, which JSON can't say
_AT_ONCE = 256  # positions whose probabilities are computed together
_CONTEXT = 5  # tokens before one that are decoded with it: some tokenizers drop a space at the beginning


class Scored(NamedTuple):
    """A token with its log-probability, and the most likely tokens in its place, best first."""

    token: int
    logprob: float | None  # None: nothing comes before it
    top: list[tuple[int, float]]


def scored(model: Any, source: Sequence[int], row: Sequence[int], top: int, *, whole: bool = False) -> list[Scored]:
    """The log-probabilities of a hypothesis, without the start token of a decoder with an encoder.

    Args:
        source: the input's tokens.
        row: the hypothesis; of a decoder-only model without the input.
        top: how many of the most likely tokens are named.
        whole: of a decoder-only model, the input's tokens, too.
    """
    if model.config.is_encoder_decoder:
        if len(row) < 2:
            return []
        inputs = torch.tensor([list(row[:-1])], device=model.device)
        call = offline.padded(model, [source], {})
        logits = model(**call, decoder_input_ids=inputs, use_cache=False).logits[0]  # [T, V]
        return _of(logits, list(row[1:]), top)
    tokens = [*source, *row]
    targets = tokens[1:] if whole else list(row)
    first = [Scored(tokens[0], None, [])] if whole else []
    if not targets:
        return first
    ids = torch.tensor([tokens[:-1]], device=model.device)
    kept = {"logits_to_keep": len(targets)} if _keeps_few(model) else {}
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **kept).logits[0]
    return first + _of(logits[-len(targets) :], targets, top)


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
