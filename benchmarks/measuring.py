"""What the benchmarks share: their options and results, the two sides, and how quiet the machine was."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import fastgen
from fastgen.bench import provenance
from fastgen.bench.machine import OtherProcesses as OtherProcesses
from fastgen.bench.machine import cpu as cpu_model

RESULTS = Path(__file__).parent / "results"
SIDES = ("stock", "fastgen")


def quieten() -> None:
    """transformers prints what is wrong and nothing else."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def running(side: str) -> contextlib.AbstractContextManager[Any]:
    return fastgen.disabled() if side == "stock" else contextlib.nullcontext()


def ratios(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Median, least and largest of the rounds' stock / fastgen, and each side's median seconds."""
    each = [one["stock"] / one["fastgen"] for one in rounds]
    return {
        "ratio": statistics.median(each),
        "min": min(each),
        "max": max(each),
        **{side: statistics.median(one[side] for one in rounds) for side in SIDES},
    }


def limit(size: int = 3072) -> float:
    """Floating-point operations a second of a large float32 product, in torch."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    found = []
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        found.append(2 * size**3 / (time.perf_counter() - start))
    return max(found)


def say_if_disturbed(cores: float | None, when: str = "") -> None:
    if cores is not None and cores > 0.1:
        print(f"Disturbed: other processes kept {cores:.1f} cores busy{when}.")


def environment(*modules: ModuleType) -> dict[str, Any]:
    """When and where, with the versions of these modules beside Python's and torch's."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_model(), "threads": torch.get_num_threads()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{module.__name__: module.__version__ for module in modules},
        },
    }


def write(folder: Path, name: str, document: dict[str, Any], indent: int | None = 2) -> Path:
    """Write a result, with what made it: the command without the paths of this machine, and fastgen's commit."""
    document = {"command": f"python benchmarks/{provenance.command(sys.argv)}"} | document
    if commit := provenance.commit():
        document["commit"] = commit
    file = folder / f"{name}-{datetime.date.today().isoformat()}.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=indent) + "\n")
    return file


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Columns, the first row above a line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def options(description: str, rounds: int | None = None, **more: Any) -> argparse.ArgumentParser:
    """A parser with the options that all have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **more
    )
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="where the JSON goes")
    return parser


def begin(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    fastgen.configure(strict=True)  # a fallback must not be timed as if it were ours
    args.output.mkdir(parents=True, exist_ok=True)
