"""Lists with models whose state or positions take no mask: each source gets what the host gives it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from tiny_models.shrinking import NotTiny, build

import fastgen
from fastgen import report
from fastgen.pipeline import batch_trial
from fastgen.pipeline.batch_effects import sees_others, sees_padding
from fastgen.pipeline.batch_trial import Sees, seen_by

READING = """BartForCausalLM BigBirdPegasusForCausalLM GitForCausalLM MvpForCausalLM
    RwkvForCausalLM WhisperForCausalLM XLMWithLMHeadModel XLNetLMHeadModel xLSTMForCausalLM""".split()
MASKING = "BloomForCausalLM FalconForCausalLM Qwen2ForCausalLM XGLMForCausalLM".split()
SOURCES = [
    torch.randint(5, 55, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
    for seed, size in enumerate((3, 9, 6, 14, 9))
]
SEARCHES: list[dict[str, Any]] = [dict(num_beams=1), dict(num_beams=3)]


def made(name: str) -> Any:
    try:
        model = build(name, 2)
    except NotTiny as error:
        pytest.skip(f"this version has no such class, or no tiny one: {error}")
    model.config.pad_token_id = model.generation_config.pad_token_id = zoo.PAD
    model.generation_config.eos_token_id = zoo.UNUSED
    return model


def accepted(model: Any, **search: Any) -> list[list[int]]:
    """What each source gets alone; skip where the host itself refuses the search."""
    try:
        return alone(model, **search)
    except (ValueError, TypeError) as error:
        pytest.skip(f"the host says {error}")


def alone(model: Any, **search: Any) -> list[list[int]]:
    inputs = [torch.tensor([source]) for source in SOURCES]
    with fastgen.disabled():
        found = [model.generate(one, attention_mask=torch.ones_like(one), **search)[0] for one in inputs]
    return [row.tolist() for row in found]


@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beams"])
@pytest.mark.parametrize("name", READING)
def test_each_source_gets_what_it_gets_alone(name: str, search: dict[str, Any]) -> None:
    model, options = made(name), dict(search, max_new_tokens=6, do_sample=False)
    expected = accepted(model, **options)
    state = torch.get_rng_state()
    assert seen_by(model, SOURCES, zoo.PAD) is not Sees.NOTHING
    assert torch.equal(torch.get_rng_state(), state) and not report.calls()
    assert [found[0].tolist() for found in fastgen.generate(model, SOURCES, batch_size=4, **options)] == expected


@pytest.mark.parametrize("name", MASKING)
def test_models_that_go_by_the_mask_have_full_batches(name: str) -> None:
    model, options = made(name), dict(num_beams=3, max_new_tokens=6)
    expected = alone(model, **options)
    assert not sees_padding(model, options, SOURCES) and not sees_others(model, options, SOURCES)
    found = fastgen.generate(model, SOURCES, batch_size=5, **options)
    assert [output[0].tolist() for output in found] == expected
    assert report.calls()[-1].batch == 5


def test_tried_once_and_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = batch_trial._tried
    monkeypatch.setattr(batch_trial, "_tried", lambda *args: (tried.append(1), real(*args))[1])
    model, known = made("BloomForCausalLM"), zoo.load("llama")
    assert seen_by(model, SOURCES[:1], zoo.PAD) is Sees.NOTHING
    assert not tried, "one source shares its batch with nobody"
    for _ in range(2):
        assert seen_by(model, SOURCES, zoo.PAD) is Sees.NOTHING
    assert len(tried) == 1
    for other in (known, zoo.load("bart")):
        assert seen_by(other, SOURCES, zoo.PAD) is Sees.NOTHING and len(tried) == 1


@pytest.mark.parametrize("settings", [dict(strict=True), dict(tier="stock"), dict(verify=1)], ids=str)
def test_with_settings_of_the_users(settings: dict[str, Any]) -> None:
    model = made("MambaForCausalLM")
    with fastgen.configured(**settings):
        assert seen_by(model, SOURCES, zoo.PAD) is Sees.NOTHING
    assert not report.calls()


def test_the_random_stream_goes_on() -> None:
    """Reformer draws numbers in each forward pass."""
    model, state = made("ReformerModelWithLMHead"), torch.get_rng_state()
    seen_by(model, SOURCES, zoo.PAD)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_trial_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other options may make up for it: each source has a call of its own."""
    model = made("BloomForCausalLM")
    with monkeypatch.context() as patched:
        patched.setattr(model, "generate", lambda **_: 1 / 0)
        assert seen_by(model, SOURCES, zoo.PAD) is Sees.OTHERS
    options = dict(num_beams=1, max_new_tokens=4)
    assert [found[0].tolist() for found in fastgen.generate(model, SOURCES, **options)] == alone(model, **options)
