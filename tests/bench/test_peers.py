"""The peers: each decodes what transformers decodes, from the same weights."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.bench import data, measure, quality
from fastgen.bench.measure import Settings
from fastgen.bench.tasks import Task

pytest.importorskip("transformers")

# Shapes whose layers are few and whose vocabulary is large: what little there is to compute is the model's own.
TASK = Task("tiny", "x", "transformer-base", (), batch=2, source=7, new=5, beams=3, layers=1)
needs_ctranslate2 = pytest.mark.skipif(
    importlib.util.find_spec("ctranslate2") is None, reason="CTranslate2 is not installed"
)
needs_fairseq = pytest.mark.skipif(importlib.util.find_spec("fairseq") is None, reason="fairseq is not installed")


def sides(task: Task, *names: str, show: tuple[str, ...] = ()) -> dict[str, Any]:
    task = dataclasses.replace(task, sides=names, rounds=1)
    result, _ = measure.run(task, Settings(threads=1, counts=True), list(show), lambda what: None)
    return dict(result["sides"])


@needs_ctranslate2
@pytest.mark.slow
@pytest.mark.parametrize("model", ["transformer-base", "gpt2", "t5-base", "demo"])
def test_ctranslate2_has_the_same_weights_and_lengths(model: str) -> None:
    task = dataclasses.replace(TASK, model=model, limit=3, new=30 if model == "demo" else 5)
    found = sides(task, "transformers", "ctranslate2", "ctranslate2-int8")
    verified = found["ctranslate2"]["verified"]
    assert verified["same_tokens"] > 0.9 and not verified["must"]  # ties of random weights may fall out differently
    assert "refused" not in found["ctranslate2-int8"]


@pytest.mark.slow
def test_a_missing_peer_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ctranslate2") is not None:
        pytest.skip("CTranslate2 is installed")
    found = sides(TASK, "transformers", "ctranslate2", "fastgen")
    assert found["ctranslate2"] == {
        "refused": "CTranslate2 is not installed: pip install ctranslate2",
        "missing": True,
    }
    assert found["fastgen"]["verified"]["different"] == []


@needs_fairseq
@pytest.mark.slow
@pytest.mark.parametrize("model", ["transformer-base", "gpt2", "bart-base", "prophetnet-large"])
def test_fairseq(model: str) -> None:
    found = sides(dataclasses.replace(TASK, model=model), "fairseq", "fastgen-fairseq", show=("phases",))
    ours = found["fastgen-fairseq"]
    assert ours["verified"]["different"] == [] and ours["verified"]["outputs"] == 2 and ours["verified"]["must"]
    assert ours["tiers"]["fast"] + ours["tiers"]["compat"] == 1 and ours["tiers"]["stock"] == 0
    assert "tiers" not in found["fairseq"] and found["fairseq"]["counts"]["operators"] > 0


@pytest.mark.slow
def test_sampling_draws_stocks_tokens() -> None:
    options = {"do_sample": True, "top_k": 32, "top_p": 0.75}
    found = sides(dataclasses.replace(TASK, beams=1, options=options), "transformers", "fastgen")
    assert found["fastgen"]["verified"]["different"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fastgen-compat", "fastgen-tree", "fastgen-slim", "fastgen-kv"])
def test_modes_are_what_they_are_called(name: str) -> None:
    found = sides(TASK, "transformers", name)[name]
    assert found["verified"]["different"] == [] and found["counts"]["operators"] > 0
    assert found["tiers"]["compat" if name == "fastgen-compat" else "fast"] == 1


@pytest.mark.slow
def test_the_parts_of_fastgen_leave_the_text_as_it_is() -> None:
    from fastgen.bench.suites import SUITES

    (section,) = SUITES["fastseq-table2"](True)
    task = dataclasses.replace(section.tasks[0], limit=6, batch=2, new=20, beams=2)
    found = sides(task, "lines", "lines-pipeline", "lines-ngrams", "lines-3", "lines-5")
    for name in list(found)[1:]:
        assert found[name]["verified"]["different"] == [] and found[name]["verified"]["outputs"] == 6, name
        assert ("tiers" in found[name]) == (name in ("lines-3", "lines-5"))


@pytest.mark.slow
def test_lists_are_decoded_as_batches_are() -> None:
    task = dataclasses.replace(TASK, model="demo", limit=5, new=30)
    found = sides(task, "transformers", "fastgen-lists", "fastgen-refill")
    for name in ("fastgen-lists", "fastgen-refill"):
        assert found[name]["verified"]["different"] == [] and found[name]["verified"]["outputs"] == 5
        assert found[name]["tiers"]["fast"] > 0 and found[name]["tiers"]["stock"] == 0


@pytest.mark.slow
def test_a_static_cache_is_compiled() -> None:
    task = dataclasses.replace(TASK, batch=1, beams=1)
    found = sides(task, "transformers", "transformers-static")
    assert found["transformers-static"]["verified"]["same_tokens"] == 1
    # Compiling takes seconds, a call of this size tenths of one.
    assert found["transformers-static"]["first_seconds"] > 5 * found["transformers"]["first_seconds"]


def test_speech_needs_no_text(tmp_path: Path) -> None:
    """A Whisper of random weights on noise, by the calls that the trained one gets."""
    import numpy
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    from fastgen.bench.runners.transformers import Runner

    torch.manual_seed(0)
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2)
    WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads)).save_pretrained(tmp_path / "whisper")
    WhisperFeatureExtractor().save_pretrained(tmp_path / "whisper")
    (tmp_path / "data/audio").mkdir(parents=True)
    numpy.save(tmp_path / "data/audio/jfk.npy", numpy.random.default_rng(0).normal(size=16000).astype("float32"))
    task = dataclasses.replace(TASK, model="whisper", new=4)
    order = {"task": task.as_dict(), "options": {}, "device": "cpu", "dtype": "float32", "threads": 1}
    runner = Runner(order | {"folders": {"shared": str(tmp_path), "whisper": str(tmp_path / "whisper")}})
    outputs = runner.outputs(runner.generate())
    assert len(outputs["tokens"]) == 2 and outputs["tokens"][0] == outputs["tokens"][1]


@pytest.mark.parametrize(("limit", "count"), [(0, 4), (1, 1)])
def test_words_of_each_clip(limit: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of four clips has four texts to compare with."""
    tokenizer = SimpleNamespace(decode=lambda tokens, **_: data.SPEECH if tokens else "And so")
    monkeypatch.setattr(data, "tokenizer_of", lambda *_: tokenizer)
    task = {"model": "whisper", "batch": 4, "limit": limit}
    assert quality.metrics(task, {}, [[1]] * count) == {"word error rate": 0.0}
    assert quality.metrics(task, {}, [[]] * count)["word error rate"] > 80
