"""Locks a file, so that only one process at a time writes it."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fastgen.files import open_own
from fastgen.pipeline.errors import InputError

if sys.platform != "win32":
    import fcntl


@contextlib.contextmanager
def locked(path: Path, what: Path) -> Iterator[BinaryIO]:
    """Open and lock `path`, for reading and appending; it is created if need be.

    Raises:
        InputError: another process that writes `what` holds it, or `path` is a link or another user's (see `open_own`).

    A file that is still empty at the end is removed. Until then, nothing else in this process may open and close
    `path`: that would unlock it.
    """
    try:
        file = _open(path, what)
    except OSError as error:
        raise InputError(f"Cannot write {path}, beside {what}: {error.strerror or error}.") from error
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):  # closing flushes, and that fails on a full disk
            if not os.fstat(file.fileno()).st_size:
                path.unlink()
        with contextlib.suppress(OSError):
            file.close()


def _open(path: Path, what: Path) -> BinaryIO:
    while True:
        file = os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)), "a+b")
        if sys.platform == "win32":
            return file
        else:  # not left out, for type checkers
            try:
                # Not flock, which forked children share: children of a data loader outlive a killed run by seconds.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    file.close()
                    raise InputError(
                        f"Another run is writing {what}: wait for its end, or choose another file."
                    ) from None
                # Some network file systems have no locks: then the run goes on without one.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # another run removed or replaced it in between
