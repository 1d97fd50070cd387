"""The CUDA operators compiled for the CPU, where `cuda_on_cpu/` runs their threads in turn and watches them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgen.ops import builder, library_cache
from fastgen.ops.operator import OPERATORS

HERE = Path(__file__).resolve().parent / "cuda_on_cpu"
NAMES = ("topk_log_softmax", "ban_repeated_ngrams_", "ban_source_ngrams_")
ORDERS = {"forward": 0, "reversed": 1, "random": 2}
_FOLLOWED = ("-fsanitize=thread", "-DFASTGEN_FOLLOW")  # calls functions of ours; the sanitizer's are not linked
_VARIANTS: dict[str, tuple[str, ...]] = {
    "emulated": (*_FOLLOWED, "--coverage", "-DFASTGEN_COVERAGE"),
    "faulty": _FOLLOWED,
    "sanitized": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-sanitize=vptr", "-g"),
}


@dataclass(frozen=True)
class Fault:
    """A mistake, seeded into a kernel: where `old` stands, `new` runs while the fault is switched on."""

    source: str
    what: str
    old: str
    new: str
    is_only_watched: bool = False  # no order of threads shows it in the outputs

    def apply(self, text: str, number: int) -> str:
        assert text.count(self.old) == 1, f"{self.source} has {self.old!r} {text.count(self.old)} times"
        return text.replace(self.old, self.new.replace("FAULT", f"(::cuda_on_cpu::fault == {number})"))


class Emulation:
    """One library: its operators, as attributes, and how the emulator runs their kernels."""

    def __init__(self, path: Path, namespace: str) -> None:
        self._library = ctypes.CDLL(str(path))
        self._operators = getattr(torch.ops, namespace)
        self.folder = path.parent
        self.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def set(self, order: str = "forward", seed: int = 0, step: int = 1, fault: int = 0, checks: bool = True) -> None:
        """How blocks and threads follow one another; one block in `step` runs; whether shared memory is watched."""
        self._library.cuda_on_cpu_set(ORDERS[order], ctypes.c_uint64(seed), ctypes.c_uint64(step), fault, int(checks))

    def counts(self) -> tuple[int, int, int]:
        """Launches, blocks and barriers so far."""
        into = (ctypes.c_uint64 * 3)()
        self._library.cuda_on_cpu_counts(into)
        return into[0], into[1], into[2]

    def dump_coverage(self, folder: Path) -> None:
        """Write how often each line has run, since the library was loaded, for `covered` with the same folder."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GCOV_PREFIX", str(folder))
            self._library.cuda_on_cpu_dump_coverage()

    def covered(self, folder: Path, source: str) -> dict[int, int]:
        """How often each line of a source has run that holds code."""
        (data,) = folder.rglob(f"{source}.gcda")
        (data.parent / f"{source}.gcno").write_bytes((self.folder / f"{source}.gcno").read_bytes())
        command = ["gcov", "--json-format", "--stdout", data.name]
        run = subprocess.run(command, cwd=data.parent, capture_output=True, text=True, check=True)
        lines: dict[int, int] = {}
        for file in json.loads(run.stdout)["files"]:
            if Path(file["file"]).name == source:
                for line in file["lines"]:  # once for each type that a template has been made for
                    number = line["line_number"]
                    lines[number] = max(lines.get(number, 0), line["count"])
        return lines


@functools.cache
def load(variant: str, faults: tuple[Fault, ...] = ()) -> Emulation:
    """Compile a variant, unless another process has done so, and load it."""
    namespace = f"fastgen_{variant}"
    path = build(variant, namespace, faults)
    library = torch.library.Library(namespace, "DEF")
    for name in NAMES:
        library.define(name + OPERATORS[name].schema)
    torch.ops.load_library(str(path))
    emulation = Emulation(path, namespace)
    emulation.definitions = library  # they last as long as this object
    return emulation


def build(variant: str, namespace: str, faults: tuple[Fault, ...] = ()) -> Path:
    """The compiled library, in the folder of fastgen's own; the test that asks is skipped where none can be had."""
    try:
        compiler = builder._find_compiler()
        folder = library_cache.trusted(library_cache.cache_folder())
    except builder.Unavailable as reason:
        pytest.skip(f"the CUDA sources can't be emulated: {reason}")
    version = builder._version(compiler)
    if "Free Software Foundation" not in version:
        pytest.skip("the CUDA sources are emulated by GCC alone")
    sources = builder.source_folder()
    texts = {path: path.read_text("utf-8") for path in sorted([*sources.glob("*.h"), *sources.glob("cuda/*")])}
    texts |= {path: path.read_text("utf-8") for path in sorted(HERE.iterdir())}
    command = [
        *(*compiler, "-c", "-Wall", "-Wno-sign-compare", "-Wno-unknown-pragmas", "-fPIC", "-fvisibility=hidden"),
        *(*builder._flags(), "-O1", "-DFASTGEN_EMULATE_CUDA", f"-DFASTGEN_EMULATED_NAMESPACE={namespace}"),
    ]
    flags = _VARIANTS[variant]
    own = [flag for flag in flags if flag not in ("-fsanitize=thread", "--coverage")]  # of the emulator itself
    link = [*compiler, "-shared", *(flag for flag in flags if flag != "-fsanitize=thread")]
    names = [path.name for path in texts if path.suffix in (".cu", ".cpp") and not (faults and path.stem == "probes")]
    about = repr((version, command, flags, names, torch.__version__, list(texts.values()), faults))
    target = folder / f"cuda-on-cpu-{hashlib.sha256(about.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with library_cache.locked(target):
        library = target / f"{variant}.so"
        if library.exists():
            return library
        target.mkdir(exist_ok=True, mode=0o700)  # not a temporary name: the counters of coverage are bound to it
        for number, fault in enumerate(faults, 1):
            path = sources / "cuda" / fault.source
            texts[path] = fault.apply(texts[path], number)
        for path, text in texts.items():
            into = target / ("sources" if path.parent == sources else "sources/cuda") / path.name
            into.parent.mkdir(parents=True, exist_ok=True)
            into.write_text(text, "utf-8")
        compiled = [target / "sources/cuda" / name for name in names]
        objects = [str(target / f"{path.name}.o") for path in compiled]
        reports = builder._run_all(
            [
                [*command, *(flags if path.suffix == ".cu" else own), "-x", "c++", str(path), "-o", into]
                for path, into in zip(compiled, objects, strict=True)
            ],
            target,
        )
        assert all(code == 0 for code, _ in reports), "\n".join(text for code, text in reports if code)
        tail = [f"-L{builder._TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
        partial = target / "partial.so"
        ((code, text),) = builder._run_all([[*link, *objects, *tail, "-o", str(partial)]], target)
        assert code == 0, text
        partial.rename(library)
        return library
