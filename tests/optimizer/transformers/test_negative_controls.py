"""The comparisons can fail: break one thing inside fastgen, and they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import zoo

import fastgen
from fastgen.cache import tree
from fastgen.cache.tree import BeamTree
from fastgen.cache.tree_layer import TreeLayer
from fastgen.decoding.beam_search import BeamSearch
from fastgen.optimizer.transformers.model.decoder import TreeDecoder

pytestmark = pytest.mark.always  # also where CI draws a part of the tests

Patch = pytest.MonkeyPatch
OPTIONS: dict[str, Any] = dict(num_beams=4, max_new_tokens=14, num_return_sequences=2)
SCORES = dict(return_dict_in_generate=True, output_scores=True)


def freeze_ancestry(patch: Patch) -> None:
    patch.setattr(BeamTree, "reorder", lambda self, parents: None)


def shift_positions(patch: Patch) -> None:
    """Off by one where models count the cache's tokens, and where the host hands them positions."""
    length = BeamTree.length.fget  # type: ignore[attr-defined]
    step_inputs = TreeDecoder.step_inputs

    def shifted(self: TreeDecoder, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = step_inputs(self, inputs)
        for name in ("position_ids", "cache_position"):
            if inputs.get(name) is not None:
                inputs[name] = inputs[name] + 1
        return inputs

    patch.setattr(BeamTree, "length", property(lambda self: length(self) + 1))
    patch.setattr(TreeDecoder, "step_inputs", shifted)


def unmap_bias(patch: Patch) -> None:
    """T5's relative bias, and sliding windows, taken by physical slot."""
    patch.setattr(BeamTree, "positions", lambda self: torch.arange(self.width)[None])


def forget_padding(patch: Patch) -> None:
    begin_decoding = BeamTree.begin_decoding
    patch.setattr(BeamTree, "begin_decoding", lambda self, mask=None: begin_decoding(self, None))


def forget_source_padding(patch: Patch) -> None:
    begin_decoding = TreeDecoder.begin_decoding

    def planted(self: TreeDecoder, inputs: dict[str, Any], outputs: Any) -> None:
        begin_decoding(self, inputs, outputs)
        if self.source_mask is not None:
            self.source_mask = torch.ones_like(self.source_mask)

    patch.setattr(TreeDecoder, "begin_decoding", planted)


def forget_window(patch: Patch) -> None:
    mask = BeamTree.mask
    patch.setattr(BeamTree, "mask", lambda self, window, dtype: mask(self, None, dtype))


def see_everything(patch: Patch) -> None:
    patch.setattr(BeamTree, "ancestry", lambda self: torch.ones_like(self._ancestry[:, :, : self.width]))


def overwrite_a_slot(patch: Patch) -> None:
    """Each step's keys land one beam further."""
    append = fastgen.cache.tree.TreeLayer.append

    def rolled(self: Any, *tensors: torch.Tensor) -> Any:
        return append(self, *(tensor.roll(1, 0) for tensor in tensors))

    patch.setattr(fastgen.cache.tree.TreeLayer, "append", rolled)


def prune_wrong_slots(patch: Patch) -> None:
    """When slots are dropped, their neighbours' keys stay."""
    prune = TreeLayer.prune
    patch.setattr(BeamTree, "_is_full", lambda self: True)
    patch.setattr(tree, "_WORTH_PRUNING", 1.0)
    patch.setattr(TreeLayer, "prune", lambda self, slots: prune(self, slots.roll(1, dims=1)))


CONTROLS: dict[Callable[[Patch], None], tuple[str, ...]] = {
    freeze_ancestry: ("bart", "t5", "whisper", "led", "gpt2", "llama", "gemma2"),
    shift_positions: ("bart", "t5", "gpt2", "llama", "bert2bert"),
    unmap_bias: ("t5", "mt5", "umt5", "mistral"),
    forget_padding: ("gpt2", "llama", "gemma2"),
    forget_source_padding: ("bart", "t5", "led", "speech_to_text"),
    forget_window: ("mistral", "gemma2", "gpt_oss"),
    see_everything: ("bart", "llama", "trocr"),
    overwrite_a_slot: ("bart", "llama", "trocr"),
    prune_wrong_slots: ("bart", "llama", "t5"),
}


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize(
    ("damage", "name"),
    [(damage, name) for damage, names in CONTROLS.items() for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_damage_is_seen(damage: Callable[[Patch], None], name: str, tier: str) -> None:
    model, inputs = zoo.load(name), {**zoo.inputs_for(name), **zoo.FAMILIES[name].generate}
    stock = harness.compare(model, inputs, tier=tier, **OPTIONS, **SCORES)
    for setting in ("off", "always"):
        with pytest.MonkeyPatch.context() as patch, harness.configured(replay=setting):
            damage(patch)
            output, _ = harness.run_fastgen(model, inputs, tier=tier, **OPTIONS, **SCORES)
        with pytest.raises(AssertionError, match=r"differ|beyond the tolerance"):
            harness.assert_same(stock, output)
        # not by a little either: logits are off by far more than the tolerance, from some step on
        steps = zip(stock.scores[1:], output.scores[1:], strict=False)
        assert max(float((mine - theirs).abs().max()) for theirs, mine in steps) > 100 * harness.TOLERANCE


def test_wrong_sentences_evicted() -> None:
    """Sentences that leave must be the finished ones."""
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=6)
    options = dict(num_beams=4, max_new_tokens=20, early_stopping=True, length_penalty=-1.0)
    options["return_dict_in_generate"] = False
    harness.compare(model, inputs, tier="fast", **options)
    evict, left = BeamSearch.evict, []

    def wrong(self: BeamSearch, finished_mask: torch.Tensor) -> torch.Tensor:
        stay = evict(self, finished_mask)
        left.append(len(finished_mask) - len(stay))
        return stay.flip(0)  # the decoder now keeps them in another order than the search

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BeamSearch, "evict", wrong)
        with pytest.raises(AssertionError, match="sequences differ"):
            harness.compare(model, inputs, tier="fast", **options)
    assert left, "no sentence ever left"


def test_a_processor_shown_other_rows_is_seen() -> None:
    """The judge itself: other scores, other shapes and other tokens are each refused."""
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart")
    stock = harness.run_stock(model, inputs, **OPTIONS, **SCORES)
    for name, change in {
        "sequences": lambda x: x.where(x != x.flatten()[-1], x + 1),
        "beam_indices": lambda x: x.roll(1, 0),
        "sequences_scores": lambda x: x + 0.01,
        "scores": lambda x: x[:-1],
    }.items():
        other = type(stock)(**{**stock, name: change(stock[name])})
        with pytest.raises(AssertionError, match=name):
            harness.assert_same(stock, other)
    harness.assert_same(stock, stock)


def test_a_fallback_is_seen() -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart")
    with pytest.raises(fastgen.FallbackError):
        harness.compare(model, inputs, use_cache=False, **OPTIONS)
    with pytest.raises(AssertionError, match="expected a reasoned fallback"):
        harness.compare(model, inputs, expected="fallback", **OPTIONS)
    with pytest.raises(AssertionError, match="expected the fast tier"):
        _, calls = harness.run_fastgen(model, inputs, tier="compat", **OPTIONS)
        harness.assert_path(calls, "fast", "accelerated")
