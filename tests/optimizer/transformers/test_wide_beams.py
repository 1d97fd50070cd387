"""Searches with many beams, each of which attends to its own path: the output stays the host's."""

from __future__ import annotations

import copy
import functools
from typing import Any

import harness
import path_rows
import pytest
import torch
import zoo

import fastgen
from fastgen import ops
from fastgen.cache import tree, wide_tree
from fastgen.cache.wide_tree import WideTree
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.model import session, wide
from fastgen.replay import statistics

pytestmark = [
    pytest.mark.skipif(not ops.is_native(torch.device("cpu")), reason="no native operators"),
    pytest.mark.skipif(not versions.PREFILLS, reason="its families are tried, not tested: their trees have masks"),
]

VOCAB = 509
DETAILS = dict(return_dict_in_generate=True, output_scores=True, num_return_sequences=7)
TOKENS = dict(return_dict_in_generate=False, num_return_sequences=7)
FAMILIES = ("bart", "t5", "gpt2", "llama", "mistral")
# By the class, the name of its configuration, and the options that the zoo's models have.
MODELS = {
    "bart": ("BartForConditionalGeneration", "BartConfig", zoo.ENCODER_DECODER),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**zoo.T5, "initializer_factor": 0.7}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", zoo.GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", zoo.GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**zoo.GROUPED, "sliding_window": 4}),
}


@functools.cache
def load(family: str) -> Any:
    """A tiny random model with words enough for hundreds of beams."""
    torch.manual_seed(3)
    model = zoo._model(*MODELS[family], vocab_size=VOCAB)()
    return model.eval()


def inputs_for(family: str, batch: int = 2) -> dict[str, torch.Tensor]:
    return zoo.text(load(family), batch=batch, length=6)


@pytest.fixture(autouse=True)
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of the operator."""
    return path_rows.counted(session, monkeypatch)


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("beams", [32, 50, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_identical(family: str, beams: int, tier: str, attended: list[int]) -> None:
    for options in (DETAILS, TOKENS):
        attended.clear()
        harness.compare(load(family), inputs_for(family), tier=tier, num_beams=beams, max_new_tokens=7, **options)
        assert len(attended) == 2 * 6 and set(attended) == {2 * beams}  # layers, and steps after the prompt's


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_hundreds(family: str, attended: list[int]) -> None:
    harness.compare(load(family), inputs_for(family, 1), num_beams=400, max_new_tokens=5, **TOKENS)
    assert set(attended) == {400}


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_ends(family: str, early: Any, attended: list[int]) -> None:
    """Sentences leave as they finish."""
    ends = list(range(20, 220, 3))
    options = dict(eos_token_id=ends, early_stopping=early, num_beams=33, max_new_tokens=9, length_penalty=0.3)
    harness.compare(load(family), inputs_for(family, 3), **options, **TOKENS)
    assert attended


@pytest.mark.parametrize(
    "options", [dict(no_repeat_ngram_size=2), dict(repetition_penalty=1.3), dict(min_new_tokens=4)]
)
def test_processors(options: dict[str, Any], attended: list[int]) -> None:
    harness.compare(load("t5"), inputs_for("t5"), num_beams=40, max_new_tokens=6, **options, **TOKENS)
    assert attended


def only_some(batch: int, ids: torch.Tensor) -> list[int]:
    """A few tokens, which depend on the sentence and on the last token."""
    return [zoo.FIRST_WORD + (7 * batch + 11 * int(ids[-1]) + 13 * i) % (VOCAB - 9) for i in range(60)]


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_allowed_tokens(family: str, attended: list[int]) -> None:
    options = dict(prefix_allowed_tokens_fn=only_some, num_beams=50, max_new_tokens=6)
    harness.compare(load(family), inputs_for(family), **options, **TOKENS)
    assert attended


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_are_pruned_and_grow(family: str, attended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_tree, "FIRST_STEPS", 3)
    prunings: list[int] = []
    prune = WideTree._prune

    def counted(self: WideTree, slots: torch.Tensor) -> None:
        prunings.append(slots.shape[1])
        prune(self, slots)

    monkeypatch.setattr(WideTree, "_prune", counted)
    for options in (DETAILS, TOKENS):
        harness.compare(load(family), inputs_for(family), num_beams=32, max_new_tokens=14, **options)
    assert attended and prunings
    monkeypatch.setattr(tree, "_WORTH_PRUNING", -1.0)
    prunings.clear()
    harness.compare(load(family), inputs_for(family), num_beams=32, max_new_tokens=14, **TOKENS)
    assert not prunings


def test_a_prompt_in_chunks(attended: list[int]) -> None:
    options = dict(num_beams=34, max_new_tokens=5, prefill_chunk_size=2)
    harness.compare(load("llama"), inputs_for("llama"), **options, **TOKENS)
    assert attended


@pytest.mark.skipif(not versions.COUNTS_IN_TENSORS, reason="steps of this version are never replayed")
@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps(family: str, tier: str, attended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in later calls on the same buffers, with other prompts, and after the tree has grown."""
    monkeypatch.setattr(wide_tree, "FIRST_STEPS", 6)
    model = copy.deepcopy(load(family))
    with harness.configured(replay="always"):
        for seed in range(3):
            inputs = zoo.text(model, batch=2, length=6, seed=seed)
            before = statistics.counts(model).replays
            harness.compare(model, inputs, tier=tier, num_beams=32, max_new_tokens=13, **TOKENS)
            assert statistics.counts(model).replays >= before + 6
            assert attended
    assert "captured" in fastgen.status().replayed[type(model).__name__]


@pytest.mark.parametrize("family", ["t5", "mistral"])
def test_recorded_steps_beyond_the_slots_at_first(
    family: str, attended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More steps than there are slots in the beginning: a path, and its bias, have a place for each."""
    monkeypatch.setattr(wide_tree, "FIRST_STEPS", 1)
    inputs = zoo.text(load(family), batch=1, length=6)
    with harness.configured(replay="always"):
        harness.compare(load(family), inputs, num_beams=32, max_new_tokens=40, **TOKENS)
    assert attended


def test_the_cache_returned_is_the_hosts(attended: list[int]) -> None:
    options = dict(num_beams=32, max_new_tokens=6, **DETAILS)
    stock = harness.run_stock(load("llama"), inputs_for("llama"), **options)
    output, _ = harness.run_fastgen(load("llama"), inputs_for("llama"), **options)
    for a, b in zip(getattr(stock, versions.CACHE), getattr(output, versions.CACHE), strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=1e-4, atol=1e-4)
    assert attended


@pytest.mark.parametrize("family", sorted(zoo.ACCELERATED))
def test_every_family(family: str, attended: list[int]) -> None:
    """Those with an attention of their own have a tree of masks."""
    model = zoo.load(family)
    inputs = {**zoo.inputs_for(family), **zoo.FAMILIES[family].generate}
    harness.compare(model, inputs, num_beams=33, max_new_tokens=6, return_dict_in_generate=False)
    if getattr(model.config, "_attn_implementation", None) == "sdpa" and family in FAMILIES:
        assert attended


def test_fewer_beams_and_other_attention_have_masks(attended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    harness.compare(load("llama"), inputs_for("llama"), num_beams=wide.WIDE_FROM - 1, max_new_tokens=4, **TOKENS)
    eager = copy.deepcopy(load("llama"))
    eager.config._attn_implementation = "eager"
    harness.compare(eager, inputs_for("llama"), num_beams=32, max_new_tokens=4, **TOKENS)
    assert not attended
    # A tree of paths makes the masks for an attention that is not torch's own.
    monkeypatch.setattr(wide, "is_wide", lambda request: True)
    harness.compare(eager, inputs_for("llama"), num_beams=32, max_new_tokens=4, **TOKENS)
    assert not attended


def test_a_path_that_is_not_followed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons can fail: without reordering the paths they do."""
    monkeypatch.setattr(WideTree, "reorder", lambda self, parents: None)
    with pytest.raises(AssertionError):
        harness.compare(load("llama"), inputs_for("llama"), num_beams=32, max_new_tokens=7, **TOKENS)
