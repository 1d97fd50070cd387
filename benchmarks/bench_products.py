"""Products of some rows with large weights: torch's, oneDNN's packed one, and our two operators, compared, then timed.

    python benchmarks/bench_products.py

Weights pass by as in a decode step: one after the other from memory, more of them than the caches hold. Beside each
number of rows stands what `sum` reads, the memory's speed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import OtherProcesses, aligned, begin, environment, options, say_if_disturbed, write
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from fastgen import ops

SHAPES = [(512, 512), (2048, 512), (512, 2048), (3072, 768), (768, 3072), (32000, 512), (192, 192)]  # [out, in]
ROWS = [1, 4, 8, 12, 16, 20, 32, 128, 512, 2048]
PASSING_BYTES = 2**27  # of weights
MOST_FLOPS = 2e10  # of all weights that pass by, but for two: with many rows arithmetic takes longer than reading


def seconds(product: Callable[[Any], Tensor], weights: list[Any]) -> float:
    """Of one product, when all weights pass by."""
    start = time.perf_counter()
    for weight in weights:
        product(weight)
    return (time.perf_counter() - start) / len(weights)


def measure(out: int, size: int, numbers: list[int], rounds: int) -> list[dict[str, Any]]:
    count = max(2, PASSING_BYTES // (out * size * 4))
    plain = [torch.randn(out, size) for _ in range(count)]
    weights: dict[str, list[Any]] = {
        "linear": plain,
        "oneDNN": [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in plain],
        "skinny": plain,
        "packed": [ops.pack_weight(weight) for weight in plain],
    }
    return [measure_rows(torch.randn(rows, size), weights, out, rounds) for rows in numbers]


def measure_rows(rows: Tensor, weights: dict[str, list[Any]], out: int, rounds: int) -> dict[str, Any]:
    """All in turn; the median of each, and of the rounds' oneDNN / ours."""
    products: dict[str, Callable[[Any], Tensor]] = {
        "linear": lambda weight: F.linear(rows, weight),
        "oneDNN": lambda weight: torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], ""),
        "skinny": lambda weight: ops.skinny_linear(rows, [weight]),
        "packed": lambda weight: ops.packed_linear(rows, weight, out),
    }
    for name, product in products.items():
        expected = F.linear(rows.double(), weights["linear"][0].double())
        torch.testing.assert_close(product(weights[name][0]).double(), expected, rtol=1e-4, atol=1e-3)
    count = max(2, int(MOST_FLOPS / (2 * out * rows.numel())))
    times = [
        {name: seconds(product, weights[name][:count]) for name, product in products.items()} for _ in range(rounds)
    ]
    median = {name: statistics.median(one[name] for one in times) for name in products}
    return {
        "rows": len(rows),
        "out": out,
        "in": rows.shape[1],
        **{f"{name}_us": 1e6 * each for name, each in median.items()},
        **{f"oneDNN_over_{name}": statistics.median(one["oneDNN"] / one[name] for one in times) for name in products},
        "gflops": {name: 2e-9 * out * rows.numel() / each for name, each in median.items()},
        "gb_per_second": {name: 4e-9 * out * rows.shape[1] / each for name, each in median.items()},
    }


def memory_speed(rounds: int) -> float:
    """GB a second that `sum` reads."""
    large = torch.ones(2**26)
    return 1e-9 * large.nbytes / statistics.median(seconds(lambda x: x.sum(), [large]) for _ in range(rounds))


def cells(result: dict[str, Any]) -> tuple[str, ...]:
    times = tuple(f"{result[f'{name}_us']:.0f}" for name in ("linear", "oneDNN", "skinny", "packed"))
    speed = result["gb_per_second"]["skinny" if result["rows"] <= 12 else "packed"]
    ours = (f"{result['oneDNN_over_skinny']:.2f}x", f"{result['oneDNN_over_packed']:.2f}x")
    return (f"{result['out']} x {result['in']}", str(result["rows"]), *times, *ours, f"{speed:.1f}")


@torch.inference_mode()
def main() -> int:
    parser = options(__doc__.splitlines()[0], rounds=7)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    begin(args)
    if not ops.is_native(torch.device("cpu")):
        sys.exit("There is no native operator to compare with.")
    torch.manual_seed(0)
    others, speed = OtherProcesses(), memory_speed(args.rounds)
    results = [
        result
        for shape in tqdm(SHAPES, unit="shape", leave=False)
        for result in measure(*shape, args.rows, args.rounds)
    ]
    document = {**environment(), "other_processes": others.cores(), "sum_gb_per_second": speed, "results": results}
    write(args.output, "products", document, indent=1)
    header = ("weight", "rows", "linear us", "oneDNN us", "skinny us", "packed us")
    print(
        f"{document['machine']['cpu']}, {args.threads} threads, torch {torch.__version__}; sum reads {speed:.1f} GB/s"
    )
    print(aligned([(*header, "oneDNN / skinny", "oneDNN / packed", "ours GB/s"), *map(cells, results)]))
    say_if_disturbed(document["other_processes"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
