"""A step of beam search by two native operators, where they may do it: see `fastgen.ops.beam_search`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgen import phases

__phase__ = phases.CHOICE


def may_find_by_row(scores: Tensor, candidates: int) -> bool:
    """Whether a sentence's candidates can be found among the best of each row of `scores`, `[B*M, V]`."""
    from fastgen import ops  # loads or even compiles the operators, so not before they are needed

    return scores.dtype == torch.float32 and scores.shape[-1] > candidates and ops.is_native(scores.device)


def candidates(
    scores: Tensor, so_far: Tensor, count: int, banned: Tensor | None, are_log_probs: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Scores, tokens and parents of the best `count` candidates, `[B, K]` each; None where torch has to find them.

    `scores` `[B*M, V]`; `so_far`: the beams' scores `[B, M]`.
    """
    from fastgen import ops

    if not may_find_by_row(scores, count):
        return None
    best, tokens, parents, is_clear = ops.beam_candidates(scores, so_far, count, banned, are_log_probs)
    return (best, tokens, parents) if bool(is_clear) else None


def advanced(
    live: Any, policy: Any, length: int, candidates: tuple[Tensor, Tensor, Tensor], stopped: Tensor
) -> tuple[Tensor, bool, int] | None:
    """Go on in place, as `BeamSearch._take` does once it is known which candidates stop.

    Returns the parents' rows, int64 `[B*M]`, whether there is another step, and how many sentences have finished. None,
    and nothing is done, where torch has to.
    """
    from fastgen import ops

    scores, tokens, parents = candidates
    if {scores.dtype, live.scores.dtype, live.finished_scores.dtype} != {torch.float32}:
        return None  # a logits processor has changed the dtype
    if stopped.dtype != torch.bool or not ops.is_native(scores.device):
        return None
    rows, state = ops.advance_beams_(
        live.tokens,
        live.rows,
        live.scores,
        live.finished_tokens,
        live.finished_rows,
        live.finished_scores,
        live.is_finished,
        live.improvable,
        live.sentence,
        scores.contiguous(),
        tokens.contiguous(),
        parents.contiguous(),
        stopped.contiguous(),
        length,
        policy.prompt_length,
        policy.divisor(length + 1),
        policy.best_divisor(length + 1),
        policy.early_stopping is True,
    )
    is_done, goes_on, num_finished = state.tolist()
    return (rows, bool(goes_on), num_finished) if is_done else None
