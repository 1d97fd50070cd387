"""Inputs of requests with the same options, and the calls of `generate` that they are put together for."""

from __future__ import annotations

import itertools
from typing import Any

from fastgen.pipeline import batch_effects, offline
from fastgen.serving.generation_request import GenerationRequest

Unit = tuple[GenerationRequest, int]  # an input of a request


def call_of(model: Any, units: list[Unit]) -> dict[str, Any]:
    """The arguments of `generate` for these inputs."""
    request, _ = units[0]
    inputs = [one.inputs[index] for one, index in units]
    return offline.padded(model, inputs, {"generation_config": request.config})


def groups(model: Any, units: list[Unit]) -> list[list[Unit]]:
    """Split inputs into calls, the longest first: by length if the padding of a shorter input would count, and one by
    one if other inputs would."""
    request, _ = units[0]
    units.sort(key=lambda unit: -_length(unit))
    inputs, options = [one.inputs[index] for one, index in units], {"generation_config": request.config}
    if batch_effects.sees_others(model, options, inputs):
        return [[unit] for unit in units]
    if not batch_effects.sees_padding(model, options, inputs):
        return [units]
    return [list(group) for _, group in itertools.groupby(units, key=_length)]


def halves(units: list[Unit]) -> tuple[list[Unit], list[Unit]]:
    """The inputs in two parts."""
    half = len(units) // 2
    return units[:half], units[half:]


def _length(unit: Unit) -> int:
    request, index = unit
    return len(request.inputs[index])
