"""Slim caches: the output is the host's, and what is stored is what was asked for."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import harness
import pytest
import torch
import transformers
import zoo
from both_hosts import run_together
from joined_calls import calls_of, refilled, stock_results
from transformers.modeling_utils import AttentionInterface

import fastgen
from fastgen import report
from fastgen.cache.slim import planner
from fastgen.cache.slim.latent import Choice, InputCache
from fastgen.optimizer.transformers import families, versions
from fastgen.optimizer.transformers.cache import planning, slim
from fastgen.optimizer.transformers.cache.slim import SlimCaches
from fastgen.optimizer.transformers.versions import CACHE
from fastgen.replay import store

pytestmark = pytest.mark.skipif(not versions.FINDS_EAGER, reason="this version keeps keys and values")
ENCODER_DECODERS = """bart bart_distilled bart_eager bert2gpt2 blenderbot m2m_100 marian mbart mt5 pegasus
speech_to_text t5 umt5 whisper""".split()
DECODERS = ["gpt2", "opt"]
FAMILIES = ENCODER_DECODERS + DECODERS
SEARCHES: dict[str, dict[str, Any]] = {
    "plain": dict(num_beams=4, max_new_tokens=16, num_return_sequences=4),
    "early": dict(num_beams=3, max_new_tokens=12, early_stopping=True, repetition_penalty=1.3),
    "greedy": dict(max_new_tokens=12),
    "sampled": dict(num_beams=1, do_sample=True, num_return_sequences=3, top_k=0, max_new_tokens=9),
}
DETAILS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
TOKENS = dict(return_dict_in_generate=False)
LONG = dict(num_beams=3, min_new_tokens=12, max_new_tokens=12, tier="compat", **TOKENS)


@pytest.fixture(autouse=True)
def slim_caches() -> Iterator[None]:
    with harness.configured(cache="x"):
        yield


def kind_of(family: str) -> str:
    return "x" if family in DECODERS else "x+e"


def inputs_for(family: str, seed: int = 0, **shape: Any) -> dict[str, Any]:
    options = (zoo.FAMILIES.get(family) or zoo.VARIANTS[family]).generate
    return {**zoo.inputs_for(family, seed=seed, **shape), **options}


def assert_stored(kind: str) -> None:
    assert {call.cache for call in report.calls()} == {kind}, report.calls()


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_identical(family: str, search: str) -> None:
    if family == "bart_eager" and not versions.FINDS_EAGER:
        pytest.skip("falls back on this version of transformers")
    model, inputs, options = zoo.load(family), inputs_for(family), SEARCHES[search]
    for tier in ("compat",) if options.get("num_beams", 1) == 1 else harness.TIERS:
        for details in (DETAILS, TOKENS):
            harness.compare(model, inputs, tier=tier, **options, **details)
            assert_stored(kind_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_bytes(family: str) -> None:
    """A latent of the model's width in place of keys and values, which are as wide each here."""
    model, inputs = zoo.load(family), inputs_for(family, batch=1, length=24)
    if "decoder_input_ids" in inputs:
        inputs["decoder_input_ids"] = inputs["decoder_input_ids"][:1]
    taken = {}
    for cache in ("kv", "x"):
        with harness.configured(cache=cache):
            _, calls = harness.run_fastgen(model, inputs, num_beams=3, min_new_tokens=8, max_new_tokens=8)
        taken[calls[-1].cache] = calls[-1].cache_bytes
    assert taken.keys() == {"kv", kind_of(family)}
    assert taken[kind_of(family)] <= taken["kv"] / 2


@pytest.mark.parametrize("family", ["bart", "t5", "whisper", "bert2gpt2", "gpt2"])
def test_pruned_at_every_step(family: str, at_every_step: list[int]) -> None:
    harness.compare(zoo.load(family), inputs_for(family), num_beams=4, max_new_tokens=16, **TOKENS)
    assert len(at_every_step) > 1
    assert_stored(kind_of(family))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) & families.SHARE_BATCHES))
def test_refilled(family: str) -> None:
    model, calls = zoo.load(family), calls_of(family, num_beams=3)
    for expected, result in zip(stock_results(model, calls), refilled(model, calls), strict=True):
        harness.assert_same(expected, result)
    assert_stored(kind_of(family))


@pytest.mark.skipif(not versions.COUNTS_IN_TENSORS, reason="steps of this version are never replayed")
@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded(family: str) -> None:
    """A later call puts its prompt and its source where the recording looks for them."""
    model = copy.deepcopy(zoo.load(family))
    for seed in range(3):
        harness.compare(model, inputs_for(family, seed), **LONG)
        assert store.count(model) == 1
    harness.compare(model, inputs_for(family, 3), **{**LONG, "tier": "auto"})
    assert_stored(kind_of(family))
    with harness.configured(cache="kv"):
        harness.compare(model, inputs_for(family), **LONG)
        assert_stored("kv")
    assert store.count(model) == 2  # one of each kind


def test_a_plan_may_change_from_call_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored follows it, and the layers are tried once."""
    model, trials = copy.deepcopy(zoo.load("bart")), []
    judge = planning._judge
    monkeypatch.setattr(planning, "_judge", lambda *args: trials.append(args) or judge(*args))
    plans = {"e+kv": Choice("kv", "e"), "x+kv": Choice("x", "kv"), "x+e": Choice("x", "e"), "kv": Choice()}
    for kind, choice in plans.items():
        monkeypatch.setattr(planner, "asked_for", lambda wanted, choice=choice: choice)
        for seed in range(2):
            harness.compare(model, inputs_for("bart", seed), num_beams=3, max_new_tokens=9)
            assert_stored(kind)
    assert len(trials) == 1


@pytest.mark.parametrize("family", ["bart", "whisper", "t5", "bert2gpt2"])
def test_a_long_prompt_reads_the_source_by_keys(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From as many tokens on as a head is wide, keys and values that are dropped again take less arithmetic."""
    model = zoo.load(family)
    rows = []
    attend = InputCache.attend
    monkeypatch.setattr(
        InputCache, "attend", lambda self, query, *rest: rows.append(len(query)) or attend(self, query, *rest)
    )
    harness.compare(model, inputs_for(family), num_beams=2, max_new_tokens=5, **TOKENS)  # tried out before
    for tokens, reads in ((3, True), (11, False)):
        prompt = torch.randint(zoo.FIRST_WORD, 40, (3, tokens), generator=torch.Generator().manual_seed(1))
        prompt[:, 0] = model.generation_config.decoder_start_token_id  # or the host puts it before
        inputs = {**inputs_for(family), "decoder_input_ids": prompt}
        rows.clear()
        harness.compare(model, inputs, num_beams=2, max_new_tokens=5, tier="fast", **TOKENS)
        assert_stored("x+e")
        assert (3 * tokens in rows) == reads, rows


@pytest.mark.parametrize("family", DECODERS)
def test_prompt_in_chunks(family: str) -> None:
    harness.compare(
        zoo.load(family), inputs_for(family, length=11), num_beams=3, max_new_tokens=6, prefill_chunk_size=4
    )
    assert_stored("x")


@pytest.mark.parametrize("family", ["bart", "gpt2"])
@pytest.mark.parametrize("batch", [1, 5])
def test_odd_batches(family: str, batch: int) -> None:
    """One sentence; one token; a sentence that finishes at once."""
    model = zoo.load(family)
    for options in (dict(max_new_tokens=1), dict(max_new_tokens=7, eos_token_id=list(range(4, 50)))):
        for beams in (2, 7):
            harness.compare(model, inputs_for(family, batch=batch), num_beams=beams, **options)
            assert_stored(kind_of(family))


@pytest.mark.parametrize("family", ["bart", "whisper", "gpt2"])
def test_the_cache_returned_is_the_hosts(family: str) -> None:
    model, inputs = zoo.load(family), inputs_for(family)
    options = dict(num_beams=3, max_new_tokens=9, **DETAILS)
    stock = harness.run_stock(model, inputs, **options)
    output, _ = harness.run_fastgen(model, inputs, **options)
    assert_stored(kind_of(family))
    for a, b in zip(getattr(stock, CACHE), getattr(output, CACHE), strict=True):
        for mine, theirs in zip(a, b, strict=True):
            if torch.is_tensor(mine):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_changed_weights_are_seen() -> None:
    model = copy.deepcopy(zoo.load("bart"))
    for _ in range(2):
        harness.compare(model, inputs_for("bart"), num_beams=3, max_new_tokens=9)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "decoder" in name and ("k_proj" in name or "v_proj" in name):
                    weight.mul_(-1.2)
    assert_stored("x+e")


def test_threads_choose_for_themselves() -> None:
    model, inputs = zoo.load("bart"), inputs_for("bart")
    options = dict(num_beams=3, max_new_tokens=12, **TOKENS)
    expected = harness.run_stock(model, inputs, **options)

    def job(cache: str) -> None:
        with fastgen.configured(cache=cache), torch.no_grad():
            assert torch.equal(model.generate(**harness.request(inputs, options)), expected)

    report.reset()
    fastgen.configure(history=64)
    run_together([lambda: job("x"), lambda: job("kv"), lambda: job("x")], rounds=4)
    assert sorted(call.cache for call in report.calls()) == ["kv"] * 4 + ["x+e"] * 8


# ---------------------------------------------------------------------------------------------- keys or values alone
MULTI_HEAD = ["bart", "m2m_100", "whisper", "t5", "t5_wide", "bert2gpt2", "gpt2", "opt"]
ROTARY = ["llama_multi_head", "llama_biased", "phi3_multi_head", "phi3_partly_rotary", "gemma_wide", "olmo"]
ONE_ALONE = [*((family, kind) for family in MULTI_HEAD for kind in "kv"), *((family, "k") for family in ROTARY)]


@functools.cache
def well_conditioned(family: str, smallest: float = 1.0) -> Any:
    """A model whose keys and values are projected by weights with singular values down to `smallest` of the largest."""
    model = copy.deepcopy(zoo.load(family)).requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for module in slim.attention_modules(model):
        projections = slim.projections_of(module)
        for weight in (projections.key, projections.value):
            rows, columns = weight.shape[0] * weight.shape[1], weight.shape[2]
            left, right = (torch.linalg.qr(torch.randn(n, n, generator=generator).double())[0] for n in (rows, columns))
            values = torch.logspace(0, math.log10(smallest), min(rows, columns)).double()
            new = left[:, : len(values)] * values @ right[: len(values)]
            weight.copy_((new * weight.std() / new.std()).view(weight.shape))
    return model


@pytest.mark.parametrize(("family", "kind"), ONE_ALONE)
def test_one_alone(family: str, kind: str) -> None:
    model, inputs = well_conditioned(family), inputs_for(family)
    with harness.configured(cache=kind):
        for search in ("plain", "greedy", "sampled"):
            for details in (DETAILS, TOKENS):
                harness.compare(model, inputs, tier="compat", **SEARCHES[search], **details)
                assert_stored(kind)
        harness.compare(model, inputs, tier="fast", **SEARCHES["plain"], **TOKENS)
        assert_stored(kind)


@pytest.mark.parametrize("family", ["bart", "bart_distilled", "m2m_100", "whisper", "t5", "t5_wide", "bert2gpt2"])
def test_the_first_layers_keys_for_all(family: str) -> None:
    model, inputs = well_conditioned(family), inputs_for(family)
    with harness.configured(cache="h"):
        for search in ("plain", "greedy"):
            for details in (DETAILS, TOKENS):
                harness.compare(model, inputs, tier="compat", **SEARCHES[search], **details)
                assert_stored("h+k")
        harness.compare(model, inputs, tier="fast", **SEARCHES["plain"], **TOKENS)
        taken = report.calls()[-1].cache_bytes
    with harness.configured(cache="k"):
        harness.compare(model, inputs, tier="fast", **SEARCHES["plain"], **TOKENS)
        assert taken < report.calls()[-1].cache_bytes


def test_the_first_layers_keys_refilled_recorded_and_returned() -> None:
    model, calls = copy.deepcopy(well_conditioned("bart")), calls_of("bart", num_beams=3)
    with harness.configured(cache="h"):
        for expected, result in zip(stock_results(model, calls), refilled(model, calls), strict=True):
            harness.assert_same(expected, result)
        assert_stored("h+k")
        for seed in range(3):
            harness.compare(model, inputs_for("bart", seed), **LONG)
        options = dict(num_beams=3, max_new_tokens=9, **DETAILS)
        stock = harness.run_stock(model, inputs_for("bart"), **options)
        output, _ = harness.run_fastgen(model, inputs_for("bart"), **options)
    for a, b in zip(getattr(stock, CACHE), getattr(output, CACHE), strict=True):
        for mine, theirs in zip(a, b, strict=True):
            if torch.is_tensor(mine):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_without_the_first_layers_keys_the_others_have_their_own() -> None:
    model = copy.deepcopy(well_conditioned("bart"))
    with torch.no_grad():
        model.model.decoder.layers[0].encoder_attn.k_proj.weight[-1] = 0
    with harness.configured(cache="h"):
        harness.compare(model, inputs_for("bart"), num_beams=3, max_new_tokens=9)
    assert_stored("k+kv")


@pytest.mark.parametrize("family", ["bart", "llama_multi_head"])
def test_one_alone_pruned_at_every_step(family: str, at_every_step: list[int]) -> None:
    with harness.configured(cache="k"):
        harness.compare(well_conditioned(family), inputs_for(family), num_beams=4, max_new_tokens=16, **TOKENS)
    assert len(at_every_step) > 1
    assert_stored("k")


@pytest.mark.parametrize("family", ["bart", "llama_multi_head"])
def test_one_alone_refilled(family: str) -> None:
    model, calls = well_conditioned(family), calls_of(family, num_beams=3)
    with harness.configured(cache="k"):
        for expected, result in zip(stock_results(model, calls), refilled(model, calls), strict=True):
            harness.assert_same(expected, result)
    assert_stored("k")


@pytest.mark.parametrize("family", ["llama_multi_head", "olmo", "gpt2"])
def test_one_alone_of_a_prompt_in_chunks(family: str) -> None:
    options = dict(num_beams=3, max_new_tokens=6, prefill_chunk_size=4)
    with harness.configured(cache="k"):
        harness.compare(well_conditioned(family), inputs_for(family, length=11), **options)
    assert_stored("k")


@pytest.mark.skipif(not versions.COUNTS_IN_TENSORS, reason="steps of this version are never replayed")
@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(("family", "kind"), [("bart", "k"), ("bart", "v"), ("llama_multi_head", "k")])
def test_one_alone_recorded(family: str, kind: str) -> None:
    model = copy.deepcopy(well_conditioned(family))
    with harness.configured(cache=kind):
        for seed in range(3):
            harness.compare(model, inputs_for(family, seed), **LONG)
            assert store.count(model) == 1
    assert_stored(kind)


@pytest.mark.parametrize("family", ["bart", "llama_multi_head"])
def test_one_alone_returns_the_hosts_cache(family: str) -> None:
    model, inputs = well_conditioned(family), inputs_for(family)
    options = dict(num_beams=3, max_new_tokens=9, **DETAILS)
    stock = harness.run_stock(model, inputs, **options)
    with harness.configured(cache="k"):
        output, _ = harness.run_fastgen(model, inputs, **options)
    assert_stored("k")
    for a, b in zip(getattr(stock, CACHE), getattr(output, CACHE), strict=True):
        for mine, theirs in zip(a, b, strict=True):
            if torch.is_tensor(mine):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["h", "k", "v"])
def test_never_wrong_tokens(kind: str) -> None:
    """From no condition at all to a hopeless one: what is not exact enough is refused."""
    stored, everything = [], {"h+k" if kind == "h" else kind}
    for exponent in range(10):
        with harness.configured(cache=kind):
            harness.compare(
                well_conditioned("bart", 10.0**-exponent), inputs_for("bart"), num_beams=3, max_new_tokens=12
            )
        stored.append({call.cache for call in report.calls()})
        if stored[-1] != everything:
            assert "its attention errs by" in report.calls()[-1].plan
    assert stored[0] == everything and stored[-1] == {"kv"}


@pytest.mark.parametrize("family", ["opt", "bart"])
def test_a_recording_is_of_one_kind(family: str) -> None:
    """Inputs, keys and values are as wide here: nothing but the kind tells their recordings apart."""
    model = copy.deepcopy(well_conditioned(family))
    inputs = inputs_for(family, batch=1)
    for kind in ("x", "k", "v", "k", "kv", "x"):
        with harness.configured(cache=kind):
            harness.compare(model, inputs, **LONG)
        assert_stored(kind_of(family) if kind == "x" else kind)
    with harness.configured(cache="k", cache_threshold=0.3):
        output, _ = harness.run_fastgen(model, inputs, num_beams=3, max_new_tokens=12, **DETAILS)
    with pytest.raises(AssertionError):
        harness.assert_same(harness.run_stock(model, inputs, num_beams=3, max_new_tokens=12, **DETAILS), output)


@pytest.mark.parametrize("kind", ["h", "k", "v"])
def test_edits_that_leave_no_trace(kind: str) -> None:
    """Through `weight.data`, as adapters merge themselves."""
    model = copy.deepcopy(well_conditioned("bart"))
    for _ in range(3):
        with harness.configured(cache=kind):
            harness.compare(model, inputs_for("bart", batch=1), **LONG)
        for layer in model.model.decoder.layers:
            for module in (layer.self_attn, layer.encoder_attn):
                module.k_proj.weight.data.mul_(1.3)
                module.v_proj.weight.data.mul_(-0.7)
    assert_stored("h+k" if kind == "h" else kind)


def test_a_first_layer_that_cannot() -> None:
    """Then the next one's keys are for all others."""
    model = copy.deepcopy(well_conditioned("bart"))
    torch.nn.utils.parametrizations.weight_norm(model.model.decoder.layers[0].encoder_attn.k_proj)
    with harness.configured(cache="h"):
        harness.compare(model.requires_grad_(False), inputs_for("bart"), num_beams=3, max_new_tokens=9)
    assert_stored("k+kv")


def test_a_rotation_that_scales() -> None:
    """What is stored rotated is divided by it when it is rotated back."""
    options = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, rope_theta=10000.0)
    config = transformers.LlamaConfig(**zoo.MULTI_HEAD, rope_parameters=options)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    assert model.model.rotary_emb.attention_scaling > 1.1
    inputs = zoo.inputs_for("llama_multi_head")
    for threshold in (0.0, 1e-30):
        with harness.configured(cache="k", cache_threshold=threshold):
            harness.compare(model, inputs, num_beams=3, max_new_tokens=9)
        assert "k" in str(report.calls()[-1].cache)


def test_double_precision() -> None:
    model = copy.deepcopy(zoo.load("bart")).double()
    options = dict(num_beams=3, max_new_tokens=9, tier="compat", **DETAILS)
    stock = harness.run_stock(model, inputs_for("bart"), **{k: v for k, v in options.items() if k != "tier"})
    output, _ = harness.run_fastgen(model, inputs_for("bart"), **options)
    assert "x" in str(report.calls()[-1].cache)
    for mine, theirs in zip(output.logits, stock.logits, strict=True):  # float32 when they are returned
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_release_forgets_inverted_weights() -> None:
    with harness.configured(cache="k"):
        harness.compare(well_conditioned("opt"), inputs_for("opt"), num_beams=3, max_new_tokens=6)
    assert planning._judged
    fastgen.release()
    assert not planning._judged


def test_weights_that_change_are_judged_again() -> None:
    model = copy.deepcopy(well_conditioned("opt"))
    attention = model.model.decoder.layers[0].self_attn
    with harness.configured(cache="k"):
        harness.compare(model, inputs_for("opt"), num_beams=3, max_new_tokens=9)
        assert_stored("k")
        with torch.no_grad():
            attention.k_proj.weight.mul_(2)
        harness.compare(model, inputs_for("opt"), num_beams=3, max_new_tokens=9)
        assert_stored("k")
        with torch.no_grad():
            attention.k_proj.weight[-1] = 0
        harness.compare(model, inputs_for("opt"), num_beams=3, max_new_tokens=9)
        assert_stored("k+kv")


@pytest.mark.parametrize(("family", "kind"), [("bart", "x"), ("bart", "k"), ("llama_multi_head", "k"), ("bart", "v")])
def test_a_threshold_is_an_approximation(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny one leaves out what rounding would; a large one changes what comes out."""
    model, options = well_conditioned(family), dict(num_beams=3, max_new_tokens=9, **DETAILS)
    with harness.configured(cache=kind, cache_threshold=1e-9):
        harness.compare(model, inputs_for(family), **options)
    stock = harness.run_stock(model, inputs_for(family), **options)
    with harness.configured(cache=kind, cache_threshold=0.3):
        output, _ = harness.run_fastgen(model, inputs_for(family), **options)
    with pytest.raises(AssertionError):
        harness.assert_same(stock, output)


def test_inspect() -> None:
    table = fastgen.inspect(well_conditioned("bart"), {**inputs_for("bart"), "num_beams": 3})
    assert [layer.is_cross_attn for layer in table.layers] == [False, True, False, True]
    for layer in table.layers:
        assert all(verdict.reason is None for verdict in layer.verdicts.values())
        assert layer.verdicts["k"].condition == pytest.approx(1, rel=1e-3)
    text = str(table)
    assert "model.decoder.layers.1.encoder_attn" in text and "refused" not in text
    assert "refused" in str(fastgen.inspect(well_conditioned("bart", 1e-9), inputs_for("bart")))


def test_inspect_says_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no slim caches: keys and values"):
        fastgen.inspect(zoo.load("qwen3"), zoo.inputs_for("qwen3"))
    with pytest.raises(ValueError, match="This call has no slim caches: output_attentions"):
        fastgen.inspect(zoo.load("opt"), {**zoo.inputs_for("opt"), "output_attentions": True, "num_beams": 2})
    with fastgen.disabled(), pytest.raises(ValueError, match="disabled"):
        fastgen.inspect(zoo.load("opt"), zoo.inputs_for("opt"))
    text = str(fastgen.inspect(zoo.load("llama"), zoo.inputs_for("llama")))
    assert "several query heads share a key head" in text and "rotated" in text


# ---------------------------------------------------------------------------------------------- where there is none
@pytest.mark.parametrize("family", ["qwen3", "gpt_neox", "led", "trocr", "bert2bert"])
def test_others_store_keys_and_values(family: str) -> None:
    if family in zoo.FALLBACK:
        pytest.skip("falls back on this version of transformers")
    for kind in ("x", "k", "v"):
        with harness.configured(cache=kind):
            harness.compare(zoo.load(family), inputs_for(family), num_beams=3, max_new_tokens=6)
        assert_stored("kv")
        assert "more than projections" in report.calls()[-1].plan


def test_a_batch_kept_full_says_why_too() -> None:
    refilled(zoo.load("llama"), calls_of("llama", num_beams=2))
    assert_stored("kv")
    assert "rotated" in report.calls()[-1].plan


@pytest.mark.parametrize("kind", ["x", "k", "v"])
@pytest.mark.parametrize("family", ["llama", "gemma", "mistral", "phi3"])
def test_rotary_models_with_shared_key_heads(family: str, kind: str) -> None:
    with harness.configured(cache=kind):
        harness.compare(zoo.load(family), inputs_for(family), num_beams=3, max_new_tokens=6)
    assert_stored("kv")
    assert ("share a key head" if kind == "k" else "rotated") in report.calls()[-1].plan


def test_half_precision_inverts_nothing() -> None:
    model = copy.deepcopy(well_conditioned("opt")).to(torch.bfloat16)
    with harness.configured(cache="k"):
        harness.run_fastgen(model, inputs_for("opt"), num_beams=3, max_new_tokens=6)
    assert_stored("kv")
    assert "nothing can be inverted" in report.calls()[-1].plan


def test_projections_of_another_kind() -> None:
    """Its weight is computed anew for each call: that layer stores keys and values, the others do not."""
    model = copy.deepcopy(zoo.load("opt"))
    torch.nn.utils.parametrizations.weight_norm(model.model.decoder.layers[1].self_attn.k_proj)
    harness.compare(model.requires_grad_(False), inputs_for("opt"), num_beams=3, max_new_tokens=6)
    assert_stored("x+kv")


def _one_for_both(model: Any) -> None:
    attention = model.model.decoder.layers[0].self_attn
    attention.v_proj = attention.k_proj


def _one_for_queries_too(model: Any) -> None:
    attention = model.model.decoder.layers[0].self_attn
    attention.q_proj = attention.k_proj


def _one_for_two_layers(model: Any) -> None:
    first, second = (layer.self_attn for layer in model.model.decoder.layers)
    second.k_proj = first.k_proj


def _one_for_two_sources(model: Any) -> None:
    first, second = (layer.encoder_attn for layer in model.model.decoder.layers)
    second.v_proj = first.v_proj


@pytest.mark.parametrize("kind", ["x", "h", "k", "v"])
@pytest.mark.parametrize("share", [_one_for_both, _one_for_queries_too, _one_for_two_layers, _one_for_two_sources])
def test_projections_that_are_shared(share: Callable[[Any], None], kind: str) -> None:
    """Who answers for one attention must not answer for another."""
    model = copy.deepcopy(well_conditioned("bart"))
    share(model)
    with harness.configured(cache=kind):
        harness.compare(model, inputs_for("bart"), num_beams=3, max_new_tokens=9, **DETAILS)
    assert "kv" in str(report.calls()[-1].cache)


@pytest.mark.parametrize("where", ["hook", "forward", "class", "autocast"])
def test_who_looks_at_keys_sees_keys(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(zoo.load("opt"))
    projection = model.model.decoder.layers[0].self_attn.k_proj
    seen = []
    if where == "hook":
        projection.register_forward_hook(lambda module, args, output: seen.append(output))
    elif where == "forward":
        stock = projection.forward
        projection.forward = lambda rows: seen.append(stock(rows)) or seen[-1]
    elif where == "class":
        stock = torch.nn.Linear.forward
        monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: seen.append(stock(self, x)) or seen[-1])
    reason = slim.unsupported_reason(model)
    if where == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert "autocast" in str(slim.unsupported_reason(model))
        return
    assert reason is not None and "of yours" in reason
    harness.compare(model, inputs_for("opt"), expected="fallback", num_beams=3, max_new_tokens=6)
    with harness.configured(foreign_code="trial"):
        harness.compare(model, inputs_for("opt"), num_beams=3, max_new_tokens=6)
    assert_stored("kv")
    assert seen and all(bool(output.any()) for output in seen)


@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_an_attention_of_yours_is_given_keys_and_values(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = AttentionInterface._global_mapping["sdpa"]

    def capped(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        return stock(module, query.tanh(), key.tanh(), value * 2, *rest, **more)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", capped)
    options = dict(num_beams=3, max_new_tokens=12, **DETAILS)
    harness.compare(zoo.load(family), inputs_for(family), expected="fallback", **options)
    with harness.configured(foreign_code="trial"):
        for _ in range(2):
            harness.compare(zoo.load(family), inputs_for(family), **options)
            assert_stored("kv")


# ---------------------------------------------------------------------------------------------- negative controls
@pytest.mark.parametrize("what", ["own", "source"])
def test_a_wrong_latent_shows(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were these tests blind to what is stored, they would pass with anything."""
    harness.compare(zoo.load("bart"), inputs_for("bart"), num_beams=3, max_new_tokens=12)  # tried out before
    if what == "own":
        take = SlimCaches.take
        monkeypatch.setattr(SlimCaches, "take", lambda self, states: take(self, states) * 1.5)
    else:
        seen = SlimCaches.seen_source
        monkeypatch.setattr(SlimCaches, "seen_source", lambda self: seen(self).flip(1))
    with pytest.raises(AssertionError, match=r"differ|tolerance"):
        harness.compare(zoo.load("bart"), inputs_for("bart"), num_beams=3, max_new_tokens=12, **DETAILS)
