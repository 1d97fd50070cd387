"""The shipped model behind the service, and what stock transformers makes of the same request."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import fastgen
from fastgen.cli import serve
from fastgen.demo import task
from fastgen.demo.job import SHIPPED_MODEL
from fastgen.optimizer.transformers.generate.continuous_batch import ContinuousBatch
from fastgen.pipeline.transformers.hypotheses import hypotheses_of
from fastgen.pipeline.transformers.load import generation_config

TEXTS = [" ".join(next(task.sentences(seed, held_out=True))[0].split()[: 3 + 2 * seed % 13]) for seed in range(40)]


@functools.cache
def loaded() -> tuple[Any, Any]:
    return AutoModelForSeq2SeqLM.from_pretrained(SHIPPED_MODEL).eval(), AutoTokenizer.from_pretrained(SHIPPED_MODEL)


def config_of(**options: Any) -> Any:
    """What the service makes of a request's options."""
    config = generation_config(*loaded(), options, None)
    config.return_dict_in_generate = config.output_scores = True
    config._fastgen_sequence_scores_only = True
    return config


def stock(text: str, seed: int = 0, **options: Any) -> tuple[list[str], list[float | None]]:
    """Texts and scores of one input alone, by stock transformers."""
    model, tokenizer = loaded()
    config = config_of(**options)
    torch.manual_seed(seed)
    with fastgen.disabled(), torch.no_grad():
        output = model.generate(tokenizer(text, return_tensors="pt").input_ids, generation_config=config)
    (found,) = hypotheses_of(model, config, output, 0)
    return tokenizer.batch_decode(found.tokens, skip_special_tokens=True), found.scores


def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take their time, so that others can come and go in between."""
    step = ContinuousBatch.step
    monkeypatch.setattr(ContinuousBatch, "step", lambda self: (time.sleep(0.03), step(self))[1])


def model_settings(*flags: str) -> Any:
    """Those of `fastgen-serve` for the shipped model."""
    return serve.settings_of(serve.parser().parse_args([str(SHIPPED_MODEL), *flags]), None).model
