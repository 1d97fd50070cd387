"""The host's top-k and top-p, one after the other, of the k scores alone.

The host's top-p (Holtzman et al., 2020) sorts the scores of all tokens to add them up, though all but k are gone by
then: on a CPU that is a third of a step of 32 sentences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

_TIE = 1e-5  # closer than that to the edge the order of the host's additions decides
_MOST = 1024  # more scores than these are not added up to within _TIE


def are_joined(first: Any, second: Any, scores: Tensor) -> bool:
    """Whether these two processors are the host's own, in their order, on a device where a sort is slow."""
    return (
        type(first) is TopKLogitsWarper
        and type(second) is TopPLogitsWarper
        and first.filter_value == second.filter_value == -float("inf")
        and first.top_k <= min(_MOST, scores.shape[-1] - 1)
        and scores.device.type == "cpu"
        and scores.dtype == torch.float32
    )


def joined(top_k: Any, top_p: Any, scores: Tensor) -> Tensor | None:
    """What the second returns for what the first does for `scores`, `[rows, V]`: new memory.

    None where ties or rounding decide which tokens stay: these are left to the host.
    """
    values, tokens = scores.topk(top_k.top_k + 1)  # the largest first
    if not (values[:, -2] > values[:, -1]).all():
        return None  # the host keeps all that are as large as the k-th
    values, tokens = values[:, :-1], tokens[:, :-1]  # [rows, k]
    rising = values.flip(-1)
    sums, edge = rising.softmax(-1).cumsum(-1), 1 - top_p.top_p
    if ((sums - edge).abs() < _TIE).any():
        return None
    goes = sums <= edge
    goes[:, -top_p.min_tokens_to_keep :] = False
    if (goes[:, :-1] & ~goes[:, 1:] & (rising[:, :-1] == rising[:, 1:])).any():
        return None  # the order in which the host sorts them decides
    left = rising.masked_fill(goes, -float("inf")).flip(-1)
    return torch.full_like(scores, -float("inf")).scatter_(1, tokens, left)
