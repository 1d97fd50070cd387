"""A certificate for tests of TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def made(folder: Path) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that nobody signed, and its key."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("needs openssl")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    names = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    made = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert)
    subprocess.run([openssl, "req", *made, *names], check=True, capture_output=True)
    return cert, key
