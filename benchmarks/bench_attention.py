"""The CPU variants of beam attention, timed over shapes: the native operator and two of plain torch.

    python benchmarks/bench_attention.py                 # shapes of beam search, 2 threads, float32
    python benchmarks/bench_attention.py --rows 5 --keys 100 1000 --blocks 96

"fused" is torch's scaled_dot_product_attention, "products" two batched matrix products with a softmax between; where
there is no native operator, fastgen.layers.attention takes the latter below `_FUSED_FROM_KEYS` keys.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import OtherProcesses, begin, cpu_model, options, write
from torch import Tensor
from tqdm import tqdm

from fastgen import ops
from fastgen.ops import attention as ops_attention

NEVER = sys.maxsize


def inputs(blocks: int, heads: int, group: int, beams: int, keys: int, size: int, biased: bool) -> list[Any]:
    """Arguments of beam_attention: `blocks` = sentences x key heads, keys in a larger buffer as in the tree."""
    batch = max(1, blocks // heads)
    heads = blocks // batch
    query = torch.randn(batch * beams, heads * group, 1, size)
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


def plain(fused_from: int, query: Tensor, key: Tensor, *rest: Any) -> Tensor:
    """As fastgen.layers.attention does it where there is no native operator, with the choice of the variant made."""
    ops_attention._FUSED_FROM_KEYS = fused_from
    folded = ops_attention.fold_beams(query, *key.shape[:2])
    return ops_attention.unfold_beams(ops_attention.folded_attention(folded, key, *rest))


VARIANTS: dict[str, Callable[..., Tensor]] = {
    "fused": functools.partial(plain, 0),
    "products": functools.partial(plain, NEVER),
    "native": ops.beam_attention,
}


def measure(shape: dict[str, Any], rounds: int, at_least: float) -> dict[str, Any]:
    """All variants in turn; the median of each, of products / fused and of native / the better of these two."""
    arguments = inputs(**shape)
    calls = {name: functools.partial(function, *arguments) for name, function in VARIANTS.items()}
    for name in ("products", "native"):
        torch.testing.assert_close(calls["fused"](), calls[name](), rtol=1e-4, atol=1e-5)
    times = [{name: seconds(call, at_least) for name, call in calls.items()} for _ in range(rounds)]
    result = {f"{name}_us": 1e6 * statistics.median(one[name] for one in times) for name in VARIANTS}
    read = 4 * (arguments[1].numel() + arguments[2].numel())  # bytes of keys and values
    return {
        **shape,
        **result,
        "products_over_fused": statistics.median(one["products"] / one["fused"] for one in times),
        "native_over_better": statistics.median(one["native"] / min(one["products"], one["fused"]) for one in times),
        "native_gb_per_second": read / result["native_us"] / 1e3,
    }


def table(results: list[dict[str, Any]], keys: list[int], ratio: str) -> str:
    """A line for each kind of shape: one of the ratios by number of keys."""
    lines = [f"{'blocks':>7}{'group':>6}{'beams':>6}{'bias':>6}" + "".join(f"{k:>7}" for k in keys)]
    kinds: dict[tuple[Any, ...], dict[int, float]] = {}
    for result in results:
        kind = tuple(result[name] for name in ("blocks", "group", "beams", "biased"))
        kinds.setdefault(kind, {})[result["keys"]] = result[ratio]
    for (blocks, group, beams, biased), row in kinds.items():
        cells = "".join(f"{row[k]:>7.2f}" for k in keys)
        lines.append(f"{blocks:>7}{group:>6}{beams:>6}{'yes' if biased else 'no':>6}" + cells)
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = options(__doc__.splitlines()[0], rounds=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 5, 8, 12], help="query rows per key head")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 3], help="query heads per key head")
    parser.add_argument("--keys", type=int, nargs="+", default=[25, 50, 100, 200, 400, 600, 800, 1000, 1250, 1500])
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32, 96, 256, 512], help="B * key heads")
    parser.add_argument("--size", type=int, default=64, help="head size (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.03, help="a variant and round (default: %(default)s)")
    return parser.parse_args()


@torch.inference_mode()
def main() -> int:
    args = parse()
    begin(args)
    if not ops.is_native(torch.device("cpu")):
        sys.exit("There is no native operator to compare with.")
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
    others = OtherProcesses()
    results = [measure(shape, args.rounds, args.seconds) for shape in tqdm(shapes, unit="shape", leave=False)]
    document = {
        "machine": {"cpu": cpu_model(), "threads": args.threads},
        "torch": torch.__version__,
        "other_processes": others.cores(),
        "results": results,
    }
    write(args.output, "attention", document, indent=1)
    print(f"{cpu_model()}, {args.threads} threads, torch {torch.__version__}, float32, heads of {args.size}")
    print("products / fused (below 1: the products win)", table(results, args.keys, "products_over_fused"), sep="\n")
    print("native / the better of both", table(results, args.keys, "native_over_better"), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
