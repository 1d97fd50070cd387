"""What the wheels of a release leave out: the libraries that torch brings, as copies would be another torch."""

from __future__ import annotations

import fnmatch
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from build_kit import ROOT, TOUCH, compiler, needs_compiler
from elf import needed_libraries

from fastgen import ops
from fastgen.ops import builder, library

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")

LIBRARIES = ("cpu", "runtime")  # the machines that build wheels have no CUDA
# What every Linux has that a wheel for manylinux runs on.
SYSTEM = {
    *("libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "libstdc++.so.6"),
    *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
}


def settings() -> dict[str, Any]:
    file = ROOT / "pyproject.toml"
    if not file.is_file():
        pytest.skip("needs a checkout")
    return tomllib.loads(file.read_text("utf-8"))["tool"]["cibuildwheel"]


def left_out(system: str) -> list[str]:
    words = shlex.split(settings()[system]["repair-wheel-command"])
    return [words[i + 1] for i, word in enumerate(words) if word == "--exclude"]


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
@pytest.mark.parametrize("name", LIBRARIES)
def test_auditwheel_copies_no_library(name: str) -> None:
    if not ops.is_native(torch.device("cpu")) or not library.is_loaded(name):
        pytest.skip(f"no native library {name}")
    others = needed_libraries(library._find(name, "")) - SYSTEM
    patterns = left_out("linux")
    assert "libtorch_cpu.so" in others
    assert [one for one in sorted(others) if not any(fnmatch.fnmatch(one, pattern) for pattern in patterns)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the libraries of torch for Linux")
def test_auditwheel_leaves_out_what_torch_brings() -> None:
    brought = [path.name for path in (Path(torch.__file__).parent / "lib").iterdir()]
    assert [pattern for pattern in left_out("linux") if not fnmatch.filter(brought, pattern)] == []


@needs_compiler
@pytest.mark.parametrize("name", LIBRARIES)
def test_delocate_copies_no_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves out a library whose path has one of the words in it."""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    linked = [f"lib{word[2:]}.dylib" for word in builder.recipe(name).tail if word.startswith("-l")]
    assert "libtorch_cpu.dylib" in linked
    assert [one for one in linked if not any(word in one for word in left_out("macos"))] == []


@pytest.fixture
def on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Windows")


needs_stable_abi = pytest.mark.skipif(not builder.is_stable("cpu"), reason="torch before 2.10 has no stable ABI")


@needs_stable_abi
def test_on_windows_clang_compiles_what_needs_the_stable_abi_alone(
    on_windows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clang = Path(compiler(tmp_path, TOUCH)).rename(tmp_path / "clang++")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    how = builder.recipe("cpu")
    assert how.compiler == "clang++"
    assert all("-fms-runtime-lib=dll" in command and "-fPIC" not in command for _, command in how.compile)
    assert "-nostartfiles" in how.link, "Clang would link the static C runtime"
    assert [word for word in how.tail if word.startswith("-l")] == ["-ltorch_cpu"]
    with pytest.raises(builder.Unavailable, match="the runtime operators are not built on Windows"):
        builder.recipe("runtime")
    clang.rename(tmp_path / "g++")
    with pytest.raises(builder.Unavailable, match=r"there is no C\+\+ compiler"):
        builder.recipe("cpu")


@needs_stable_abi
def test_on_windows_a_wheel_brings_the_library_or_nothing_does(
    on_windows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "AHEAD_OF_TIME", tmp_path)
    for mode in ("", "build"):
        with pytest.raises(builder.Unavailable, match="on Windows native operators come in the wheel"):
            library._find("cpu", mode)
        for other in ("runtime", "cuda"):  # which no wheel brings
            with pytest.raises(builder.Unavailable, match=f"the {other} operators are not built on Windows"):
                library._find(other, mode)
    ready = tmp_path / f"cpu-{builder.source_key('cpu')}{builder.SUFFIX}"
    ready.touch()
    assert library._find("cpu", "required") == library._find("cpu", "build") == ready


@pytest.mark.parametrize("missing", ["cpu", "runtime"])
def test_what_no_wheel_for_windows_has_is_not_required(
    missing: str, on_windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, *_: object) -> str:
        if name == missing:
            raise builder.Unavailable("it is not there")
        return ""

    monkeypatch.setattr(library, "_load", load)
    if missing == "runtime":
        assert library._load_all(["cpu", "runtime"], "required", ()) == {"cpu": "", "runtime": "it is not there"}
        monkeypatch.setattr(platform, "system", lambda: "Linux")
    with pytest.raises(RuntimeError, match="FASTGEN_NATIVE=required, but it is not there"):
        library._load_all(["cpu", "runtime"], "required", ())


def test_commands_that_windows_shares_have_double_quotes() -> None:
    """There cmd.exe runs them, to which single quotes are letters."""
    commands = [value for name, value in settings().items() if name.startswith("before-") or name.endswith("-command")]
    assert len(commands) == 3
    assert not [command for command in commands if "'" in command]
