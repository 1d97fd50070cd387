"""The two CPU variants of beam attention, timed over shapes: which one to take from how many keys on.

    python benchmarks/bench_attention.py                 # shapes of beam search, 2 threads, float32
    python benchmarks/bench_attention.py --rows 5 --keys 100 1000 --blocks 96

"fused" is torch's scaled_dot_product_attention, "products" two batched matrix products with a softmax between.
fastgen.attention takes the latter below `_FUSED_FROM_KEYS` keys.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_generate import RESULTS, cpu_model
from tqdm import tqdm

from fastgen import attention

NEVER = sys.maxsize


def inputs(blocks: int, heads: int, group: int, beams: int, keys: int, size: int, biased: bool) -> list[Any]:
    """Arguments of beam_attention: `blocks` = sentences x key heads, keys in a larger buffer as in the tree."""
    batch = max(1, blocks // heads)
    heads = blocks // batch
    query = torch.randn(batch, heads, group, beams, size)
    buffers = (torch.randn(batch, heads, keys + 64 * beams, size) for _ in range(2))
    key, value = (buffer[:, :, :keys] for buffer in buffers)
    bias = torch.zeros(batch, 1, beams, keys) if biased else None
    return [query, key, value, bias, size**-0.5]


def seconds(call: Callable[[], Any], at_least: float) -> float:
    """Of one call: the mean over as many as take about `at_least` seconds."""
    started = time.perf_counter()
    call()
    once = max(time.perf_counter() - started, 1e-6)
    times = max(3, int(at_least / once))
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def variant(fused_from: int, arguments: list[Any]) -> Callable[[], Any]:
    def call() -> Any:
        attention._FUSED_FROM_KEYS = fused_from
        return attention.beam_attention(*arguments)

    return call


def measure(shape: dict[str, Any], rounds: int, at_least: float) -> dict[str, Any]:
    """Both variants in turn; the median of each, and of products / fused."""
    arguments = inputs(**shape)
    fused, products = variant(0, arguments), variant(NEVER, arguments)
    torch.testing.assert_close(fused(), products(), rtol=1e-4, atol=1e-5)
    pairs = [(seconds(fused, at_least), seconds(products, at_least)) for _ in range(rounds)]
    return {
        **shape,
        "fused_us": 1e6 * statistics.median(a for a, _ in pairs),
        "products_us": 1e6 * statistics.median(b for _, b in pairs),
        "products_over_fused": statistics.median(b / a for a, b in pairs),
    }


def table(results: list[dict[str, Any]], keys: list[int]) -> str:
    """A line for each kind of shape: time of the products over time of fused, by number of keys."""
    lines = ["products / fused (below 1: the products win)"]
    lines.append(f"{'blocks':>7}{'group':>6}{'beams':>6}{'bias':>6}" + "".join(f"{k:>7}" for k in keys))
    kinds: dict[tuple[Any, ...], dict[int, float]] = {}
    for result in results:
        kind = tuple(result[name] for name in ("blocks", "group", "beams", "biased"))
        kinds.setdefault(kind, {})[result["keys"]] = result["products_over_fused"]
    for (blocks, group, beams, biased), row in kinds.items():
        cells = "".join(f"{row[k]:>7.2f}" for k in keys)
        lines.append(f"{blocks:>7}{group:>6}{beams:>6}{'yes' if biased else 'no':>6}" + cells)
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 5, 8, 12], help="query rows per key head")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 3], help="query heads per key head")
    parser.add_argument("--keys", type=int, nargs="+", default=[25, 50, 100, 200, 400, 600, 800, 1000, 1250, 1500])
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32, 96, 256, 512], help="B * key heads")
    parser.add_argument("--size", type=int, default=64, help="head size (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.03, help="a variant and round (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="where the JSON goes")
    return parser.parse_args()


@torch.inference_mode()
def main() -> int:
    args = parse()
    torch.set_num_threads(args.threads)
    shapes = [
        {
            "blocks": blocks,
            "heads": 8,
            "group": group,
            "beams": rows // group,
            "keys": keys,
            "size": args.size,
            "biased": biased,
        }
        for blocks in args.blocks
        for rows in args.rows
        for group in args.groups
        if rows % group == 0
        for biased in (False, True)
        for keys in args.keys
    ]
    torch.manual_seed(0)
    results = [measure(shape, args.rounds, args.seconds) for shape in tqdm(shapes, unit="shape", leave=False)]
    document = {
        "machine": {"cpu": cpu_model(), "threads": args.threads},
        "torch": torch.__version__,
        "results": results,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / f"attention-{datetime.date.today().isoformat()}.json"
    file.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{cpu_model()}, {args.threads} threads, torch {torch.__version__}, float32, heads of {args.size}")
    print(table(results, args.keys))
    return 0


if __name__ == "__main__":
    sys.exit(main())
