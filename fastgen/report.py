"""What ran where and why: the last calls, counters, and the status shown to the user."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import textwrap
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from fastgen import config, locks

TIERS = ("fast", "compat", "stock")
_WIDTH = 100
_logger = logging.getLogger("fastgen")
_providers: dict[str, Callable[[], Any]] = {}
_Provider = TypeVar("_Provider", bound=Callable[[], Any])


def provides(field: str) -> Callable[[_Provider], _Provider]:
    """Decorate a function that says what a field of `Status` is; until its module is loaded, that is the default."""

    def added(provider: _Provider) -> _Provider:
        _providers[field] = provider
        return provider

    return added


def provided() -> dict[str, Any]:
    """The fields of `Status` that other modules know."""
    return {field: provider() for field, provider in _providers.items()}


class FallbackError(RuntimeError):
    """In strict mode, raised where the stock code would have taken over; the message is the reason."""


@dataclass(frozen=True)
class Call:
    """One call as it ran: a beam search, or greedy search and sampling, whose `beams` are the samples of a prompt."""

    host: str
    model: str
    tier: str  # "fast": our loop; "compat": the host's loop, our steps; "stock": all the host's
    reason: str | None  # why not a better tier
    batch: int
    beams: int
    steps: int | None = None
    seconds: float | None = None
    cache_bytes: int | None = None
    # What was stored of each position: "kv", slim caches (see fastgen.cache.slim.latent), or "rows": the host's cache.
    cache: str | None = None
    plan: str | None = None  # what was predicted for it and for others, or why it could not be another


class OfThisVersion(str):
    """A reason for a fallback that lies in the host's version: no call of this kind can be accelerated on it."""


@dataclass(frozen=True)
class HostStatus:
    """`state`: "accelerated", "partly accelerated" or "NOT accelerated", from what the calls so far did; "ready"
    before the first; "not imported", "left alone" or "disabled"."""

    name: str
    version: str | None
    state: str
    detail: str = ""


@dataclass(frozen=True)
class Status:
    """A snapshot of fastgen; print it."""

    version: str
    enabled: bool
    hosts: tuple[HostStatus, ...]
    counters: dict[str, int]
    calls: tuple[Call, ...]  # the latest last
    packed_weights: int = 0  # with a packed copy
    packed_bytes: int = 0
    quantized: str = ""  # what became of weights in fewer bits, see `configure`
    buffer_bytes: int = 0  # buffers, in use or not, and what arenas keep for later
    operators: dict[str, str] = field(default_factory=dict)  # how each runs; empty until they are first used
    encoders: dict[str, int] = field(default_factory=dict)  # batches read without padding: see `encoders`
    replayed: dict[str, str] = field(default_factory=dict)  # what became of replaying steps, by class of the model
    speculated: dict[str, str] = field(default_factory=dict)  # what became of drafts, by class of the model
    prefixes: dict[str, int] = field(default_factory=dict)  # calls, hits, tokens and bytes: see `prefix_cache`
    prefixes_unused: dict[str, str] = field(default_factory=dict)  # why calls kept none, by class of the model
    verified: str = ""  # what became of calls that the host decoded too, see `verify`

    def __str__(self) -> str:
        lines = [f"fastgen {self.version}, {'enabled' if self.enabled else 'disabled'}"]
        for host in self.hosts:
            lines.append(f"  {' '.join(filter(None, (host.name, host.version)))}: {host.state}")
            lines += _wrapped(host.detail, "    ")
        used = ", ".join(f"{name} {how}" for name, how in self.operators.items())
        lines += textwrap.wrap(f"operators: {used or 'not used yet'}", _WIDTH, subsequent_indent="  ")
        total = ", ".join(f"{self.counters.get(tier, 0)} {tier}" for tier in TIERS)
        lines.append(f"calls so far: {total}")
        if self.encoders.get("batches"):
            saved = 1 - self.encoders["read"] / self.encoders["positions"]
            lines.append(f"encoders: {self.encoders['batches']} batches grouped by length, {saved:.0%} shorter")
        if self.packed_weights:
            lines.append(f"packed weights: {self.packed_weights}, {size(self.packed_bytes)}")
        if self.quantized:
            lines += textwrap.wrap(f"rounded weights: {self.quantized}", _WIDTH, subsequent_indent="  ")
        if self.buffer_bytes:
            lines.append(f"buffers kept for later calls: {size(self.buffer_bytes)}")
        if found := self.prefixes:
            lines.append(
                f"prefixes kept: {size(found['bytes'])}; {found['hits']} of {found['calls']} calls began with one, "
                f"{found['tokens']} tokens were not read again"
            )
        for model, why in self.prefixes_unused.items():
            lines += textwrap.wrap(f"no prefix of {model}: {why}", _WIDTH, subsequent_indent="  ")
        if self.verified:
            lines += textwrap.wrap(f"verified: {self.verified}", _WIDTH, subsequent_indent="  ")
        for model, how in self.speculated.items():
            lines += textwrap.wrap(f"drafts of {model}: {how}", _WIDTH, subsequent_indent="  ")
        for model, how in self.replayed.items():
            lines += textwrap.wrap(f"replaying {model}: {how}", _WIDTH, subsequent_indent="  ")
        if self.calls:
            lines += _table(self.calls)
        return "\n".join(lines)


def _table(calls: tuple[Call, ...]) -> list[str]:
    header = ("tier", "host", "model", "batch", "beams", "steps", "seconds", "cache")
    rows = [
        (
            call.tier,
            call.host,
            call.model,
            str(call.batch),
            str(call.beams),
            "-" if call.steps is None else str(call.steps),
            "-" if call.seconds is None else f"{call.seconds:.3f}",
            "-" if call.cache_bytes is None else " ".join(filter(None, (size(call.cache_bytes), call.cache))),
        )
        for call in calls
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [_row(header, widths)]
    for call, row in zip(calls, rows, strict=True):
        lines.append(_row(row, widths))
        lines += _wrapped(f"why: {call.reason}" if call.reason else "", "      ")
        if call.plan and (call is calls[-1] or call.cache != "kv"):
            lines += _wrapped(f"cache: {call.plan}", "      ")
    return lines


def _row(cells: tuple[str, ...], widths: list[int]) -> str:
    words = [
        cell.ljust(width) if column < 3 else cell.rjust(width)  # numbers to the right
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  " + "  ".join(words).rstrip()


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


_lock = locks.reentrant_lock()
_is_silent: contextvars.ContextVar[bool] = contextvars.ContextVar("fastgen_is_silent", default=False)
_calls: deque[Call] = deque()
_counters: Counter[str] = Counter()
_logged: set[tuple[str, str]] = set()
_outcomes: Counter[tuple[str, bool]] = Counter()  # of each host's calls, by whether they were accelerated
_last_reasons: dict[str, str] = {}  # of each host's calls that were not
_warned: set[str] = set()  # hosts
_operators: dict[str, str] = {}
_encoders: Counter[str] = Counter()


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Inside the block no call of this thread, or task, is recorded."""
    token = _is_silent.set(True)
    try:
        yield
    finally:
        _is_silent.reset(token)


def record(call: Call) -> None:
    """Remember `call`; a fallback is logged too, once per model and reason."""
    if call.tier not in TIERS:
        raise ValueError(f"tier must be one of {', '.join(TIERS)}, not {call.tier!r}.")
    if _is_silent.get():
        return
    settings = config.current()
    is_stock = call.tier == "stock"
    history = max(config.everywhere("history"))  # what a block says of its own calls is no reason to forget others
    with _lock:
        _counters[call.tier] += 1
        if settings.tier != "stock":  # else the user's wish
            _outcomes[call.host, not is_stock] += 1
            if is_stock and call.reason:
                _last_reasons[call.host] = call.reason
        if settings.history:
            _calls.append(call)
        while len(_calls) > history:
            _calls.popleft()
    if is_stock and call.reason:
        log_once(call.reason, call.model)
    if isinstance(call.reason, OfThisVersion):
        warn_of_version(call.host, f"to itself in calls like this one: {call.reason}", loses_nothing=True)


def state_of(host: str) -> tuple[str, str]:
    """A patched host's `HostStatus.state` and `detail`."""
    with _lock:
        accelerated, stock = _outcomes[host, True], _outcomes[host, False]
        reason = _last_reasons.get(host)
        why = f", the last because {reason}" if reason else ""
    if not stock:
        return "accelerated" if accelerated else "ready", ""
    if accelerated:
        return "partly accelerated", f"{stock} of {accelerated + stock} calls were left to {host}{why}"
    return "NOT accelerated", f"all calls so far ({stock}) were left to {host}{why}"


def warn_of_version(host: str, found: str, loses_nothing: bool = False) -> None:
    """Warn that this version of the host, or some of its calls, are not accelerated, once for each host.

    Args:
        found: what is left alone and why, as in "alone: ...".
        loses_nothing: as for `warn`.
    """
    with _lock:
        if host in _warned:
            return
        _warned.add(host)
    version = getattr(sys.modules.get(host), "__version__", "")
    tested = getattr(sys.modules.get(f"fastgen.optimizer.{host}"), "TESTED", "")
    text = (
        f"fastgen leaves {host} {version} {found}. That works as without fastgen, and no faster. The newest version "
        f"tested is {tested}: use that one, or a newer fastgen, which `python -m fastgen` then checks."
    )
    warn(text, loses_nothing)


def warn(text: str, loses_nothing: bool = True) -> None:
    """A RuntimeWarning at the line that led here and is neither ours, a host's nor torch's; ours in a thread of ours.

    Args:
        loses_nothing: log the warning where the user's filter makes an error of it: a call is under way.
    """
    caller = frame = sys._getframe(1)
    while _module_of(frame).partition(".")[0] in _NOT_THE_USERS:
        if frame.f_back is None:
            frame = caller
            break
        frame = frame.f_back
    place = (frame.f_code.co_filename, frame.f_lineno, _module_of(frame))
    try:
        warnings.warn_explicit(text, RuntimeWarning, *place, frame.f_globals.setdefault("__warningregistry__", {}))
    except RuntimeWarning:
        if not loses_nothing:
            raise
        _logger.warning("%s", text)


_NOT_THE_USERS = frozenset(
    "contextlib fastgen fairseq functools importlib threading torch transformers whisper".split()
)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def log_once(reason: str, model: str = "") -> None:
    """Say at INFO level why `model` ran stock, the first time only."""
    with _lock:
        if (model, reason) in _logged:
            return
        _logged.add((model, reason))
    _logger.info("%s runs stock: %s", model or "a model", reason)


def log(text: str) -> None:
    """Say it at INFO level."""
    _logger.info("%s", text)


def calls() -> tuple[Call, ...]:
    """The last calls, the latest last."""
    with _lock:
        return tuple(_calls)


def counters() -> dict[str, int]:
    """Calls per tier since the start, also those that `calls` has forgotten."""
    with _lock:
        return {tier: _counters[tier] for tier in TIERS}


def set_operators(how: dict[str, str]) -> None:
    """Remember how each operator runs, such as "native (cpu)"; fastgen.ops says so when it is loaded."""
    with _lock:
        _operators.update(how)


@provides("operators")
def operators() -> dict[str, str]:
    """How each operator runs; empty until they are first used."""
    with _lock:
        return dict(_operators)


def note_encoder(read: int, positions: int) -> None:
    """An encoder has read a batch without (most of) its padding: `read` of its `positions`."""
    with _lock:
        _encoders.update(batches=1, read=read, positions=positions)


@provides("encoders")
def encoders() -> dict[str, int]:
    """The `batches` that encoders read in groups of like length, their `positions`, and how many were `read`."""
    with _lock:
        return dict(_encoders)


def reset() -> None:
    """Forget all calls, counters and what was logged."""
    with _lock:
        _encoders.clear()
        _calls.clear()
        _counters.clear()
        _logged.clear()
        _outcomes.clear()
        _last_reasons.clear()
