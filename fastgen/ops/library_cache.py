"""Manages the folder of a user's compiled libraries. A library runs as the user: nobody else may put one there.

File names can be foreseen, and `FASTGEN_CACHE_DIR` may be a folder where others write, too. So the folder and every
file that is read must be the user's own or root's, and nobody else may write to them. A library's name tells what it
was compiled from, and a file beside it holds a digest: a library that a crash has cut short is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from fastgen import files
from fastgen.ops import builder

_OWN = "set FASTGEN_CACHE_DIR to a folder of your own"
_OF_THIS_PROCESSOR = re.compile(r"-m(?:arch|cpu)=native")
# Of /proc/cpuinfo: on x86, on Arm, on others.
_FIELDS = {"vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features", "cpu", "isa"}


class Untrusted(Exception):
    """Others could put a library into the cache, or have done so. The message says what to do."""


def cache_folder() -> Path:
    """The folder for libraries: $FASTGEN_CACHE_DIR, $XDG_CACHE_HOME/fastgen or ~/.cache/fastgen.

    Raises:
        builder.Unavailable: if that is in the home of a user who has none, or depends on the current directory.
    """
    own, base = os.environ.get("FASTGEN_CACHE_DIR", ""), os.environ.get("XDG_CACHE_HOME", "")
    if not own and os.path.isabs(base):  # by its specification a relative one is ignored
        return Path(base) / "fastgen"
    folder = Path(own or "~/.cache/fastgen")
    if str(folder).startswith("~"):
        folder = _in_home(folder)
    if not folder.is_absolute():  # it would be another one in each current directory
        raise builder.Unavailable(f"FASTGEN_CACHE_DIR must be an absolute path, not {own}")
    return folder


def _in_home(folder: Path) -> Path:
    with contextlib.suppress(RuntimeError):  # there is no such user
        found = folder.expanduser()
        # Python turns an empty HOME into the root directory; a relative HOME would depend on the current directory.
        if os.environ.get("HOME") != "" and found.is_absolute():
            return found
    raise builder.Unavailable("there is no home directory to keep libraries in (set FASTGEN_CACHE_DIR)")


def cached_name(library: str) -> str:
    """The name of the library's file in the cache, a hash of sources, versions and flags: no compiler is needed.

    Raises:
        builder.Unavailable: if the CUDA devices can't be asked what they are.
    """
    asked = [os.environ.get("CXXFLAGS", "")]
    if _OF_THIS_PROCESSOR.search(f"{asked[0]} {os.environ.get('CXX', '')}"):  # others may share the folder
        asked.append(_processor())
    if library == "cuda":  # nvcc reads these variables by itself
        asked += [os.environ.get(f"NVCC_{which}_FLAGS", "") for which in ("PREPEND", "APPEND")]
        asked += builder.cuda_architectures()
    fits = builder.source_key(library)
    return f"{library}-{hashlib.sha256(repr((fits, asked)).encode()).hexdigest()[:16]}.so"


def _processor() -> str:
    """What tells this processor from others of its architecture."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text("utf-8", "replace").partition("\n\n")[0]
        pairs = ([part.strip() for part in line.split(":", 1)] for line in first.splitlines())
        if known := sorted(pair for pair in pairs if pair[0] in _FIELDS):
            return repr(known)
    return platform.node()  # one library for each machine


# ---------------------------------------------------------------------------------------------- whom it belongs to
def trusted(folder: Path) -> Path:
    """Check that no other user owns or can replace `folder`, which need not exist; return it with parents resolved.

    Raises:
        Untrusted: with what to do about it.
        OSError: it can't be looked at.
    """
    if sys.platform == "win32":
        raise builder.Unavailable("no library is kept on Windows")  # `library` asks for none
    folder = Path(os.path.realpath(folder.parent)) / folder.name
    for parent in folder.parents:
        with contextlib.suppress(FileNotFoundError):
            _check_parent(parent)
    with contextlib.suppress(FileNotFoundError):
        found = folder.lstat()
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if is_ours and found.st_mode & stat.S_IWGRP and _is_own_group(found.st_gid):
            folder.chmod(stat.S_IMODE(found.st_mode) & ~stat.S_IWGRP)  # earlier versions left it to the umask
        if why := files.why_not_trusted(folder):
            remedy = _OWN
            if stat.S_ISLNK(found.st_mode):
                remedy = f"set FASTGEN_CACHE_DIR to {os.path.realpath(folder)}, if that is yours"
            elif found.st_uid in (os.geteuid(), 0):
                remedy = f"`chmod go-w {folder}`, or {_OWN}"  # files that others have put there are not loaded
            raise Untrusted(f"{why}: {remedy}")
    return folder


def _check_parent(parent: Path) -> None:
    """Check that no other user may rename folders in `parent`, and so replace a cache that has been checked.

    Raises:
        Untrusted: if another user may.
    """
    if sys.platform == "win32":
        return
    found = parent.stat()
    # Whoever owns "/" is root, also where a container shows root as another user.
    if found.st_uid not in (os.geteuid(), 0, os.stat("/").st_uid):
        raise Untrusted(f"{parent} belongs to another user: {_OWN}")
    if found.st_mode & stat.S_ISVTX:  # as in /tmp: only their owners may rename the files
        return
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)):
        raise Untrusted(f"others may rename what is in {parent}: `chmod go-w {parent}`, or {_OWN}")


def _is_own_group(number: int) -> bool:
    """Whether the user is alone in the group. Many systems give each user but root such a group, and a umask of 002."""
    if sys.platform == "win32":
        return False
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return os.geteuid() != 0 and group.gr_name == user and set(group.gr_mem) <= {user}


# ---------------------------------------------------------------------------------------------- what it holds
def why_not_loadable(target: Path) -> str:
    """Why the file `target` cannot be loaded as the library that was compiled there; "" if it can."""
    try:
        is_whole = _read(_digest_of(target)) == _digest(target)
    except OSError as error:
        return f"{target} is left alone ({error.filename}: {error.strerror})"
    return "" if is_whole else f"{target} is left alone (it is not as it was compiled)"


def _digest_of(target: Path) -> Path:
    return target.with_suffix(".sha256")


def _digest(target: Path) -> bytes:
    return hashlib.sha256(_read(target)).hexdigest().encode()


def _read(path: Path) -> bytes:
    with open(files.open_trusted(path), "rb") as file:
        return file.read()


@contextlib.contextmanager
def locked(target: Path) -> Iterator[bool]:
    """Let only one thread of one process at a time work on `target`; the folder is made if it does not exist.

    Yields whether that is so: some network file systems have no locks, and there several may build at once.

    Raises:
        Untrusted: the folder is not the user's alone.
        OSError: it can't be made, or the file to lock is somebody else's.
    """
    if sys.platform == "win32":
        raise builder.Unavailable("no library is kept on Windows")
    import fcntl

    for parent in reversed(target.parent.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)  # as the specification of XDG_CACHE_HOME says
    files.private_folder(target.parent)
    trusted(target.parent)  # others may have been there first
    descriptor = files.open_own(target.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    is_alone = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # released when the file is closed, however the process ends
        except OSError:
            is_alone = False
        yield is_alone
    finally:
        if is_alone:  # children that were forked meanwhile, as a data loader's, have the file open as long as they live
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def build(how: builder.Recipe, target: Path, is_alone: bool = True) -> None:
    """Compile into `target`, a file for the user alone; `is_alone`: the caller has locked it, and no other builds it.

    Raises:
        builder.BuildFailed: as `builder.build` does.
        OSError: there is no place to write to.
    """
    if is_alone:
        for left in target.parent.glob(f"{builder.scratch_prefix(target)}*"):  # by builds that were killed
            shutil.rmtree(left, ignore_errors=True)
    with _unwound_by_sigterm():
        builder.build(how, target, mode=0o600)
    digest = _digest_of(target)
    written = digest.with_name(f"{digest.name}.{os.getpid()}")
    written.unlink(missing_ok=True)
    with open(files.open_own(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(_digest(target))
    os.replace(written, digest)


class _Terminated(BaseException):
    """Raised in the main thread when SIGTERM arrives."""


@contextlib.contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block before the process: unhandled, it ends the process at once and leaves files behind."""
    is_main = threading.current_thread() is threading.main_thread()  # no other may handle signals
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def unwind(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one does not wait
        raise _Terminated

    try:
        signal.signal(signal.SIGTERM, unwind)
        yield
    except _Terminated:
        os.kill(os.getpid(), signal.SIGTERM)  # so that the exit status says that SIGTERM ended the process
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
