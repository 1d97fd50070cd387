"""What `bench_ray.py --failures` does: nodes and drivers die at random moments of a run, which must end the same."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from pathlib import Path
from typing import Any

# When something dies, of the time that the command takes without Ray. Nodes in one run, which takes longer than that;
# drivers each in a run of its own, when the first blocks are whole (at 0.4 to 0.5 of it), and others are left.
_NODES, _DRIVERS = ((0.1, 0.9),) * 3, ((0.5, 0.75),) * 2


def nodes_die(command: list[str], cluster: Any, parts: Path, seconds: float) -> dict[str, Any]:
    """The run's seconds, and how many parts were whole at each death. Another node takes the place of each one."""
    chance, whole = random.Random(20_000), []
    when = sorted(chance.uniform(*bounds) * seconds for bounds in _NODES)
    started = time.perf_counter()
    process = subprocess.Popen(command)
    for moment in when:
        _sleep_until(started + moment, process)
        whole.append(len(_marks(parts)))
        # As if its machine were switched off: the node and all that runs there.
        cluster.remove_node(chance.choice(sorted(cluster.worker_nodes, key=lambda node: node.node_id)), False)
        cluster.add_node(num_cpus=1)
    _end(process, parts, kept={})
    return {"at_seconds": when, "parts_whole_then": whole, "seconds": time.perf_counter() - started}


def drivers_die(command: list[str], parts: Path, seconds: float) -> dict[str, Any]:
    """Runs whose driver is killed, each but the first begun with `--resume`, and one that comes to the end."""
    chance, whole = random.Random(20_000), []
    when = [chance.uniform(*bounds) * seconds for bounds in _DRIVERS]
    kept: dict[Path, int] = {}
    ran = 0.0
    for after in [*when, None]:
        started = time.perf_counter()
        process = subprocess.Popen([*command, "--resume"])
        if after is None:
            _end(process, parts, kept)
        else:
            _sleep_until(started + after, process)
            process.kill()
            process.wait()
            now = _marks(parts)
            if any(now.get(mark) != written for mark, written in kept.items()):
                raise SystemExit("parts that were whole are gone or written again")
            if len(now) == len(kept):
                raise SystemExit(f"no part became whole in {after:.0f} s: nothing that a resumed run could keep")
            kept = now
            whole.append(len(kept))
        ran += time.perf_counter() - started
    return {"at_seconds_of_its_run": when, "parts_whole_then": whole, "seconds": ran}


def _marks(parts: Path) -> dict[Path, int]:
    """The parts that are whole, and when they were."""
    found = {}
    for mark in (parts / "_done").glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # in the end they are put together, and removed
            found[mark] = mark.stat().st_mtime_ns
    return found


def _sleep_until(end: float, process: subprocess.Popen[bytes]) -> None:
    while (left := end - time.perf_counter()) > 0:
        if process.poll() is not None:
            raise SystemExit(f"the run ended, with {process.returncode}, before something could die")
        time.sleep(min(left, 0.1))


def _end(process: subprocess.Popen[bytes], parts: Path, kept: dict[Path, int]) -> None:
    while process.poll() is None:
        if any(kept.get(mark, written) != written for mark, written in _marks(parts).items()):
            raise SystemExit("parts that were whole are written again")
        time.sleep(0.1)
    if process.returncode not in (0, 1):  # 1: lines of nothing but spaces are records that fail
        raise SystemExit(f"the run ended with {process.returncode}")
