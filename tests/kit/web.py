"""A folder on a server of HTTP, on the loopback."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...


class _Refusing(_Quiet):
    """Answers everything with an error."""

    def __init__(self, *args: Any, status: int, **options: Any) -> None:
        self._status = status
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        self.send_error(self._status)

    do_HEAD = do_GET


@contextlib.contextmanager
def served(folder: Path, *, status: int | None = None) -> Iterator[str]:
    """The address of the folder; with `status`, of an error, that is the answer to everything."""
    handler: Any = functools.partial(_Quiet, directory=str(folder))
    if status is not None:
        handler = functools.partial(_Refusing, directory=str(folder), status=status)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
