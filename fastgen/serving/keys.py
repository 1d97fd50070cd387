"""The keys that open the service, from the environment and from a file."""

from __future__ import annotations

import re
from pathlib import Path

from fastgen.pipeline.errors import InputError, is_utf8

_KEY = re.compile(r"[!-~]+")  # what a header can hold


def keys_of(token: str | None, path: str | None) -> tuple[str, ...] | None:
    """The keys that open the service: `token`, and those in the file at `path`, one a line; None without either.

    Raises:
        InputError: the token is no text, or the file can't be read, has no key, or has a line that is none. The
            sentence quotes no key.
    """
    if token is not None and not is_utf8(token):
        raise InputError("FASTGEN_SERVE_TOKEN is no text in UTF-8: choose letters, digits and signs of ASCII.")
    keys = [] if token is None else [token]
    if path is None:
        return tuple(keys) or None
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"Cannot read --api-key-file {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise InputError(f"--api-key-file {path} is no text in UTF-8: write one key a line.") from None
    found = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    if not found:
        raise InputError(f"--api-key-file {path} has no key: write one key a line.")
    if bad := next((number for number, key in found.items() if not _KEY.fullmatch(key)), None):
        raise InputError(f"--api-key-file {path}, line {bad}: a key has letters, digits and signs of ASCII, no spaces.")
    return tuple(dict.fromkeys([*keys, *found.values()]))
