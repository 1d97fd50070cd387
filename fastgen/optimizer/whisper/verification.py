"""Runs a decoding by the host, too, and compares the results: see `fastgen.optimizer.verification`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fastgen.optimizer import draws, together, verification

_HOST = "whisper"
_SHOWN = "task language temperature sample_len best_of beam_size patience length_penalty fp16".split()


def run(stock: Callable[[Any, Tensor], Any], task: Any, mel: Tensor) -> Any:
    """Run `stock`, the host's `DecodingTask.run`, over the tree; if a comparison is due, compare with the host."""
    if not verification.is_on():
        return stock(task, mel)
    model, before = task.model, verification.RandomState(mel.device)
    with verification.watching() as seen:
        results = stock(task, mel)
    if not seen or not verification.is_due(model):
        return results
    if reason := _incomparable(task):
        verification.note(verification.UNVERIFIED, reason)
        return results
    gaps = torch.full((mel.shape[0],), torch.inf, device="cpu")

    def again() -> Any:
        with _looking(task, gaps):
            return stock(task, mel)

    options = {name: value for name, value in asdict(task.options).items() if name in _SHOWN and value is not None}
    facts = {"model": f"{type(model).__name__}, {model.dims}", "mel": tuple(mel.shape), "options": options}
    question = verification.Question(_HOST, model, before, facts)
    return together.outside(question.answer, results, again, lambda theirs: _judged(theirs, results, gaps))


def _incomparable(task: Any) -> str | None:
    parts = [task, task.decoder, task.sequence_ranker, *task.logit_filters]
    if any(type(part).__module__ != "whisper.decoding" for part in parts):
        return "with code of yours between the steps"
    return "in half precision" if task.options.fp16 else None


@contextlib.contextmanager
def _looking(task: Any, gaps: Tensor) -> Iterator[None]:
    """Inside the block, note by how little the host decides each segment, in `gaps`, float `[B]`."""
    update, rows = task.decoder.update, task.n_group
    beams = task.options.beam_size or 1

    def looked(tokens: Tensor, logits: Tensor, sum_logprobs: Tensor) -> Any:
        if task.options.temperature:
            with draws.watched(lambda apart: seen(apart.unflatten(0, (-1, rows)).min(1).values)):
                return update(tokens, logits, sum_logprobs)
        sums = logits.float().log_softmax(-1) + sum_logprobs[:, None]
        first = tokens.shape[1] == task.sample_begin  # all beams are the same
        sums = sums.unflatten(0, (-1, rows))[:, : 1 if first else rows].flatten(1)
        seen(verification.least_gap(sums, 2 * beams if beams > 1 else 1))
        return update(tokens, logits, sum_logprobs)

    def seen(apart: Tensor) -> None:
        torch.minimum(gaps, apart.cpu(), out=gaps)

    task.decoder.update = looked
    try:
        yield
    finally:
        del task.decoder.update


def _judged(theirs: list[Any], mine: list[Any], gaps: Tensor) -> tuple[str, str]:
    kind = verification.SAME
    for number, (a, b) in enumerate(zip(theirs, mine, strict=True)):
        if (a.tokens, a.language) != (b.tokens, b.language):
            if float(gaps[number]) >= verification.GAP or a.language != b.language:
                return verification.DIFFERENT, f"segment {number} has other tokens"
            kind = verification.NEAR_TIE
            continue
        for name in ("avg_logprob", "no_speech_prob"):
            if not math.isclose(
                getattr(a, name), getattr(b, name), rel_tol=1e-5, abs_tol=verification.TOLERANCE
            ) and not (math.isnan(getattr(a, name)) and math.isnan(getattr(b, name))):
                return verification.DIFFERENT, f"{name} of segment {number} differs"
    return kind, ""
