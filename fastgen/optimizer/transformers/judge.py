"""Judges whether fastgen's output equals stock's, exactly or except for choices that rounding decides in stock.

In float32 and float64 all tokens must be the same. Where they part, stock runs again and its choice at that step is
looked at: two candidates within 1e-5 are a near-tie. Scores of the same tokens must be within the tolerance.

In half precision sums in another order differ visibly, and so do tokens soon after. There the claim is another: if the
search is given stock's scores at every step, all tokens are stock's, and the logits for these tokens are stock's within
the precision's tolerance.

If stock can run in float64, too, differences beyond these tolerances still count as rounding if fastgen's scores, for
the same tokens, are at most twice as far from the float64 scores as stock's are. Where tokens part, the gap of stock's
choice must then be at most twice stock's error up to that step, which is all that this error can reverse. In half
precision logits may be at most twice the tolerance apart.
"""

from __future__ import annotations

import contextlib
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList

from fastgen import locks
from fastgen.optimizer import draws
from fastgen.optimizer.verification import GAP, TOLERANCE, least_gap

SAME, NEAR_TIE, ROUNDING, DIFFERENT = "same", "near-tie", "rounding", "different"
BY_LOGITS = "logits of the same tokens"
PARTED = 1e-3  # scores for other tokens differ by more
# Largest difference of two logits for the same tokens, relative to the largest logit.
HALF_TOLERANCE = {"bfloat16": 0.1, "float16": 0.02}
DETAILS = {"return_dict_in_generate": True, "output_scores": True}
_SCORES = ("sequences_scores", "scores", "logits")
Run = Callable[..., Any]  # runs the call with further options, and returns the output
_recording = locks.lock()  # only one thread at a time replaces the host's functions


@dataclass(frozen=True)
class Verdict:
    kind: str
    why: str = ""


def judged(stock: Run, ours: Run, beams: int, half: str = "", exact: Run | None = None) -> Verdict:
    """Run both and compare them, several times if needed; each must return the same each time.

    Args:
        half: the dtype of the linear layers, if that is one of half precision.
        exact: stock in float64, if scores and choices may be judged by it: ROUNDING.
    """
    theirs, mine = outcome(stock), outcome(ours)
    errors = [isinstance(result, Exception) for result in (theirs, mine)]
    if any(errors):
        same = all(errors) and type(theirs) is type(mine) and str(theirs) == str(mine)
        return Verdict(SAME) if same else Verdict(DIFFERENT, f"stock: {_said(theirs)}; fastgen: {_said(mine)}")
    if half:
        if type(theirs) is type(mine) and torch.equal(sequences_of(theirs), sequences_of(mine)):
            return Verdict(SAME)
        return _given_stocks_scores(stock, ours, HALF_TOLERANCE[half], exact)
    found = difference(theirs, mine)
    if found is None:
        return Verdict(SAME)
    if exact is not None and found.partition(":")[0] in _SCORES and _rounds_alike(outcome(exact), theirs, mine):
        return Verdict(ROUNDING, found)
    gaps = Gaps(beams)
    # All hypotheses: one that is as good as the last one returned is a tie with it.
    details = {**DETAILS, **({"num_return_sequences": beams} if beams > 1 else {})}
    with gaps.recorded():
        theirs = stock(**details)
    mine = ours(**details)
    if (why := parted_wrongly(theirs, mine, gaps)) is None:
        return Verdict(NEAR_TIE, found)
    if exact is not None and (apart := _errors_alike(stock, ours, exact)):
        gaps.errors = apart
        if parted_wrongly(theirs, mine, gaps) is None:
            return Verdict(ROUNDING, found)
    return Verdict(DIFFERENT, f"{found}; {why}")


def outcome(run: Run) -> Any:
    """The output of `run`, or the error that it raises."""
    try:
        return run()
    except Exception as error:  # whatever stock raises, fastgen must raise
        return error


def _said(result: Any) -> str:
    if isinstance(result, Exception):
        return f"{type(result).__name__}: {(str(result).splitlines() or [''])[0][:200]}"
    return f"tokens {tuple(sequences_of(result).shape)}"


def sequences_of(output: Any) -> Tensor:
    tokens: Tensor = output if isinstance(output, Tensor) else output.sequences
    return tokens


# ---------------------------------------------------------------------------------------------- equality
def difference(stock: Any, ours: Any) -> str | None:
    """How two outputs differ; None if they do not."""
    if isinstance(stock, Tensor) != isinstance(ours, Tensor) or type(stock) is not type(ours):
        return f"{type(stock).__name__} became {type(ours).__name__}"
    theirs, mine = sequences_of(stock), sequences_of(ours)
    if theirs.dtype != mine.dtype or not torch.equal(theirs, mine):
        return f"sequences differ{_where(theirs, mine)}"
    if isinstance(stock, Tensor):
        return None
    if _absent(stock, ours, "beam_indices") or not _equal(stock.get("beam_indices"), ours.get("beam_indices")):
        return "beam_indices differ"
    return next((f"{name}: {found}" for name in _SCORES if (found := _of_scores(stock, ours, name))), None)


def _rounds_alike(exact: Any, stock: Any, ours: Any) -> bool:
    """Whether our scores that exceed the tolerance, for the same tokens, are at most twice as far from float64's as
    stock's are."""
    if isinstance(exact, Exception) or not torch.equal(sequences_of(exact), sequences_of(stock)):
        return False
    beyond = [name for name in _SCORES if _of_scores(stock, ours, name)]
    errors = [[_error(exact, run, name) for name in beyond] for run in (ours, stock)]
    return all(mine <= 2 * theirs < torch.inf for mine, theirs in zip(*errors, strict=True))


def _error(exact: Any, run: Any, name: str) -> float:
    """The largest error of a run's scores; inf if they cannot be compared."""
    right, scores = _listed(exact.get(name)), _listed(run.get(name))
    if len(right) != len(scores) or any(a.shape != b.shape for a, b in zip(right, scores, strict=True)):
        return torch.inf
    errors = [(a - b.double()).abs()[torch.isfinite(a)] for a, b in zip(right, scores, strict=True)]
    return max((float(each.max()) for each in errors if each.numel()), default=0.0)


def _where(theirs: Tensor, mine: Tensor) -> str:
    if theirs.shape[0] != mine.shape[0]:
        return f": {theirs.shape[0]} rows became {mine.shape[0]}"
    shared = min(theirs.shape[1], mine.shape[1])
    row, position = next(iter((theirs[:, :shared] != mine[:, :shared]).nonzero().tolist()), (0, shared))
    return f" from position {position} of row {row} on"


def _of_scores(stock: Any, ours: Any, name: str) -> str | None:
    if _absent(stock, ours, name):
        return "only one of the two has any"
    theirs, mine = _listed(stock.get(name)), _listed(ours.get(name))
    if len(theirs) != len(mine):
        return f"{len(theirs)} steps became {len(mine)}"
    steps = enumerate(zip(theirs, mine, strict=True))
    return next((f"step {step}, {found}" for step, pair in steps if (found := _far(*pair))), None)


def _absent(stock: Any, ours: Any, name: str) -> bool:
    return (stock.get(name) is None) != (ours.get(name) is None)


def _equal(theirs: Tensor | None, mine: Tensor | None) -> bool:
    return theirs is None or mine is None or torch.equal(theirs, mine)


def _listed(value: Any) -> list[Tensor]:
    return [] if value is None else [value] if isinstance(value, Tensor) else list(value)


def _far(theirs: Tensor, mine: Tensor) -> str | None:
    if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
        return f"{tuple(theirs.shape)} {theirs.dtype} became {tuple(mine.shape)} {mine.dtype}"
    finite = torch.isfinite(theirs)
    if not torch.equal(finite, torch.isfinite(mine)):
        return "other tokens are banned"
    error = ((theirs - mine).abs() - TOLERANCE - 1e-5 * theirs.abs())[finite]
    return f"{float(error.max()):.1e} beyond the tolerance" if error.numel() and float(error.max()) > 0 else None


# ---------------------------------------------------------------------------------------------- near-ties
@dataclass
class Gaps:
    """The gaps between candidates by which stock decides, for each step and row (samples) or sentence (beams)."""

    beams: int
    steps: list[Tensor] = field(default_factory=list)  # [rows] or [sentences], one for each step
    errors: list[float] = field(default_factory=list)  # errors of stock's scores for each step, if those count

    def limit(self, step: int) -> float:
        """The gap at this step below which a choice is a near-tie."""
        return max([GAP, *(2 * error for error in self.errors[: step + 1])])

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside the block, record the gaps of the one stock call in it."""
        choose, thread = GenerationMixin._get_top_k_continuations, threading.get_ident()

        def chosen(model: Any, accumulated_log_probs: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not kwargs["do_sample"] and threading.get_ident() == thread:
                self.steps.append(least_gap(accumulated_log_probs, kwargs["beams_to_keep"]))
            return choose(model, accumulated_log_probs, *args, **kwargs)

        with (
            _recording,
            draws.watched(self.steps.append),
            unittest.mock.patch.object(GenerationMixin, "_get_top_k_continuations", chosen),
        ):
            yield


def parted_wrongly(stock: Any, ours: Any, gaps: Gaps) -> str | None:
    """Why near-ties do not explain how two detailed outputs differ; None if they do."""
    if type(stock) is not type(ours):
        return f"{type(stock).__name__} became {type(ours).__name__}"
    if gaps.beams < 2 and not gaps.steps:
        gaps.steps = [least_gap(scores, 1) for scores in stock.scores]
    sentences = stock.scores[0].shape[0] // gaps.beams
    found = [_of_sentence(stock, ours, gaps, sentence, sentences) for sentence in range(sentences)]
    wrong = next(
        (f"sentence {sentence}: {why}" for sentence, why in enumerate(found) if why not in ("", NEAR_TIE)), None
    )
    return wrong or (None if NEAR_TIE in found else "no choice of a token differs")


def _of_sentence(stock: Any, ours: Any, gaps: Gaps, sentence: int, sentences: int) -> str:
    """Judge one sentence: "" if it is the same, NEAR_TIE, or what is wrong."""
    rows = slice(sentence * gaps.beams, (sentence + 1) * gaps.beams)
    steps = min(len(stock.scores), len(ours.scores))
    apart = (step for step in range(steps) if _are_apart(stock.scores[step][rows], ours.scores[step][rows]))
    parted = next(apart, None)
    if parted == 0:
        return "scores of the first step differ"
    if parted is not None:
        return _chosen(gaps, parted - 1, sentence)
    if gaps.beams < 2:
        return _of_last_token(stock, ours, gaps, sentence, steps)
    if len(stock.scores) != len(ours.scores):
        return ""  # another sentence may have made it longer
    # Swapped beams go on alike if no step tells them apart: in a repetition longer than a sliding window.
    tied = any(float(step[sentence]) < GAP for step in gaps.steps)
    theirs, mine = (_hypotheses(run, sentence, sentences) for run in (stock, ours))
    return _ranked(theirs, mine, tied, gaps.limit(steps))


def _hypotheses(run: Any, sentence: int, sentences: int) -> list[tuple[tuple[int, ...], float]]:
    """Tokens and score of each hypothesis of a sentence, the best first."""
    count = run.sequences.shape[0] // sentences
    rows = slice(sentence * count, (sentence + 1) * count)
    tokens, used = run.sequences[rows].tolist(), (run.beam_indices[rows] >= 0).sum(1).tolist()
    prompt = run.sequences.shape[1] - run.beam_indices.shape[1]
    kept = (tuple(row[: prompt + length]) for row, length in zip(tokens, used, strict=True))
    return list(zip(kept, run.sequences_scores[rows].tolist(), strict=True))


def _ranked(
    stock: list[tuple[tuple[int, ...], float]], ours: list[tuple[tuple[int, ...], float]], tied: bool, limit: float
) -> str:
    """Compare a sentence's hypotheses: "" if all are the same, NEAR_TIE if they are ranked otherwise.

    `tied`: whether stock had a near-tie in this sentence at some step. The scores of no step differ.
    """
    theirs, mine = [tokens for tokens, _ in stock], [tokens for tokens, _ in ours]
    if theirs == mine:
        return ""
    if sorted(theirs) != sorted(mine):
        return NEAR_TIE if tied else "its hypotheses differ, though no step's scores do"
    scores = dict(stock)
    apart = max(abs(scores[a] - scores[b]) for a, b in zip(theirs, mine, strict=True))
    return NEAR_TIE if apart < limit else f"the same hypotheses, ranked otherwise, {apart:.1e} apart"


def _chosen(gaps: Gaps, step: int, sentence: int) -> str:
    gap = float(gaps.steps[step][sentence])
    return NEAR_TIE if gap < gaps.limit(step) else f"step {step} chooses otherwise, where the gap is {gap:.1e}"


def _are_apart(theirs: Tensor, mine: Tensor) -> bool:
    return not torch.allclose(theirs, mine, rtol=1e-5, atol=PARTED)


def _of_last_token(stock: Any, ours: Any, gaps: Gaps, row: int, steps: int) -> str:
    """Judge a row whose scores are all equal, so that at most the last token differs."""
    prompt = stock.sequences.shape[1] - len(stock.scores)
    theirs, mine = (run.sequences[row, prompt : prompt + steps] for run in (stock, ours))
    parted: list[int] = (theirs != mine).nonzero().flatten().tolist()
    return _chosen(gaps, parted[0], row) if parted else ""


# ---------------------------------------------------------------------------------------------- the same tokens
class Recording(LogitsProcessor):
    """Records the scores of each step, and returns the scores `instead` in their place, if there are any."""

    def __init__(self, instead: list[Tensor] | None = None) -> None:
        self.scores: list[Tensor] = []
        self._instead = instead

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.scores.append(scores.clone())
        if self._instead is None or len(self.scores) > len(self._instead):
            return scores
        given = self._instead[len(self.scores) - 1]
        return given.to(scores.dtype, copy=True) if given.shape == scores.shape else scores


def _recorded(run: Run, instead: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
    """The tokens, and the scores of each step before they were replaced by `instead`."""
    recording = Recording(instead)
    tokens = sequences_of(run(logits_processor=LogitsProcessorList([recording])))
    return tokens, recording.scores


def _given_stocks_scores(stock: Run, ours: Run, tolerance: float, exact: Run | None) -> Verdict:
    tokens, theirs = _recorded(stock)
    my_tokens, mine = _recorded(ours, theirs)
    if not torch.equal(tokens, my_tokens):
        return Verdict(DIFFERENT, "with stock's scores at every step, tokens differ")
    apart = _apart(theirs, mine, relative=True)
    if apart <= tolerance:
        return Verdict(NEAR_TIE, f"{BY_LOGITS} are within {apart:.1e} of the largest")
    why = f"{BY_LOGITS} differ by {apart:.1e} of the largest"
    alike = apart <= 2 * tolerance and exact is not None and _errors_alike(stock, ours, exact)
    return Verdict(ROUNDING if alike else DIFFERENT, why)


def _errors_alike(stock: Run, ours: Run, exact: Run) -> list[float]:
    """The error of stock's scores at each step, against float64 for the same tokens; [] if our errors are over twice
    as large."""
    tokens, theirs = _recorded(stock)
    my_tokens, mine = _recorded(ours, theirs)
    in_float64 = outcome(lambda: _recorded(exact, theirs))
    if isinstance(in_float64, Exception):  # not every model runs in float64
        return []
    right_tokens, right = in_float64
    if not (torch.equal(tokens, my_tokens) and torch.equal(tokens, right_tokens)):
        return []
    errors, error = _steps_apart(right, theirs), _apart(right, theirs)
    return errors if 0 < error < torch.inf and _apart(right, mine) <= 2 * error else []


def _apart(scores: list[Tensor], others: list[Tensor], relative: bool = False) -> float:
    """The largest difference, perhaps relative to a step's largest score; inf if scores cannot be compared."""
    return max(_steps_apart(scores, others, relative), default=0.0)


def _steps_apart(scores: list[Tensor], others: list[Tensor], relative: bool = False) -> list[float]:
    if len(scores) != len(others):
        return [torch.inf]
    return [_step_apart(*pair, relative) for pair in zip(scores, others, strict=True)]


def _step_apart(scores: Tensor, others: Tensor, relative: bool) -> float:
    finite = torch.isfinite(scores) & (scores > -1e8)
    if scores.shape != others.shape or not torch.equal(torch.isfinite(scores), torch.isfinite(others)):
        return torch.inf
    if not finite.any():
        return 0.0
    apart = (scores.double() - others.double())[finite].abs().max()
    return float(apart / scores[finite].abs().max().clamp(min=1.0) if relative else apart)
