"""Sequences that a model may generate, and no others, as retrieval and recommendation have them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen.decoding.trie import Trie

_SEED = 0
_CODES = 256  # tokens of a sequence are codes, the same at each place: a sequence is an item's code, as in TIGER
_END = 1  # no code; outputs are cut before it


def tokens_for(task: dict[str, Any], model: Any) -> Trie:
    """`prefix_allowed_tokens_fn` for `allowed_outputs` random sequences of `new` tokens; stock calls it, too."""
    from fastgen.decoding.trie import Trie

    draw = random.Random(_SEED)
    first = model.config.vocab_size // 2
    sequences = [[first + draw.randrange(_CODES) for _ in range(task["new"])] for _ in range(task["allowed_outputs"])]
    prompt = 1 if model.config.is_encoder_decoder else task["source"]
    return Trie(sequences, eos_token_id=_END, prompt_length=prompt)
