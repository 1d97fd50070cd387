"""Finds, or builds, and loads the native libraries, by the environment variable FASTGEN_NATIVE.

| FASTGEN_NATIVE | |
| --- | --- |
| unset | the library built ahead of time, else the cached one, else compile it; else, silently, the reference |
| 0 | the reference only |
| build | compile the sources afresh |
| required | as if unset, but an error where no native library can be had |
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch

from fastgen import config, report
from fastgen.ops import builder

_UNWRITTEN = {  # what has no kernel, and why
    ("beam_attention", "cuda"): "torch's own attention, or Triton's where that is faster",
    ("fingerprint", "cuda"): "torch's own sums",
    ("multinomial", "cuda"): "torch's own",
    ("skinny_linear", "cuda"): "torch's own products",
    ("packed_linear", "cuda"): "torch's own products",
    ("screened_linear", "cuda"): "torch's own products",
}

_lock = threading.Lock()
_loaded: dict[str, str] | None = None  # library -> "" if it is loaded, else why not


def load(operators: tuple[str, ...]) -> None:
    """Load the libraries that this machine can use, once, and report what each of `operators` is now.

    Raises:
        RuntimeError: under FASTGEN_NATIVE=required, if one can't be had.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            wanted = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
            mode = config.native()
            _loaded = {library: "FASTGEN_NATIVE=0" if mode == "0" else _load(library, mode) for library in wanted}
        report.set_operators({operator: _how(operator, _loaded) for operator in operators})


def _how(operator: str, loaded: dict[str, str]) -> str:
    """How the operator runs, such as "native (cpu)"."""
    why_not = {library: why or _UNWRITTEN.get((operator, library), "") for library, why in loaded.items()}
    native = [library for library, why in why_not.items() if not why]
    missing = [f"{library}: {why}" for library, why in why_not.items() if why]
    parts = [f"native ({', '.join(native)})"] if native else []
    parts += [f"reference ({'; '.join(missing)})"] if missing else []
    return ", ".join(parts)


def is_loaded(library: str) -> bool:
    """Whether "cpu" or "cuda" runs natively."""
    return _loaded is not None and _loaded.get(library) == ""


def _load(library: str, mode: str) -> str:
    """Why there is no native `library`; "" once it is loaded."""
    try:
        torch.ops.load_library(str(_find(library, mode)))
        return ""
    except builder.Unavailable as error:
        if mode == "required":
            raise RuntimeError(f"FASTGEN_NATIVE=required, but {error}.") from error
        if mode == "build":
            report.warn(f"FASTGEN_NATIVE=build, but {error}.")
        return str(error)
    except (builder.BuildFailed, OSError) as error:  # OSError: no place to write to, or the loader refuses the file
        if mode == "required":
            raise RuntimeError(f"FASTGEN_NATIVE=required, but {error}.") from error
        text = f"fastgen runs its {library} operators in plain torch, which is slower: {error}. "
        text += "FASTGEN_NATIVE=build tries again, FASTGEN_NATIVE=0 says no more."
        report.warn(text)
        return str(error).partition(" (log:")[0]


def _find(library: str, mode: str) -> Path:
    """The library ahead of time, or in the cache; a compiler is asked for only if it is in neither."""
    if mode != "build":
        ready = builder.AHEAD_OF_TIME / f"{library}-{builder.source_key(library)}.so"
        if ready.is_file() and (library != "cuda" or _fits_devices(ready)):
            return ready
    target = builder.cache_folder() / builder.cached_name(library)
    if target.is_file() and mode != "build":
        return target
    how = builder.recipe(library)
    with builder.locked(target):
        if mode != "build":
            if target.is_file():  # another process has built it meanwhile
                return target
            if (failed := how.log(target)).is_file():
                raise builder.BuildFailed("an earlier build failed", failed)
        print(
            f"fastgen: compiling its {library} operators with {how.compiler}, once, into {target.parent}",
            file=sys.stderr,
            flush=True,
        )
        builder.build(how, target)
    return target


def _fits_devices(library: Path) -> bool:
    """Whether a library built ahead of time holds code for every device here; a file beside it says what it holds."""
    built = library.with_suffix(".arch").read_text("utf-8").split()
    return set(builder.device_architectures()) <= {name.partition("+")[0].rstrip("af") for name in built}
