"""Slots that no beam descends from make room: the output stays the host's, and long generations stay small."""

from __future__ import annotations

import copy

import harness
import pytest
import torch
import zoo

import fastgen
from fastgen.cache import tree
from fastgen.cache.tree import BeamTree
from fastgen.cache.tree_layer import TreeLayer
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.versions import CACHE

DETAILS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)


@pytest.mark.parametrize("search", ["plain", "ranked", "sampled"])
@pytest.mark.parametrize("family", sorted(zoo.ACCELERATED))
def test_identical(family: str, search: str, at_every_step: list[int]) -> None:
    options = {
        "plain": dict(num_beams=4, max_new_tokens=16),
        "ranked": dict(num_beams=3, max_new_tokens=14, num_return_sequences=3, no_repeat_ngram_size=2),
        "sampled": dict(num_beams=4, max_new_tokens=12, do_sample=True, top_k=0, temperature=1.3),
    }[search]
    inputs = {**zoo.inputs_for(family), **zoo.FAMILIES[family].generate}
    for details in (DETAILS, dict(return_dict_in_generate=False)):
        if zoo.MAJOR < 5 and (family, search) == ("vit2gpt2", "plain") and details is DETAILS:
            continue  # as in test_families.py: two beams that tie within 1e-5 swap their rows of scores
        at_every_step.clear()
        harness.compare(zoo.load(family), inputs, **options, **details)
        assert len(at_every_step) > 1
        if search == "plain":
            assert any(stayed < 4 * step for step, stayed in enumerate(at_every_step)), at_every_step


def test_samples_share_nothing_to_drop(at_every_step: list[int]) -> None:
    options = dict(num_beams=1, do_sample=True, num_return_sequences=3, max_new_tokens=9)
    for _ in range(2):  # before its first call a model may be tried out
        at_every_step.clear()
        harness.compare(zoo.load("llama"), zoo.inputs_for("llama"), **options)
    assert at_every_step[:4] == [0, 3, 6, 9]


def test_the_cache_returned_is_the_hosts(at_every_step: list[int]) -> None:
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama")
    options = dict(num_beams=3, max_new_tokens=9, **DETAILS)
    stock = harness.run_stock(model, inputs, **options)
    output, _ = harness.run_fastgen(model, inputs, **options)
    for a, b in zip(getattr(stock, CACHE), getattr(output, CACHE), strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=1e-4, atol=1e-4)


def test_long_generations_stay_small() -> None:
    """Without force: of 300 steps with 4 beams the slots of little more than 300 stay, where beams coalesce."""
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", batch=2)
    options = dict(num_beams=4, max_new_tokens=300, min_new_tokens=300)
    harness.compare(model, inputs, **options, return_dict_in_generate=False)
    config, prompt = model.config, inputs["input_ids"].shape[1]
    size = 2 * config.num_hidden_layers * 2 * config.num_key_value_heads * 4
    size *= getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slots = fastgen.status().calls[-1].cache_bytes / size
    assert slots < prompt + 1.6 * 300, f"{slots} slots"


def grown(steps: int, beams: int, batch: int, coalesce: bool) -> BeamTree:
    """A tree of random parents; each slot's key says which step and beam wrote it."""
    generator = torch.Generator().manual_seed(steps)
    result = BeamTree(batch, beams, steps)
    layer = TreeLayer(result)
    result.layers.append(layer)
    layer.prefill(torch.full((batch, 1, 2, 1), -1.0), torch.full((batch, 1, 2, 1), -1.0))
    result.begin_decoding()
    first = torch.arange(batch)[:, None] * beams
    paths = torch.zeros(batch, beams, 0)
    for step in range(steps):
        result.advance()
        keys = (step * beams + torch.arange(beams)).float().expand(batch, beams)
        layer.append(keys[:, None, :, None], keys[:, None, :, None])
        paths = torch.cat([paths, keys[:, :, None]], dim=2)
        own = torch.arange(beams).expand(batch, beams)
        parents = torch.randint(0, beams, (batch, beams), generator=generator) if coalesce else own
        result.reorder((parents + first).flatten())
        paths = paths.gather(1, parents[:, :, None].expand_as(paths))
        seen = result.ancestry()
        stored = layer.stored()[0][:, 0, : result.used, 0]
        for sentence in range(batch):
            for beam in range(beams):
                found = stored[sentence][seen[sentence, beam]][2:]
                assert torch.equal(found.sort().values, paths[sentence, beam])
        index = result.paths().view(batch, beams, -1)
        in_order = stored[:, None].expand(-1, beams, -1).gather(2, index)
        assert torch.equal(in_order[:, :, 2:], paths)
        assert (result.positions()[:, : result.used].shape[-1]) == result.used
    return result


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("coalesce", [False, True])
@pytest.mark.parametrize("beams", [1, 2, 5])
def test_paths(beams: int, coalesce: bool, forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "FIRST_STEPS", 4)
    if forced:
        monkeypatch.setattr(BeamTree, "_is_full", lambda self: True)
        monkeypatch.setattr(tree, "_WORTH_PRUNING", 1.0)
    result = grown(40, beams, 3, coalesce)
    if coalesce and beams > 2:
        assert result.used - 2 < 40 * beams * 0.7
    elif not coalesce:
        assert result.used - 2 == 40 * beams


@pytest.mark.skipif(not versions.FINDS_EAGER, reason="4.57 asks each layer's cache for its length")
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("replay", ["off", "always"])
@pytest.mark.parametrize("family", ["llama", "bart", "marian"])
def test_layers_that_were_cut_out(family: str, missing: int, replay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that stay keep their numbers, and the cache has nothing for the others."""
    monkeypatch.setattr("fastgen.cache.tree.FIRST_STEPS", 4)
    model = copy.deepcopy(zoo.load(family))
    layers = model.get_decoder().layers
    layers.append(copy.deepcopy(layers[1]))
    for name in ("self_attn", "encoder_attn"):
        if hasattr(layers[2], name):
            getattr(layers[2], name).layer_idx = 2
    setattr(model.config, "num_hidden_layers" if family == "llama" else "decoder_layers", 3)
    del layers[missing]
    inputs = zoo.inputs_for(family, batch=5)
    with harness.configured(replay=replay):
        for options in (dict(num_beams=3), dict(num_beams=4, early_stopping=True, eos_token_id=[24, 7, 9, 11, 13])):
            for is_dict in (True, False):
                more = dict(max_new_tokens=20, return_dict_in_generate=is_dict)
                expected = "accelerated" if missing or versions.PREFILLS else "fallback"
                harness.compare(model, inputs, expected=expected, **options, **more)
