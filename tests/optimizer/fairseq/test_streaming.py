"""`fastgen.stream` with fairseq: the tokens of the best hypothesis, as they are decided."""

from __future__ import annotations

import copy
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models.bart.hub_interface import BARTHubInterface
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf

import fastgen
from fastgen.optimizer import beam_streaming

BEAMS = (1, 2, 5)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    dict(len_penalty=2.0, max_len_b=30),
    dict(len_penalty=-1.0),
    dict(len_penalty=0.0, min_len=6),
    dict(normalize_scores=False),
    dict(unk_penalty=-3.0),
    dict(no_repeat_ngram_size=2, max_len_b=30),
)


def generator_of(name: str, **options: Any) -> SequenceGenerator:
    return SequenceGenerator([models.load(name)], models.dictionary(), **{"beam_size": 4, "max_len_b": 14, **options})


@pytest.mark.parametrize("name", ["post-norm", "pre-norm", "bart"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_tokens_of_the_best_hypothesis(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    early = 0
    finish = beam_streaming.BeamStreaming.finish

    def noted(self: Any, best: torch.Tensor) -> None:
        nonlocal early
        early += sum(map(len, self._front._told))
        finish(self, best)

    monkeypatch.setattr(beam_streaming.BeamStreaming, "finish", noted)
    for beams, seed in itertools.product(BEAMS, range(4)):
        sample = models.batch([9], seed=seed)
        run = functools.partial(models.generate, name, sample, beam_size=beams, **options)
        # Of stock's own n-gram bans see `_NgramBlocker`.
        expected = judge.ours(run)[0] if "no_repeat_ngram_size" in options else judge.stock(run)
        generator = generator_of(name, beam_size=beams, **options)
        found = fastgen.stream(generator, [models.load(name)], sample)
        assert list(found) == expected[0][0]["tokens"].tolist()
        assert fastgen.status().calls[-1].tier == "fast"
    assert early, "nothing is told before the end"


def test_the_prefix_is_streamed_too() -> None:
    sample, prefix = models.prompts([6]), models.prompts([6])["net_input"]["src_tokens"]
    expected = judge.stock(lambda: models.prompted("lm", sample, beam_size=3))
    tokens = fastgen.stream(
        generator_of("lm", beam_size=3), [models.load("lm")], sample, prefix_tokens=prefix, bos_token=models.EOS
    )
    found = list(tokens)
    assert found == expected[0][0]["tokens"].tolist() and found[:6] == prefix[0].tolist()


def test_a_hub_interface() -> None:
    words = models.dictionary()
    task = TranslationTask(OmegaConf.structured(TranslationConfig), words, words)
    hub = BARTHubInterface(OmegaConf.structured(FairseqConfig), task, copy.deepcopy(models.load("bart"))).eval()
    hub.bpe = SimpleNamespace(encode=str, decode=str)
    tokens = hub.encode("w5 w6 w7 w8 w9 w10")
    expected = judge.stock(lambda: hub.generate([tokens], beam=4, max_len_b=12))
    assert list(fastgen.stream(hub, [tokens], beam=4, max_len_b=12)) == expected[0][0]["tokens"].tolist()
    with pytest.raises(ValueError, match="one input at a time: this call has 2 sentences"):
        list(fastgen.stream(hub, [tokens, tokens], beam=4, max_len_b=12))


def test_leaving_early() -> None:
    sample = models.batch([9])
    tokens = fastgen.stream(generator_of("post-norm", min_len=12), [models.load("post-norm")], sample)
    next(tokens)
    tokens.close()
    judge.compare(lambda: models.generate("post-norm", sample))


def test_what_cannot_be_streamed() -> None:
    sample, model = models.batch([9]), models.load("post-norm")
    constrained = generator_of("post-norm", match_source_len=True)
    with pytest.raises(ValueError, match="needs fastgen's own beam search: match_source_len rejects"):
        list(fastgen.stream(constrained, [model], sample))
    with fastgen.configured(tier="compat"), pytest.raises(ValueError, match="tier='compat' is configured"):
        list(fastgen.stream(generator_of("post-norm"), [model], sample))
    with fastgen.disabled(), pytest.raises(ValueError, match="fastgen is disabled"):
        list(fastgen.stream(generator_of("post-norm"), [model], sample))
