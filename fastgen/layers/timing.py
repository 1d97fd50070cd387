"""Times two ways to compute a product, and says which is faster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Product = Callable[[Tensor, Any, "Tensor | None"], Tensor]  # of rows, weights, a bias

# Timings of a shape for either way: as many as fit into these seconds, three at least, after some calls to warm up.
_TRIALS, _TRIAL_SECONDS, _WARM_UP = 20, 0.02, 3
_PASSING_BYTES = 2**26  # bytes of weights that are read while a shape is timed


def is_faster(
    product: Product,
    prepare: Callable[[Tensor], Any],
    weight: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    over: Product | None,
) -> bool:
    """Whether `product` is faster than torch's (or `over`) for `rows` and many copies of `weight`, `[out, in]`.

    In a decode step one weight after the other comes from memory; a single one would stay in the nearest cache.
    """
    fitting = _PASSING_BYTES // (weight.numel() * weight.element_size())
    count = max(1, min(fitting, _TRIALS + _WARM_UP))
    weights = [weight.clone() for _ in range(count)]  # keeps the strides
    theirs = _median_seconds(lambda i: (over or nn.functional.linear)(rows, weights[i % count], bias))
    prepared = [prepare(copy) for copy in weights]
    return _median_seconds(lambda i: product(rows, prepared[i % count], bias)) < theirs


def _median_seconds(product: Callable[[int], Tensor]) -> float:
    for i in range(_WARM_UP):
        product(-1 - i)
    seconds: list[float] = []
    while len(seconds) < 3 or (len(seconds) < _TRIALS and sum(seconds) < _TRIAL_SECONDS):
        start = time.perf_counter()
        product(len(seconds))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
