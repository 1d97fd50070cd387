"""What fastgen leaves to stock, and what an error leaves behind."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections.abc import Iterator
from types import MethodType
from typing import Any

import harness
import pytest
import torch
import transformers
import zoo
from disguise import disguised
from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessor, LogitsProcessorList, StaticCache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama import modeling_llama

import fastgen
from fastgen import report
from fastgen.cache import tree
from fastgen.optimizer.transformers import interception, support, versions
from fastgen.optimizer.transformers.cache import hosts_caches
from fastgen.optimizer.transformers.versions import CACHE

pytestmark = pytest.mark.always  # also where CI draws a part of the tests

SEARCH = dict(num_beams=3, max_new_tokens=7)


# ---------------------------------------------------------------------------------------------- left to stock
def assert_falls_back(model: Any, inputs: dict[str, Any], reason: str = "", **options: Any) -> None:
    """Identical to stock with a reason on record; in strict mode an error that says the same."""
    options = {**SEARCH, **options}
    harness.compare(model, inputs, expected="fallback", **options)
    recorded = fastgen.status().calls[-1].reason
    assert recorded is not None and reason in recorded, f"{reason!r} is not in {recorded!r}"
    with pytest.raises(fastgen.FallbackError) as raised:
        harness.run_fastgen(model, inputs, strict=True, **options)
    assert str(raised.value) == recorded


both = pytest.mark.parametrize("name", ["bart", "llama"])


@both
@pytest.mark.parametrize("option", ["output_attentions", "output_hidden_states"])
def test_inner_tensors(name: str, option: str) -> None:
    model = copy.deepcopy(zoo.load(name))  # the host leaves hooks on it
    if option == "output_attentions":  # stock needs eager attention for these
        model.set_attn_implementation("eager")
    assert_falls_back(model, zoo.inputs_for(name), option, **{option: True}, return_dict_in_generate=True)


def test_inner_tensors_have_stock_values() -> None:
    model, inputs = copy.deepcopy(zoo.load("bart")), zoo.inputs_for("bart")
    model.set_attn_implementation("eager")
    options = dict(SEARCH, output_attentions=True, output_hidden_states=True, return_dict_in_generate=True)
    stock = harness.run_stock(model, inputs, **options)
    output, _ = harness.run_fastgen(model, inputs, strict=False, **options)
    for name in ("decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        for theirs, mine in zip(stock[name], output[name], strict=True):
            for a, b in zip(theirs, mine, strict=True):
                assert torch.equal(a, b)


@both
@pytest.mark.parametrize("filled", [False, True])
def test_a_cache_of_the_user(name: str, filled: bool) -> None:
    """Empty, or (decoder-only) holding the keys of all tokens but the last: see test_users_cache.py for the latter."""
    model, inputs = zoo.load(name), zoo.inputs_for(name, ragged=False)

    def cache() -> Any:
        if model.config.is_encoder_decoder:
            return EncoderDecoderCache(DynamicCache(), DynamicCache())
        own = DynamicCache(config=model.config)
        if filled:
            rows = inputs["input_ids"][:, :-1].repeat_interleave(SEARCH["num_beams"], 0)
            model(input_ids=rows, **{CACHE: own}, use_cache=True)
        return own

    if filled and model.config.is_encoder_decoder:
        pytest.skip("a filled cache needs the encoder's states of an earlier call")
    stock = harness.run_stock(model, {**inputs, CACHE: cache()}, **SEARCH)
    output, calls = harness.run_fastgen(model, {**inputs, CACHE: cache()}, strict=False, **SEARCH)
    assert torch.equal(stock, output)
    if not model.config.is_encoder_decoder and zoo.MAJOR >= 5:
        harness.assert_path(calls, "auto", "accelerated")
        return
    harness.assert_path(calls, "auto", "fallback")
    with pytest.raises(fastgen.FallbackError, match=f"passed {CACHE}"):
        harness.run_fastgen(model, {**inputs, CACHE: cache()}, **SEARCH)


@both
def test_a_static_cache(name: str) -> None:
    assert_falls_back(zoo.load(name), zoo.inputs_for(name), "static", cache_implementation="static")


@both
def test_no_cache(name: str) -> None:
    assert_falls_back(zoo.load(name), zoo.inputs_for(name), "cache", use_cache=False)


def test_a_cache_that_is_not_used() -> None:
    """It is no sign of a newer host."""
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "fastgen leaves")
        harness.run_fastgen(
            model, {**inputs, CACHE: DynamicCache(config=model.config)}, strict=False, use_cache=False, **SEARCH
        )
    reason = fastgen.status().calls[-1].reason
    assert reason == "no cache of the standard kind is used" and not isinstance(reason, report.OfThisVersion)


@both
def test_training_mode(name: str) -> None:
    model = copy.deepcopy(zoo.load(name)).train()
    assert_falls_back(model, zoo.inputs_for(name), "training")


@pytest.mark.parametrize("name", zoo.FALLBACK)
def test_families_left_to_stock(name: str) -> None:
    assert_falls_back(zoo.load(name), zoo.inputs_for(name))


def test_a_model_that_reorders_its_cache_itself() -> None:
    model = copy.deepcopy(zoo.load("bart"))

    class Own(type(model)):  # type: ignore[misc]
        def _reorder_cache(self, cache: Any, beam_idx: torch.Tensor) -> Any:
            cache.reorder_cache(beam_idx)
            return cache

    model.__class__ = Own
    assert_falls_back(model, zoo.inputs_for("bart"), "reorder")


def test_tier_stock() -> None:
    """Asked for by the user: no reason to raise, even in strict mode."""
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama")
    stock = harness.run_stock(model, inputs, **SEARCH)
    output, calls = harness.run_fastgen(model, inputs, tier="stock", strict=True, **SEARCH)
    assert torch.equal(stock, output)
    assert [call.tier for call in calls] == ["stock"] and calls[0].reason


def test_disabled_records_nothing() -> None:
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama")
    fastgen.report.reset()
    harness.run_stock(model, inputs, **SEARCH)
    assert not fastgen.status().calls


# ---------------------------------------------------------------------------------------------- stock's own errors
BAD = {
    "unknown": dict(foo_bar=1),
    "no_beams": dict(num_beams=0),
    "too_many_returned": dict(num_beams=2, num_return_sequences=3),
    "not_a_number": dict(num_beams=2, length_penalty="long"),
    "no_length": dict(num_beams=2, max_new_tokens=0),
    "negative_temperature": dict(do_sample=True, temperature=-1.0),
    "bad_words": dict(bad_words_ids=[[-1]]),
    "early_stopping": dict(early_stopping="sometimes"),
    "low_memory": dict(low_memory=True),
}


@both
@pytest.mark.parametrize("case", BAD)
def test_bad_options_raise_what_stock_raises(name: str, case: str) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name)
    options = {**SEARCH, **BAD[case]}
    stock, mine = (_error_of(model, inputs, options, disabled) for disabled in (True, False))
    assert mine == stock
    if case not in ("early_stopping", "no_length"):  # these some versions accept
        assert stock is not None, "stock accepts this: the case tests nothing"


@both
def test_bad_inputs_raise_what_stock_raises(name: str) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name)
    for bad in (
        {**inputs, "input_ids": inputs["input_ids"] + zoo.VOCAB},  # out of the vocabulary
        {**inputs, "attention_mask": inputs["attention_mask"][:, :-1]},
        {**inputs, "input_ids": inputs["input_ids"][0]},
    ):
        stock, mine = (_error_of(model, bad, SEARCH, disabled) for disabled in (True, False))
        assert mine == stock


def _error_of(model: Any, inputs: dict[str, Any], options: dict[str, Any], disabled: bool) -> Any:
    try:
        if disabled:
            harness.run_stock(model, inputs, **options)
        else:
            harness.run_fastgen(model, inputs, strict=False, **options)
    except Exception as error:  # whatever it is, it is what we compare
        return type(error), str(error)
    return None


# ---------------------------------------------------------------------------------------------- errors inside our path
class Injected(Exception):
    pass


class FailsAtStep(LogitsProcessor):
    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left <= 0:
            raise Injected
        return scores


def _state(model: Any) -> dict[str, Any]:
    """All that a call might leave changed on the host: attributes of modules, configs, classes, registries."""
    state: dict[str, Any] = {
        "mixin": dict(vars(GenerationMixin)),
        "interface": dict(vars(AttentionInterface)),
        "functions": {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS},
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
    }
    for name, module in model.named_modules():
        state[f"class of {name}"] = dict(vars(type(module)))
        state[f"module {name}"] = {
            key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()
        }
        config = getattr(module, "config", None)
        if config is not None:
            state[f"config of {name}"] = {**config.to_dict(), "attention": config._attn_implementation}
    return state


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    assert before.keys() == after.keys()
    found = []
    for place in before:
        for key in before[place].keys() | after[place].keys():
            old, new = before[place].get(key), after[place].get(key)
            if isinstance(old, dict) and isinstance(new, dict):
                same = old.keys() == new.keys() and all(old[k] is new[k] or _equal(old[k], new[k]) for k in old)
            else:
                same = old is new or _equal(old, new)
            if not same:
                found.append(f"{place}.{key}")
    return found


def _equal(old: Any, new: Any) -> bool:
    simple = (bool, int, float, str, list, tuple, dict, set, type(None))
    return isinstance(old, simple) and type(old) is type(new) and old == new


@pytest.fixture(params=["bart", "t5", "trocr", "llama", "gpt_oss"])
def checked(request: pytest.FixtureRequest) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A model whose state must be the same after the test, and which must still generate."""
    model, inputs = zoo.load(request.param), zoo.inputs_for(request.param)
    stock = harness.run_stock(model, inputs, return_dict_in_generate=True, **SEARCH)
    harness.run_fastgen(model, inputs, **SEARCH)  # whatever is set up once, lazily, is set up now
    before = _state(model)
    yield model, inputs
    assert not _differences(before, _state(model))
    for tier in harness.TIERS:
        harness.compare(model, inputs, tier=tier, stock=stock, **SEARCH)
    assert not _differences(before, _state(model))


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("step", [1, 3])
def test_a_processor_that_raises(checked: Any, tier: str, step: int) -> None:
    model, inputs = checked
    processors = LogitsProcessorList([FailsAtStep(step)])
    with pytest.raises(Injected):
        harness.run_fastgen(model, inputs, tier=tier, logits_processor=processors, **SEARCH)


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("failure", [Injected, torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_step_that_raises(
    checked: Any, tier: str, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step, in the last attention module, when the tree is half written."""
    model, inputs = checked
    append, calls = tree.TreeLayer.append, 0

    def fail(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise failure()
        return append(*args)

    with monkeypatch.context() as patch:
        patch.setattr(tree.TreeLayer, "append", fail)
        with pytest.raises(failure):
            harness.run_fastgen(model, inputs, tier=tier, **SEARCH)
    assert calls == 6 and interception.current() is None


@pytest.mark.parametrize("tier", harness.TIERS)
def test_a_criterion_that_raises(checked: Any, tier: str) -> None:
    model, inputs = checked

    def criterion(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        raise Injected

    with pytest.raises(Injected):
        harness.run_fastgen(model, inputs, tier=tier, stopping_criteria=[criterion], **SEARCH)


def test_configuration_errors_name_the_option() -> None:
    with pytest.raises(ValueError, match="tier"):
        fastgen.configure(tier="fastest")
    with pytest.raises(TypeError, match="strictly"):
        fastgen.configure(strictly=True)


# ---------------------------------------------------------------------------------------------- changed by the user
class _OwnAttention(modeling_llama.LlamaAttention):
    """As remote code may have it: nothing in `forward` shows that it attends by itself."""

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        return self._run(hidden_states, **kwargs)

    def _run(self, states: Any, position_embeddings: Any, attention_mask: Any, **others: Any) -> Any:
        shape = (*states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        if (cache := others.get(CACHE)) is not None:
            k, v = cache.update(k, v, self.layer_idx)
        mask = None if q.shape[2] == 1 else attention_mask
        causal = mask is None and q.shape[2] > 1
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(*states.shape[:-1], -1)), None


@pytest.mark.skipif(not versions.FINDS_EAGER, reason="before 5.0 flex attention wants a compiler")
@pytest.mark.parametrize("beams", [1, 3])
def test_masks_that_are_no_tensors(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention takes a `BlockMask`, which the host hands through."""
    for where, value in {  # it would be compiled, for minutes
        "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
        "torch.compile": disguised(lambda function, **options: function, torch.compile),
        "transformers.integrations.flex_attention.WrappedFlexAttention._instance": None,
    }.items():
        monkeypatch.setattr(where, value)
    model = copy.deepcopy(zoo.load("llama"))
    model.set_attn_implementation("flex_attention")
    assert_falls_back(model, zoo.inputs_for("llama"), "flex_attention", num_beams=beams, max_new_tokens=4)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_tested_type_with_an_attention_of_its_own(batch: int) -> None:
    model = copy.deepcopy(zoo.load("llama"))
    for index, layer in enumerate(model.model.layers):
        own = _OwnAttention(model.config, index).eval()
        own.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = own
    inputs = zoo.inputs_for("llama", batch=batch, ragged=False)
    assert_falls_back(model, {"input_ids": inputs["input_ids"]}, "which has its own forward")
    with harness.configured(foreign_code="trial"):
        assert_falls_back(model, {"input_ids": inputs["input_ids"]}, "it cannot run on the tree")


def test_attention_replaced_after_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", ragged=False)
    harness.compare(model, inputs, **SEARCH)

    def forward(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
        if kwargs[CACHE] is not None:  # says that it fills the cache by itself
            assert kwargs[CACHE].update
        return stock(self, hidden_states, **kwargs)

    stock = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    assert_falls_back(model, inputs, "has another forward than transformers's LlamaAttention")


@pytest.mark.parametrize("where", ["instance", "mixin"])
def test_search_rules_replaced(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own loop then runs the user's rule, over the tree; where a trial would have to run it too, it is left
    to the host."""
    model, inputs, calls = zoo.load("bart"), zoo.inputs_for("bart"), []
    stock_rule = GenerationMixin._get_top_k_continuations

    def rule(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return stock_rule(self, *args, **kwargs)

    owner, value = (model, MethodType(rule, model)) if where == "instance" else (GenerationMixin, rule)
    monkeypatch.setattr(owner, "_get_top_k_continuations", value)
    stock = harness.run_stock(model, inputs, **SEARCH)
    seen = len(calls)
    output, recorded = harness.run_fastgen(model, inputs, strict=False, **SEARCH)
    assert recorded[-1].tier == ("compat" if versions.FINDS_EAGER else "stock")
    assert "_get_top_k_continuations" in str(recorded[-1].reason)
    assert torch.equal(stock, output) and len(calls) == 2 * seen > 0


def test_a_rope_that_begins_anew() -> None:
    """Phi3 drops its cache where the long factors of its rope begin."""
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[2.0] * 4)
    config = copy.deepcopy(zoo.load("phi3").config)
    config.original_max_position_embeddings = 12
    if zoo.MAJOR >= 5:
        config.rope_parameters = dict(rope, original_max_position_embeddings=12)
    else:
        config.rope_scaling = dict(type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4)
    torch.manual_seed(0)
    model = type(zoo.load("phi3"))(config).eval()
    inputs = {"input_ids": zoo.inputs_for("phi3", ragged=False, length=10)["input_ids"]}
    assert_falls_back(model, inputs, "from 12 tokens on")


def test_dynamically_quantised_layers() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch was built without fbgemm")
    model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(zoo.load("bart")), {torch.nn.Linear})
    assert_falls_back(model, zoo.inputs_for("bart"), "dynamically quantised")


def test_caches_of_a_newer_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another name, or of a kind that no version tested has: the user hears of it once."""
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart")
    monkeypatch.setattr(report, "_warned", set())
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="its cache is called") as caught:
        patch.setattr(support, "CACHE", "keys_and_values")
        for _ in range(2):
            assert_falls_back(model, inputs, f"its cache is called {CACHE}, and not keys_and_values")
    assert len(caught) == 1
    monkeypatch.setattr(report, "_warned", set())
    kind = type("FoldedCache", (DynamicCache,), {"__module__": DynamicCache.__module__})
    reason = hosts_caches.unsupported_cache(kind())
    assert reason == "its cache is a FoldedCache" and isinstance(reason, report.OfThisVersion)
    assert not isinstance(hosts_caches.unsupported_cache(StaticCache(model.config, 8)), report.OfThisVersion)
    mine = type("FoldedCache", (DynamicCache,), {"__module__": "mine"})
    assert not isinstance(hosts_caches.unsupported_cache(mine()), report.OfThisVersion)


def test_a_host_without_a_name_that_we_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out at the first call: one warning, and the host's own search."""
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart")
    stock = harness.run_stock(model, inputs, **SEARCH)
    monkeypatch.setitem(sys.modules, "fastgen.optimizer.transformers.dispatch", None)
    monkeypatch.delattr("fastgen.optimizer.transformers.dispatch")
    try:
        monkeypatch.setattr(report, "_warned", set())
        with pytest.warns(RuntimeWarning, match="leaves transformers .* alone"):
            assert torch.equal(model.generate(**inputs, **SEARCH), stock)
        assert torch.equal(model.generate(**inputs, **SEARCH), stock)
        host = fastgen.status().hosts[0]
        assert host.state == "left alone" and "fastgen.optimizer.transformers.dispatch" in host.detail
    finally:
        monkeypatch.undo()
        fastgen.disable()
        fastgen.enable()
    harness.compare(model, inputs, **SEARCH)
    assert fastgen.status().hosts[0] == report.HostStatus("transformers", transformers.__version__, "accelerated")


@pytest.mark.parametrize(
    ("changed", "gains"),
    [
        ({}, True),
        ({"calls_back": True}, False),
        ({"foreign": ["a hook"]}, False),
        ({"facts": types.SimpleNamespace(is_watched=True)}, False),
        ({"off_tree": "it attends in chunks"}, False),
        ({"cuda_graphs": False}, False),
    ],
    ids=str,
)
def test_one_sample_on_a_gpu(changed: dict[str, Any], gains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gains by replayed steps alone: where there are none, the host decodes."""
    changed = dict(changed)
    graphs, off_tree = changed.pop("cuda_graphs", True), changed.pop("off_tree", None)
    request: Any = types.SimpleNamespace(
        model=torch.nn.Linear(1, 1),
        input_ids=types.SimpleNamespace(device=torch.device("cuda"), shape=(1, 4)),
        generation_config=types.SimpleNamespace(max_length=40),
        batch=1,
        is_beam_search=False,
        calls_back=False,
        foreign=[],
        facts=types.SimpleNamespace(is_watched=False),
    )
    monkeypatch.setattr(support, "off_tree_reason", lambda request: off_tree)
    monkeypatch.setattr(support.versions, "COUNTS_IN_TENSORS", True)
    for name, value in changed.items():
        setattr(request, name, value)
    with fastgen.configured(cuda_graphs=graphs):
        assert support._one_row_gains(request) == gains


def test_one_sample_without_a_cache_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it gains is asked last: the question is about the cache, and there may be none."""
    monkeypatch.setattr(support, "_one_row_gains", lambda request: support.off_tree_reason(request) is None)
    for family in ("gpt2", "bart"):
        model, inputs = zoo.load(family), zoo.inputs_for(family)
        harness.compare(model, inputs, expected="fallback", use_cache=False, max_new_tokens=6)
        harness.compare(model, inputs, max_new_tokens=6)


@pytest.mark.skipif(zoo.MAJOR < 5, reason="4.57 has other caches for it")
@pytest.mark.parametrize("beams", [1, 3])
def test_logits_that_are_no_numbers(beams: int) -> None:
    """A trial has nothing to compare; once there are numbers the model is tried."""
    model, inputs = copy.deepcopy(zoo.load("lfm2")), zoo.inputs_for("lfm2")
    norm, options = model.model.embedding_norm.weight, dict(num_beams=beams, max_new_tokens=4)
    kept = norm.detach().clone()
    norm.fill_(torch.nan)
    harness.compare(model, inputs, expected="fallback", return_dict_in_generate=False, **options)
    assert "not finite" in str(fastgen.status().calls[-1].reason)
    norm.copy_(kept)
    harness.compare(model, inputs, **options)
