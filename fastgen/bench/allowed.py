"""Sequences that a model may generate, and no others, as retrieval and recommendation have them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen.decoding.trie import Trie

_SEED = 0
_CODES = 256  # tokens of a sequence are codes, the same at each place: a sequence is an item's code, as in TIGER
_END = 1  # no code; outputs are cut before it


def trie_for(task: dict[str, Any], model: Any) -> Trie:
    """`prefix_allowed_tokens_fn` for `allowed_outputs` random sequences of `new` tokens; stock calls it, too."""
    from fastgen.decoding.trie import Trie

    return Trie(_sequences(task, model), eos_token_id=_END, prompt_length=_prompt(task, model))


def function_for(task: dict[str, Any], model: Any) -> Callable[[int, Any], list[int]]:
    """The same sequences, by a function as users write it: nested dictionaries, walked from the root at each call."""
    root, prompt = dictionaries(_sequences(task, model), _END), _prompt(task, model)

    def allowed(_: int, ids: Any) -> list[int]:
        node = root
        for token in ids[prompt:].tolist():
            node = node.get(token, {})
        return list(node) or [_END]

    return allowed


def dictionaries(sequences: list[list[int]], end: int) -> dict[int, Any]:
    """A trie of nested dictionaries: by token, what may follow."""
    root: dict[int, Any] = {}
    for sequence in sequences:
        node = root
        for token in sequence:
            node = node.setdefault(token, {})
        node[end] = {}
    return root


def _sequences(task: dict[str, Any], model: Any) -> list[list[int]]:
    draw = random.Random(_SEED)
    first = model.config.vocab_size // 2
    return [[first + draw.randrange(_CODES) for _ in range(task["new"])] for _ in range(task["allowed_outputs"])]


def _prompt(task: dict[str, Any], model: Any) -> int:
    """How many tokens precede a sequence."""
    return 1 if model.config.is_encoder_decoder else int(task["source"])
