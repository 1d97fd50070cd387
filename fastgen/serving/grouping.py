"""Inputs of requests with the same options, and the calls of `generate` that they are put together for."""

from __future__ import annotations

import itertools
from typing import Any

from fastgen.optimizer.transformers import versions
from fastgen.pipeline import offline
from fastgen.serving.generation_request import GenerationRequest

Unit = tuple[GenerationRequest, int]  # an input of a request


def call_of(model: Any, units: list[Unit]) -> dict[str, Any]:
    """The arguments of `generate` for these inputs."""
    request, _ = units[0]
    inputs = [one.inputs[index] for one, index in units]
    return offline.padded(model, inputs, {"generation_config": request.config})


def groups(model: Any, units: list[Unit]) -> list[list[Unit]]:
    """Split inputs into calls, the longest first: by length if processors would see the padding of a shorter input."""
    request, _ = units[0]
    units.sort(key=lambda unit: -_length(unit))
    if not _sees_padding(model, request.config, _length(units[-1])):
        return [units]
    return [list(group) for _, group in itertools.groupby(units, key=_length)]


def halves(units: list[Unit]) -> tuple[list[Unit], list[Unit]]:
    """The inputs in two parts."""
    half = len(units) // 2
    return units[:half], units[half:]


def _length(unit: Unit) -> int:
    request, index = unit
    return len(request.inputs[index])


def _sees_padding(model: Any, config: Any, shortest: int) -> bool:
    """Whether the host has a processor for these options that takes the padding of a shorter input for tokens.

    Args:
        shortest: tokens of the shortest input.
    """
    if config.encoder_repetition_penalty not in (None, 1.0):
        return True
    if model.config.is_encoder_decoder:  # whose other processors see the output, or ban the padding, which is no word
        return False
    return (
        bool(config.no_repeat_ngram_size or config.encoder_no_repeat_ngram_size)
        or (config.forced_bos_token_id is not None and shortest == 1)  # behind such a prompt alone
        or (config.repetition_penalty not in (None, 1.0) and not versions.penalty_ignores_padding())
    )
