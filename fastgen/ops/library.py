"""Finds, or builds, and loads the native libraries, by the environment variable FASTGEN_NATIVE.

| FASTGEN_NATIVE | |
| --- | --- |
| unset | the library built ahead of time, else the cached one, else compile it, else plain torch, which is said |
| 0 | plain torch, which is not said |
| build | compile the sources afresh |
| required | as if unset, but an error where no native library can be had |
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path

import torch

from fastgen import config, locks, report
from fastgen.ops import builder, library_cache

_UNWRITTEN = {  # operators without a kernel, and what runs instead
    ("beam_attention", "cuda"): "torch's own attention, or Triton's where that is faster",
    ("beam_candidates", "cuda"): "torch's own operators",
    ("advance_beams_", "cuda"): "torch's own operators",
    ("path_attention", "cuda"): "torch's own operators",
    ("fingerprint", "cuda"): "torch's own sums",
    ("multinomial", "cuda"): "torch's own",
    ("skinny_linear", "cuda"): "torch's own products",
    ("packed_linear", "cuda"): "torch's own products",
    ("screened_linear", "cuda"): "torch's own products",
    ("quantize_rows", "cuda"): "torch's own operators",
    ("dequantize", "cuda"): "torch's own operators",
    ("quantized_linear", "cuda"): "torch's own products",
    ("dynamic_quantized_linear", "cuda"): "torch's own products",
}

_OF_RUNTIME = ("multinomial",)  # operators for the CPU that are in the library "runtime"

_lock = locks.lock()
_loaded: dict[str, str] | None = None  # library -> "" if it is loaded, else why not


class _Incomplete(Exception):
    """A library was loaded and registers too little."""


def load(operators: tuple[str, ...]) -> None:
    """Load the libraries that this machine can use, once, and report how each of `operators` runs.

    Raises:
        RuntimeError: under FASTGEN_NATIVE=required, if one can't be had.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            wanted = ["cpu", "runtime", *(["cuda"] if torch.cuda.is_available() else [])]
            mode = config.native()
            _loaded = dict.fromkeys(wanted, "FASTGEN_NATIVE=0") if mode == "0" else _load_all(wanted, mode, operators)
        report.set_operators({operator: _how(operator, _loaded) for operator in operators})


def was_loaded() -> bool:
    """Whether `load` has been called."""
    return _loaded is not None


def _how(operator: str, loaded: dict[str, str]) -> str:
    """How the operator runs, such as "native (cpu)"."""
    devices = [device for device in ("cpu", "cuda") if device in loaded]
    native = [device for device in devices if _is_registered(operator, device)]
    missing = [
        f"{device}: {loaded[_library_of(operator, device)] or _UNWRITTEN.get((operator, device), '')}"
        for device in devices
        if device not in native
    ]
    parts = [f"native ({', '.join(native)})"] if native else []
    parts += [f"plain torch ({'; '.join(missing)})"] if missing else []
    return ", ".join(parts)


def _is_registered(operator: str, device: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"fastgen::{operator}", device.upper())


def _library_of(operator: str, device: str) -> str:
    """The library in which an operator's kernel for a device is."""
    return "runtime" if device == "cpu" and operator in _OF_RUNTIME else device


def is_loaded(library: str) -> bool:
    """Whether "cpu", "runtime" or "cuda" has been loaded."""
    return _loaded is not None and _loaded.get(library) == ""


def _load_all(wanted: list[str], mode: str, operators: tuple[str, ...]) -> dict[str, str]:
    """Load `wanted`: why each library is missing, "" if it is loaded; prints one line on those not compiled here."""
    loaded: dict[str, str] = {}
    unavailable: dict[str, builder.Unavailable] = {}
    for library in wanted:
        if library == "runtime" and loaded["cpu"]:  # the same would be said twice
            loaded[library] = loaded["cpu"]
            continue
        try:
            loaded[library] = _load(library, mode, operators)
        except builder.Unavailable as error:
            is_nowhere = library != "cpu" and platform.system() == "Windows"  # nor in the wheel
            if mode == "required" and not is_nowhere:
                raise RuntimeError(f"FASTGEN_NATIVE=required, but {error}.") from error
            loaded[library] = str(error)
            if library == "runtime":  # the status says it: a machine without a compiler needs none for the rest
                continue
            if mode == "build":
                report.warn(f"FASTGEN_NATIVE=build, but {error}.")
            else:
                unavailable[library] = error
    if unavailable:
        reasons = dict.fromkeys(map(str, unavailable.values()))  # each once
        remedy = next((f"{error.remedy} " for error in unavailable.values() if error.remedy), "")
        _say(
            f"fastgen runs its {' and '.join(unavailable)} operators in plain torch, which is slower: "
            f"{'; '.join(reasons)}. {remedy}FASTGEN_NATIVE=0 says no more."
        )
    return loaded


def _load(library: str, mode: str, operators: tuple[str, ...]) -> str:
    """Load one library; returns why that failed, "" if it did not.

    Raises:
        builder.Unavailable: it can't be compiled here.
        RuntimeError: under FASTGEN_NATIVE=required, if it can't be had for another reason.
    """
    try:
        path = _find_and_load(library, mode)
        device = "cpu" if library == "runtime" else library
        written = [one for one in operators if _library_of(one, device) == library and (one, device) not in _UNWRITTEN]
        if missing := [operator for operator in written if not _is_registered(operator, device)]:
            raise _Incomplete(f"the library {path} registers no {', '.join(missing)}")
        return ""
    # OSError: no place to write to, or the loader refuses the file
    except (builder.BuildFailed, library_cache.Untrusted, _Incomplete, OSError) as error:
        if mode == "required":
            raise RuntimeError(f"FASTGEN_NATIVE=required, but {error}.") from error
        text = f"fastgen runs its {library} operators in plain torch, which is slower: {error}. "
        is_final = isinstance(error, library_cache.Untrusted) or platform.system() == "Windows"
        text += "" if is_final else "FASTGEN_NATIVE=build tries again, "
        text += "FASTGEN_NATIVE=0 says no more."
        report.warn(text)
        return str(error).partition(" (log:")[0]


def _find_and_load(library: str, mode: str) -> Path:
    """Have torch load what `_find` finds; returns where it is, and raises what that raises.

    A library that was built ahead of time may need a newer system than this one, where machines share an environment:
    then the next best is found, or compiled.
    """
    path = _find(library, mode)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        if path.parent != builder.AHEAD_OF_TIME or platform.system() == "Windows":
            raise
        try:
            path = _find(library, mode, may_be_ready=False)
        except builder.Unavailable as reason:
            raise builder.Unavailable(f"{reason}, and {path} can't be loaded ({error})", reason.remedy) from error
        torch.ops.load_library(str(path))
    return path


def _find(library: str, mode: str, may_be_ready: bool = True) -> Path:
    """Find the library in the cache or, if it `may_be_ready`, before that one built ahead of time; else compile it.

    Raises:
        builder.Unavailable: it can't be compiled here.
        builder.BuildFailed: a compiler gave up.
        library_cache.Untrusted: others could have put it into the cache.
        OSError: there is no place to write to.
    """
    is_windows = platform.system() == "Windows"
    if (mode != "build" and may_be_ready) or is_windows:
        ready = builder.AHEAD_OF_TIME / f"{library}-{builder.source_key(library)}{builder.SUFFIX}"
        # It lies among the package's own code: whoever could replace it could replace this file, too.
        if ready.is_file() and (library != "cuda" or _fits_devices(ready)):
            return ready
    builder.check_system(library)
    if is_windows:  # where `library_cache` can't tell whom a folder belongs to
        raise builder.Unavailable("on Windows native operators come in the wheel", "Install fastgen from its wheel.")
    target = library_cache.trusted(library_cache.cache_folder()) / library_cache.cached_name(library)
    why_not = "" if mode == "build" else library_cache.why_not_loadable(target)
    if mode != "build" and not why_not:
        return target
    try:
        how = builder.recipe(library)
    except builder.Unavailable as error:
        if why_not and os.path.lexists(target):
            raise builder.Unavailable(f"{error}, and {why_not}", error.remedy) from error
        raise
    with library_cache.locked(target) as is_alone:
        if mode != "build":
            if not library_cache.why_not_loadable(target):  # another process has built it meanwhile
                return target
            if (failed := how.log(target)).is_file():
                raise builder.BuildFailed("an earlier build failed", failed)
        _say(f"fastgen: compiling its {library} operators with {how.compiler}, once, into {target.parent}")
        library_cache.build(how, target, is_alone)
    return target


def _say(line: str) -> None:
    """Print a line on standard error, if there is one."""
    if sys.stderr is not None:  # None for a program without a console
        with contextlib.suppress(OSError, ValueError):  # it has been closed
            print(line, file=sys.stderr, flush=True)


def _fits_devices(library: Path) -> bool:
    """Whether a library built ahead of time holds code for every device here; a file beside it says what it holds."""
    built = library.with_suffix(".arch").read_text("utf-8").split()
    return set(builder.device_architectures()) <= {name.partition("+")[0].rstrip("af") for name in built}
