"""Self-attention of many beams: to their own paths, and to all slots with the ancestry as mask.

    python benchmarks/bench_wide.py                 # 8 to 1,000 beams after 4 and 16 steps, 2 threads, float32

Beams coalesce as in a search: the parents of a step are drawn, so few ancestors are left of its first steps. No slot is
pruned. Making the mask or the paths is not timed.
"""

from __future__ import annotations

import functools
import statistics
import sys
from typing import Any

import torch
from bench_attention import seconds
from measuring import begin, cpu_model, options, write
from torch import Tensor

from fastgen import ops
from fastgen.cache.tree import additive_mask


def inputs(beams: int, steps: int, prompt: int, key_heads: int, group: int, size: int) -> tuple[Any, ...]:
    """Query, keys, values, paths and mask of one sentence."""
    paths = torch.zeros(beams, 0, dtype=torch.int64)
    for step in range(steps):
        own = prompt + step * beams + torch.arange(beams)
        paths = torch.cat([paths[torch.randint(beams, (beams,))], own[:, None]], dim=1)
    slots = prompt + beams * steps
    seen = torch.zeros(1, 1, beams, slots, dtype=torch.bool)
    seen[..., :prompt] = True
    seen[0, 0].scatter_(1, paths, True)
    query = torch.randn(beams, key_heads * group, 1, size)
    key, value = (torch.randn(1, key_heads, slots, size) for _ in range(2))
    return query, key, value, paths.int(), additive_mask(seen, torch.float32)


def measure(shape: dict[str, int], rounds: int, at_least: float) -> dict[str, Any]:
    query, key, value, paths, mask = inputs(**shape)
    scale = shape["size"] ** -0.5
    calls = {
        "masked": functools.partial(ops.beam_attention, query, key, value, mask, scale),
        "paths": functools.partial(ops.path_attention, query, key, value, paths, None, scale, shape["prompt"]),
    }
    found: list[Tensor] = [call() for call in calls.values()]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    times = [{name: seconds(call, at_least) for name, call in calls.items()} for _ in range(rounds)]
    result = {f"{name}_us": 1e6 * statistics.median(one[name] for one in times) for name in calls}
    return {**shape, **result, "masked_over_paths": statistics.median(one["masked"] / one["paths"] for one in times)}


@torch.inference_mode()
def main() -> int:
    parser = options(__doc__.splitlines()[0], rounds=3)
    parser.add_argument("--beams", type=int, nargs="+", default=[8, 16, 32, 50, 100, 400, 1000])
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--seconds", type=float, default=0.05, help="a variant and round (default: %(default)s)")
    args = parser.parse_args()
    begin(args)
    if not ops.is_native(torch.device("cpu")):
        sys.exit("There is no native operator to compare.")
    torch.manual_seed(0)
    kinds = [dict(key_heads=8, group=1, size=64), dict(key_heads=8, group=2, size=128)]  # of T5-small and Qwen3-0.6B
    shapes = [
        dict(beams=beams, steps=steps, prompt=prompt, **kind)
        for kind in kinds
        for prompt in args.prompts
        for steps in args.steps
        for beams in args.beams
    ]
    results = [measure(shape, args.rounds, args.seconds) for shape in shapes]
    write(args.output, "wide", {"machine": {"cpu": cpu_model(), "threads": args.threads}, "results": results}, indent=1)
    for one in results:
        print(*(f"{name}={value:.5g}" for name, value in one.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
