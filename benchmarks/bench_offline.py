"""A list of sentences of mixed lengths: stock batch by batch, in the order of the list and by length, against
`fastgen.generate` without and with refill. Every sentence is compared with stock's before anything is timed.

    python benchmarks/bench_offline.py --shared ../shared
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_generate
import measuring
import torch
import transformers
from measuring import OtherProcesses

import fastgen

BATCH = 64


def stock(model: Any, sources: list[Any], options: dict[str, Any], by_length: bool) -> list[list[int]]:
    order = range(len(sources))
    if by_length:
        order = sorted(order, key=lambda index: len(sources[index]))
    pad = model.config.pad_token_id
    found: list[list[int]] = [[]] * len(sources)
    with fastgen.disabled():
        for first in range(0, len(sources), BATCH):
            part = order[first : first + BATCH]
            rows = [sources[index] for index in part]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
            output = model.generate(input_ids=ids, attention_mask=(ids != pad).long(), **options)
            for index, row in zip(part, output.tolist(), strict=True):
                found[index] = row
    for row in found:
        while row[-1] == pad:
            row.pop()
    return found


def ours(model: Any, sources: list[Any], options: dict[str, Any], refill: bool) -> list[list[int]]:
    results = fastgen.generate(model, sources, batch_size=BATCH, refill=refill, **options)
    return [hypotheses[0].tolist() for hypotheses in results]


def main() -> int:
    parser = measuring.options(__doc__, rounds=3)
    parser.add_argument("--shared", type=Path, required=True, metavar="DIR", help="holds data/ and models/")
    parser.add_argument("--sentences", type=int, default=1000)
    args = parser.parse_args()
    measuring.begin(args)
    bench_generate.quieten()
    job = bench_generate._translation(args)
    sources = [row[mask.bool()] for batch in job.batches for row, mask in zip(*batch.values(), strict=True)]
    random.Random(0).shuffle(sources)
    sources = sources[: args.sentences]
    sides: dict[str, Callable[[], list[list[int]]]] = {
        "stock, in order": lambda: stock(job.model, sources, job.options, by_length=False),
        "stock, by length": lambda: stock(job.model, sources, job.options, by_length=True),
        "fastgen": lambda: ours(job.model, sources, job.options, refill=False),
        "fastgen, refilled": lambda: ours(job.model, sources, job.options, refill=True),
    }
    outputs = {name: run() for name, run in sides.items()}
    theirs = outputs["stock, in order"]
    different = {name: sum(a != b for a, b in zip(theirs, found, strict=True)) for name, found in outputs.items()}
    print(f"{len(sources)} sentences; differing from stock: {different}")
    rounds: list[dict[str, Any]] = []
    for number in range(0 if any(different.values()) else args.rounds):
        one: dict[str, Any] = {"other_processes": {}}
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            others, started = OtherProcesses(), time.perf_counter()
            sides[name]()
            one[name], one["other_processes"][name] = time.perf_counter() - started, others.cores()
        rounds.append(one)
    summary = {
        name: {
            "seconds": statistics.median(one[name] for one in rounds),
            "ratios": sorted(one["stock, in order"] / one[name] for one in rounds),
        }
        for name in sides
        if rounds
    }
    for name, values in summary.items():
        ratios = values["ratios"]
        print(
            f"{name:>18} {values['seconds']:7.2f} s  {statistics.median(ratios):.2f}x "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}) of stock in order"
        )
    document = {
        "what": f"{len(sources)} sentences of mixed lengths, batches of {BATCH}, trained translation model",
        **measuring.environment(transformers, fastgen),
        "options": job.options,
        "different": different,
        "summary": summary,
        "rounds": rounds,
    }
    measuring.write(args.output, "offline", document)
    return int(any(different.values()))


if __name__ == "__main__":
    raise SystemExit(main())
