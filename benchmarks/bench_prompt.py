"""The prompt of one sentence, greedy: the forward pass until the first token, beside the machine's limit.

    python benchmarks/bench_prompt.py                                       # random weights
    python benchmarks/bench_prompt.py --smollm DIR --shared ../shared       # and SmolLM2-135M

Both sides generate one token, in turn. The floating-point operations of stock's pass are counted, and their rate is set
beside that of one large product on the same threads: what is near to it cannot be made faster in float32.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from measuring import (
    OtherProcesses,
    aligned,
    begin,
    environment,
    limit,
    options,
    quieten,
    ratios,
    running,
    say_if_disturbed,
    write,
)
from torch.utils.flop_counter import FlopCounterMode

from fastgen.bench import models

PROMPTS = (("gpt2", 128), ("gpt2", 512), ("llama-1b", 128))
TRAINED = (("smollm", 64), ("smollm", 512))


def seconds(job: models.Job, side: str) -> float:
    with torch.no_grad(), running(side):
        start = time.perf_counter()
        job.model.generate(**job.batches[0], **job.options)
        return time.perf_counter() - start


def measure(name: str, source: int, rounds: int, folders: dict[str, str]) -> dict[str, Any]:
    task = dict(name=name, model=name, batch=1, source=source, new=1, beams=1, layers=0, options={}, limit=0)
    job = models.build(task, folders)
    job.model.requires_grad_(False)  # the counter of operations would look for gradients
    with torch.no_grad(), running("stock"), FlopCounterMode(display=False) as counter:
        job.model.generate(**job.batches[0], **job.options)
    for _ in range(2):  # fastgen's first call times products
        seconds(job, "fastgen")
    times = [{side: seconds(job, side) for side in ("stock", "fastgen")} for _ in range(rounds)]
    return {"model": name, "tokens": source, "rounds": times, **ratios(times), "operations": counter.get_total_flops()}


def main() -> None:
    parser = options(__doc__ or "", rounds=9)
    parser.add_argument("--smollm", type=Path, metavar="DIR", help="SmolLM2-135M as transformers saves it")
    parser.add_argument(
        "--shared", type=Path, metavar="DIR", help="the folder with data/docs.txt, for SmolLM2's prompt"
    )
    args = parser.parse_args()
    begin(args)
    quieten()
    folders = {name: str(folder) for name in ("smollm", "shared") if (folder := getattr(args, name))}
    others, peak, records = OtherProcesses(), limit(), []
    rows = [("", "stock", "fastgen", "", "of the limit")]
    for name, source in (*PROMPTS, *(TRAINED if len(folders) == 2 else ())):
        records.append(found := measure(name, source, args.rounds, folders))
        rates = (found["operations"] / found[side] / peak for side in ("stock", "fastgen"))
        rows.append(
            (
                f"{name}, {source} tokens",
                *(f"{found[side] * 1e3:.0f} ms" for side in ("stock", "fastgen")),
                f"{found['ratio']:.2f}x ({found['min']:.2f} to {found['max']:.2f})",
                " / ".join(f"{rate:.0%}" for rate in rates),
            )
        )
        print(aligned(rows[:1] + rows[-1:]), flush=True)
        write(args.output, "prompt", {**environment(transformers), "limit": peak, "records": records})
    say_if_disturbed(others.cores())
    print(f"{statistics.median(found['ratio'] for found in records):.2f}x in the median")


if __name__ == "__main__":
    main()
