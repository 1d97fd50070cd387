"""Finding and compiling the native libraries, each time in a fresh process with a cache of its own."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from build_kit import REAL, TOUCH, USE, compiler, needs_compiler, use

from fastgen import ops
from fastgen.ops import builder, library, library_cache
from fastgen.ops.operator import OPERATORS

LIBRARIES = ("cpu", "runtime")


def test_without_a_compiler_plain_torch_serves_and_one_line_says_so(copy: Path, tmp_path: Path) -> None:
    run = use(tmp_path, copy, PATH=str(tmp_path), CXX="")
    assert run.returncode == 0, run.stderr
    reason = "plain torch (cpu: there is no C++ compiler)"
    assert run.stdout.splitlines() == ["operators: " + ", ".join(f"{name} {reason}" for name in OPERATORS)]
    assert run.stderr == (
        "fastgen runs its cpu operators in plain torch, which is slower: there is no C++ compiler. Install one, such "
        "as g++. FASTGEN_NATIVE=0 says no more.\n"
    )
    assert use(tmp_path, copy, "import fastgen; fastgen.status()", PATH=str(tmp_path), CXX="").stderr == ""
    assert not list(tmp_path.glob("cpu-*"))  # no cache for nothing


@pytest.mark.parametrize(
    "reasons, said",
    [
        (["there is no C++ compiler"] * 2, "there is no C++ compiler."),
        (["there is no C++ compiler", "no toolkit"], "there is no C++ compiler; no toolkit."),
    ],
)
def test_one_line_for_both_libraries(
    reasons: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(library: str, *_: object) -> str:
        raise builder.Unavailable(reasons[library == "cuda"])

    monkeypatch.setattr(library, "_load", refuse)
    assert library._load_all(["cpu", "cuda"], "", ()) == dict(zip(("cpu", "cuda"), reasons, strict=True))
    assert capsys.readouterr().err == (
        f"fastgen runs its cpu and cuda operators in plain torch, which is slower: {said} "
        "FASTGEN_NATIVE=0 says no more.\n"
    )


def test_a_program_without_a_console(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(library.sys, "stderr", None)
    library._say("a line")
    assert capsys.readouterr().out == ""


def test_without_a_compiler_for_the_runtime(copy: Path, tmp_path: Path) -> None:
    """As with a wheel that was built for another torch: nothing is said, but in the status."""
    if not ops.is_native(torch.device("cpu")):
        pytest.skip("no native operators")
    found = library._find("cpu", "")
    (copy / "fastgen/_native").mkdir()
    shutil.copyfile(found, copy / f"fastgen/_native/cpu-{builder.source_key('cpu')}.so")
    run = use(tmp_path, copy, USE + WITHOUT_RUNTIME, PATH=str(tmp_path), CXX="")
    assert run.returncode == 0 and run.stderr == "", run.stderr
    status, sums = run.stdout.splitlines()
    assert status.count("native (cpu)") == len(OPERATORS) - 1
    assert "multinomial plain torch (cpu: there is no C++ compiler)" in status
    assert sums == "True None"
    run = use(tmp_path, copy, PATH=str(tmp_path), CXX="", FASTGEN_NATIVE="required")
    assert run.stderr.splitlines()[-1] == "RuntimeError: FASTGEN_NATIVE=required, but there is no C++ compiler."


WITHOUT_RUNTIME = """
from fastgen.memory import arena
from fastgen.replay import program
layer = torch.nn.Linear(400, 400)
with arena.of(layer):
    drawn = ops.multinomial(torch.eye(3))
print(drawn.tolist() == [0, 1, 2], program.native([], []))
"""


def test_required_without_a_compiler(copy: Path, tmp_path: Path) -> None:
    run = use(tmp_path, copy, PATH=str(tmp_path), CXX="", FASTGEN_NATIVE="required")
    assert run.returncode != 0
    assert run.stderr.splitlines()[-1] == "RuntimeError: FASTGEN_NATIVE=required, but there is no C++ compiler."


def test_build_without_a_compiler(copy: Path, tmp_path: Path) -> None:
    run = use(tmp_path, copy, FASTGEN_NATIVE="build", CXX="no-such-compiler")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[1:] == [
        "RuntimeWarning: FASTGEN_NATIVE=build, but there is no C++ compiler no-such-compiler, which CXX names."
    ]


def test_switched_off(tmp_path: Path) -> None:
    run = use(tmp_path, FASTGEN_NATIVE="0", CXX=compiler(tmp_path, "exit 1"))
    assert run.stdout.count("plain torch (cpu: FASTGEN_NATIVE=0)") == len(OPERATORS), run.stderr
    assert run.stderr == "" and not (tmp_path / "calls").exists()


AUTOGRAD = """
import torch
from fastgen import ops
tokens, scores = torch.tensor([[1, 1]]), torch.zeros(1, 3)
ops.ban_repeated_ngrams_(tokens, scores, 2)
ops.ban_source_ngrams_(tokens, tokens, scores, 2)
print(scores._version, scores.tolist(), ops.is_native(scores.device))
ops.ban_repeated_ngrams_(tokens, scores.requires_grad_(), 2)
"""


def test_the_reference_tells_autograd(tmp_path: Path) -> None:
    """Also where torch calls it, unlike in the other tests, as an operator."""
    run = use(tmp_path, code=AUTOGRAD, FASTGEN_NATIVE="0")
    assert run.stdout == "2 [[0.0, -inf, 0.0]] False\n", run.stderr
    assert run.stderr.splitlines()[-1].startswith("RuntimeError: scores that require a gradient")


INTERRUPTED = """
import torch

real = torch.library.register_fake

def register_fake(name, *arguments, **options):
    if name == "fastgen::quantized_linear":  # the third operator of its module
        torch.library.register_fake = real
        raise KeyboardInterrupt
    return real(name, *arguments, **options)

torch.library.register_fake = register_fake
try:
    import fastgen.ops
except KeyboardInterrupt as error:
    kept = error  # as a notebook keeps the last one, with all that its frames hold
from fastgen import ops
codes, scales = ops.quantize_weight(torch.eye(3))
print(ops.quantized_linear(torch.eye(3), [codes], [scales]).tolist() == torch.eye(3).tolist(), type(kept).__name__)
"""


def test_an_import_that_was_interrupted_can_be_done_anew(tmp_path: Path) -> None:
    run = use(tmp_path, code=INTERRUPTED, FASTGEN_NATIVE="0")
    assert run.stdout == "True KeyboardInterrupt\n", run.stderr


def test_a_wrong_setting(tmp_path: Path) -> None:
    run = use(tmp_path, code="import fastgen", FASTGEN_NATIVE="yes")
    message = "ValueError: FASTGEN_NATIVE must be 0, build or required, or not be set, not 'yes'."
    assert run.stderr.splitlines()[-1] == message


@needs_compiler
def test_broken_sources(copy: Path, tmp_path: Path) -> None:
    (copy / "csrc/arguments.h").write_text('#include "missing_on_purpose.h"\n')
    cache = tmp_path / "cache"
    cache.mkdir()
    run = use(cache, copy)
    assert run.returncode == 0, run.stderr
    (log,) = cache.glob("cpu-*.log")
    assert "interrupted" not in log.name
    assert "missing_on_purpose.h" in log.read_text()
    (warning,) = run.stdout.splitlines()[1:]
    assert warning.startswith("RuntimeWarning: fastgen runs its cpu operators in plain torch, which is slower: ")
    assert f"(log: {log})" in warning
    assert "plain torch (cpu: compiling the cpu operators with" in run.stdout
    assert not list(cache.glob("*.so"))

    # The next process says so again, without compiling in vain; `build` tries.
    again = use(cache, copy)
    assert "an earlier build failed" in again.stdout and f"(log: {log})" in again.stdout
    assert "compiling" not in again.stderr and "compiling" in run.stderr
    assert "compiling" in use(cache, copy, FASTGEN_NATIVE="build").stderr
    required = use(cache, copy, FASTGEN_NATIVE="required")
    assert required.returncode != 0
    assert f"RuntimeError: FASTGEN_NATIVE=required, but an earlier build failed (log: {log})." in required.stderr


@pytest.mark.parametrize(
    "body",
    [
        "kill -9 $$",
        "exit 137",
        'echo "c++: fatal error: Killed signal terminated program cc1plus" >&2; exit 1',
        'echo "cc1plus: out of memory allocating 65536 bytes" >&2; exit 1',
        'echo "fatal error: error writing to /tmp/x.s: No space left on device" >&2; exit 1',
    ],
)
def test_a_compiler_that_was_killed_gets_another_chance(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(builder, "AHEAD_OF_TIME", tmp_path)
    monkeypatch.setenv("CXX", compiler(tmp_path, body))
    for _ in range(2):
        with pytest.raises(builder.BuildFailed, match="compiling the cpu operators with cxx failed"):
            library._find("cpu", "")
    (log,) = tmp_path.glob("*.log")
    assert log.name.endswith(".interrupted.log")
    compiler(tmp_path, TOUCH)
    assert library._find("cpu", "").read_text() == "built\n"
    assert not list(tmp_path.glob("*.log"))


def test_a_failed_build_keeps_no_other_compiler_from_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(builder, "AHEAD_OF_TIME", tmp_path)
    monkeypatch.setenv("CXX", compiler(tmp_path, "echo error: an option is unknown; exit 1"))
    with pytest.raises(builder.BuildFailed, match="compiling"):
        library._find("cpu", "")
    with pytest.raises(builder.BuildFailed, match="an earlier build failed"):
        library._find("cpu", "")
    newer = Path(compiler(tmp_path, TOUCH))
    newer.write_text(newer.read_text().replace("test 1.0", "test 2.0"))
    assert library._find("cpu", "").is_file()
    assert not list(tmp_path.glob("*.log"))


def test_a_cache_that_cannot_be_written(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = use(tmp_path, copy, FASTGEN_CACHE_DIR=str(tmp_path / "file/cache"), CXX=compiler(tmp_path, TOUCH))
    assert run.returncode == 0, run.stderr
    assert "RuntimeWarning: fastgen runs its cpu operators in plain torch" in run.stdout


def test_a_library_that_does_not_load(copy: Path, tmp_path: Path) -> None:
    run = use(tmp_path, copy, CXX=compiler(tmp_path, TOUCH))
    assert run.returncode == 0, run.stderr
    assert "RuntimeWarning: fastgen runs its cpu operators in plain torch" in run.stdout


def test_processes_build_once(copy: Path, tmp_path: Path) -> None:
    """The others wait, and find what the first has built."""
    cxx = compiler(tmp_path, TOUCH)
    runs: list[subprocess.CompletedProcess[str]] = []
    threads = [threading.Thread(target=lambda: runs.append(use(tmp_path, copy, CXX=cxx))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.returncode for run in runs] == [0, 0, 0], runs
    assert sum("compiling" in run.stderr for run in runs) == 1
    sources = len(list((copy / "csrc/cpu").glob("*.cpp")))
    assert len((tmp_path / "calls").read_text().splitlines()) == sources + 1  # and one that links
    assert not list(tmp_path.glob("building-*"))


def test_threads_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", compiler(tmp_path, TOUCH))
    monkeypatch.setattr(builder, "AHEAD_OF_TIME", tmp_path)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(library._find("cpu", ""))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert found[0].read_text() == "built\n"
    assert (tmp_path / "calls").read_text().count("-shared") == 1


def test_the_cache_depends_on_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CXX", "CXXFLAGS", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    first = library_cache.cached_name("cpu"), library_cache.cached_name("cuda")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert (library_cache.cached_name("cpu"), library_cache.cached_name("cuda")) == first
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    assert library_cache.cached_name("cpu") == first[0] and library_cache.cached_name("cuda") != first[1]
    for change, is_for_all in (
        (lambda: monkeypatch.setenv("CXXFLAGS", "-O1"), False),
        (lambda: monkeypatch.setattr(torch, "__version__", "2.99.0"), builder.is_stable("cpu")),
        (lambda: monkeypatch.setattr(builder.platform, "machine", lambda: "riscv64"), False),
    ):
        before = library_cache.cached_name("cpu"), library_cache.cached_name("runtime")
        change()
        after = library_cache.cached_name("cpu"), library_cache.cached_name("runtime")
        assert (after[0] == before[0]) == is_for_all and after[1] != before[1]


def test_the_cache_needs_no_compiler(copy: Path, tmp_path: Path) -> None:
    """Nor the one that built it: a process without any finds what another has left."""
    if not ops.is_native(torch.device("cpu")):
        pytest.skip("no native operators")
    assert "compiling" in use(tmp_path, copy, CXX=compiler(tmp_path, TOUCH)).stderr
    (built,) = tmp_path.glob("*.so")
    assert built.read_text() == "built\n" and built.name == library._find("cpu", "").name
    for found in (library._find("cpu", ""), library._find("runtime", "")):
        for suffix in (".so", ".sha256"):
            shutil.copyfile(found.with_suffix(suffix), (tmp_path / found.name).with_suffix(suffix))
    run = use(tmp_path, copy, PATH=str(tmp_path), CXX="", FASTGEN_NATIVE="required")
    assert run.stdout.count("native (cpu)") == len(OPERATORS), run.stderr
    assert run.stderr == ""


@pytest.mark.parametrize("variable, text", [("CXXFLAGS", "-O2 -march=native"), ("CXX", "g++ -mcpu=native")])
def test_code_for_one_processor_alone(variable: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines with other processors may share the folder, as in a home on a cluster."""
    for name in ("CXX", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, text.replace("native", "x86-64-v3"))
    any_of_them = library_cache.cached_name("cpu")
    monkeypatch.setattr(library_cache, "_processor", lambda: "another")
    assert library_cache.cached_name("cpu") == any_of_them
    monkeypatch.setenv(variable, text)
    other = library_cache.cached_name("cpu")
    monkeypatch.undo()
    monkeypatch.setenv(variable, text)
    assert library_cache.cached_name("cpu") != other and library_cache._processor() == library_cache._processor()


def test_what_others_leave_among_the_sources(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "source_folder", lambda: copy / "csrc")
    before = builder.source_key("cpu")
    (copy / "csrc/cpu/.topk.cpp.swp").write_text("")
    (copy / "csrc/cpu/._topk.cpp").write_text("")  # as from an archive made on macOS
    (copy / "csrc/cpu/topk.cpp~").write_text("")
    (copy / "csrc/cpu/.ipynb_checkpoints").mkdir()
    assert builder.source_key("cpu") == before
    (copy / "csrc/cpu/more.h").write_text("")
    assert builder.source_key("cpu") != before


def test_a_library_built_ahead_of_time_that_does_not_load(copy: Path, tmp_path: Path) -> None:
    """As where it was built on a newer system: the next best is taken, and where there is none, that is said."""
    if not ops.is_native(torch.device("cpu")):
        pytest.skip("no native operators")
    ready = copy / f"fastgen/_native/cpu-{builder.source_key('cpu')}.so"
    ready.parent.mkdir()
    ready.write_text("for another system\n")
    run = use(tmp_path, copy, PATH=str(tmp_path), CXX="")
    assert f"plain torch, which is slower: there is no C++ compiler, and {ready} can't be loaded (" in run.stderr
    for found in (library._find("cpu", ""), library._find("runtime", "")):
        for suffix in (".so", ".sha256"):
            shutil.copyfile(found.with_suffix(suffix), (tmp_path / found.name).with_suffix(suffix))
    run = use(tmp_path, copy, PATH=str(tmp_path), CXX="", FASTGEN_NATIVE="required")
    assert run.stdout.count("native (cpu)") == len(OPERATORS) and run.stderr == "", run.stderr


def test_clang_brings_no_openmp_beside_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code would call functions that GNU's OpenMP, which torch's wheels have, does not have: nothing would load."""
    script = Path(compiler(tmp_path, TOUCH))
    monkeypatch.setenv("CXX", str(script))

    def openmp() -> tuple[bool, bool]:
        how = builder.recipe("runtime")
        compiles = {"-fopenmp" in command for _, command in how.compile}
        assert len(compiles) == 1
        return compiles.pop(), "-fopenmp" in how.tail

    monkeypatch.setattr(builder.platform, "system", lambda: "Linux")
    for version, own, expected in (
        ("g++ (Debian 12.2.0-14) 12.2.0", [tmp_path / "libgomp.so.1"], (True, False)),
        ("g++ (Debian 12.2.0-14) 12.2.0", [], (True, True)),
        ("Debian clang version 14.0.6", [tmp_path / "libgomp.so.1"], (False, False)),
        ("Debian clang version 14.0.6", [], (True, True)),  # torch's may be Clang's
    ):
        monkeypatch.setattr(builder, "_version", lambda command, version=version: version)
        monkeypatch.setattr(builder, "_own_openmp", lambda own=own: own)
        assert openmp() == expected


def test_how_many_compilers_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the processors of this process, which may be one of many: each takes memory as well."""
    seen: list[int] = []

    class Pool(builder.ThreadPoolExecutor):
        def __init__(self, count: int) -> None:
            seen.append(count)
            super().__init__(count)

    monkeypatch.setattr(builder, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(builder.os, "sched_getaffinity", lambda process: {5}, raising=False)
    monkeypatch.setattr(builder.os, "cpu_count", lambda: 64)
    for asked in ("", "3", "0", "many"):
        monkeypatch.setenv("MAX_JOBS", asked)
        assert builder._run_all([["true"]], tmp_path) == [(0, "$ true\n")]
    assert seen == [1, 3, 1, 1]


def test_a_library_built_ahead_of_time_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "AHEAD_OF_TIME", tmp_path)
    ready = tmp_path / f"cpu-{builder.source_key('cpu')}{builder.SUFFIX}"
    ready.write_text("")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library._find("cpu", "") == library._find("cpu", "required") == ready
    with pytest.raises(builder.Unavailable):
        library._find("cpu", "build")


@pytest.mark.parametrize("variable", ["CXX", "CXXFLAGS"])
def test_quotes_that_are_not_closed(variable: str, copy: Path, tmp_path: Path) -> None:
    settings = {"CXX": compiler(tmp_path, TOUCH)} | {variable: "c++ '-DNAME=1"}
    run = use(tmp_path, copy, **settings)
    assert run.returncode == 0, run.stderr
    assert f"plain torch (cpu: the quotes in {variable} are not closed: c++ '-DNAME=1)" in run.stdout


def test_a_user_without_a_home(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = use(tmp_path, copy, FASTGEN_CACHE_DIR="", XDG_CACHE_HOME="", HOME="", CXX=compiler(tmp_path, TOUCH))
    assert run.returncode == 0, run.stderr
    reason = "there is no home directory to keep libraries in (set FASTGEN_CACHE_DIR)"
    assert run.stdout.count(reason) == len(OPERATORS)
    assert reason in run.stderr and len(run.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "cxx"}

    import pwd  # no Windows

    def unknown(user: object) -> object:
        raise KeyError(user)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for own, home in (("~no-such-user/here", "/home"), ("~", ""), ("~/here", ""), ("", ""), ("", "here"), ("", None)):
        monkeypatch.setenv("FASTGEN_CACHE_DIR", own)
        monkeypatch.delenv("HOME", raising=False)
        if home is not None:
            monkeypatch.setenv("HOME", home)
        with pytest.raises(builder.Unavailable, match="there is no home directory"):
            library_cache.cache_folder()


@pytest.mark.parametrize("path", ["here", "./here", ".", "../here"])
def test_a_cache_in_the_current_directory(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_CACHE_DIR", path)
    with pytest.raises(builder.Unavailable, match="FASTGEN_CACHE_DIR must be an absolute path, not "):
        library._find("cpu", "build")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for name in ("FASTGEN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert library_cache.cache_folder() == Path("/home/somebody/.cache/fastgen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert library_cache.cache_folder() == Path("/var/cache/fastgen")
    for ignored in ("", "cache", "./cache", "~/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert library_cache.cache_folder() == Path("/home/somebody/.cache/fastgen")
    monkeypatch.setenv("FASTGEN_CACHE_DIR", "~/here")
    assert library_cache.cache_folder() == Path("/home/somebody/here")


def test_cuda_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a 12.0+PTX")
    assert builder._gencode(builder.cuda_architectures()) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Ampere;Hopper")
    assert builder.cuda_architectures() == ["8.0", "8.6+PTX", "9.0+PTX"]
    for unknown in ("Shannon", "9.0+SASS"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", unknown)
        with pytest.raises(builder.Unavailable, match="must name architectures like"):
            builder._gencode(builder.cuda_architectures())


def test_cuda_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    capabilities = [(9, 0), (8, 0), (9, 0)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device])
    assert builder.cuda_architectures() == ["8.0", "9.0"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "native")
    assert builder.cuda_architectures() == ["8.0", "9.0"]
    for built, fits in (("8.0 9.0a+PTX 12.0", True), ("9.0", False)):
        (tmp_path / "cuda.arch").write_text(built)
        assert library._fits_devices(tmp_path / "cuda.so") is fits

    def refuse(device: int) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with\nmultiprocessing, ...")

    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    for function in (builder.cuda_architectures, lambda: library_cache.cached_name("cuda")):
        with pytest.raises(
            builder.Unavailable, match=r"^the CUDA devices can't be asked: Cannot re-initialize .* with$"
        ):
            function()
    with pytest.raises(builder.Unavailable, match="the CUDA devices can't be asked"):
        library._load("cuda", "", ())


def test_the_host_compiler_of_nvcc(tmp_path: Path) -> None:
    for cxx, compiler_named, options in (
        (["g++"], "g++", []),
        (["ccache", "g++"], "g++", []),
        (["/usr/bin/sccache", "/opt/gcc/bin/g++-13", "-m64"], "/opt/gcc/bin/g++-13", ["-Xcompiler=-m64"]),
        (["env", "TMPDIR=/x", "distcc", "clang++", "-Wl,-z"], "clang++", ["-Xcompiler=-Wl\\,-z"]),
        (["ccache"], "ccache", []),  # a link to it that is named as the compiler would be
    ):
        command = builder.cuda_command(tmp_path, cxx, ["9.0"])
        assert command[command.index("-ccbin") + 1] == compiler_named
        assert [word for word in command if word.startswith("-Xcompiler")][1:] == options


def test_the_standard_that_torch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, standard in (("2.6.0", "17"), ("2.13.0+cpu", "17"), ("2.14.0a0+git1", "20"), ("3.0.1", "20")):
        monkeypatch.setattr(torch, "__version__", version)
        assert f"-std=c++{standard}" in builder._flags()


@needs_compiler
@pytest.mark.slow
def test_a_real_build_from_the_sources(tmp_path: Path) -> None:
    started = time.time()
    run = use(tmp_path, FASTGEN_NATIVE="build", CXXFLAGS="-O0")
    assert run.stdout.count("native (cpu)") == len(OPERATORS), run.stdout + run.stderr
    lines = run.stderr.splitlines()
    assert len(lines) == 2 and all(f"compiling its {name} operators" in lines[i] for i, name in enumerate(LIBRARIES))
    for name in LIBRARIES:
        (built,) = tmp_path.glob(f"{name}-*.so")
        assert built.stat().st_mtime >= started - 1
    cached = use(tmp_path, CXXFLAGS="-O0", FASTGEN_NATIVE="required")
    assert cached.stdout == run.stdout and cached.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("source", sorted(path.name for path in builder.source_folder().glob("cuda/*.cu")))
def test_the_cuda_sources_compile(source: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None or REAL is None:
        pytest.skip("there is no nvcc, or no C++ compiler")
    command = builder.cuda_command(Path(nvcc).resolve().parents[1], [REAL], ["9.0"])
    if not (builder._TORCH / "include/c10/cuda/impl/cuda_cmake_macros.h").exists():  # a torch without CUDA
        stub = tmp_path / "stub/c10/cuda/impl/cuda_cmake_macros.h"
        stub.parent.mkdir(parents=True)
        stub.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
        command += ["-I", str(tmp_path / "stub")]
    path = builder.source_folder() / "cuda" / source
    run = subprocess.run(
        [*command, "-Werror=all-warnings", str(path), "-o", str(tmp_path / "object.o")],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert run.returncode == 0, run.stdout


@needs_compiler
def test_a_program_that_only_compiles_them_loads_the_library() -> None:
    code = """
import torch
from fastgen import ops
step = torch.compile(lambda logits: ops.topk_log_softmax(logits, 2), fullgraph=True, backend="eager")
assert not ops.library.was_loaded()
assert step(torch.tensor([[1.0, 3.0, 2.0]]))[1].tolist() == [[1, 2]]
print(ops.library.is_loaded("cpu"))
"""
    run = use(library_cache.cache_folder(), code=code)  # where it has been built
    assert run.stdout == "True\n", run.stderr


WHICH = """
#define FASTGEN_LOOPS "loops.h"
#include "cpu/each_isa.h"
#include <cstdio>
#include <cstdlib>
int main(int count, char** words) {
  const auto number = [&](int i) { return static_cast<uint32_t>(std::strtoul(words[i], nullptr, 0)); };
  std::printf("%d", static_cast<int>(
      count > 1 ? fastgen::newest_of(number(1), number(2), number(3)) : fastgen::instruction_set()));
}
"""


def which(folder: Path) -> Path:
    """A program that prints which instructions are chosen, here or for what cpuid and XCR0 say."""
    (folder / "loops.h").touch()
    (folder / "which.cpp").write_text(WHICH)
    folders = [f"-I{folder}", f"-I{builder.source_folder()}"]
    subprocess.run([REAL, "-std=c++17", *folders, folder / "which.cpp", "-o", folder / "which"], check=True)
    return folder / "which"


only_x86 = pytest.mark.skipif(
    REAL is None or platform.machine() not in ("x86_64", "AMD64"),
    reason="needs a C++ compiler and an x86-64 processor: others have one instruction set",
)


@only_x86
def test_instructions_need_the_processor_and_the_system(tmp_path: Path) -> None:
    program = which(tmp_path)
    leaf1 = 1 << 12 | 1 << 23 | 1 << 28 | 1 << 29  # FMA, POPCNT, AVX, F16C
    avx2, avx512 = 1 << 5, 1 << 5 | 1 << 16 | 1 << 17 | 1 << 30 | 1 << 31  # F, DQ, BW, VL
    rows = [
        (2, leaf1, avx512, 0xE7),
        (1, leaf1, avx2, 0xE7),
        (1, leaf1, avx512, 0x7),  # a system that does not keep the registers of AVX-512
        (1, leaf1, avx512, 0x67),
        (1, leaf1, avx512 & ~(1 << 30), 0xE7),  # Xeon Phi
        (0, leaf1, avx512, 0x3),
        (0, leaf1, avx512 & ~avx2, 0xE7),
        (0, leaf1 & ~(1 << 12), avx512, 0xE7),
        (0, leaf1 & ~(1 << 29), avx512, 0xE7),
        (0, 0, 0, 0),
    ]
    for expected, *words in rows:
        run = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=True)
        assert int(run.stdout) == expected, words


@only_x86
def test_the_instructions_are_those_that_torch_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = which(tmp_path)
    asks = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    sets = ["DEFAULT", "AVX2", "AVX512"]

    def chosen() -> int:
        chosen = int(subprocess.run([program], capture_output=True, text=True, check=True).stdout)
        torchs = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True).stdout
        assert sets[chosen] == torchs.strip()
        return chosen

    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    for most in range(chosen()):  # torch believes the variable: it may not name what the processor lacks
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", sets[most].lower())
        assert chosen() == most
