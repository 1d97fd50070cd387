"""The work of a beam search between two steps of the model: the candidates, and what becomes of the beams.

`B` sentences, `M` beams, `K` candidates a sentence, `V` vocabulary, `L` maximal length, `P` length of the prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastgen.ops.operator import define
from fastgen.ops.topk import check_topk, reference_topk_log_softmax

_DEAD = -1.0e9  # transformers' mark of a beam that must not be chosen
_REAL = 0.1 * _DEAD  # what is worth less was marked


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
        log_probs = torch.where(log_probs.isneginf(), log_probs, logits.gather(1, tokens))  # -inf of what is banned
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
    scores: Tensor,
    finished_tokens: Tensor,
    finished_rows: Tensor,
    finished_scores: Tensor,
    is_finished: Tensor,
    improvable: Tensor,
    sentence: Tensor,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    stopped: Tensor,
    length: int,
    prompt_length: int,
    divisor: float,
    best_divisor: float,
    early_stopping: bool,
) -> tuple[Tensor, Tensor]:
    """Let the best M candidates that go on be the beams, and those of the best M that end compete with the hypotheses
    finished before, by the rules of transformers' `_beam_search`; all in place, and all or nothing.

    Args:
        tokens, finished_tokens: hypotheses, int64 `[B, M, L]`. rows, finished_rows: the rows that chose their tokens,
            int32 `[B, M, L - P]`. scores: sums of log-probabilities, finished_scores: normalised ones, the best first,
            float32 `[B, M]`. is_finished: which places are taken, bool `[B, M]`. improvable: bool `[B, 1]`. All of
            these are changed.
        sentence: each sentence's place in the request, int64 `[B]`.
        candidate_scores: float32 `[B, K]`, K >= M, the best first; candidate_tokens, candidate_parents: int64 `[B, K]`.
        stopped: which candidates end here, bool `[B, K]`.
        length: of the beams so far, P to L - 1; prompt_length: P.
        divisor: by which scores of candidates that end are divided; best_divisor: those of beams that go on.
        early_stopping: whether a sentence with M finished hypotheses takes no more.

    Returns:
        parents: the row that each beam continues, int64 `[B*M]`.
        state: int64 `[4]`: whether anything was done; whether a sentence goes on; how many sentences have finished, so
            that no step can change them; how many places are left that no hypothesis has taken. Nothing is done where
            equal scores leave the order to `torch.topk`, where fewer than M candidates go on, or where a score, of a
            candidate or of a place that is taken, is not that of an ordinary hypothesis (NaN, above zero, or marked as
            dead). Then all numbers are zero. A place that none has taken stays as it is, while the host puts some
            candidate there that has not ended.

    Raises:
        ValueError, TypeError: for shapes and dtypes other than these, or a tensor that is not contiguous.
    """
    arguments = (tokens, rows, scores, finished_tokens, finished_rows, finished_scores, is_finished, improvable)
    candidates = (candidate_scores, candidate_tokens, candidate_parents, stopped)
    numbers = (length, prompt_length, divisor, best_divisor, early_stopping)
    parents, state = _advance_beams_(*arguments, sentence, *candidates, *numbers)
    return parents, state


def check_beams(
    tokens: Tensor,
    rows: Tensor,
    scores: Tensor,
    finished_tokens: Tensor,
    finished_rows: Tensor,
    finished_scores: Tensor,
    is_finished: Tensor,
    improvable: Tensor,
    sentence: Tensor,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    stopped: Tensor,
    length: int,
    prompt_length: int,
) -> None:
    if tokens.dim() != 3 or scores.dim() != 2 or not scores.numel():
        shapes = f"{list(tokens.shape)} and {list(scores.shape)}"
        raise ValueError(f"tokens must be [batch, beams, length] and scores [batch, beams], not of shapes {shapes}.")
    if candidate_scores.dim() != 2:
        raise ValueError(f"candidate_scores must be [batch, candidates], not of shape {list(candidate_scores.shape)}.")
    if not 0 <= prompt_length <= length < tokens.shape[2]:
        raise ValueError(f"length must be {prompt_length} to {tokens.shape[2] - 1}, not {length}.")
    (batch, beams), longest, count = scores.shape, tokens.shape[2], candidate_scores.shape[1]
    if count < beams:
        raise ValueError(f"candidates must be {beams} or more, not {count}.")
    steps = longest - prompt_length
    for name, tensor, shape, dtype in (
        ("tokens", tokens, (batch, beams, longest), torch.int64),
        ("rows", rows, (batch, beams, steps), torch.int32),
        ("scores", scores, (batch, beams), torch.float32),
        ("finished_tokens", finished_tokens, (batch, beams, longest), torch.int64),
        ("finished_rows", finished_rows, (batch, beams, steps), torch.int32),
        ("finished_scores", finished_scores, (batch, beams), torch.float32),
        ("is_finished", is_finished, (batch, beams), torch.bool),
        ("improvable", improvable, (batch, 1), torch.bool),
        ("sentence", sentence, (batch,), torch.int64),
        ("candidate_scores", candidate_scores, (batch, count), torch.float32),
        ("candidate_tokens", candidate_tokens, (batch, count), torch.int64),
        ("candidate_parents", candidate_parents, (batch, count), torch.int64),
        ("stopped", stopped, (batch, count), torch.bool),
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
    scores: Tensor,
    finished_tokens: Tensor,
    finished_rows: Tensor,
    finished_scores: Tensor,
    is_finished: Tensor,
    improvable: Tensor,
    sentence: Tensor,
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    candidate_parents: Tensor,
    stopped: Tensor,
    length: int,
    prompt_length: int,
    divisor: float,
    best_divisor: float,
    early_stopping: bool,
) -> tuple[Tensor, Tensor]:
    state = tokens, rows, scores, finished_tokens, finished_rows, finished_scores, is_finished, improvable
    candidates = candidate_scores, candidate_tokens, candidate_parents, stopped
    check_beams(*state, sentence, *candidates, length, prompt_length)
    beams, step = scores.shape[1], length - prompt_length

    going_on = ~stopped & ((~stopped).cumsum(1) <= beams)  # the first M
    is_ordinary = _are_ordinary(candidate_scores, candidate_parents, going_on, beams)
    is_ordinary &= ~(is_finished & ~(finished_scores > _REAL)).any(1)  # a dead beam has ended
    is_ordinary &= all(_is_normal(number) for number in (divisor, best_divisor))  # or a quotient might be NaN
    parents = candidate_parents.clamp(0, beams - 1)

    accepts = improvable & ~is_finished.all(1, keepdim=True) if early_stopping else improvable
    ending = stopped[:, :beams] & accepts
    normalised = candidate_scores[:, :beams] / divisor
    is_ordinary &= ((normalised > _REAL) | ~ending).all(1)
    both = torch.cat([finished_scores, normalised.masked_fill(~ending, -torch.inf)], dim=1)
    merged, places = both.sort(dim=1, descending=True, stable=True)  # an old one before an equal one
    is_ordinary &= ((merged[:, :-1] > merged[:, 1:]) | (merged[:, 1:] <= _REAL)).all(1)
    places, new_finished, is_done = places[:, :beams], merged[:, :beams], is_ordinary.all()

    chosen = going_on.sort(dim=1, descending=True, stable=True)[1][:, :beams]
    after = []
    for running, finished, new, column in (
        (tokens, finished_tokens, candidate_tokens, length),
        (rows, finished_rows, (parents + sentence[:, None] * beams).to(rows.dtype), step),
    ):
        after += _moved(running, finished, new, parents, chosen, places, column)
    new_scores = candidate_scores.gather(1, chosen)
    new_flags = torch.cat([is_finished, ending], dim=1).gather(1, places)
    worst = torch.where(new_flags, new_finished.min(dim=1, keepdim=True)[0], _DEAD)
    may_improve = improvable & (new_scores[:, :1] / best_divisor > worst).any(1, keepdim=True)
    after = [after[0], after[2], new_scores, after[1], after[3], new_finished, new_flags, may_improve]
    for before, new in zip(state, after, strict=True):
        before.copy_(torch.where(is_done, new, before))

    goes_on = may_improve.any() & ~(new_flags.all() & early_stopping)
    num_finished = (new_flags & (new_finished > _REAL)).all(1) & ~(may_improve[:, 0] & (not early_stopping))
    found = torch.stack([is_done.long(), goes_on.long(), num_finished.sum(), (~new_flags).sum()])
    return (parents.gather(1, chosen) + _first_rows(tokens)).flatten() * is_done, found * is_done


def _is_normal(number: float) -> bool:
    """Whether a float32 of this value is a normal number."""
    limits = torch.finfo(torch.float32)
    return limits.tiny <= abs(number) <= limits.max


def _are_ordinary(scores: Tensor, parents: Tensor, going_on: Tensor, beams: int) -> Tensor:
    """Which sentences have candidates `[B, K]` that leave nothing to torch, of which M are `going_on`; bool `[B]`."""
    is_ordinary = (scores[:, :-1] > scores[:, 1:]).all(1) & (scores[:, 0] <= 0)
    is_ordinary &= (going_on.sum(1) == beams) & ((scores > _REAL) | ~going_on).all(1)
    is_ordinary &= ((parents >= 0) & (parents < beams)).all(1)
    return is_ordinary


def _first_rows(tokens: Tensor) -> Tensor:
    """Each sentence's first row, int64 `[B, 1]`."""
    return torch.arange(tokens.shape[0], device=tokens.device)[:, None] * tokens.shape[1]


def _moved(
    running: Tensor, finished: Tensor, new: Tensor, parents: Tensor, chosen: Tensor, places: Tensor, column: int
) -> list[Tensor]:
    """What `running` and `finished`, `[B, M, L]`, become: `new`, `[B, K]`, is what each candidate adds at `column`."""
    beams, first = running.shape[1], _first_rows(running)

    def of_beams(tensor: Tensor, which: Tensor) -> Tensor:
        return tensor.flatten(0, 1).index_select(0, (which + first).flatten()).view_as(tensor)

    is_new, candidate = places >= beams, (places - beams).clamp(min=0)
    entering = of_beams(running, parents.gather(1, candidate))
    entering[:, :, column] = new.gather(1, candidate)
    extended = of_beams(running, parents.gather(1, chosen))
    extended[:, :, column:] = running[:, :, column:]
    extended[:, :, column] = new.gather(1, chosen)
    return [extended, torch.where(is_new[:, :, None], entering, of_beams(finished, places.clamp(max=beams - 1)))]


def fake_advance_beams_(*arguments: Any) -> tuple[Tensor, Tensor]:
    check_beams(*arguments[:15])
    scores: Tensor = arguments[2]
    return scores.new_empty(scores.numel(), dtype=torch.int64), scores.new_empty(4, dtype=torch.int64)


_beam_candidates = define(
    "beam_candidates",
    "(Tensor logits, Tensor scores, int k, Tensor? banned=None, bool are_log_probs=False) "
    "-> (Tensor scores, Tensor tokens, Tensor parents, Tensor is_clear)",
    reference_beam_candidates,
    fake_beam_candidates,
)
_advance_beams_ = define(
    "advance_beams_",
    "(Tensor(a!) tokens, Tensor(b!) rows, Tensor(c!) scores, Tensor(d!) finished_tokens, Tensor(e!) finished_rows, "
    "Tensor(f!) finished_scores, Tensor(g!) is_finished, Tensor(h!) improvable, Tensor sentence, "
    "Tensor candidate_scores, Tensor candidate_tokens, Tensor candidate_parents, Tensor stopped, int length, "
    "int prompt_length, float divisor, float best_divisor, bool early_stopping) -> (Tensor parents, Tensor state)",
    reference_advance_beams_,
    fake_advance_beams_,
)
