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
    rows = [own_tokens(row, config, model) for row in new.tolist()]
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


def own_tokens(row: list[int], config: Any, model: Any) -> list[int]:
    """The tokens of a hypothesis: without what follows the end token, and without padding at the end.

    Where padding is token 0, the host's beam search fills up with end tokens.
    """
    begun = int(model.config.is_encoder_decoder)  # the decoder's start token, which may be of either kind
    ends = _ends(config.eos_token_id)
    end = next((place + 1 for place in range(begun, len(row)) if row[place] in ends), len(row))
    return row[:begun] + without_tail(row[begun:end], config.pad_token_id)


def without_tail(row: list[int], pad: int) -> list[int]:
    """The row without padding at the end."""
    end = len(row)
    while end and row[end - 1] == pad:
        end -= 1
    return row[:end]


def _ends(tokens: int | list[int] | None) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)
