"""The worker pool: results, failures in a task, workers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fastgen.pipeline import WorkerError, WorkerPool

# `eval` builds the handlers: spawned workers can import it, but not necessarily this file.
DOUBLE = "lambda task: 2 * task"
# Notes its process id in the file it is given, waits, and answers.
SLOW = "lambda task: (open(task, 'a').write(f'{__import__(\"os\").getpid()}\\n'), __import__('time').sleep(1), 7)[-1]"


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_task_has_its_result(workers: int) -> None:
    with WorkerPool(workers, eval, DOUBLE) as pool:
        futures = [pool.submit(task) for task in range(50)]
        assert [future.result() for future in futures] == [2 * task for task in range(50)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_task_fails_alone(workers: int) -> None:
    with WorkerPool(workers, eval, "lambda task: 1 / task") as pool:
        futures = [pool.submit(task) for task in (1, 0, 2)]
        assert futures[0].result() == 1.0
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            futures[1].result()
        assert futures[2].result() == 0.5


def test_large_tasks_and_results_do_not_block_each_other() -> None:
    with WorkerPool(2, eval, "lambda task: task + task") as pool:
        futures = [pool.submit("x" * 2**20) for _ in range(8)]
        assert all(len(future.result()) == 2**21 for future in futures)


def test_the_work_of_a_killed_worker_is_done_by_another(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    note.touch()
    with WorkerPool(1, eval, SLOW) as pool:
        future = pool.submit(str(note))
        while not note.read_text().endswith("\n"):
            time.sleep(0.01)
        first = int(note.read_text())
        assert first in pool.pids
        os.kill(first, signal.SIGKILL)
        assert future.result(timeout=30) == 7
        assert pool.restarts == 1
    pids = note.read_text().split()
    assert len(pids) == 2 and len(set(pids)) == 2


def test_a_task_that_always_kills_its_worker_fails() -> None:
    with WorkerPool(1, eval, "lambda task: __import__('os')._exit(3) if task else 'fine'") as pool:
        bad, good = pool.submit(1), pool.submit(0)
        with pytest.raises(WorkerError, match="died 3 times"):
            bad.result(timeout=60)
        assert good.result(timeout=60) == "fine"


def test_workers_ignore_the_interrupt_of_the_group() -> None:
    with WorkerPool(1, eval, DOUBLE) as pool:
        assert pool.submit(1).result() == 2
        os.kill(pool.pids[0], signal.SIGINT)
        assert pool.submit(2).result() == 4
        assert pool.restarts == 0


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs signal masks")
def test_an_interrupt_while_workers_start_does_not_reach_them(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with WorkerPool(1, eval, DOUBLE) as pool:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        for _ in range(20):  # Python takes about 20 ms to start
            os.kill(pool.pids[0], signal.SIGINT)
            time.sleep(0.005)
        assert pool.submit(2).result(timeout=60) == 4
        assert pool.restarts == 0
    assert "KeyboardInterrupt" not in capfd.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """In mid-task, and with the pipe's other end still open in a process that the parent forked."""
    code = """
import os, sys, time
from fastgen.pipeline import WorkerPool
if __name__ == "__main__":
    pool = WorkerPool(1, eval, "lambda task: __import__('time').sleep(task)")
    pool.submit(0).result()
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    pool.submit(60)
    print(pool.pids[0], flush=True)
    time.sleep(60)
"""
    script = tmp_path / "parent.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 10
        while _runs(worker):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_process_is_left_after_an_error() -> None:
    with pytest.raises(KeyError), WorkerPool(2, eval, DOUBLE) as pool:
        pids = pool.pids
        raise KeyError
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_that_die_as_they_start_fail_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with more to set up than a pipe holds: nobody may wait for a dead worker to read it."""
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # Python ends before it runs anything
    seen: list[BaseException | None] = []

    def run() -> None:
        with WorkerPool(1, eval, "lambda task: len(x)", {"x": "a" * 2**20}) as pool:
            seen.append(pool.submit(0).exception(timeout=60))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert [str(error) for error in seen] == ["a worker process died 3 times at the same task"]


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs signal masks")
def test_an_interrupt_does_not_reach_the_first_worker_of_a_process() -> None:
    """With the first one Python starts a process of its own, and some versions then unblock the signal."""
    script = f"""
import os, signal, time
from fastgen.pipeline import WorkerPool
if __name__ == "__main__":
    with WorkerPool(1, eval, {DOUBLE!r}) as pool:
        for _ in range(20):
            os.kill(pool.pids[0], signal.SIGINT)
            time.sleep(0.005)
        assert pool.submit(2).result(timeout=60) == 4
        assert pool.restarts == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
