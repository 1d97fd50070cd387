"""Splits the output of `generate` into the hypotheses of each record."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Hypotheses(NamedTuple):
    """The hypotheses of one record, best first."""

    tokens: list[list[int]]  # without the prompt of a decoder-only model, and without padding at the end
    scores: list[float | None]


def hypotheses_of(model: Any, config: Any, output: Any, longest: int) -> list[Hypotheses]:
    """The hypotheses of each record, from the output for a batch.

    Args:
        config: the GenerationConfig; with `return_dict_in_generate` and `output_scores` there are scores.
        output: what `model.generate` returned.
        longest: number of tokens of each prompt, padding included.
    """
    count = int(config.num_return_sequences or 1)
    sequences = output if isinstance(output, Tensor) else output.sequences
    new = sequences if model.config.is_encoder_decoder else sequences[:, longest:]
    rows = [without_tail(row, config.pad_token_id, int(model.config.is_encoder_decoder)) for row in new.tolist()]
    scores: list[float | None] = [None] * len(rows) if isinstance(output, Tensor) else _scores(model, config, output)
    return [Hypotheses(rows[k : k + count], scores[k : k + count]) for k in range(0, len(rows), count)]


def _scores(model: Any, config: Any, output: Any) -> list[float | None]:
    """The scores of beam search; without beams, the sums of the tokens' log-probabilities."""
    scores = getattr(output, "sequences_scores", None)
    if scores is None:
        steps = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        # After the end token a row is padding, whose probabilities don't count.
        ends = torch.tensor(_ends(config.eos_token_id), device=steps.device)
        ended = torch.isin(output.sequences[:, -steps.shape[1] :], ends).cumsum(-1)  # [B, T]
        after = torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], dim=-1) > 0
        scores = steps.masked_fill(after, 0.0).sum(-1)
    return [float(score) for score in scores.tolist()]


def without_tail(row: list[int], pad: int, begun: int = 0) -> list[int]:
    """The row without padding at the end.

    Args:
        begun: tokens at the beginning that stay: the start token of a decoder may be the padding, too.
    """
    end = len(row)
    while end > begun and row[end - 1] == pad:
        end -= 1
    return row[:end]


def _ends(tokens: int | list[int] | None) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)
