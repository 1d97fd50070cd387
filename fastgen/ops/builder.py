"""Compiles csrc/ into libraries that torch loads: at the first use, or ahead of time by setup.py.

It calls the compilers directly, so it needs no build system. `setup.py` loads this file by its path, because importing
the package would load the operators: nothing else of fastgen may be imported here. `fastgen.ops.library_cache` decides
where the libraries of the first use are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

LIBRARIES = ("cpu", "runtime", "cuda")  # folders of csrc/
_PACKAGE = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).resolve().parent
AHEAD_OF_TIME = _PACKAGE / "_native"
SUFFIX = ".dll" if os.name == "nt" else ".so"
_STABLE_ABI = "0x020a000000000000"  # of torch 2.10: the first with threads in it

_LAUNCHERS = {"ccache", "sccache", "distcc", "icecc", "env"}  # what CXX may name before the compiler
# Signs that a compiler was killed or lacked room: the next one may succeed.
_PASSING = re.compile(r"killed|died due to signal|out of memory|cannot allocate|memory exhausted|no space left", re.I)
# The names that torch takes in TORCH_CUDA_ARCH_LIST, for what its CUDA still supports.
_ARCHITECTURES = {
    "Pascal": "6.0 6.1+PTX",
    "Volta": "7.0+PTX",
    "Volta+Tegra": "7.2",
    "Turing": "7.5+PTX",
    "Ampere": "8.0 8.6+PTX",
    "Ampere+Tegra": "8.7",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0 10.3 12.0 12.1+PTX",
    "Blackwell+Tegra": "11.0",
}


class Unavailable(Exception):
    """Raised, with the reason, where nothing can be compiled; not an error for the user.

    Args:
        remedy: a sentence on what the user can do, where the reason does not say so.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


class BuildFailed(Exception):
    """A compiler gave up. The message names the log."""

    def __init__(self, what: str, log: Path) -> None:
        super().__init__(f"{what} (log: {log})")
        self.log = log


def source_folder() -> Path:
    """The folder csrc/: inside an installed package, beside the package in a checkout."""
    for folder in (_PACKAGE / "_csrc", _PACKAGE.parent / "csrc"):
        if folder.is_dir():
            return folder
    raise Unavailable("the C++ sources are not there")


def _sources(library: str) -> list[Path]:
    folder = source_folder()
    found = [*folder.glob(f"{library}/*"), *folder.glob("*.h")]
    # Not what an editor or a file browser leaves beside them.
    return sorted(path for path in found if path.suffix in (".h", ".cpp", ".cu") and not path.name.startswith("."))


def is_stable(library: str) -> bool:
    """Whether a library is compiled by torch's stable ABI, and so serves torch 2.10 and every later one.

    "runtime" reaches into torch itself, and "cuda" calls operators of torch that have no stable form.
    """
    return library == "cpu" and _torch_version() >= (2, 10)


def _torch_version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


def source_key(library: str) -> str:
    """A hash of all that a library must fit, wherever it was built: sources, torch or its stable ABI, architecture."""
    if is_stable(library):
        fits: tuple[object, ...] = (_STABLE_ABI,)
    else:
        fits = (torch.__version__, torch._C._GLIBCXX_USE_CXX11_ABI, [path.name for path in _own_openmp()])
    digest = hashlib.sha256(repr((*fits, platform.system(), platform.machine())).encode())
    for source in _sources(library):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Recipe:
    """How one library is compiled: a command for each source, and one that links their objects."""

    library: str
    compiler: str  # its name, for the user
    compile: tuple[tuple[Path, tuple[str, ...]], ...]  # the source, and the command up to its input and output
    link: tuple[str, ...]
    tail: tuple[str, ...]  # libraries go behind the objects
    key: str  # changes with the compilers and their commands

    def log(self, target: Path) -> Path:
        """The log of a failed build of `target`; another compiler, and so another name, may try again."""
        return target.with_name(f"{target.stem}-{self.key}.log")


def recipe(library: str) -> Recipe:
    """How to compile `library`, one of `LIBRARIES`, here.

    Raises:
        Unavailable: if a compiler or its requirements are missing.
    """
    check_system(library)
    is_windows = platform.system() == "Windows"
    cxx = _find_compiler()
    versions = _version(cxx)
    user = _words("CXXFLAGS")
    # On Windows all code can be moved. There torch catches exceptions of libraries that share its C and C++ runtime:
    # objects name the shared one, and -nostartfiles keeps Clang from naming the static one, too.
    shared = ["-fms-runtime-lib=dll"] if is_windows else ["-fPIC", "-fvisibility=hidden"]
    cpp = [*cxx, "-c", "-Wall", *shared, *_flags(), *user]  # torch finds what is registered
    link = [*cxx, "-shared", *(["-nostartfiles"] if is_windows else []), *user]
    tail = [f"-L{_TORCH / 'lib'}", "-ltorch_cpu"]
    if is_stable(library):
        cpp.append(f"-DTORCH_TARGET_VERSION={_STABLE_ABI}")
    else:
        tail.append("-lc10")
    if platform.system() == "Darwin":
        tail += ["-undefined", "dynamic_lookup"]
    elif not is_stable(library):
        own = list(map(str, _own_openmp()))
        # at::parallel_for is a header. Clang's code wants another OpenMP than torch's; without any it has one thread.
        if not (library == "runtime" and own and "clang" in versions):
            cpp.append("-fopenmp")
        tail += own or ["-fopenmp"]
    commands = {".cpp": cpp}
    if library == "cuda":
        home = _cuda_home()
        commands[".cu"] = cuda_command(home, cxx, cuda_architectures())
        tail += ["-lc10_cuda", "-ltorch_cuda", f"-L{home / 'lib64'}", "-lcudart"]
        versions += _version([str(home / "bin/nvcc")])
    compiled = tuple(
        (source, tuple(commands[source.suffix])) for source in _sources(library) if source.suffix in commands
    )
    key = hashlib.sha256(repr((versions, [command for _, command in compiled], link, tail)).encode()).hexdigest()[:16]
    return Recipe(library, Path(_compiler_of(cxx)[0]).name, compiled, tuple(link), tuple(tail), key)


def check_system(library: str) -> None:
    """Refuse what can't be built on this system, whatever is installed.

    Raises:
        Unavailable: on Windows, where `library` needs more of torch than the stable ABI.
    """
    if platform.system() == "Windows" and not is_stable(library):
        remedy = "Install torch 2.10 or newer." if library == "cpu" else ""
        raise Unavailable(f"the {library} operators are not built on Windows", remedy)


def cuda_command(home: Path, cxx: list[str], architectures: list[str]) -> list[str]:
    """The command for a CUDA source, without input and output; `cxx`: the C++ compiler, as CXX may name it."""
    compiler, *options = _compiler_of(cxx)
    options = [word.replace(",", "\\,") for word in options]  # nvcc splits at commas
    host = ["-ccbin", compiler, "-Xcompiler=-fPIC,-fvisibility=hidden", *(f"-Xcompiler={word}" for word in options)]
    return [str(home / "bin/nvcc"), "-c", *host, *_flags(), *_gencode(architectures)]


def _compiler_of(cxx: list[str]) -> list[str]:
    """CXX without launchers such as ccache: nvcc can't call the compiler through one."""
    first = 0
    while first < len(cxx) - 1 and (Path(cxx[first]).name in _LAUNCHERS or "=" in cxx[first]):  # env NAME=value g++
        first += 1
    return cxx[first:]


def _flags() -> list[str]:
    # The include folder not from torch.utils.cpp_extension, which needs setuptools and is slow to import.
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    # torch's headers want C++20 from 2.14 on; older compilers, which suffice before, don't have it.
    standard = "c++20" if _torch_version() >= (2, 14) else "c++17"
    return [f"-std={standard}", "-O3", "-DNDEBUG", abi, "-isystem", str(_TORCH / "include")]


def build(how: Recipe, target: Path, mode: int | None = None) -> None:
    """Compile into the file `target`, which appears complete or not at all.

    Args:
        mode: permissions of `target`; by default those that the process's umask leaves.

    Raises:
        BuildFailed: with the compilers' output in a log, `how.log(target)` if they would fail again.
        OSError: there is no place to write to.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=scratch_prefix(target)) as name:  # of mode 0700
        folder = Path(name)
        objects = [folder / f"{source.stem}-{source.suffix[1:]}.o" for source, _ in how.compile]
        commands = [
            [*command, str(source), "-o", str(into)]
            for (source, command), into in zip(how.compile, objects, strict=True)
        ]
        library = folder / target.name
        reports = _run_all(commands, folder)
        if all(code == 0 for code, _ in reports):
            reports += _run_all([[*how.link, *map(str, objects), *how.tail, "-o", str(library)]], folder)
        if any(code for code, _ in reports):
            lasting = not any(_has_passing_cause(code, text) for code, text in reports)
            log = how.log(target) if lasting else target.with_suffix(".interrupted.log")
            written = folder / "log"
            written.write_text("\n".join(text for _, text in reports), "utf-8")
            written.chmod(0o600)  # its commands may name what is private
            os.replace(written, log)  # written in place, a link of that name would be followed
            raise BuildFailed(f"compiling the {how.library} operators with {how.compiler} failed", log)
        if mode is not None:
            library.chmod(mode)
        os.replace(library, target)
        for log in target.parent.glob(f"{target.stem}*.log"):
            log.unlink(missing_ok=True)


def scratch_prefix(target: Path) -> str:
    """How the names of folders begin in which builds of `target` work; a build that is killed leaves one."""
    return f"building-{target.stem}-"


def _has_passing_cause(code: int, text: str) -> bool:
    """Whether a command failed by a signal (as a shell reports it: 128 + its number), or for want of memory or room."""
    return code < 0 or 128 < code < 192 or (code != 0 and _PASSING.search(text) is not None)


def _run_all(commands: list[list[str]], folder: Path) -> list[tuple[int, str]]:
    """Run commands side by side, as many as `_jobs` says; returns exit code and output of each.

    An exception in this thread ends the commands first: they would go on for minutes, in a folder that is removed. Each
    has a session of its own, as it starts other processes. Temporary files are in `folder`, too.
    """
    running: set[subprocess.Popen[str]] = set()
    lock, is_over = threading.Lock(), False
    environment = os.environ | dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(folder))  # the latter two for Windows

    def run(command: list[str]) -> tuple[int, str]:
        with lock:
            if is_over:
                return -signal.SIGTERM, ""
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            running.add(process)
        output, _ = process.communicate()
        with lock:
            running.discard(process)
        return process.returncode, f"$ {shlex.join(command)}\n{output}"

    with ThreadPoolExecutor(_jobs()) as pool:
        try:
            return list(pool.map(run, commands))
        except BaseException:
            with lock:
                is_over = True
                for process in running:
                    with contextlib.suppress(ProcessLookupError):
                        if sys.platform == "win32":
                            process.kill()
                        else:
                            os.killpg(process.pid, signal.SIGKILL)
            raise


def _jobs() -> int:
    """How many compilers run side by side: MAX_JOBS, as in torch's own builds, or this process's processors."""
    if (asked := os.environ.get("MAX_JOBS", "")).isdecimal() and int(asked):
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Looks for compilers and toolkits.


def _words(variable: str) -> list[str]:
    text = os.environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError:
        raise Unavailable(f"the quotes in {variable} are not closed: {text}") from None


def _find_compiler() -> list[str]:
    if own := _words("CXX"):
        if shutil.which(os.environ["CXX"]):  # a path whose spaces or backslashes are none of a shell's
            return [os.environ["CXX"]]
        if shutil.which(own[0]) is None:
            raise Unavailable(f"there is no C++ compiler {own[0]}, which CXX names", "Install it, or unset CXX.")
        return own
    # On Windows Clang alone, from 19 on: the sources use vectors and attributes that Microsoft's compiler lacks, torch
    # can't catch exceptions of GCC's, and older Clangs hide AVX there.
    is_windows = platform.system() == "Windows"
    for name in ("clang++",) if is_windows else ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise Unavailable(
        "there is no C++ compiler", f"Install {'Clang 19 or newer' if is_windows else 'one, such as g++'}."
    )


def _version(command: list[str]) -> str:
    return subprocess.run([*command, "--version"], stdout=subprocess.PIPE, text=True, errors="replace").stdout


def _own_openmp() -> list[Path]:
    """torch's own OpenMP: its wheels bring one of another name, and the threads of a second one would not obey
    torch.set_num_threads."""
    return sorted((_TORCH / "lib").glob("libgomp*.so*"))[:1]


def _cuda_home() -> Path:
    version = torch.version.cuda
    if version is None:
        raise Unavailable("this torch has no CUDA")
    found = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    if not found and nvcc:
        found = str(Path(nvcc).resolve().parents[1])
    home = Path(found or "/usr/local/cuda")
    if not (home / "bin/nvcc").is_file():
        raise Unavailable("there is no CUDA toolkit (set CUDA_HOME)")
    toolkit = _version([str(home / "bin/nvcc")]).partition("release ")[2].partition(",")[0]
    if toolkit.partition(".")[0] != version.partition(".")[0]:
        raise Unavailable(f"the CUDA toolkit is {toolkit}, torch's CUDA {version}")
    return home


def cuda_architectures() -> list[str]:
    """The architectures in TORCH_CUDA_ARCH_LIST, or of this machine's devices: ["8.0", "9.0+PTX"].

    Raises:
        Unavailable: if there is neither.
    """
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if listed and listed != ["native"]:
        return [number for name in listed for number in _ARCHITECTURES.get(name, name).split()]
    found = device_architectures()
    if not found:
        raise Unavailable("there is no CUDA device to build for (set TORCH_CUDA_ARCH_LIST)")
    return found


def device_architectures() -> list[str]:
    """The architectures of this machine's CUDA devices, each once.

    Raises:
        Unavailable: if they can't be asked, as in a process that was forked after CUDA's start.
    """
    try:
        found = {torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())}
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise Unavailable(f"the CUDA devices can't be asked: {reason}") from error
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def _gencode(architectures: list[str]) -> list[str]:
    flags = []
    for name in architectures:
        number, _, ptx = name.partition("+")
        digits = number.replace(".", "")
        if not digits.rstrip("af").isdigit() or ptx not in ("", "PTX"):
            raise Unavailable(f"TORCH_CUDA_ARCH_LIST must name architectures like 9.0, 9.0+PTX or Hopper, not {name!r}")
        flags.append(f"-gencode=arch=compute_{digits},code=sm_{digits}")
        if ptx:
            flags.append(f"-gencode=arch=compute_{digits},code=compute_{digits}")
    return flags
