"""Files that fastgen writes beside a user's: nobody else may turn one into another file, or write to it.

In a folder that several users write to, the name of such a file can be foreseen: a symbolic or hard link of that name
would have a run truncate whatever it leads to.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor of `path`, a regular file of this user's; created with mode 0600 if `flags` have O_CREAT.

    Whoever wants it empty truncates it afterwards, once it is known to be the user's own: no O_TRUNC here.

    Raises:
        OSError: as `os.open`; and if it is a link, no regular file, or somebody else's.
    """

    def why_not(found: os.stat_result) -> str:
        if sys.platform != "win32" and found.st_uid != os.geteuid():
            return "it belongs to another user"
        return "it has a second name (a hard link): remove it" if found.st_nlink > 1 else ""

    return _open_checked(path, flags, why_not)


def open_trusted(path: str | os.PathLike[str]) -> int:
    """A descriptor to read `path`, a regular file that only this user or root could have written.

    Raises:
        OSError: as `os.open`; and if it is a link, no regular file, or one that others could have written.
    """
    return _open_checked(path, os.O_RDONLY, lambda found: _why_others_could_write(found, "it"))


def _open_checked(path: str | os.PathLike[str], flags: int, why_not: Callable[[os.stat_result], str]) -> int:
    # O_NONBLOCK: a pipe of that name would keep us waiting.
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # what systems say to O_NOFOLLOW
            raise _refused(path, "it is a symbolic link: remove it") from error
        if error.errno == errno.ENXIO:  # a pipe that nobody reads
            raise _refused(path, "it is no regular file") from error
        raise
    try:
        found = os.fstat(descriptor)
        if why := why_not(found) if stat.S_ISREG(found.st_mode) else "it is no regular file":
            raise _refused(path, why)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _why_others_could_write(found: os.stat_result, name: str) -> str:
    """Why somebody but this user and root could have written a file or folder; "" if nobody could."""
    if sys.platform == "win32":
        return ""  # there the access lists of a user's folders keep others out
    if found.st_uid not in (os.geteuid(), 0):
        return f"{name} belongs to another user"
    return f"others may write to {name}" if found.st_mode & _OTHERS_WRITE else ""


def why_not_trusted(path: str | os.PathLike[str]) -> str:
    """Why others could have put there what `path`, a file or folder, holds; "" if only this user or root could.

    Raises:
        OSError: it can't be looked at.
    """
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        return f"{os.fspath(path)} is a symbolic link"
    return _why_others_could_write(found, os.fspath(path))


def private_folder(path: Path) -> None:
    """Make the folder `path` where it is not there: with mode 0700, parents as they usually are.

    Raises:
        OSError: it can't be made, or others could have put there what it holds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
    if why := why_not_trusted(path):
        raise PermissionError(errno.EPERM, why)


def _refused(path: str | os.PathLike[str], why: str) -> PermissionError:
    return PermissionError(errno.EPERM, why, os.fspath(path))
