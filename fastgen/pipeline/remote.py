"""Files elsewhere, which fsspec opens by a URI such as s3://, gs://, hf:// or https://, as files of this machine.

An input is fetched as a whole before a run, and an output is written here and sent as a whole at the end: a run reads
its input several times, and object stores append to no file.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from fastgen import installing
from fastgen.pipeline.errors import InputError, first_line

_USER = re.compile(r"(?<=://)[^/?#]*@")  # with a password
_QUERY = re.compile(r"\?.*")  # what a signed address is signed with
_QUERY_OR_FRAGMENT = re.compile(r"[?#].*")
_URI = re.compile(r"\w+://\S+?(?=['\")\]>,.;:]*(?:\s|$))")  # without the quotes and signs behind it
_READ_ONLY = ("http", "https")  # fsspec would send a file there by POST, which no server of files expects


def is_remote(path: str) -> bool:
    """Whether a path is a URI, which no file of this machine is named by."""
    return "://" in path


def shown(path: str) -> str:
    """A path or URI as messages, results and journals may have it: without passwords and signatures.

    An object's name may have a #, which begins a fragment only on the web.
    """
    if not is_remote(path):
        return path
    last = _QUERY_OR_FRAGMENT if path.partition("://")[0].lower() in _READ_ONLY else _QUERY
    return last.sub("", _USER.sub("", path))


def without_secrets(text: object) -> str:
    """What others say, such as a package's error, with URIs in it as `shown` has them."""
    return _URI.sub(lambda uri: shown(uri[0]), str(text))


def opened(path: str) -> tuple[Any, str]:
    """fsspec's file system for a URI, and the path within it.

    Raises:
        InputError: fsspec, or the package that it needs for this kind of URI, is not installed or refuses the URI.
    """
    try:
        import fsspec.core
    except ImportError as error:
        raise InputError(f"{shown(path)} needs fsspec: {installing.command('transformers')} ({error}).") from error
    with _refusing(f"Cannot use {shown(path)}"):
        system, inside = fsspec.core.url_to_fs(path)
        return system, str(inside)


@contextlib.contextmanager
def fetched(path: str) -> Iterator[Path]:
    """The file at `path`, as a file of this machine: itself, or a copy that is removed at the end.

    Raises:
        InputError: it can't be read.
    """
    if not is_remote(path):
        yield Path(path)
        return
    system, inside = opened(path)
    with _folder() as folder:
        copy = folder / _name(path)
        with _refusing(f"Cannot read {shown(path)}"):
            system.get_file(inside, str(copy))
        if not copy.is_file():
            raise InputError(f"{shown(path)} is no file: without --ray, INPUT is one.")
        yield copy


class Sent:
    """An output that is written to a file of this machine, `local`, and sent to `path` at the end."""

    def __init__(self, path: str, *, overwrite: bool) -> None:
        """Nothing is written yet.

        Raises:
            InputError: nothing can be sent there, or something is there and `overwrite` is not given.
        """
        self._shown = shown(path)
        if path.partition("://")[0] in _READ_ONLY:
            raise InputError(f"{self._shown} can only be read: choose an OUTPUT that can be written.")
        self._system, self._inside = opened(path)
        with _refusing(f"Cannot use {self._shown}"):
            is_there = not overwrite and self._system.exists(self._inside)
        if is_there:
            raise InputError(f"{self._shown} exists: --overwrite replaces it.")
        self._folder = Path(tempfile.mkdtemp(prefix="fastgen-"))
        self.local = self._folder / _name(path)

    def send(self) -> None:
        """Send what has been written; InputError if that fails."""
        with _refusing(f"Cannot write {self._shown}"):
            self._system.put_file(str(self.local), self._inside)

    def remove(self) -> None:
        """Remove the local file."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def has_results(self) -> bool:
        """Whether anything has been written."""
        return self.local.exists() and self.local.stat().st_size > 0


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fastgen-") as name:
        yield Path(name)


def _name(path: str) -> str:
    return PurePosixPath(shown(path).partition("://")[2]).name or "file"


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn any error into an InputError that begins with `what`."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{what}: there is no such file.") from error
    except Exception as error:  # each package that fsspec calls has errors of its own
        why = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{what}: {without_secrets(why)}.") from error
