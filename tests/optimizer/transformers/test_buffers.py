"""Calls of one model share their buffers one after the other, whatever became of the call before."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import harness
import pytest
import torch
import zoo
from transformers import LogitsProcessor, LogitsProcessorList

from fastgen.memory import buffers
from fastgen.optimizer.transformers.versions import CACHE

pytestmark = pytest.mark.skipif(not buffers._COUNTS, reason="this torch does not count references to memory")
SEARCH: dict[str, Any] = dict(num_beams=4, max_new_tokens=20)


@pytest.fixture(autouse=True)
def _all_are_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(buffers, "_MIN_BYTES", 0)  # tiny models have tiny buffers
    buffers.release()
    gc.disable()  # buffers are to be free when the call ends, not when the collector comes round
    yield
    gc.enable()
    buffers.release()


def _poison() -> None:
    """Fill all idle memory with NaN: whoever reads what it has not written will show it."""
    for kept in buffers._kept.values():
        for buffer in filter(buffers._is_idle, kept):
            buffer.fill_(255)


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("family", zoo.ACCELERATED)
def test_later_calls_run_in_the_same_memory(family: str, tier: str) -> None:
    model, sizes = zoo.load(family), []
    for seed in (0, 1, 0):
        _poison()
        inputs = zoo.inputs_for(family, seed=seed, batch=5)
        inputs = {**inputs, **{n: v[:1].expand(5, -1) for n, v in zoo.FAMILIES[family].generate.items()}}
        stock = harness.run_stock(model, inputs, **SEARCH)
        output, calls = harness.run_fastgen(model, inputs, tier=tier, **SEARCH)
        harness.assert_path(calls, tier, "accelerated")
        assert torch.equal(stock, output)
        sizes.append(buffers.nbytes())
        assert all(buffers._is_idle(buffer) for kept in buffers._kept.values() for buffer in kept)
    assert sizes[0] > 0 and sizes[2] == sizes[1]


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("family", sorted({"bart", "llama"}.intersection(zoo.ACCELERATED)))
def test_a_cache_that_was_returned_is_nobody_elses(family: str, tier: str) -> None:
    model, inputs = zoo.load(family), zoo.inputs_for(family)
    first, _ = harness.run_fastgen(model, inputs, tier=tier, return_dict_in_generate=True, **SEARCH)
    expected = copy.deepcopy(_keys(first))
    again, _ = harness.run_fastgen(model, inputs, tier=tier, return_dict_in_generate=True, **SEARCH)
    harness.run_fastgen(model, zoo.inputs_for(family, seed=3), tier=tier, **SEARCH)
    _poison()
    assert all(map(torch.equal, _keys(again), expected))


@pytest.mark.parametrize(
    "options", [dict(num_beams=3), dict(num_beams=1), dict(num_beams=3, return_dict_in_generate=True)]
)
def test_tensors_of_a_call_are_freed_when_it_ends(options: dict[str, Any]) -> None:
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama")

    def alive() -> set[int]:
        return {id(one) for one in gc.get_objects() if isinstance(one, torch.Tensor)}

    for _ in range(3):
        model.generate(**inputs, max_new_tokens=8, **options)
    gc.collect()
    before = alive()
    for _ in range(4):
        model.generate(**inputs, max_new_tokens=8, **options)
    assert len(alive() - before) < 4, "none for each call"


def _keys(output: Any) -> list[torch.Tensor]:
    cache = getattr(getattr(output, CACHE), "self_attention_cache", getattr(output, CACHE))
    return [layer.keys for layer in cache.layers]


class _Fails(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 8:
            raise RuntimeError("as it happens")
        return scores


@pytest.mark.parametrize("tier", harness.TIERS)
def test_a_call_that_fails_leaves_its_buffers(tier: str) -> None:
    model, inputs = zoo.load("gpt2"), zoo.inputs_for("gpt2")
    harness.run_fastgen(model, inputs, tier=tier, **SEARCH)
    size = buffers.nbytes()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="as it happens"):
            harness.run_fastgen(model, inputs, tier=tier, logits_processor=LogitsProcessorList([_Fails()]), **SEARCH)
    harness.compare(model, inputs, tier=tier, **SEARCH)
    assert buffers.nbytes() <= 2 * size
