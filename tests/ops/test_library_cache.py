"""The folder of compiled libraries: no library of other users is loaded, and what a build leaves is the user's."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from build_kit import REAL, TOUCH, compiler, needs_compiler, use

from fastgen import files
from fastgen.ops import builder, library, library_cache
from fastgen.ops.operator import OPERATORS

pytestmark = pytest.mark.skipif(os.name != "posix", reason="native operators are built on POSIX systems")
as_root = pytest.mark.skipif(os.name == "posix" and os.geteuid() != 0, reason="only root can give files away")
SOMEBODY = 65534
Plant = Callable[[Path], object]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the cache, and a compiler that writes "built"."""
    monkeypatch.setenv("FASTGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", compiler(tmp_path, TOUCH))
    monkeypatch.setattr(builder, "AHEAD_OF_TIME", tmp_path / "none")
    (tmp_path / "cache").mkdir(mode=0o755, exist_ok=True)
    return tmp_path / "cache"


def target(cache: Path) -> Path:
    return cache / library_cache.cached_name("cpu")


def plant(path: Path, content: bytes = b"planted") -> None:
    """A library and its digest, as a build would leave them."""
    path.write_bytes(content)
    path.with_suffix(".sha256").write_text(hashlib.sha256(content).hexdigest())
    for file in (path, path.with_suffix(".sha256")):
        file.chmod(0o644)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def give_away(path: Path) -> None:
    os.chown(path, SOMEBODY, SOMEBODY)


def without_spaces(text: str) -> str:
    return "".join(text.split())


def link_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


# ---------------------------------------------------------------------------------------------- the folder
FOLDERS = [
    pytest.param(lambda folder: folder.chmod(0o775), "others may write to .*: `chmod go-w ", id="group-writable"),
    pytest.param(lambda folder: folder.chmod(0o1777), "others may write to .*: `chmod go-w ", id="writable-by-all"),
    pytest.param(link_folder, "is a symbolic link: set FASTGEN_CACHE_DIR to .*/elsewhere", id="symbolic-link"),
    pytest.param(give_away, "belongs to another user: set FASTGEN_CACHE_DIR", id="another-user", marks=as_root),
    pytest.param(lambda folder: folder.parent.chmod(0o777), "others may rename what is in ", id="parent"),
    pytest.param(lambda folder: give_away(folder.parent), "belongs to another user", id="their-parent", marks=as_root),
]


@pytest.mark.parametrize("spoil, why", FOLDERS)
@pytest.mark.parametrize("mode", ["", "build", "required"])
def test_a_folder_of_others_is_left_alone(spoil: Plant, why: str, mode: str, cache: Path, tmp_path: Path) -> None:
    plant(target(cache))
    before = contents(cache)
    spoil(cache)
    with pytest.raises(library_cache.Untrusted, match=why):
        library._find("cpu", mode)
    assert contents(cache) == before and not (tmp_path / "calls").exists()


def test_a_new_folder_is_not_made_where_others_may_rename_it(cache: Path, tmp_path: Path) -> None:
    cache.rmdir()
    tmp_path.chmod(0o777)
    with pytest.raises(library_cache.Untrusted, match="others may rename what is in"):
        library._find("cpu", "")
    assert not cache.exists()


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o500])
def test_a_folder_of_ones_own(mode: int, cache: Path) -> None:
    """Also one that others may read, as earlier versions made it, or that nobody may write to."""
    plant(target(cache))
    cache.chmod(mode)
    assert library._find("cpu", "required").read_text() == "planted"
    assert stat.S_IMODE(cache.stat().st_mode) == mode


def test_parents_that_are_safe(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sticky one, as /tmp, and a link, which leads to where nobody else may rename anything."""
    plant(target(cache))
    tmp_path.chmod(0o1777)
    assert library._find("cpu", "").parent == cache
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("FASTGEN_CACHE_DIR", str(tmp_path / "link/cache"))
    assert library._find("cpu", "").parent == cache


def test_a_group_of_ones_own(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a umask of 002, earlier versions made a folder that the user's own group may write to."""
    plant(target(cache))
    tmp_path.chmod(0o775)
    cache.chmod(0o775)
    monkeypatch.setattr(library_cache, "_is_own_group", lambda number: True)
    assert library._find("cpu", "").parent == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o755


@pytest.mark.parametrize(
    "user, group, members, number, is_own",
    [
        ("ann", "ann", [], 1000, True),
        ("ann", "ann", ["ann"], 1000, True),
        ("ann", "ann", ["ann", "bob"], 1000, False),
        ("ann", "staff", [], 1000, False),
        ("root", "root", [], 0, False),
    ],
)
def test_which_group_is_ones_own(
    user: str, group: str, members: list[str], number: int, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grp
    import pwd

    monkeypatch.setattr(os, "geteuid", lambda: number)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name=user))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=members))
    assert library_cache._is_own_group(5) == is_own


@needs_compiler
@pytest.mark.parametrize("spoil, why", [FOLDERS[0], FOLDERS[3]])
def test_code_of_others_does_not_run(spoil: Plant, why: str, copy: Path, tmp_path: Path) -> None:
    source, cache, trace = tmp_path / "planted.cpp", tmp_path / "cache", tmp_path / "trace"
    source.write_text(
        f'#include <cstdio>\n__attribute__((constructor)) void run() {{ std::fclose(std::fopen("{trace}", "w")); }}\n'
    )
    cache.mkdir(mode=0o700)
    library = target(cache)
    subprocess.run([str(REAL), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    plant(library, library.read_bytes())
    spoil(cache)
    run = use(cache, copy)
    assert run.returncode == 0, run.stderr
    assert not trace.exists()
    (warning,) = run.stdout.splitlines()[1:]
    assert warning.startswith("RuntimeWarning: fastgen runs its cpu operators in plain torch, which is slower: ")
    assert re.search(why, warning) and str(cache) in warning and warning.endswith(". FASTGEN_NATIVE=0 says no more.")
    reason = warning.partition("slower: ")[2].removesuffix(". FASTGEN_NATIVE=0 says no more.")
    # The status is wrapped, also at hyphens.
    assert without_spaces(run.stdout).count(without_spaces(f"plain torch (cpu: {reason})")) == len(OPERATORS)
    # The same library is run from a folder that is the user's own: what is tested here is the folder.
    os.chown(cache, os.geteuid(), os.getegid())
    cache.chmod(0o700)
    use(cache, copy)
    assert trace.exists()


# ---------------------------------------------------------------------------------------------- the library
def link_library(library: Path) -> None:
    library.rename(library.parent.parent / "other.so")
    library.symlink_to(library.parent.parent / "other.so")


def cut(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:-1])


LIBRARIES = [
    pytest.param(link_library, id="symbolic-link"),
    pytest.param(give_away, id="another-user", marks=as_root),
    pytest.param(lambda library: give_away(library.with_suffix(".sha256")), id="their-digest", marks=as_root),
    pytest.param(lambda library: library.chmod(0o664), id="group-writable"),
    pytest.param(lambda library: library.with_suffix(".sha256").chmod(0o666), id="digest-writable"),
    pytest.param(cut, id="cut-short"),
    pytest.param(lambda library: library.write_bytes(b""), id="empty"),
    pytest.param(lambda library: library.with_suffix(".sha256").unlink(), id="no-digest"),
    pytest.param(lambda library: (library.unlink(), os.mkfifo(library)), id="pipe"),
]


@pytest.mark.parametrize("spoil", LIBRARIES)
def test_a_library_that_is_not_what_was_compiled_is_compiled_again(spoil: Plant, cache: Path) -> None:
    plant(target(cache))
    spoil(target(cache))
    for _ in range(2):
        found = library._find("cpu", "")
        assert found == target(cache) and not found.is_symlink() and found.read_text() == "built\n"
    assert (cache.parent / "calls").read_text().count("-shared") == 1
    if (other := cache.parent / "other.so").exists():
        assert other.read_bytes() == b"planted"


def test_without_a_compiler_a_damaged_library_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(target(cache))
    cut(target(cache))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(builder.Unavailable, match=f"CXX names, and {target(cache)} is left alone"):
        library._find("cpu", "")


def test_a_second_name_of_a_library_does_no_harm(cache: Path) -> None:
    """As in a backup that shares its files."""
    plant(target(cache))
    os.link(target(cache), cache.parent / "second")
    assert library._find("cpu", "").read_text() == "planted"


@needs_compiler
def test_a_library_that_registers_nothing(copy: Path, tmp_path: Path) -> None:
    link = f'for last; do :; done; exec {REAL} -shared -x c++ /dev/null -o "$last"'
    body = f'case "$*" in *-shared*) {link};; *) {TOUCH};; esac'
    run = use(tmp_path, copy, CXX=compiler(tmp_path, body))
    assert run.returncode == 0, run.stderr
    held = [name for name in OPERATORS if name not in library._OF_RUNTIME]
    missing = f"{target(tmp_path)} registers no {', '.join(held)}"
    (warning,) = run.stdout.splitlines()[1:]
    assert f"plain torch, which is slower: the library {missing}. FASTGEN_NATIVE=build tries again" in warning
    assert run.stdout.splitlines()[0].count("plain torch (cpu: the library") == len(OPERATORS)
    required = use(tmp_path, copy, FASTGEN_NATIVE="required", CXX=compiler(tmp_path, body))
    assert f"RuntimeError: FASTGEN_NATIVE=required, but the library {missing}." in required.stderr


# ---------------------------------------------------------------------------------------------- what a build leaves
@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


@pytest.mark.usefixtures("no_umask")
def test_the_modes_of_a_build(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = f'stat -c %a "$(dirname "$last")" "$TMPDIR" >> {tmp_path}/modes'
    monkeypatch.setenv("CXX", compiler(tmp_path, f"{TOUCH}\n{note}"))
    cache.rmdir()
    monkeypatch.setenv("FASTGEN_CACHE_DIR", str(cache / "new/fastgen"))
    name = library._find("cpu", "").stem
    assert set((tmp_path / "modes").read_text().split()) == {"700"}
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert modes(cache) == {
        "new": 0o700,
        "fastgen": 0o700,
        f"{name}.so": 0o600,
        f"{name}.sha256": 0o600,
        f"{name}.lock": 0o600,
    }


@pytest.mark.usefixtures("no_umask")
def test_the_modes_of_a_failed_build(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(cache.parent, "exit 1"))
    with pytest.raises(builder.BuildFailed):
        library._find("cpu", "")
    assert set(modes(cache).values()) == {0o600} and len(modes(cache)) == 2
    assert len(list(cache.glob("*.log"))) == len(list(cache.glob("*.lock"))) == 1


def test_a_log_does_not_follow_a_link(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = cache.parent / "victim"
    victim.write_text("mine")
    monkeypatch.setenv("CXX", compiler(cache.parent, "kill -9 $$"))
    target(cache).with_suffix(".interrupted.log").symlink_to(victim)
    with pytest.raises(builder.BuildFailed):
        library._find("cpu", "")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda lock, victim: lock.symlink_to(victim), "it is a symbolic link"),
        (lambda lock, victim: os.link(victim, lock), "it has a second name"),
        (lambda lock, victim: os.mkfifo(lock), "it is no regular file"),
    ],
)
def test_a_lock_that_leads_elsewhere(make: Callable[[Path, Path], None], why: str, cache: Path) -> None:
    victim = cache.parent / "victim"
    victim.write_text("mine")
    make(target(cache).with_suffix(".lock"), victim)
    with pytest.raises(OSError, match=why):
        library._find("cpu", "")
    assert victim.read_text() == "mine" and not target(cache).exists()


def test_a_lock_is_not_emptied(cache: Path) -> None:
    lock = target(cache).with_suffix(".lock")
    lock.write_text("noted")
    assert library._find("cpu", "").is_file()
    assert lock.read_text() == "noted"


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_lock(cache: Path) -> None:
    """As a worker of a data loader: others would wait for as long as it lives."""
    import fcntl

    with library_cache.locked(target(cache)) as is_alone:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
    try:
        assert is_alone and child.is_alive()
        with open(target(cache).with_suffix(".lock"), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        child.kill()
        child.join()


def test_a_child_that_is_forked_while_another_thread_builds() -> None:
    """It has a copy of the lock, and no thread that would release it."""
    with library._lock:
        child = multiprocessing.get_context("fork").Process(target=library.load, args=(("topk_log_softmax",),))
        child.start()
        child.join(20)
    try:
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()


def test_a_file_system_without_locks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some network file systems are: builds go on, and leave those of other processes alone."""
    import fcntl

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    others = cache / f"{builder.scratch_prefix(target(cache))}another"
    others.mkdir()
    found = library._find("cpu", "required")
    assert found == target(cache) and found.read_text() == "built\n" and not library_cache.why_not_loadable(found)
    assert others.is_dir()
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock", ".sha256", ".so"]


# ---------------------------------------------------------------------------------------------- builds that are killed
START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
import torch
from fastgen import ops
ops.is_native(torch.device("cpu"))
"""


@pytest.fixture
def begun(copy: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose compilers have begun, and hang."""
    # A shell that waits for another process, as compilers do: to end the first leaves the second.
    cxx = compiler(tmp_path, f"echo $$ >> {tmp_path}/pids\nsleep 100\n{TOUCH}")
    settings = {name: value for name, value in os.environ.items() if not name.startswith("FASTGEN")}
    settings |= {"FASTGEN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(copy), "CXX": cxx}
    with subprocess.Popen([sys.executable, "-c", START], env=settings, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 100
        while not (tmp_path / "pids").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield process
        process.kill()
    for session in (tmp_path / "pids").read_text().split():
        try:
            os.killpg(int(session), signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_build_leaves_nothing(
    number: signal.Signals, begun: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert list((tmp_path / "cache").glob("building-cpu-*"))
    begun.send_signal(number)
    assert begun.wait(30) == -number  # the compilers were not waited for
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_the_next_build_removes_what_a_killed_one_has_left(
    begun: subprocess.Popen[bytes], tmp_path: Path, cache: Path
) -> None:
    begun.kill()
    begun.wait()
    assert list(cache.glob("building-cpu-*"))
    (cache / "building-cpu-another-1").mkdir()  # another library's, whose lock is not held
    compiler(tmp_path, TOUCH)
    assert library._find("cpu", "").read_text() == "built\n"
    assert [path.name for path in cache.glob("building-*")] == ["building-cpu-another-1"]


def test_a_handler_of_the_users_stays(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        monkeypatch.setenv("CXX", compiler(tmp_path, f"kill -TERM {os.getpid()}\n{TOUCH}"))
        assert library._find("cpu", "").is_file()
        assert seen
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_is_as_it_was_after_a_build(cache: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        library._find("cpu", "")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_is_opened_to_be_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    file.chmod(0o644)
    os.close(files.open_trusted(file))
    for mode in (0o664, 0o646):
        file.chmod(mode)
        with pytest.raises(PermissionError, match="others may write to it"):
            files.open_trusted(file)
    with pytest.raises(PermissionError, match="no regular file"):
        files.open_trusted(tmp_path)
