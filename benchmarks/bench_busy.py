"""The demo on a machine that other programs use: how long OpenMP's threads spin while they wait.

    python benchmarks/bench_busy.py                # alone, and beside a process that keeps every core busy; 3 rounds

A thread of GNU's OpenMP, which torch's wheels for Linux bring, that waits for another spins first. Where other programs
want the cores, it spins in the time of the thread that it waits for. `GOMP_SPINCOUNT` says how often a thread looks
before it sleeps; `OMP_WAIT_POLICY=passive` stands for 0. Each run is a process of its own and compares all outputs with
stock's; the settings take turns.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from measuring import aligned, environment, options, write
from tqdm import tqdm

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}
_MOST_SECONDS = 180
OTHER = "import torch\na = torch.randn(2048, 2048)\nwhile True: a @ a"
DEMO = "import sys\nfrom fastgen.cli.demo import main\nsys.exit(main(['--quiet', '--limit', '128']))"


@contextlib.contextmanager
def another(is_there: bool) -> Iterator[None]:
    """A process that multiplies matrices with all threads."""
    if not is_there:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", OTHER])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def demo(setting: dict[str, str]) -> dict[str, float]:
    """Inputs a second, of stock and of fastgen; 0 where a run takes longer than three minutes."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", DEMO]
    try:
        run = subprocess.run(
            command, env=known | setting, capture_output=True, text=True, check=True, timeout=_MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"stock": 0.0, "fastgen": 0.0}
    found = re.search(r"inputs per second\s+([\d,.]+)\s+([\d,.]+)", run.stdout)
    assert found is not None, run.stdout
    return {side: float(found[i].replace(",", "")) for i, side in ((1, "stock"), (2, "fastgen"))}


def main() -> int:
    args = options(__doc__.splitlines()[0], rounds=3).parse_args()
    import transformers

    rounds: list[dict[str, Any]] = []
    bar = tqdm(total=args.rounds * 2 * len(SETTINGS), unit="run")
    for number in range(args.rounds):
        names = list(SETTINGS) if number % 2 == 0 else list(SETTINGS)[::-1]
        for is_busy in (False, True):
            with another(is_busy):
                for name in names:
                    bar.update()
                    rounds.append({"round": number, "busy": is_busy, "setting": name, **demo(SETTINGS[name])})
    bar.close()

    def median(name: str, is_busy: bool, side: str) -> float:
        return statistics.median(each[side] for each in rounds if each["setting"] == name and each["busy"] == is_busy)

    summary = {
        name: {
            where: {side: median(name, is_busy, side) for side in ("stock", "fastgen")}
            for where, is_busy in (("alone", False), ("busy", True))
        }
        for name in SETTINGS
    }
    rows = [("inputs a second", "stock", "fastgen", "stock, busy", "fastgen, busy")]
    for name, one in summary.items():
        rows.append(
            (name, *(f"{one[where][side]:,.0f}" for where in ("alone", "busy") for side in ("stock", "fastgen")))
        )
    print(aligned(rows))
    print(write(args.output, "busy", {**environment(transformers), "summary": summary, "rounds": rounds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
