"""Operators in a fresh process with a cache of its own, and compilers that are scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USE = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from fastgen import ops
    import fastgen, torch
    assert ops.topk_log_softmax(torch.tensor([[1.0, 3.0, 2.0]]), 2)[1].tolist() == [[1, 2]]
assert ops.is_native(torch.device("cpu")) == ("native" in fastgen.status().operators["topk_log_softmax"])
print(next(line for line in str(fastgen.status()).replace("\\n  ", " ").splitlines() if line.startswith("operators")))
for warning in caught:
    if "fastgen" in str(warning.message).lower():
        print(f"{warning.category.__name__}: {warning.message}")
"""
REAL = shutil.which("c++") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(REAL is None, reason="there is no C++ compiler")


def use(cache: Path, root: Path = ROOT, code: str = USE, **environment: str) -> subprocess.CompletedProcess[str]:
    """Use an operator in a fresh process, which must not find the libraries of others."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("FASTGEN")}
    settings |= {"FASTGEN_CACHE_DIR": str(cache), "PYTHONPATH": str(root), **environment}
    return subprocess.run([sys.executable, "-c", code], env=settings, cwd=cache, capture_output=True, text=True)


def compiler(folder: Path, body: str) -> str:
    """A C++ compiler of our own: it notes each call in the file `calls`, then does `body`."""
    script = folder / "cxx"
    text = f'#!/bin/sh\ncase "$*" in *--version*) echo test 1.0; exit;; esac\necho "$@" >> {folder}/calls\n{body}\n'
    script.write_text(text)
    script.chmod(0o755)
    return str(script)


TOUCH = 'sleep 0.2; for last; do :; done; echo built > "$last"'  # -o is the last option
