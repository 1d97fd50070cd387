"""Tests of Triton kernels where there is no GPU: in the interpreter, and compiled for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_in_the_interpreter(file: str) -> None:
    """All of this file's tests but those that need a GPU or the compiler; none may be skipped."""
    only = "not gpu and not compiles and not in_the_interpreter"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-k", only, file]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout and "skipped" not in run.stdout, run.stdout + run.stderr


def run_outside_the_interpreter(script: str, cache: Path) -> str:
    """What the script prints, where Triton compiles, and keeps what it compiles in this folder."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
