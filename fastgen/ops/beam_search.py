"""The work of a beam search between two steps of the model: the candidates, and what becomes of the beams.

`B` sentences, `M` beams, `K` candidates a sentence, `V` vocabulary, `L` maximal length, `P` length of the prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgen.ops.operator import define
from fastgen.ops.topk import check_topk, reference_topk_log_softmax


def beam_candidates(
    logits: Tensor, scores: Tensor, k: int, banned: Tensor | None = None, are_log_probs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The k best continuations of each sentence's beams together: step 2 of LightSeq's search (Wang et al. 2021,
    https://arxiv.org/abs/2010.13887, section 2.2), exactly.

    Args:
        logits: float32 `[B*M, V]`; or log-probabilities, if they `are_log_probs`.
        scores: the beams' sums of log-probabilities so far, float32 `[B, M]`.
        k: 1 to V - 1.
        banned: int64 `[width]` or `[B*M, width]`: as in `topk_log_softmax`.

    Returns:
        scores: sums of log-probabilities, float32 `[B, k]`, best first.
        tokens, parents: of each candidate the token, and the beam that it continues; int64 `[B, k]` each.
        is_clear: int64 `[1]`, 0 if two of some sentence's k + 1 best are equal, or if a row's log-sum-exp is not
            finite. Then the order is arbitrary, and others may belong among the k.

    Raises:
        ValueError: for shapes, devices or numbers other than these.
        TypeError: for other dtypes.
    """
    best, tokens, parents, is_clear = _beam_candidates(logits, scores, k, banned, are_log_probs)
    return best, tokens, parents, is_clear


def check_candidates(logits: Tensor, scores: Tensor, k: int, banned: Tensor | None) -> None:
    check_topk(logits, 1, banned)
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, not {logits.dtype}.")
    if scores.dim() != 2 or scores.shape[1] == 0 or scores.numel() != logits.shape[0]:
        shape = list(scores.shape)
        raise ValueError(f"scores must be [batch, beams], {logits.shape[0]} in all, not of shape {shape}.")
    if scores.dtype != torch.float32:
        raise TypeError(f"scores must be float32, not {scores.dtype}.")
    if scores.device != logits.device:
        raise ValueError(f"scores are on {scores.device} and logits on {logits.device}.")
    if not 1 <= k < logits.shape[1]:
        raise ValueError(f"k must be 1 to {logits.shape[1] - 1}, not {k}.")


def reference_beam_candidates(
    logits: Tensor, scores: Tensor, k: int, banned: Tensor | None = None, are_log_probs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_candidates(logits, scores, k, banned)
    log_probs, tokens, log_sum_exp = reference_topk_log_softmax(logits, k + 1, banned)
    if are_log_probs:
        log_probs = logits.gather(1, tokens)
    best, tokens, parents, is_clear = merged_candidates(log_probs, tokens, log_sum_exp, scores)
    return best.contiguous(), tokens, parents, is_clear.long()[None]


def merged_candidates(
    log_probs: Tensor, tokens: Tensor, log_sum_exp: Tensor, scores: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `beam_candidates` returns, from the k + 1 best of each row: one more, to see a tie at the end.

    `log_probs`, `tokens` `[B*M, k + 1]` and `log_sum_exp` `[B*M]`: as of `topk_log_softmax`. `is_clear` is bool `[]`.
    """
    beams, wanted = scores.shape[1], tokens.shape[1]
    totals = (log_probs.view(-1, beams, wanted) + scores[:, :, None]).flatten(1)
    best, places = torch.topk(totals, k=wanted)  # [B, k + 1]
    # The operator ranks NaN otherwise than torch, also the NaN that log_softmax makes of infinite logits.
    is_clear = (best[:, :-1] > best[:, 1:]).all() & (log_sum_exp.abs() < torch.inf).all()
    places = places[:, :-1]
    return best[:, :-1], tokens.view(-1, beams * wanted).gather(1, places), places // wanted, is_clear


def fake_beam_candidates(
    logits: Tensor, scores: Tensor, k: int, banned: Tensor | None = None, are_log_probs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_candidates(logits, scores, k, banned)
    shape = scores.shape[0], k
    return (
        scores.new_empty(shape),
        scores.new_empty(shape, dtype=torch.int64),
        scores.new_empty(shape, dtype=torch.int64),
        scores.new_empty(1, dtype=torch.int64),
    )


def advance_beams_(
    tokens: Tensor,
    rows: Tensor,
    finished_tokens: Tensor,
    finished_rows: Tensor,
    sentence: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    going_on: Tensor,
    places: Tensor,
    length: int,
    prompt_length: int,
) -> Tensor:
    """Put finished hypotheses in their places, and let the candidates that go on be the beams; in place.

    Args:
        tokens, finished_tokens: hypotheses, int64 `[B, M, L]`. rows, finished_rows: the rows that chose their tokens,
            int32 `[B, M, L - P]`. These four are changed.
        sentence: each sentence's place in the request, int64 `[B]`.
        candidate_tokens, candidate_parents: each candidate's token, and the beam that it continues, int64 `[B, K]`.
        going_on: the candidates that are the next beams, int64 `[B, M]`.
        places: the next finished hypotheses, int64 `[B, M]`: the old one of that number or, from M on, the candidate
            of that number less M.
        length: of the beams so far, P to L - 1; prompt_length: P.

    Returns: the row that each beam continues, int64 `[B*M]`.

    Raises:
        ValueError, TypeError: for shapes and dtypes other than these, or a tensor that is not contiguous.
        IndexError: for a beam or a candidate that there is not.
    """
    state, candidates = (tokens, rows, finished_tokens, finished_rows), (candidate_tokens, candidate_parents)
    parents: Tensor = _advance_beams_(*state, sentence, *candidates, going_on, places, length, prompt_length)
    return parents


def check_beams(
    tokens: Tensor,
    rows: Tensor,
    finished_tokens: Tensor,
    finished_rows: Tensor,
    sentence: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    going_on: Tensor,
    places: Tensor,
    length: int,
    prompt_length: int,
) -> None:
    if tokens.dim() != 3 or candidate_tokens.dim() != 2:
        raise ValueError(
            "tokens must be [batch, beams, length] and candidate_tokens [batch, candidates], "
            f"not of shapes {list(tokens.shape)} and {list(candidate_tokens.shape)}."
        )
    (batch, beams, longest), count = tokens.shape, candidate_tokens.shape[1]
    if not 0 <= prompt_length <= length < longest:
        raise ValueError(f"length must be {prompt_length} to {longest - 1}, not {length}.")
    for name, tensor, shape, dtype in (
        ("tokens", tokens, (batch, beams, longest), torch.int64),
        ("rows", rows, (batch, beams, longest - prompt_length), torch.int32),
        ("finished_tokens", finished_tokens, (batch, beams, longest), torch.int64),
        ("finished_rows", finished_rows, (batch, beams, longest - prompt_length), torch.int32),
        ("sentence", sentence, (batch,), torch.int64),
        ("candidate_tokens", candidate_tokens, (batch, count), torch.int64),
        ("candidate_parents", candidate_parents, (batch, count), torch.int64),
        ("going_on", going_on, (batch, beams), torch.int64),
        ("places", places, (batch, beams), torch.int64),
    ):
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, not of shape {list(tensor.shape)}.")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has another dtype: {str(tensor.dtype).removeprefix('torch.')}.")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous.")


def reference_advance_beams_(
    tokens: Tensor,
    rows: Tensor,
    finished_tokens: Tensor,
    finished_rows: Tensor,
    sentence: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    going_on: Tensor,
    places: Tensor,
    length: int,
    prompt_length: int,
) -> Tensor:
    state, candidates = (tokens, rows, finished_tokens, finished_rows), (candidate_tokens, candidate_parents)
    check_beams(*state, sentence, *candidates, going_on, places, length, prompt_length)
    batch, beams = places.shape
    first = torch.arange(batch, device=tokens.device)[:, None] * beams

    def of_beams(tensor: Tensor, which: Tensor) -> Tensor:
        return tensor.flatten(0, 1).index_select(0, (which + first).flatten()).view_as(tensor)

    is_new, candidate = (places >= beams)[:, :, None], (places - beams).clamp(min=0)
    parents = candidate_parents.gather(1, going_on)
    for running, finished, new, column in (
        (tokens, finished_tokens, candidate_tokens, length),
        (rows, finished_rows, (candidate_parents + sentence[:, None] * beams).to(rows.dtype), length - prompt_length),
    ):
        entering = of_beams(running, candidate_parents.gather(1, candidate))
        entering[:, :, column] = new.gather(1, candidate)
        finished.copy_(torch.where(is_new, entering, of_beams(finished, places.clamp(max=beams - 1))))
        running[:, :, :column] = of_beams(running, parents)[:, :, :column]
        running[:, :, column] = new.gather(1, going_on)
    return (parents + first).flatten()


def fake_advance_beams_(*arguments: Any) -> Tensor:
    check_beams(*arguments)
    tokens: Tensor = arguments[0]
    return tokens.new_empty(tokens.shape[0] * tokens.shape[1])


_beam_candidates = define(
    "beam_candidates",
    "(Tensor logits, Tensor scores, int k, Tensor? banned=None, bool are_log_probs=False) "
    "-> (Tensor scores, Tensor tokens, Tensor parents, Tensor is_clear)",
    reference_beam_candidates,
    fake_beam_candidates,
)
_advance_beams_ = define(
    "advance_beams_",
    "(Tensor(a!) tokens, Tensor(b!) rows, Tensor(c!) finished_tokens, Tensor(d!) finished_rows, Tensor sentence, "
    "Tensor candidate_tokens, Tensor candidate_parents, Tensor going_on, Tensor places, int length, int prompt_length) "
    "-> Tensor",
    reference_advance_beams_,
    fake_advance_beams_,
)
