"""Runs a search by the host, too, and compares the hypotheses: see `fastgen.optimizer.verification`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from fairseq import search
from torch import Tensor

from fastgen.optimizer import draws, verification
from fastgen.optimizer.fairseq.request import Request, calls_back, is_interrupted

_HOST = "fairseq"
_OPTIONS = """beam_size max_len_a max_len_b min_len normalize_scores len_penalty unk_penalty temperature
match_source_len""".split()
Hypotheses = list[list[dict[str, Any]]]


def _model_of(request: Request) -> Any:
    """The user's model; the first of several; None if the generator's `model` is no ensemble."""
    return next(iter(getattr(request.generator.model, "models", ())), None)


def run(
    request: Request,
    ours: Callable[[], Any],
    stock: Callable[[Any, dict[str, Any]], Any],
    view: Any,
    sample: dict[str, Any],
) -> Any:
    """Return the result of `ours`; if a comparison is due, compare it with `stock`, the host's search.

    `view`, `sample`: the arguments of `stock`, a view of the generator, to be changed here, and the sample.
    """
    model = _model_of(request)
    before = verification.RandomState(torch.device("cpu") if request.source is None else request.source.device)
    with verification.watching() as seen:
        result = ours()
    if not seen or model is None or not verification.is_due(model):
        return result
    if reason := _incomparable(request):
        verification.note(verification.UNVERIFIED, reason)
        return result
    # Sentences are numbered by place, as the host does if a sample has no numbers: the search is told which are left.
    if "id" in sample:
        sample = {**sample, "id": torch.arange(request.batch, device=torch.as_tensor(sample["id"], device=None).device)}
    gaps = torch.full((request.batch,), torch.inf, device="cpu")
    if type(request.generator.search) in (search.BeamSearch, search.Sampling):
        view.__dict__["search"] = _Looking(request.generator.search, gaps)
    question = verification.Question(_HOST, model, before, _facts(request))
    return question.answer(result, lambda: stock(view, sample), lambda theirs: _judged(theirs, result, gaps))


def _incomparable(request: Request) -> str | None:
    if calls_back(request) or is_interrupted(request):
        return "with code of yours between the steps"
    if not type(request.generator.search).__module__.startswith("fairseq."):
        return "with a search of yours"
    if any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in _model_of(request).parameters()):
        return "in half precision"
    return None


def _facts(request: Request) -> dict[str, Any]:
    generator = request.generator
    options = {name: getattr(generator, name, None) for name in _OPTIONS}
    inputs = request.sample["net_input"]
    return {
        "model": f"{type(_model_of(request)).__name__}, {len(generator.model.models)} of them",
        "search": type(generator.search).__name__,
        "inputs": verification.plain(inputs),
        "options": verification.plain({**options, "prefix_tokens": request.prefix_tokens}),
    }


class _Looking:
    """The host's beam search or sampling, which also notes by how little each sentence is decided, float `[B]`."""

    def __init__(self, stock: Any, gaps: Tensor) -> None:
        self._stock, self._gaps = stock, gaps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def step(
        self, step: int, lprobs: Tensor, scores: Tensor, prev_output_tokens: Any = None, original_batch_idxs: Any = None
    ) -> Any:
        """`lprobs` `[B', M, V]`: of the sentences `original_batch_idxs`, which are left; `scores` `[B', M, step]`."""
        left = torch.as_tensor(original_batch_idxs, device="cpu")

        def seen(gaps: Tensor) -> None:
            self._gaps[left] = torch.minimum(self._gaps[left], gaps.view(len(left), -1).min(1).values.cpu().float())

        if isinstance(self._stock, search.Sampling):
            with draws.watched(seen):
                return self._stock.step(step, lprobs, scores, prev_output_tokens, original_batch_idxs)
        beams = lprobs.shape[1]
        sums = lprobs[:, :1] if step == 0 else lprobs + scores[:, :, step - 1 :]
        seen(verification.least_gap(sums.flatten(1), 2 * beams))
        return self._stock.step(step, lprobs, scores, prev_output_tokens, original_batch_idxs)


def _judged(theirs: Hypotheses, mine: Hypotheses, gaps: Tensor) -> tuple[str, str]:
    found = [(number, _difference(*pair)) for number, pair in enumerate(zip(theirs, mine, strict=True))]
    apart = [(number, why) for number, why in found if why]
    for number, why in apart:
        ranked = [float(hypothesis["score"]) for hypothesis in theirs[number]]
        closest = min((a - b for a, b in itertools.pairwise(ranked)), default=float("inf"))
        if why != _TOKENS or min(float(gaps[number]), closest) >= verification.GAP:
            return verification.DIFFERENT, f"sentence {number}: {why}"
    return (verification.NEAR_TIE if apart else verification.SAME), ""


_TOKENS = "its hypotheses have other tokens"


def _difference(theirs: list[dict[str, Any]], mine: list[dict[str, Any]]) -> str | None:
    tokens = [[hypothesis["tokens"].tolist() for hypothesis in side] for side in (theirs, mine)]
    if tokens[0] != tokens[1]:
        return _TOKENS
    for a, b in zip(theirs, mine, strict=True):
        for name in ("score", "positional_scores"):
            one, other = (torch.as_tensor(each[name], device="cpu") for each in (a, b))
            if not torch.allclose(one, other, rtol=1e-5, atol=verification.TOLERANCE, equal_nan=True):
                return f"{name} differs by {float((one - other).abs().max()):.1e}"
    return None
