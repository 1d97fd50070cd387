"""Models that cannot run on the tree: the prompt once per sentence, then the host's own cache, one row per beam."""

from __future__ import annotations

import copy
from typing import Any

import harness
import pytest
import tiny_models
import torch
import transformers
import zoo
from tiny_models.shrinking import build
from torch import nn

import fastgen
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.model.row_decoder import RowDecoder
from fastgen.optimizer.transformers.versions import CACHE
from fastgen.replay.tape import Tape

pytestmark = pytest.mark.skipif(not versions.PREFILLS, reason="this version reads prompts otherwise")

SEARCHES: dict[str, dict[str, Any]] = {
    "plain": dict(num_beams=4, max_new_tokens=16),
    "two beams": dict(num_beams=2, max_new_tokens=10),
    "ranked": dict(num_beams=4, max_new_tokens=14, num_return_sequences=3, length_penalty=2.0, no_repeat_ngram_size=2),
    "early": dict(num_beams=3, max_new_tokens=12, early_stopping=True, repetition_penalty=1.3),
    "never": dict(num_beams=3, max_new_tokens=12, early_stopping="never", length_penalty=-1.0),
    "drawn": dict(num_beams=4, max_new_tokens=12, do_sample=True, top_k=20, temperature=1.3),
    "greedy": dict(num_beams=1, max_new_tokens=16),
    "samples": dict(num_beams=1, max_new_tokens=12, do_sample=True, num_return_sequences=3, top_k=0),
}
DETAILS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)


def _ran_by_rows(reason: str = "") -> None:
    last = fastgen.status().calls[-1]
    assert last.tier in ("fast", "compat") and last.cache == "rows", last
    assert last.plan and reason in last.plan, last.plan


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("family", zoo.BY_ROWS)
def test_identical(family: str, search: str, details: bool) -> None:
    options = {**SEARCHES[search], **(DETAILS if details else dict(return_dict_in_generate=False))}
    harness.compare(zoo.load(family), zoo.inputs_for(family, batch=4), **options)
    _ran_by_rows("computes attention itself")


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("family", zoo.BY_ROWS)
def test_both_tiers_and_plain_inputs(family: str, tier: str, batch: int) -> None:
    inputs = zoo.inputs_for(family, batch=batch, ragged=False)
    harness.compare(zoo.load(family), inputs, tier=tier, **SEARCHES["plain"], **DETAILS)
    harness.compare(zoo.load(family), {"input_ids": inputs["input_ids"]}, tier=tier, **SEARCHES["early"])
    _ran_by_rows()


@pytest.mark.parametrize("search", ["plain", "drawn", "greedy", "samples"])
def test_eager_attention_past_the_function(search: str) -> None:
    """GPT-2 has a switch by which eager attention is computed past the function that is looked up."""
    model = zoo._model("GPT2LMHeadModel", "GPT2Config", zoo.GPT2, reorder_and_upcast_attn=True)().eval()
    model.set_attn_implementation("eager")
    inputs, options = zoo.inputs_for("gpt2", batch=4), {**SEARCHES[search], **DETAILS}
    harness.compare(model, inputs, expected="rows", **options)
    _ran_by_rows("as its configuration says")
    model.set_attn_implementation("sdpa")
    harness.compare(model, inputs, **options)
    assert fastgen.status().calls[-1].cache != "rows"


@pytest.mark.parametrize("family", zoo.BY_ROWS)
def test_the_prompt_is_read_once_and_sentences_leave(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = zoo.load(family), zoo.inputs_for(family, batch=6)
    options = dict(num_beams=4, max_new_tokens=20, early_stopping=True, length_penalty=-1.0)
    harness.compare(model, inputs, **options, return_dict_in_generate=False)  # it is tried in the first call
    read, rows = [], []
    prefill, run = versions.prefill, RowDecoder.run

    def count_prompt(model: Any, input_ids: torch.Tensor, *args: Any) -> Any:
        read.append(len(input_ids))
        return prefill(model, input_ids, *args)

    def count_rows(self: RowDecoder, forward: Any, step: dict[str, Any]) -> Any:
        rows.append(len(step["decoder_input_ids" if self.is_encoder_decoder else "input_ids"]))
        return run(self, forward, step)

    monkeypatch.setattr(versions, "prefill", count_prompt)
    monkeypatch.setattr(RowDecoder, "run", count_rows)
    harness.compare(model, inputs, **options, return_dict_in_generate=False)
    assert read == [6]
    assert rows == sorted(rows, reverse=True) and rows[-1] < rows[0] == 24, rows


@pytest.mark.parametrize("family", [*zoo.BY_ROWS, *zoo.HYBRIDS])
def test_the_cache_that_is_returned(family: str) -> None:
    model, inputs = zoo.load(family), zoo.inputs_for(family)
    options = dict(num_beams=3, max_new_tokens=9, return_dict_in_generate=True)
    stock = harness.run_stock(model, inputs, **options)
    output, calls = harness.run_fastgen(model, inputs, **options)
    assert calls[-1].tier == "fast"
    theirs, mine = getattr(stock, CACHE), getattr(output, CACHE)
    assert type(theirs) is type(mine)
    parts = ("self_attention_cache", "cross_attention_cache") if model.config.is_encoder_decoder else (None,)
    for part in parts:
        a, b = (cache if part is None else getattr(cache, part) for cache in (theirs, mine))
        assert len(a.layers) == len(b.layers) > 0
        for one, other in zip(a.layers, b.layers, strict=True):
            _assert_same_layer(one, other)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_cache_of_the_models_own_around_the_hosts(beams: int) -> None:
    """BLIP puts the cache that it is given into one with a part for cross-attention, and fills that once."""
    model = build("BlipForConditionalGeneration", 2)
    inputs = tiny_models.INPUTS["BlipForConditionalGeneration"](model)[0][1]
    keys = [part.key for name, part in model.named_modules() if name.endswith("crossattention.self")]
    found = []
    for run in (harness.run_stock, harness.run_fastgen):
        result = run(model, inputs, num_beams=beams, max_new_tokens=8, return_dict_in_generate=True)
        found.append(getattr(result if run is harness.run_stock else result[0], CACHE))
    _ran_by_rows()
    assert type(found[0]) is type(found[1]) is transformers.EncoderDecoderCache
    for part in ("self_attention_cache", "cross_attention_cache"):
        theirs, mine = (getattr(cache, part).layers for cache in found)
        assert len(theirs) == len(mine) == len(keys) == 2
        for one, other in zip(theirs, mine, strict=True):
            _assert_same_layer(one, other)


@pytest.mark.parametrize("search", [dict(num_beams=4), dict(do_sample=True, num_return_sequences=4, temperature=1.5)])
@pytest.mark.parametrize("family", ["llama", "bart"])
def test_numbers_that_are_none(family: str, search: dict[str, Any]) -> None:
    """NaN in one row's keys reaches no other row: these have caches of their own."""
    for seed in range(4):
        model, inputs = copy.deepcopy(zoo.load(family)), zoo.inputs_for(family, seed=seed, ragged=False)
        free = [token for token in range(zoo.FIRST_WORD, zoo.VOCAB) if token not in inputs["input_ids"]]
        output = model.get_output_embeddings()
        output.weight = nn.Parameter(output.weight.detach().clone())
        with torch.no_grad():
            model.get_input_embeddings().weight[free[7 * seed % len(free)], :4] = torch.nan
        harness.compare(
            model, inputs, expected="rows", max_new_tokens=16, top_k=0, remove_invalid_values=True, **search
        )
        _ran_by_rows("remove_invalid_values expects NaN")


def _assert_same_layer(stock: Any, ours: Any) -> None:
    for name in ("keys", "values"):
        if getattr(stock, name, None) is not None:
            torch.testing.assert_close(getattr(ours, name), getattr(stock, name), rtol=1e-4, atol=1e-4)
    for name in ("conv_states", "recurrent_states"):
        for number, state in getattr(stock, name, {}).items():
            torch.testing.assert_close(getattr(ours, name)[number], state, rtol=1e-4, atol=1e-4)


def test_a_model_with_code_of_the_users_is_left_alone() -> None:
    """In the prompt, such code would see fewer rows than the host shows it."""
    model, seen = copy.deepcopy(zoo.load("bloom")), []
    model.transformer.h[0].register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    harness.compare(model, zoo.inputs_for("bloom"), expected="fallback", **SEARCHES["plain"])
    assert set(seen) == {12}


def test_weights_changed_between_calls() -> None:
    model, inputs = copy.deepcopy(zoo.load("bloom")), zoo.inputs_for("bloom")
    for factor in (1.0, 1.5, 0.7):
        with torch.no_grad():
            model.transformer.h[1].mlp.dense_h_to_4h.weight.mul_(factor)
        harness.compare(model, inputs, **SEARCHES["plain"])
        _ran_by_rows()


# ---------------------------------------------------------------------------------------------- recurrent states
@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("family", zoo.HYBRIDS)
def test_recurrent_states_beside_the_tree(family: str, search: str, details: bool) -> None:
    options = {**SEARCHES[search], **(DETAILS if details else dict(return_dict_in_generate=False))}
    harness.compare(zoo.load(family), zoo.inputs_for(family, batch=4), **options)
    assert fastgen.status().calls[-1].cache == "kv"


@pytest.mark.parametrize("replay", ["off", "auto", "always"])
@pytest.mark.parametrize("family", zoo.HYBRIDS)
def test_long_outputs_of_hybrids(family: str, replay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree is pruned and grows, sentences leave, and steps may be replayed."""
    monkeypatch.setattr("fastgen.cache.tree.FIRST_STEPS", 4)
    with harness.configured(replay=replay):
        for options in (dict(num_beams=4, early_stopping=True), dict(num_beams=3, length_penalty=-1.0)):
            harness.compare(
                zoo.load(family),
                zoo.inputs_for(family, batch=5),
                max_new_tokens=30,
                return_dict_in_generate=False,
                **options,
            )
            assert fastgen.status().calls[-1].cache == "kv"


@pytest.mark.parametrize("where", ["in the step", "after it"])
@pytest.mark.parametrize("family", zoo.HYBRIDS)
def test_a_capture_that_fails_advances_no_state_twice(family: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has run, in part or as a whole, and is run again: recurrent states are first put back."""
    model, inputs = zoo.load(family), zoo.inputs_for(family, batch=2)
    options = dict(num_beams=3, max_new_tokens=12, **DETAILS)
    with harness.configured(replay="always"):
        harness.compare(model, inputs, **options)  # the family is tried now
    capture, failed = Tape.capture, []

    def failing(self: Tape, function: Any, device: torch.device) -> Any:
        def step() -> Any:
            result = function()
            if where == "in the step":
                failed.append(True)
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return result

        capture(self, step, device)
        failed.append(True)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Tape, "capture", failing)
    with harness.configured(replay="always"):
        harness.compare(model, inputs, **options)
        assert failed
        monkeypatch.setattr("fastgen.optimizer.transformers.cache.recurrent.saved", lambda layers: lambda: None)
        with pytest.raises(AssertionError):  # the negative control
            harness.compare(model, inputs, **options)


# ---------------------------------------------------------------------------------------------- negative controls
@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("bloom", "fastgen.optimizer.transformers.model.row_decoder.RowDecoder.select"),
        ("bloom", "reorder_cache"),
        ("qwen3_next", "fastgen.optimizer.transformers.cache.recurrent.reorder"),
    ],
)
def test_beams_that_keep_another_past_are_noticed(family: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the model has been tried: a trial would leave it to the host."""
    model, inputs = zoo.load(family), zoo.inputs_for(family, batch=4)
    options = dict(num_beams=4, max_new_tokens=20, early_stopping=True, length_penalty=-1.0)
    harness.compare(model, inputs, **options, return_dict_in_generate=False)
    if where == "reorder_cache":  # but for the one that repeats the prompt's
        reorder = RowDecoder.reorder

        def once(self: RowDecoder, parents: torch.Tensor) -> None:
            if not self.num_steps:
                reorder(self, parents)

        monkeypatch.setattr(RowDecoder, "reorder", once)
    else:
        monkeypatch.setattr(where, lambda *_: None)
    with pytest.raises((AssertionError, RuntimeError)):
        harness.compare(model, inputs, **options, return_dict_in_generate=False)
