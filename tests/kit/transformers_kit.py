"""fastgen-generate-transformers run on the shipped model, and what stock transformers makes of the same inputs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import fastgen
from fastgen.cli import generate_transformers
from fastgen.demo.job import SHIPPED_MODEL

MODEL = str(SHIPPED_MODEL)
FLAGS = ["--num-beams", "3", "--max-new-tokens", "24", "--workers", "0", "--quiet", "--batch-size", "5"]


def run(*arguments: object) -> int:
    return generate_transformers.main([str(argument) for argument in arguments])


def stock(texts: Sequence[str], **options: int) -> tuple[list[str], list[float]]:
    """Texts and scores, one input at a time by stock transformers."""
    return _stock(tuple(texts), tuple(options.items()))


@functools.cache
def _stock(texts: tuple[str, ...], options: tuple[tuple[str, int], ...]) -> tuple[list[str], list[float]]:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(MODEL).eval(), AutoTokenizer.from_pretrained(MODEL)
    flags = {"num_beams": 3, "max_new_tokens": 24, "return_dict_in_generate": True, "output_scores": True}
    outputs: list[str] = []
    scores: list[float] = []
    with fastgen.disabled(), torch.inference_mode():
        for text in texts:
            output = model.generate(tokenizer(text, return_tensors="pt").input_ids, **flags, **dict(options))
            outputs += tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
            scores += output.sequences_scores.tolist()
    return outputs, scores
