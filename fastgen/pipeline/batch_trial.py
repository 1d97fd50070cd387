"""Tries whether a model of no tested family keeps the sources of a batch apart: not all of the host's models do."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from typing import Any

from fastgen import config, report
from fastgen.memory import limits
from fastgen.pipeline.padding import padded_together

_MOST, _LONGER = 16, 4  # tokens of the shorter source, and by which the longer one is longer
_STEPS = 3  # the first reads the prompts, the second goes on from what the model keeps of them
# Of the spread of the logits: more than rounding, and less than what other tokens or positions do.
_ROUNDING, _ROUNDING_IN_HALF_PRECISION = 1e-3, 0.1


class Sees(enum.Enum):
    """What a decoder-only model goes by besides the source that it continues."""

    NOTHING = enum.auto()
    PADDING = enum.auto()  # before the source, though it is masked: its state or its positions take no mask
    OTHERS = enum.auto()  # other sources of the batch, even such of the same length


_found: weakref.WeakKeyDictionary[Any, Sees] = weakref.WeakKeyDictionary()


def seen_by(model: Any, sources: Sequence[Any], pad: int) -> Sees:
    """What the tokens depend on that this model gives a source in a batch.

    Found out once for each model, from the next tokens after the shortest of `sources`: alone, beside one of the same
    length, and beside a longer one. The last two are made from the longest source.
    """
    if model.config.is_encoder_decoder or len(sources) < 2 or _is_known(model):
        return Sees.NOTHING
    if model not in _found:
        short, long = (list(map(int, found(sources, key=len)[-_MOST:])) for found in (min, max))
        try:
            _found[model] = _tried(model, short, long, pad)
        except Exception as error:
            if limits.is_out_of_memory(error):
                raise
            _found[model] = Sees.OTHERS  # the call itself will say so, unless other options make up for it
    return _found[model]


def _is_known(model: Any) -> bool:
    try:
        from fastgen.optimizer.transformers.families import FAMILIES
    except ImportError:  # fastgen leaves this version alone
        return False
    family = FAMILIES.get(model.config.model_type)  # of others the decoder alone may number its tokens without a mask
    return (family is not None and family.chunks_prompts) or type(model).__module__.startswith("fastgen.")


def _tried(model: Any, short: list[int], long: list[int], pad: int) -> Sees:
    import torch
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=_STEPS,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        pad_token_id=pad,
        output_logits=True,
        return_dict_in_generate=True,
    )

    def following(*rows: list[int]) -> list[Any]:
        """The logits of each step after the first of these rows, padded to the longest."""
        ids, mask = (each.to(model.device) for each in padded_together(rows, pad, on_left=True))
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        return [step[0].float() for step in found.logits]

    def differs(beside: list[Any]) -> bool:
        for one, other in zip(alone, beside, strict=False):  # beside another source it may go on behind an end
            finite = one.isfinite() & other.isfinite()
            apart, spread = (one - other)[finite].abs(), (one - one[finite].mean())[finite].abs()
            if len(apart) and apart.max() > rounding * spread.max():
                return True
            if one.argmax() != other.argmax():  # a tie, behind which tokens are others
                break
        return False

    is_whole = model.dtype in (torch.float32, torch.float64)
    rounding = _ROUNDING if is_whole else _ROUNDING_IN_HALF_PRECISION
    others = [*long, *short][::-1]
    devices = [model.device] if model.device.type == "cuda" else []
    # Some models draw numbers in each forward pass: the user's stream goes on as if nothing had been tried.
    with report.silenced(), config.configured(tier="stock"), torch.random.fork_rng(devices):
        alone = following(short)
        if differs(following(short, others[: len(short)])):
            return Sees.OTHERS
        return Sees.PADDING if differs(following(short, others[: len(short) + _LONGER])) else Sees.NOTHING
