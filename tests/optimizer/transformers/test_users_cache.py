"""A cache that the user passes: tokens are stock's, and so is what is in the cache afterwards."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import harness
import pytest
import torch
import zoo
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache

import fastgen
from fastgen import report
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.cache import gathered, users_cache

pytestmark = pytest.mark.skipif(not versions.PREFILLS, reason="4.57 cuts prompts otherwise")
NAMES = [name for name in zoo.DECODERS if name in zoo.ACCELERATED]
SEARCHES: dict[str, dict[str, Any]] = {
    "beams": dict(num_beams=4, num_return_sequences=2),
    "greedy": dict(),
    "samples": dict(do_sample=True, top_k=12, num_return_sequences=3),
    "beam_samples": dict(num_beams=3, do_sample=True),
}
PREFIX, LENGTH = 9, 14


def rows_of(search: str) -> int:
    return SEARCHES[search].get("num_beams") or SEARCHES[search].get("num_return_sequences") or 1


def read_by_hand(model: Any, inputs: Any, length: int, rows: int, with_config: bool = True) -> DynamicCache:
    """A cache with the first tokens of each prompt, read without fastgen, `rows` rows for each."""
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    if length:
        mask = inputs["attention_mask"][:, :length]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad(), fastgen.disabled():
            model(
                inputs["input_ids"][:, :length], attention_mask=mask, position_ids=positions, **{versions.CACHE: cache}
            )
        cache.batch_repeat_interleave(rows)
    return cache


def both(model: Any, inputs: Any, cache: Any, **options: Any) -> list[tuple[Any, Any, tuple[report.Call, ...]]]:
    """Output, the user's cache afterwards, and calls: of stock and of fastgen."""
    found = []
    for is_ours in (False, True):
        own = copy.deepcopy(cache)
        torch.manual_seed(harness.SEED)
        report.reset()
        if is_ours:
            output = model.generate(**inputs, past_key_values=own, **options)
        else:
            with fastgen.disabled():
                output = model.generate(**inputs, past_key_values=own, **options)
        found.append((output, own, report.calls()))
    return found


def assert_same_caches(stock: Any, ours: Any) -> None:
    assert type(stock) is type(ours) and len(stock.layers) == len(ours.layers)
    assert vars(stock).keys() == vars(ours).keys()
    assert stock.get_seq_length() == ours.get_seq_length()
    for theirs, mine in zip(stock.layers, ours.layers, strict=True):
        assert type(theirs) is type(mine)
        assert vars(theirs).keys() == vars(mine).keys()
        for name, value in vars(theirs).items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                torch.testing.assert_close(getattr(mine, name), value, rtol=1e-4, atol=1e-4)
            elif isinstance(value, torch.Tensor):
                assert torch.equal(getattr(mine, name), value)
            else:
                assert getattr(mine, name) == value, name


@pytest.mark.parametrize("detailed", [True, False], ids=["dict", "tokens"])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", NAMES)
def test_as_stock(name: str, search: str, detailed: bool) -> None:
    model, options = zoo.load(name), {**SEARCHES[search], "max_new_tokens": 9}
    details = dict(return_dict_in_generate=True, output_scores=True, output_logits=True) if detailed else {}
    inputs = zoo.inputs_for(name, length=LENGTH)
    window = getattr(model.config, "sliding_window", None) or LENGTH
    length = min(PREFIX, window - 1)
    cache = read_by_hand(model, inputs, length, rows_of(search))
    for tier in harness.TIERS if "num_beams" in options else ("auto",):
        with harness.configured(strict=True, tier=tier):
            (stock, theirs, _), (ours, mine, calls) = both(model, inputs, cache, **options, **details)
        harness.assert_same(stock, ours)
        harness.assert_path(calls, tier, "accelerated")
        assert_same_caches(theirs, mine)
        if detailed:
            assert getattr(ours, versions.CACHE) is mine and getattr(stock, versions.CACHE) is theirs
        # What the tree took was not written to.
        again = read_by_hand(model, inputs, length, rows_of(search))
        assert all(torch.equal(a.keys, b.keys) for a, b in zip(again.layers, cache.layers, strict=True))


def test_the_documented_pattern() -> None:
    """One sentence, a cache without a configuration that is copied for each prompt, and used on for the next turn."""
    model = zoo.load("llama")
    inputs = zoo.inputs_for("llama", batch=2, length=LENGTH, ragged=False)
    prompts = [dict(input_ids=row[None], attention_mask=torch.ones_like(row[None])) for row in inputs["input_ids"]]
    prompts[1]["input_ids"][:, :PREFIX] = prompts[0]["input_ids"][:, :PREFIX]
    cache = read_by_hand(model, prompts[0], PREFIX, 1, with_config=False)
    for prompt in prompts:
        with harness.configured(strict=True):
            (stock, theirs, _), (ours, mine, _) = both(model, prompt, cache, max_new_tokens=6)
        assert torch.equal(stock, ours)
        assert_same_caches(theirs, mine)
        following = torch.cat([stock, prompts[0]["input_ids"][:, :3]], dim=1)
        turn = dict(input_ids=following, attention_mask=torch.ones_like(following))
        with harness.configured(strict=True):
            (stock, theirs, _), (ours, mine, _) = both(model, turn, mine, max_new_tokens=6)
        assert torch.equal(stock, ours)
        assert_same_caches(theirs, mine)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_returned_cache(name: str, beams: int) -> None:
    """Of one turn, for the next; then `reset`, and used for another prompt."""
    model, inputs = zoo.load(name), zoo.inputs_for(name, batch=1, length=5, ragged=False)
    options = dict(num_beams=beams, max_new_tokens=3, return_dict_in_generate=True)
    found = []
    # A window that has moved on stays with the host; and with beams, they begin alike only by chance.
    is_strict = beams == 1 and name != "mistral"
    for block in (fastgen.disabled(), harness.configured(strict=is_strict)):
        with block:
            first = model.generate(**inputs, **options)
            cache = getattr(first, versions.CACHE)
            longer = torch.cat([first.sequences, inputs["input_ids"][:, :2]], dim=1)
            again = dict(input_ids=longer, attention_mask=torch.ones_like(longer))
            second = model.generate(**again, **options, past_key_values=cache)
            lengths = [cache.get_seq_length()]
            cache.reset()
            lengths.append(cache.get_seq_length())
            if cache.layers[0].keys is None:  # before 5.24 it is filled with zeros
                third = model.generate(**again, **options, past_key_values=cache)
                lengths += third.sequences.flatten().tolist()
        found.append([first.sequences, second.sequences, torch.tensor(lengths)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("looks", [False, True])
def test_a_returned_cache_is_reset(looks: bool) -> None:
    """Whether its keys have been looked at or not; the tree does not stay behind them."""
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", length=LENGTH)
    with harness.configured(strict=True):
        output = model.generate(**inputs, num_beams=3, max_new_tokens=4, return_dict_in_generate=True)
    cache = getattr(output, versions.CACHE)
    if looks:
        assert cache.layers[0].keys.shape[2] == cache.get_seq_length() and not cache.layers[0]._stored
    with fastgen.disabled():
        output = model.generate(**inputs, num_beams=3, max_new_tokens=4, return_dict_in_generate=True)
    stocks = getattr(output, versions.CACHE)
    for each in (cache, stocks):
        each.reset()
    assert cache.get_seq_length() == stocks.get_seq_length()
    shape = 3 * inputs["input_ids"].shape[0], *cache_shape(model)
    found = [each.update(torch.ones(shape), torch.ones(shape), 0)[0] for each in (cache, stocks)]
    assert torch.equal(*found)


def cache_shape(model: Any) -> tuple[int, int, int]:
    config = model.config
    return config.num_key_value_heads, 3, config.hidden_size // config.num_attention_heads


@pytest.mark.parametrize("kind", ["kv", "x"])
def test_a_returned_cache_knows_nothing_of_later_weights(kind: str) -> None:
    model, inputs = zoo.fresh("bart"), zoo.inputs_for("bart", length=LENGTH)
    options = dict(num_beams=2, max_new_tokens=6, return_dict_in_generate=True)
    with fastgen.disabled():
        stock = getattr(model.generate(**inputs, **options), versions.CACHE)
    with harness.configured(strict=True, cache=kind):
        ours = getattr(model.generate(**inputs, **options), versions.CACHE)
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.self_attn.k_proj.weight.mul_(2)
            layer.encoder_attn.v_proj.weight.mul_(2)
    for theirs, mine in zip(stock.self_attention_cache.layers, ours.self_attention_cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)
    for theirs, mine in zip(stock.cross_attention_cache.layers, ours.cross_attention_cache.layers, strict=True):
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [DynamicCache, DynamicLayer], ids=lambda kind: kind.__name__)
def test_a_replaced_method_of_the_hosts_caches(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As who quantises keys does: the tree would call none of it."""
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", length=LENGTH)
    update = kind.update

    @functools.wraps(update)
    def rounding(self: Any, keys: Any, values: Any, *args: Any, **options: Any) -> Any:
        return update(self, (keys * 2).round() / 2, values, *args, **options)

    monkeypatch.setattr(kind, "update", rounding)
    with fastgen.disabled():
        stock = model.generate(**inputs, num_beams=3, max_new_tokens=8)
    report.reset()
    assert torch.equal(stock, model.generate(**inputs, num_beams=3, max_new_tokens=8))
    assert report.calls()[-1].tier == "stock" and f"{kind.__name__}.update" in (report.calls()[-1].reason or "")


def test_without_memory_the_cache_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out where the last layer is handed back."""
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", length=LENGTH)
    cache = read_by_hand(model, inputs, PREFIX, 3)
    gather, calls = gathered._gather, itertools.count()

    def failing(source: Any, index: Any) -> Any:
        if next(calls) == 2 * len(cache.layers) - 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return gather(source, index)

    monkeypatch.setattr(gathered, "_gather", failing)
    before = copy.deepcopy(cache)
    with pytest.raises(RuntimeError, match="can't allocate"), harness.configured(strict=True):
        model.generate(**inputs, past_key_values=cache, num_beams=3, max_new_tokens=6)
    assert next(calls) == 2 * len(cache.layers)
    before._is_user_defined = True  # which the host notes
    assert_same_caches(before, cache)


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_an_empty_cache(name: str, with_config: bool) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name, length=LENGTH)
    cache = read_by_hand(model, inputs, 0, 1, with_config)
    is_like = with_config or name != "mistral"  # without one it has no windows
    with harness.configured(strict=is_like):
        (stock, theirs, _), (ours, mine, calls) = both(model, inputs, cache, num_beams=3, max_new_tokens=9)
    assert torch.equal(stock, ours)
    assert_same_caches(theirs, mine)
    harness.assert_path(calls, "auto", "accelerated" if is_like else "fallback")


def test_recorded_steps() -> None:
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", length=LENGTH)
    cache = read_by_hand(model, inputs, PREFIX, 3)
    with harness.configured(strict=True, replay="always"):
        for _ in range(3):
            (stock, theirs, _), (ours, mine, _) = both(model, inputs, cache, num_beams=3, max_new_tokens=14)
            assert torch.equal(stock, ours)
            assert_same_caches(theirs, mine)
            model.generate(**inputs, num_beams=3, max_new_tokens=14)
            assert_same_caches(theirs, mine)  # later calls do not write to it


def test_a_cache_that_is_read_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: other keys give other scores."""
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", length=LENGTH)
    cache = read_by_hand(model, inputs, PREFIX, 3)
    states = users_cache._states
    monkeypatch.setattr(users_cache, "_states", lambda cache: [x + 0.5 for x in states(cache)])
    (stock, _, _), (ours, _, _) = both(
        model, inputs, cache, num_beams=3, max_new_tokens=6, return_dict_in_generate=True, output_scores=True
    )
    assert not torch.allclose(stock.scores[0], ours.scores[0], atol=1e-3)


# ---------------------------------------------------------------------------------------------- left to stock
class _Looks(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


def _round(part: Any) -> None:
    """Replace a method in the object itself."""
    update = part.update
    part.update = lambda keys, values, *args, **options: update((keys * 4).round() / 4, values, *args, **options)


def _left(model: Any, inputs: Any, cache: Any, reason: str, **options: Any) -> None:
    (stock, theirs, _), (ours, mine, calls) = both(model, inputs, cache, **options)
    assert torch.equal(stock, ours)
    assert_same_caches(theirs, mine)
    assert calls[-1].tier == "stock" and reason in calls[-1].reason, calls[-1]


def test_left_to_stock() -> None:
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", length=LENGTH)
    options = dict(num_beams=3, max_new_tokens=6)
    cache = read_by_hand(model, inputs, PREFIX, 3)
    _left(model, inputs, cache, "code of yours", logits_processor=LogitsProcessorList([_Looks()]), **options)
    other = copy.deepcopy(cache)
    other.layers[0].keys[1] += 0.1  # of one beam
    _left(model, inputs, other, "do not begin alike", **options)
    for part in (lambda cache: cache, lambda cache: cache.layers[1]):
        found = []
        for block in (fastgen.disabled(), harness.configured(strict=False)):
            rounded = copy.deepcopy(cache)
            _round(part(rounded))
            with block:
                found.append(model.generate(**inputs, past_key_values=rounded, **options))
        last = report.calls()[-1]
        assert torch.equal(*found) and last.tier == "stock" and "no plain DynamicCache" in (last.reason or "")
    # Only the tokens that are not in it.
    rest = dict(inputs, input_ids=inputs["input_ids"][:, PREFIX:])
    _left(model, rest, cache, "must be the beginning of input_ids", **options)
    with (
        pytest.raises(fastgen.FallbackError, match=f"the user passed {versions.CACHE}: "),
        harness.configured(strict=True),
    ):
        model.generate(**rest, past_key_values=copy.deepcopy(cache), **options)


def test_a_window_that_has_moved_on() -> None:
    model = zoo.load("mistral")
    inputs = zoo.inputs_for("mistral", length=LENGTH)
    cache = read_by_hand(model, inputs, model.config.sliding_window + 2, 3)
    _left(model, inputs, cache, "not all positions", num_beams=3, max_new_tokens=6)


def test_too_few_rows_raise_stocks_error() -> None:
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", length=LENGTH)
    cache = read_by_hand(model, inputs, PREFIX, 1)
    errors = []
    for block in (fastgen.disabled(), harness.configured(strict=False)):
        with block, pytest.raises(RuntimeError) as raised:
            model.generate(**inputs, past_key_values=copy.deepcopy(cache), num_beams=3, max_new_tokens=6)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_a_static_cache() -> None:
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", length=LENGTH)
    report.reset()
    model.generate(**inputs, past_key_values=StaticCache(config=model.config, max_cache_len=40), max_new_tokens=4)
    call = report.calls()[-1]
    assert call.tier == "stock" and "it is no plain DynamicCache" in (call.reason or "")


def test_verified_calls_leave_it_alone() -> None:
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", length=LENGTH)
    cache = read_by_hand(model, inputs, PREFIX, 3)
    with harness.configured(verify=1):
        (stock, theirs, _), (ours, mine, _) = both(model, inputs, cache, num_beams=3, max_new_tokens=6)
    assert torch.equal(stock, ours)
    assert_same_caches(theirs, mine)
