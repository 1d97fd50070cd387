"""The user's settings: environment variables first, `configure` over them."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from fastgen import locks

TIERS = ("auto", "fast", "compat", "stock")
PACKING = REPLAY = ("auto", "always", "off")
FOREIGN_CODE = ("stock", "trial")
WEIGHTS = ("float32", "bf16", "int8")
WORDS_OF_WEIGHTS = {"bf16": "bfloat16", "int8": "8 bits"}  # those that round, in words for the user
CACHES = ("auto", "kv", "x", "h", "k", "v")
NATIVE = ("", "0", "build", "required")
_FLAGS = {"": False, "0": False, "false": False, "no": False, "off": False}
_FLAGS |= {"1": True, "true": True, "yes": True, "on": True}


@dataclass(frozen=True)
class Config:
    """What a call may do. An instance never changes; `configure` installs a new one."""

    strict: bool = False  # raise FallbackError where the stock code would take over
    tier: str = "auto"  # the best that a request allows, or the best to try
    history: int = 32  # calls that status() remembers
    packing: str = "auto"  # products of our own, on packed weights or not: where a timing says so, "always", or "off"
    weights: str = "float32"  # of linear layers: as they are, or rounded ("bf16", "int8"), which may change the outputs
    speculate: str | int = "auto"  # greedy search and sampling of one sentence on a CPU: how many tokens are drafted
    replay: str = "auto"  # on the CPU, record decode steps and replay them: "auto", "always" or "off"
    cache: str = "auto"  # what is stored of each position: what a plan says, keys and values ("kv"), or a slim cache
    cache_threshold: float = 0.0  # slim caches leave out of a sum what weighs less: an approximation unless it is 0
    cuda_graphs: bool = True  # on CUDA, capture decode steps and replay them
    foreign_code: str = "stock"  # hooks, subclasses and replaced parts of a model: left to the host, or tried ("trial")
    prefix_cache: int = 0  # bytes for what was computed for prompts and sources, kept for later calls; 0: none
    verify: int = 0  # every so many accelerated calls of a model, one is decoded by the host too and compared; 0: none

    def __post_init__(self) -> None:
        for name in ("strict", "cuda_graphs"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {value!r}.")
        for name, choices in (
            ("tier", TIERS),
            ("packing", PACKING),
            ("weights", WEIGHTS),
            ("replay", REPLAY),
            ("cache", CACHES),
            ("foreign_code", FOREIGN_CODE),
        ):
            value = getattr(self, name)
            if value not in choices:
                error = ValueError if isinstance(value, str) else TypeError
                raise error(f"{name} must be one of {', '.join(choices)}, not {value!r}.")
        for name in ("history", "prefix_cache", "verify"):
            if not isinstance(value := getattr(self, name), int) or isinstance(value, bool):
                raise TypeError(f"{name} must be a whole number, not {value!r}.")
            if value < 0:
                raise ValueError(f"{name} must be 0 or more, not {value!r}.")
        speculate = self.speculate
        if isinstance(speculate, bool) or not isinstance(speculate, (str, int)):
            raise TypeError(f"speculate must be auto, off, or a whole number, not {speculate!r}.")
        if speculate not in ("auto", "off") and not (isinstance(speculate, int) and 1 <= speculate <= 11):
            raise ValueError(f"speculate must be auto, off, or a whole number from 1 to 11, not {speculate!r}.")
        if self.weights != "float32" and self.packing == "off":
            raise ValueError(f"packing must be auto or always with weights={self.weights!r}, not 'off'.")
        if self.weights != "float32" and self.verify:
            raise ValueError(f"verify must be 0 with weights={self.weights!r}: its outputs may differ from the host's.")
        threshold = self.cache_threshold
        if not isinstance(threshold, (int, float)) or isinstance(threshold, bool):
            raise TypeError(f"cache_threshold must be a number, not {threshold!r}.")
        if not 0 <= threshold < 1:
            raise ValueError(f"cache_threshold must be at least 0 and less than 1, not {threshold!r}.")


def refill_pays(device: str) -> bool:
    """Whether batches are kept full by default, on a `device` of this type.

    On a CPU a smaller batch is a quicker one. On a GPU a step takes as long for few sentences as for many; but a batch
    that changes at each step cannot be captured, and graphs save more.
    """
    return device != "cpu" and not (device == "cuda" and current().cuda_graphs)


def flag(variable: str) -> bool:
    """An environment variable read as yes or no; unset means no."""
    text = os.environ.get(variable, "")
    try:
        return _FLAGS[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{variable} must be 0 or 1, not {text!r}.") from None


def native() -> str:
    """FASTGEN_NATIVE: "0", "build", "required", or "" for the automatic choice (see fastgen.ops.library)."""
    text = os.environ.get("FASTGEN_NATIVE", "")
    if text.strip().lower() not in NATIVE:
        raise ValueError(f"FASTGEN_NATIVE must be 0, build or required, or not be set, not {text!r}.")
    return text.strip().lower()


def from_environment() -> Config:
    """The settings of FASTGEN_STRICT, FASTGEN_TIER and so on, defaults where a variable is unset."""
    native()  # not a setting that can be changed later, but a mistake in it should show at once as well
    options: dict[str, Any] = {
        name: flag(variable)
        for name in ("strict", "cuda_graphs")
        if os.environ.get(variable := f"FASTGEN_{name.upper()}", "").strip()
    }
    for name in ("tier", "packing", "weights", "replay", "cache", "foreign_code"):
        if text := os.environ.get(f"FASTGEN_{name.upper()}", "").strip():
            options[name] = text.lower()
    if text := os.environ.get("FASTGEN_SPECULATE", "").strip().lower():
        options["speculate"] = int(text) if text.isdecimal() else text
    for name in ("history", "prefix_cache", "verify"):
        if text := os.environ.get(f"FASTGEN_{name.upper()}", "").strip():
            try:
                options[name] = int(text)
            except ValueError:
                raise ValueError(f"FASTGEN_{name.upper()} must be a whole number, not {text!r}.") from None
    if threshold := os.environ.get("FASTGEN_CACHE_THRESHOLD", "").strip():
        try:
            options["cache_threshold"] = float(threshold)
        except ValueError:
            raise ValueError(f"FASTGEN_CACHE_THRESHOLD must be a number, not {threshold!r}.") from None
    try:
        return Config(**options)
    except ValueError as error:  # the message begins with the option's name
        option, _, rest = str(error).partition(" ")
        hint = " (The folder for compiled libraries is FASTGEN_CACHE_DIR.)" if option == "cache" else ""
        raise ValueError(f"FASTGEN_{option.upper()} {rest}{hint}") from None


_lock = locks.reentrant_lock()
_current = from_environment()


# What `configured` blocks of this thread, or task, say beside it.
_own: contextvars.ContextVar[tuple[dict[str, Any], ...]] = contextvars.ContextVar("fastgen_options", default=())
_blocks: list[dict[str, Any]] = []  # what those say that are open now, of all threads, with the blocks around them


def current() -> Config:
    """The settings in force here."""
    if not (blocks := _own.get()):
        return _current
    return replace(_current, **{name: value for options in blocks for name, value in options.items()})


def configure(**options: Any) -> Config:
    """Change the named settings for the whole process and return the result; an error changes nothing."""
    global _current
    _check_names(options)
    with _lock:
        changed = replace(_current, **options)
        for block in list(_blocks):
            try:
                replace(changed, **block)
            except ValueError as error:  # else each call in that block would raise it
                raise ValueError(f"{error} A block of fastgen.configured that is open says so.") from None
        _current = changed
        return _current


@contextlib.contextmanager
def configured(**options: Any) -> Iterator[Config]:
    """Inside the block the named settings are others for this thread, or asyncio task, alone; blocks nest."""
    _check_names(options)
    block = {name: value for each in (*_own.get(), options) for name, value in each.items()}
    with _lock:
        replace(_current, **block)  # raises what is wrong with their values
        _blocks.append(block)
    token = _own.set((*_own.get(), options))
    try:
        yield current()
    finally:
        with _lock:
            _blocks.remove(block)
        _own.reset(token)


def everywhere(name: str) -> list[Any]:
    """The values of a setting that are in force now: the process's, and those of open blocks of any thread."""
    with _lock:
        return [getattr(_current, name), *(options[name] for options in list(_blocks) if name in options)]


def _check_names(options: dict[str, Any]) -> None:
    known = [field.name for field in fields(Config)]
    for name in options:
        if name not in known:
            raise TypeError(f"there is no option {name!r}: the options are {', '.join(known)}.")


def reset() -> Config:
    """Back to what the environment says."""
    global _current
    with _lock:
        _current = from_environment()
        return _current
