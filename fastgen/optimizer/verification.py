"""`verify=N`: of every N accelerated calls of a model, the last one is also decoded by the host, and compared.

For a difference that is no near-tie of the host's, a warning says all that is needed to reproduce it, except the texts;
the host's output is returned, and the model is left to the host from then on.
"""

from __future__ import annotations

import contextlib
import contextvars
import platform
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fastgen import config, locks, report
from fastgen.memory import limits
from fastgen.version import __version__

GAP = 1e-5  # two candidates closer than this count as equal
TOLERANCE = 1e-4  # for scores
SAME, NEAR_TIE, DIFFERENT, UNVERIFIED = "same", "near-ties", "different", "not verified"

_lock = locks.reentrant_lock()
_counts: Counter[str] = Counter()
_unverified: Counter[str] = Counter()  # by reason
_waiting: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # calls since the last comparison
_stopped: weakref.WeakKeyDictionary[Any, tuple[str, str]] = weakref.WeakKeyDictionary()  # host, and what differs
_is_comparing: contextvars.ContextVar[bool] = contextvars.ContextVar("fastgen_is_comparing", default=False)
_seen: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("fastgen_seen", default=None)


def is_on() -> bool:
    """Whether accelerated calls are counted and compared here; not inside a comparison."""
    return config.current().verify > 0 and not _is_comparing.get()


def reason_against(model: Any) -> str | None:
    """Why this model is left to the host; None if no difference has been found."""
    if not _stopped or model is None or (found := _stopped.get(model)) is None:
        return None
    host, why = found
    return f"fastgen's output was not {host}'s in a call that was verified ({why})"


@contextlib.contextmanager
def watching() -> Iterator[list[Any]]:
    """Collect the searches of this thread, or task, that adapters note by `note_accelerated` inside the block."""
    seen: list[Any] = []
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


def note_accelerated(search: Any) -> None:
    """Note that a search has run over the tree."""
    if (seen := _seen.get()) is not None:
        seen.append(search)


@contextlib.contextmanager
def comparing(**options: Any) -> Iterator[None]:
    """Inside the block, calls are neither recorded nor verified; `options` are settings for them."""
    token = _is_comparing.set(True)
    try:
        with config.configured(strict=False, **options), report.silenced():
            yield
    finally:
        _is_comparing.reset(token)


def is_due(model: Any) -> bool:
    """Count an accelerated call of `model`; returns whether to compare it."""
    with _lock:
        _waiting[model] = count = _waiting.get(model, 0) + 1
        if count < config.current().verify:
            return False
        del _waiting[model]
        return True


def note(kind: str, reason: str = "") -> None:
    """Count the outcome of a call: SAME, NEAR_TIE, DIFFERENT, or UNVERIFIED with the reason."""
    with _lock:
        _counts[kind] += 1
        if reason:
            _unverified[reason] += 1


def _versions(host: str) -> dict[str, str]:
    processor = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return {
        "fastgen": __version__,
        host: getattr(sys.modules.get(host), "__version__", "unknown"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor,
    }


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options in a form that shows no texts: numbers as they are, of tensors and lists only the size."""
    return {name: _shown(value) for name, value in options.items() if value is not None}


def _shown(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__


def least_gap(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The smallest gap between neighbours among the best `count` + 1 of each row of `scores`, `[rows, candidates]`:
    float `[rows]`, inf where the others are banned."""
    best = scores.topk(min(count + 1, scores.shape[-1])).values
    gaps = best[:, :-1] - best[:, 1:]
    return gaps.masked_fill(~(best[:, 1:] > -1e8), torch.inf).min(1).values


class RandomState:
    """The state of torch's random generators, on the CPU and on one GPU, when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def now(self) -> RandomState:
        return RandomState(self._device)

    def is_as(self, other: RandomState) -> bool:
        """Whether the same numbers follow."""
        pairs = (self._cpu, other._cpu), (self._cuda, other._cuda)
        return all(mine is None or (its is not None and torch.equal(mine, its)) for mine, its in pairs)

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


@dataclass
class Question:
    """The comparison of one call with the host."""

    host: str
    model: Any  # the user's model, left to the host after a difference: see `reason_against`
    before: RandomState  # from before the call
    facts: dict[str, Any]  # options and shapes, without texts

    def answer(self, output: Any, stock: Callable[[], Any], judged: Callable[[Any], tuple[str, str]]) -> Any:
        """The result for the user: our `output` or, if the host's differs, what `stock` returns or raises.

        `judged`: judges the host's output: SAME, NEAR_TIE or DIFFERENT, and how it differs. Afterwards the random
        generators are in the state that follows the returned result.
        """
        after = self.before.now()
        try:
            with comparing(tier="stock"):
                self.before.restore()
                theirs = stock()
        except Exception as error:
            if limits.is_out_of_memory(error):
                note(UNVERIFIED, "for want of memory")
                after.restore()
                return output
            self._stop(f"it raises {type(error).__name__}")
            raise
        behind = self.before.now()
        try:
            kind, why = judged(theirs)
        except Exception as error:  # in further runs, which look for near-ties
            kind, why = DIFFERENT, f"they differ, and a closer look failed ({type(error).__name__})"
        if kind == DIFFERENT:
            behind.restore()
            self._stop(why)
            return theirs
        note(kind)
        after.restore()
        return output

    def _stop(self, why: str) -> None:
        note(DIFFERENT)
        with _lock:
            _stopped[self.model] = (self.host, why)
        what = "\n".join(f"  {key}: {value}" for key, value in {**self.facts, **_versions(self.host)}.items())
        text = (
            f"fastgen's output of {type(self.model).__name__} was not that of {self.host}: {why}. {self.host}'s own is "
            f"returned, and this model is no longer accelerated. Please report it, with these lines:\n{what}"
        )
        report.warn(text)


def counts() -> dict[str, int]:
    """How many calls had each outcome, those that could not be compared included."""
    with _lock:
        return dict(_counts)


@report.provides("verified")
def summary() -> str:
    """The counts of compared calls in one line; empty if there are none."""
    with _lock:
        if not _counts:
            return ""
        compared = sum(_counts[kind] for kind in (SAME, NEAR_TIE, DIFFERENT))
        parts = [f"{_counts[SAME]} the same", f"{_counts[NEAR_TIE]} near-ties", f"{_counts[DIFFERENT]} different"]
        text = f"{compared} {'call' if compared == 1 else 'calls'} compared with the host: {', '.join(parts)}"
        why = ", ".join(f"{count} {reason}" for reason, count in _unverified.most_common())
        return f"{text}; not compared: {why}" if why else text


def reset() -> None:
    """Forget all counts, and the models that were left to the host."""
    with _lock:
        for each in (_counts, _unverified, _waiting, _stopped):
            each.clear()
