"""The demo's job: the shipped model and its sentences, or the user's own."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from fastgen.demo import task
from fastgen.demo.comparison import Job
from fastgen.pipeline.errors import InputError, tell, writable
from fastgen.pipeline.transformers.records import read_lines

SHIPPED_MODEL = Path(__file__).parent / "model"
SHIPPED_INPUTS = 320
SEED = 7  # the training script tests with another seed


def read_inputs(path: Path, limit: int | None) -> list[str]:
    """The file's lines that are not blank."""
    texts = [line for line in read_lines(path) if line.strip()][:limit]
    if not texts:
        raise InputError(f"The input file {path} holds no text: write one input a line.")
    return texts


def load(name: str, device: str) -> tuple[Any, Any]:
    """Model (float32, as its config says seq2seq or causal) and tokenizer."""
    from fastgen.pipeline.transformers import load, tokenizing

    load.check_path(name, "--model")
    where = load.find_device(device)
    with load.asking_the_hub([name], lambda text: tell(f"fastgen-demo: {text}")):
        config = load.load_config(name)
        tokenizer = tokenizing.load_tokenizer(tokenizing.TokenizerSpec(name))
    if why := tokenizing.why_unfit(tokenizer, config):
        raise InputError(f"Cannot use the model {name!r}: it {why}.")
    model = load.load_model(name, config, "float32", where)
    if not config.is_encoder_decoder:
        tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise InputError(f"The tokenizer of {name!r} has neither a padding nor an end token.")
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def build_job(
    model: str | None,
    source: Path | None,
    *,
    limit: int | None,
    beams: int,
    batch_size: int,
    max_new_tokens: int,
    device: str,
) -> Job:
    """Load the model, `model` or the shipped one, and read the inputs, the file `source` or the shipped sentences.

    Raises:
        InputError: the model or the file can't be used.
    """
    if model and not source:
        raise InputError("--model needs --input FILE, a text file with one input a line.")
    answers = None
    if source:
        sources = read_inputs(source, limit)
    else:
        pairs = list(itertools.islice(task.sentences(SEED, held_out=True), limit or SHIPPED_INPUTS))
        sources, answers = [s for s, _ in pairs], [t for _, t in pairs]
    loaded, tokenizer = load(model or str(SHIPPED_MODEL), device)
    max_new, max_source = _lengths(loaded, tokenizer, max_new_tokens)
    return Job(
        name=writable(model) if model else "the shipped demo model (figures to words)",
        model=loaded,
        tokenizer=tokenizer,
        sources=sources,
        answers=answers,
        beams=beams,
        batch_size=batch_size,
        max_new_tokens=max_new,
        max_source=max_source,
    )


def _lengths(model: Any, tokenizer: Any, max_new: int) -> tuple[int, int | None]:
    """New tokens and source tokens that the model has positions for; None: no limit known."""
    positions = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    if model.config.is_encoder_decoder:
        max_new, max_source = min(max_new, positions - 1), positions
    else:
        max_new = min(max_new, positions // 2)
        max_source = positions - max_new
    max_source = min(max_source, tokenizer.model_max_length)
    return max_new, None if max_source > 10**9 else max_source
