"""Times of Whisper's tokens: decode steps run on the tree, and the chosen tokens are aligned as the host does it."""

from __future__ import annotations

import copy
from typing import Any

import harness
import pytest
import torch
import zoo
from transformers import LogitsProcessor, LogitsProcessorList

import fastgen
from fastgen import report
from fastgen.optimizer.transformers import versions

pytestmark = pytest.mark.skipif(not versions.PREFILLS, reason="this version asks the model for attentions by name")

FRAME = 0.02  # seconds
TIMES = dict(return_token_timestamps=True, return_segments=True)
ATTENTIONS = {"cross_attentions", "decoder_attentions", "encoder_attentions"}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": dict(max_new_tokens=12),
    "to the end": dict(max_new_tokens=40),
    "samples": dict(max_new_tokens=12, do_sample=True, num_return_sequences=2),
    "timestamps": dict(max_new_tokens=12, return_timestamps=True),
    "a prompt": dict(max_new_tokens=12, prompt_ids=torch.tensor([7, 9, 11])),
    "fallback": dict(max_new_tokens=8, return_timestamps=True, temperature=(0.0, 0.6), logprob_threshold=-0.1),
}


@pytest.fixture
def model() -> Any:
    found = copy.deepcopy(zoo.load("whisper"))
    found.generation_config.alignment_heads = [[0, 1], [1, 0], [1, 2]]
    found.config.median_filter_width = 3
    return found


def _features(frames: int = 24, batch: int = 3) -> torch.Tensor:
    return zoo.features(None, batch=batch, length=frames)["input_features"]


def _generated(model: Any, features: torch.Tensor, **options: Any) -> Any:
    torch.manual_seed(1)
    model.set_attn_implementation("sdpa")  # the host leaves it eager
    return model.generate(features, **TIMES, **copy.deepcopy(options))


def _stock(model: Any, features: torch.Tensor, **options: Any) -> Any:
    with fastgen.disabled():
        return _generated(model, features, **options)


def _ours(model: Any, features: torch.Tensor, **options: Any) -> tuple[Any, set[str]]:
    report.reset()
    with fastgen.configured(history=64):
        found = _generated(model, features, **options)
    return found, {call.tier for call in report.calls()}


def _assert_same(stock: Any, ours: Any, times: bool = True) -> None:
    assert stock.keys() == ours.keys() and torch.equal(stock["sequences"], ours["sequences"])
    if times and "token_timestamps" in stock:
        torch.testing.assert_close(stock["token_timestamps"], ours["token_timestamps"], rtol=0, atol=FRAME)
    assert len(stock["segments"]) == len(ours["segments"])
    for theirs, mine in zip(stock["segments"], ours["segments"], strict=True):
        assert len(theirs) == len(mine)
        for one, other in zip(theirs, mine, strict=True):
            assert one.keys() == other.keys() and torch.equal(one["tokens"], other["tokens"])
            assert set(one["result"]) - set(other["result"]) <= ATTENTIONS, "nothing but attentions may be missing"
            if times:
                torch.testing.assert_close(one["token_timestamps"], other["token_timestamps"], rtol=0, atol=FRAME)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_stocks_times(model: Any, options: dict[str, Any]) -> None:
    for batch in (3, 1):
        features = _features(batch=batch)
        ours, tiers = _ours(model, features, **options)
        assert tiers == {"compat"}
        _assert_same(_stock(model, features, **options), ours)


def test_recordings_of_different_lengths(model: Any) -> None:
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[1, 16:], mask[2, 20:] = 0, 0
    for attention_mask in (mask, mask[:1].expand(3, -1)):
        options = dict(max_new_tokens=12, attention_mask=attention_mask)
        ours, tiers = _ours(model, _features(), **options)
        assert tiers == {"compat"}
        _assert_same(_stock(model, _features(), **options), ours)


@pytest.mark.parametrize("batch", [1, 2])
def test_long_recordings(model: Any, batch: int) -> None:
    features = _features(70, batch)
    options = dict(max_new_tokens=9, return_timestamps=True, attention_mask=torch.ones(batch, 70, dtype=torch.long))
    ours, tiers = _ours(model, features, **options)
    assert tiers == {"compat"}
    _assert_same(_stock(model, features, **options), ours)


class Forced(LogitsProcessor):
    """Makes greedy search choose these tokens, of which the first are the prompt, and then the end."""

    def __init__(self, tokens: torch.Tensor, end: int) -> None:
        self._tokens, self._end = tokens.tolist(), end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1]
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._tokens[place] if place < len(self._tokens) else self._end] = 0.0
        return forced


@pytest.mark.parametrize("returned", [1, 3])
def test_beams(model: Any, returned: int) -> None:
    """The tokens are stock's, and the times those that stock finds if it is made to choose these tokens greedily."""
    features, options = _features(), dict(max_new_tokens=12, num_beams=3, num_return_sequences=returned)
    ours, tiers = _ours(model, features, **options)
    assert tiers == {"fast"}
    _assert_same(_stock(model, features, **options), ours, times=False)
    for number, segments in enumerate(ours["segments"]):
        whole = segments[0]["result"]["sequences"]
        processors = LogitsProcessorList([Forced(whole, model.generation_config.eos_token_id)])
        sound = features[number // returned : number // returned + 1]
        forced = _stock(model, sound, max_new_tokens=12, logits_processor=processors)["segments"][0][0]
        assert torch.equal(forced["tokens"], segments[0]["tokens"])
        torch.testing.assert_close(segments[0]["token_timestamps"], forced["token_timestamps"], rtol=0, atol=FRAME)


def test_attentions_that_the_user_wants(model: Any) -> None:
    """The host decodes, and they are there."""
    options = dict(max_new_tokens=8, output_attentions=True)
    ours, tiers = _ours(model, _features(), **options)
    assert tiers == {"stock"} and "output_attentions" in str(report.calls()[-1].reason)
    stock = _stock(model, _features(), **options)
    _assert_same(stock, ours)
    assert set(stock["segments"][0][0]["result"]) == set(ours["segments"][0][0]["result"]) >= ATTENTIONS


def test_what_is_left_to_the_host_is_the_hosts(model: Any) -> None:
    model.get_decoder().layers[0].register_forward_hook(lambda *_: None)
    ours, tiers = _ours(model, _features(), max_new_tokens=8)
    assert tiers == {"stock"}
    assert set(ours["segments"][0][0]["result"]) >= ATTENTIONS
    _assert_same(_stock(model, _features(), max_new_tokens=8), ours)


def test_verified(model: Any) -> None:
    from fastgen.optimizer import verification

    verification.reset()
    with harness.configured(verify=1):
        _ours(model, _features(), max_new_tokens=8)
    assert verification.counts() == {verification.SAME: 1}
    verification.reset()
