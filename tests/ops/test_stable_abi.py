"""The CPU's operators need nothing of torch but its stable ABI: one library serves every torch from 2.10 on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build_kit import needs_compiler
from elf import undefined_symbols

from fastgen import ops
from fastgen.ops import builder, library
from fastgen.ops.operator import _named

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files"),
    pytest.mark.skipif(not builder.is_stable("cpu"), reason="torch before 2.10 has no stable ABI that suffices"),
]
# A name of a namespace of torch's, in C++, and not the end of a longer one such as `cat`.
_UNSTABLE = re.compile(r"_Z\w*(?<!\d)(?:2at|3c10|5torch|6caffe2)[0-9A-Z]")


def unstable(path: Path) -> list[str]:
    return sorted(name for name in undefined_symbols(path) if _UNSTABLE.match(name))


def found(name: str) -> Path:
    """A library, built where it has to be."""
    if not ops.is_native(torch.device("cpu")) or not library.is_loaded(name):
        pytest.skip(f"no native library {name}")
    return library._find(name, "")


@pytest.mark.parametrize(
    ("symbol", "is_unstable"),
    [
        ("_ZN2at3_ops5empty4callEN3c108ArrayRefIlEE", True),
        ("_ZNK3c105Error4whatEv", True),
        ("_ZTIN3c105ErrorE", True),
        ("_ZN5torch7LibraryC1ENS0_4KindE", True),
        ("_ZNSt6vectorIN2at6TensorESaIS1_EE17_M_realloc_insertIJRKS1_EEEvv", True),
        ("_ZNSt13runtime_errorC1ERKSs", False),
        ("_ZN4what12at_something3runEv", False),
        ("aoti_torch_get_size", False),
        ("torch_parallel_for", False),
    ],
)
def test_which_symbols_are_unstable(symbol: str, is_unstable: bool) -> None:
    assert bool(_UNSTABLE.match(symbol)) == is_unstable


def test_the_operators_need_no_unstable_symbol() -> None:
    path = found("cpu")
    assert unstable(path) == []
    symbols = undefined_symbols(path)
    assert {"torch_library_impl", "torch_parallel_for"} <= symbols
    assert not any(name.startswith(("Py", "_Py", "GOMP_", "omp_")) for name in symbols), "another Python, other threads"


def test_an_unstable_symbol_is_seen() -> None:
    """In the library that reaches into torch."""
    assert any("SetCPUAllocator" in name for name in unstable(found("runtime")))


def test_the_key_of_the_library_is_that_of_every_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for version in ("2.10.0", "2.13.0+cpu", "2.16.0a0+git1"):
        monkeypatch.setattr(torch, "__version__", version)
        keys.append([builder.source_key(name) for name in builder.LIBRARIES])
    cpu, runtime, cuda = (set(column) for column in zip(*keys, strict=True))
    assert len(cpu) == 1 and len(runtime) == len(cuda) == 3
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    assert not builder.is_stable("cpu") and builder.source_key("cpu") not in cpu


def test_the_errors_that_kernels_name() -> None:
    assert isinstance(_named(RuntimeError("TypeError: rows must be float32, not double.")), TypeError)
    assert str(_named(RuntimeError("IndexError: paths: 5"))) == "paths: 5"
    other = RuntimeError("KeyError: no")
    assert _named(other) is other


@pytest.mark.native
def test_the_operators_are_called_with_what_they_refuse() -> None:
    """By torch itself, where nobody raises the exception that the kernel names."""
    if not ops.is_native(torch.device("cpu")):
        pytest.skip("no native operators")
    with pytest.raises(RuntimeError, match=r"^ValueError: k must be 1 to 4, not 5\.$"):
        torch.ops.fastgen.topk_log_softmax(torch.zeros(2, 4), 5)
    with pytest.raises(ValueError, match=r"^k must be 1 to 4, not 5\.$"):
        ops.topk_log_softmax(torch.zeros(2, 4), 5)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("source", sorted(path.name for path in builder.source_folder().glob("cpu/*.cpp")))
def test_the_sources_compile_for_older_torch(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the stable ABI, as before torch 2.10, by this torch's headers."""
    monkeypatch.setattr(builder, "is_stable", lambda library: False)
    commands = dict((path.name, command) for path, command in builder.recipe("cpu").compile)
    path = builder.source_folder() / "cpu" / source
    command = [*(word for word in commands[source] if word not in ("-c", "-O3")), "-fsyntax-only", "-Werror", str(path)]
    run = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0, run.stdout
