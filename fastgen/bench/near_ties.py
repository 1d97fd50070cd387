"""Whether an output that differs from a host's is one that the host itself might as well have given.

Where two candidates are as good as equal, rounding decides, and another order of additions may choose the other one.
Such a near-tie has to be shown of the host, by itself: its weights are moved by less than the error that its own sums
may have, and it is asked again. The computed inner product of n numbers is the exact one of numbers moved by up to
n u / (1 - n u) (Higham, Accuracy and Stability of Numerical Algorithms, 2002, equation 3.4), here by 2 u. That needs
nothing of a host but its outputs; a gap between scores would have to be found in the loop of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TRIES = 16


def answers(runner: Any, number: int) -> Iterator[dict[str, Any]]:
    """A host's outputs for one of its inputs, alone: as it is, then by weights moved at random.

    Each weight is moved relatively by up to about the epsilon of its dtype, 2 u. Inputs and weights are not set back.
    """
    import torch

    runner.keep(number)
    weights = [(weight, weight.detach().clone()) for weight in runner.model.parameters()]
    yield runner.outputs(runner.generate())
    for seed in range(TRIES):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight, own in weights:
                by = 2 * torch.rand(own.shape, generator=generator) - 1
                weight.copy_(own * (1 + by.to(own) * torch.finfo(own.dtype).eps))
        yield runner.outputs(runner.generate())
