"""CPU time of a process and of its workers."""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fastgen.bench import machine


def _spin(seconds: float, ready: Any, end: Any) -> None:
    before = time.process_time()
    while time.process_time() < before + seconds:
        pass
    ready.set()
    end.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_time_of_worker_processes_counts() -> None:
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    before = machine.cpu_seconds() - time.process_time()
    worker = context.Process(target=_spin, args=(0.3, ready, end))
    worker.start()
    try:
        assert ready.wait(60)
        assert machine.cpu_seconds() - time.process_time() - before >= 0.25
    finally:
        end.set()
        worker.join()


@pytest.mark.parametrize(
    "text, name",
    (
        ("processor : 0\ncpu family : 25\nmodel : 17\nmodel name : AMD EPYC\n", "AMD EPYC (family 25, model 17)"),
        ("cpu family : 6\nmodel : 143\nmodel name : Intel(R) Xeon(R) 8480C\n", "Intel(R) Xeon(R) 8480C"),
    ),
)
def test_a_processor_without_a_number_is_told_by_its_family(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert machine.cpu(tmp_path / "cpuinfo") == name
    assert machine.cpu(tmp_path / "none")
