"""Tests of Triton kernels where there is no GPU: in the interpreter, and compiled for one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest


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


def multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mends Triton's interpreter, whose `tl.dot` takes the bits of bfloat16 for integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    stock = interpreter.InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return stock(self, widened(a), widened(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def assert_every_line_runs(module: Any, run: Callable[[], None]) -> None:
    """`run` reaches every statement of this module's kernels, in the interpreter, which keeps the numbers of lines."""
    file = Path(module.__file__)
    kernels = [
        node
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
    ]
    statements = {
        node.lineno
        for kernel in kernels
        for node in ast.walk(kernel)
        if isinstance(node, ast.stmt) and node is not kernel and not _is_text(node)
    }
    reached: set[int] = set()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != str(file):
            return None
        if event == "line":
            reached.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    missed = sorted(statements - reached)
    number = len(statements)
    print(f"{file.name}: {number - len(missed)} of {number} lines of kernels; not run: {missed or 'none'}")
    assert statements and not missed, missed


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
