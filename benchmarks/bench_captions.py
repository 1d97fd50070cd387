"""Where the time of a caption goes: what precedes the second token, and the decode steps, beside the machine's limit.

    python benchmarks/bench_captions.py                       # all models of `fastgen-bench captions`
    python benchmarks/bench_captions.py --model florence2-base --images 2

Before the second token a call runs the vision tower, an encoder or a Q-former, and the prompt, which fastgen leaves to
the host's own code. So its floating-point operations are counted, and their rate is set beside that of one large
product on the same threads: what is near to it cannot be made faster by another way to generate. Both sides generate
two tokens and then all, in turn; the difference is the decode steps.
"""

from __future__ import annotations

import statistics
import time
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
    running,
    say_if_disturbed,
    write,
)
from torch.utils.flop_counter import FlopCounterMode

from fastgen.bench import models
from fastgen.bench.captioners import CAPTIONERS

NEW = 32


def seconds(job: models.Job, side: str, new: int) -> float:
    with torch.no_grad(), running(side):
        start = time.perf_counter()
        job.model.generate(**job.batches[0], **{**job.options, "max_new_tokens": new, "min_new_tokens": new})
        return time.perf_counter() - start


def operations(job: models.Job) -> int:
    """Floating-point operations of stock until the second token."""
    with torch.no_grad(), running("stock"), FlopCounterMode(display=False) as counter:
        job.model.generate(**job.batches[0], **{**job.options, "max_new_tokens": 2, "min_new_tokens": 2})
    return counter.get_total_flops()


def measure(name: str, images: int, rounds: int) -> dict[str, Any]:
    task = dict(name=name, model=name, batch=images, source=0, new=NEW, beams=3, layers=0, options={}, limit=0)
    job = models.build(task, {})
    job.model.requires_grad_(False)  # the counter of operations would look for gradients
    for side in ("stock", "fastgen"):
        seconds(job, side, NEW)  # fastgen's first call times products and proves recorded steps
    done = operations(job)
    times = [
        {f"{side} {new}": seconds(job, side, new) for side in ("stock", "fastgen") for new in (2, NEW)}
        for _ in range(rounds)
    ]
    medians = {key: statistics.median(one[key] for one in times) for key in times[0]}
    return {"model": name, "images": images, "rounds": times, "median": medians, "operations": done}


def main() -> None:
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--model", nargs="+", default=list(CAPTIONERS), choices=list(CAPTIONERS))
    parser.add_argument("--images", type=int, default=8)
    args = parser.parse_args()
    begin(args)
    quieten()
    others, peak, records = OtherProcesses(), limit(), []
    rows = [("", "stock", "fastgen", "", "before the second token", "of the limit", "decode steps")]
    for name in args.model:
        records.append(found := measure(name, args.images, args.rounds))
        one = found["median"]
        whole, before = (one[f"stock {NEW}"], one[f"fastgen {NEW}"]), (one["stock 2"], one["fastgen 2"])
        steps = [all_ - first for all_, first in zip(whole, before, strict=True)]
        rows.append(
            (
                f"{name}, {args.images} images",
                *(f"{each:.1f} s" for each in whole),
                f"{whole[0] / whole[1]:.2f}x",
                f"{before[0]:.1f} / {before[1]:.1f} s",
                f"{found['operations'] / before[0] / peak:.0%} / {found['operations'] / before[1] / peak:.0%}",
                f"{steps[0]:.1f} / {steps[1]:.1f} s, {steps[0] / steps[1]:.2f}x",
            )
        )
        print(aligned(rows[:1] + rows[-1:]), flush=True)
        write(args.output, "captions-parts", {**environment(transformers), "limit": peak, "records": records})
    say_if_disturbed(others.cores())


if __name__ == "__main__":
    main()
