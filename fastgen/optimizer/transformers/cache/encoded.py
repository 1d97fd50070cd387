"""Keeps what an encoder has computed for a text, so that a later call with the same text need not read it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen.cache import by_model
from fastgen.optimizer.transformers.cache.prefixes import SHORTEST
from fastgen.optimizer.transformers.cache.state import are_plain, state_of
from fastgen.optimizer.transformers.model.facts import facts_of

Read = Callable[[Tensor, Tensor], Any]  # of tokens and their mask: the host's output

_STATES = "last_hidden_state"
_kinds: weakref.WeakKeyDictionary[Any, type] = weakref.WeakKeyDictionary()  # of the host's outputs, by model


def read(model: Any, tokens: Tensor, mask: Tensor, encode: Read) -> Any:
    """The encoder's output for texts, of which those that are kept are not read.

    States of padding may be zeros, where the host has numbers that mean nothing.

    Args:
        tokens: int64 `[B, N]`, padded on the right.
        mask: of the padding, the same shape.
        encode: reads texts.
    """
    if not by_model.is_on() or torch.is_autocast_enabled(tokens.device.type):
        return encode(tokens, mask)
    lengths = [int(length) for length in mask.sum(1).tolist()]  # the mask may have any dtype
    if sum(lengths) < SHORTEST or not are_plain(encoder := model.get_encoder()):
        return encode(tokens, mask)
    key = by_model.key_of(model, ("encoder", state_of(model, encoder, facts_of(model))))
    texts = [_as_one(row[:length]) for row, length in zip(tokens.tolist(), lengths, strict=True)]
    found = [by_model.prefixes.find(key, text) for text in texts]
    new = [row for row, each in enumerate(found) if not each.length]
    by_model.note(sum(length for length, each in zip(lengths, found, strict=True) if each.length))
    kind = _kinds.get(model)
    if len(new) == len(texts) or kind is None:
        new, output = list(range(len(texts))), _read(model, tokens, mask, encode)
    else:
        output = _joined(kind, tokens, mask, partial(_read, model, encode=encode), new, found)
    if model in _kinds:
        for row in new:
            by_model.keep(key, texts[row], (output[_STATES][row, : lengths[row]],))
    return output


def _as_one(text: list[int]) -> tuple[Hashable]:
    """A text as a sequence of one: states depend on all of the text, so that a part of it serves nobody."""
    return (tuple(text),)


def _read(model: Any, tokens: Tensor, mask: Tensor, encode: Read) -> Any:
    """Read texts, and note whether the output may be kept: it is states alone, and no random numbers were drawn."""
    before = torch.get_rng_state()
    output = encode(tokens, mask)
    if list(output) == [_STATES] and torch.equal(before, torch.get_rng_state()):
        _kinds[model] = type(output)
    else:
        _kinds.pop(model, None)
    return output


def _joined(kind: type, tokens: Tensor, mask: Tensor, encode: Read, new: list[int], found: list[Any]) -> Any:
    """The states that are kept and, read now, those of the rows that are new."""
    like = next(each.parts[0][0] for each in found if each.length)
    states = like.new_zeros(*tokens.shape, like.shape[1])
    for row, each in enumerate(found):
        if each.length:
            (kept,) = each.parts[0]
            states[row, : len(kept)] = kept
    if new:
        rows = torch.tensor(new, device=tokens.device)
        length = int(mask[rows].sum(1).max())
        states[rows, :length] = encode(tokens[rows, :length], mask[rows, :length])[_STATES]
    return kind(**{_STATES: states})
