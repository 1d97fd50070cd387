"""What one step of a search costs in operators and in memory, counted: no clock, so the counts are the same everywhere.

On a CPU each small operator costs a few microseconds, at small batches as much as the arithmetic. A change that raises
a count beyond its bound is to earn it, or to do without; a change that lowers one should lower the bound.
"""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass, field
from typing import Any

import harness
import pytest
import torch
import zoo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastgen
from fastgen import ops
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.patching import foreign_code

# Operators and large allocations of a step in our fast tier, the most of transformers 5.23, 5.17 and 4.57.
BOUNDS = {"bart": (280, 2), "gpt2": (239, 27), "llama": (327, 7), "t5": (326, 2)}
STEPS = range(6, 10)  # in the middle of the search
SEARCH: dict[str, Any] = dict(num_beams=4, max_new_tokens=16, eos_token_id=None)  # no step differs by what ends in it
BATCH, LENGTH = 3, 24


@dataclass
class Cost:
    operators: collections.Counter[str] = field(default_factory=collections.Counter)
    allocations: list[tuple[str, int]] = field(default_factory=list)  # operators and bytes of new memory

    def large(self, size: int) -> list[tuple[str, int]]:
        return [(name, count) for name, count in self.allocations if count >= size]


class Counting(TorchDispatchMode):
    """Adds what runs inside to the last of `costs`."""

    def __init__(self) -> None:
        super().__init__()
        self.costs = [Cost()]

    def next_step(self, *_: Any) -> None:
        self.costs.append(Cost())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        cost, name = self.costs[-1], str(func)
        cost.operators[name] += 1
        given = {storage._cdata for storage in _storages((args, kwargs))}
        cost.allocations += [(name, s.nbytes()) for s in _storages(output) if s._cdata not in given]
        return output


def _storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _costs(family: str) -> tuple[Cost, ...]:
    """Those of the steps in the middle, each from one forward pass to the next."""
    model, inputs = zoo.load(family), zoo.inputs_for(family, batch=BATCH, length=LENGTH)
    counting = Counting()
    with pytest.MonkeyPatch.context() as patch:
        if not fastgen.status().enabled:
            patch.setattr(type(model), "forward", _after(counting.next_step, type(model).forward))
        patch.setattr(foreign_code, "active_mode", lambda: None)  # this one counts, and changes nothing
        for name in ("reading", "run"):  # the prompt's forward pass, and a step's
            patch.setattr(TreeDecoder, name, _after(counting.next_step, getattr(TreeDecoder, name)))
        with counting:
            zoo.generate(model, inputs, **SEARCH)
    costs = counting.costs[-SEARCH["max_new_tokens"] :]  # an unproven model's few steps come before
    assert len(costs) == SEARCH["max_new_tokens"]
    return tuple(costs[step] for step in STEPS)


def _after(first: Any, method: Any) -> Any:
    return functools.wraps(method)(lambda *args, **kwargs: (first(), method(*args, **kwargs))[1])


def _most(costs: tuple[Cost, ...]) -> tuple[int, int]:
    rows = BATCH * SEARCH["num_beams"] * zoo.VOCAB * 4  # bytes of the logits
    return max(cost.operators.total() for cost in costs), max(len(cost.large(rows)) for cost in costs)


@pytest.mark.parametrize("family", [name for name in BOUNDS if name in zoo.ACCELERATED])
def test_a_step_costs_no_more_than_it_did(family: str) -> None:
    if not ops.is_native(torch.device("cpu")):
        pytest.skip("without the native operators a step costs more")
    fastgen.configure(strict=True, tier="fast", packing="off")
    costs = _costs(family)
    harness.assert_path(fastgen.status().calls, "fast", "accelerated")
    with fastgen.disabled():
        _, stock = _most(_costs(family))
    operators, allocations = _most(costs)
    bound = BOUNDS[family]
    assert operators <= bound[0] and allocations <= bound[1] and allocations < stock, costs
