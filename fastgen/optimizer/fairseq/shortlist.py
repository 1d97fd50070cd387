"""The best tokens of each row in place of all: the host's loop and its search then work on a handful of columns.

Beside the model, a step of the host's loop is some ten passes over the scores `[B*M, V]`: normalise, look for NaN, add
the beams' scores, choose the best of `M * V`. What it then chooses is among the best `2M` of each row and the tokens
that the loop itself treats apart (padding, the end, the unknown word).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fairseq import search
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.models.transformer import TransformerModelBase
from torch import Tensor

from fastgen.optimizer.fairseq.requests import Request
from fastgen.optimizer.fairseq.views import replaced

_MOST_SPECIAL = 16  # tokens that are columns whatever their score
_SOFTMAX = ("get_normalized_probs", "get_normalized_probs_scriptable")


def is_shortened(generator: Any) -> bool:
    """Whether this generator's steps can be: plain beam search with one model, whose scores are a plain softmax."""
    model, special = generator.model.single_model, max(generator.pad, generator.eos, generator.unk) + 1
    return (
        type(generator.search) is search.BeamSearch
        and generator.model.models_size == 1
        and generator.lm_model is None
        and generator.token_indices_to_suppress is None
        and 2 * generator.beam_size + special < generator.vocab_size
        and special <= _MOST_SPECIAL
        and _is_softmax(model)
        and _is_native(next(model.parameters()).device)
    )


def _is_softmax(model: Any) -> bool:
    plain = {
        getattr(owner, name) for owner in (BaseFairseqModel, TransformerModelBase, FairseqDecoder) for name in _SOFTMAX
    }
    own = any(
        name in vars(module) or getattr(type(module), name) not in plain
        for module in (model, model.decoder)
        for name in _SOFTMAX
    )
    return not own and model.decoder.adaptive_softmax is None


def _is_native(device: torch.device) -> bool:
    from fastgen import ops  # loads or even compiles them, so not before they are needed

    return ops.is_native(device)


def unnormalised(model: Any) -> Any:
    """A view of the model that leaves its logits as they are."""
    return replaced(model, get_normalized_probs=lambda output, log_probs, sample: output[0])


class Shortlist:
    """Stands in for the generator's `search` during one call."""

    def __init__(self, request: Request, view: Any) -> None:
        """`view`: of the request's generator, for this call."""
        from fastgen import ops

        self.inner, self.steps = request.generator.search, 0  # steps: those that were shortened
        self._ops, self._view, self._model = ops, view, request.generator.model.single_model
        self._vocabulary, self._wanted = view.vocab_size, 2 * request.beams + 1  # one more, to see a tie at the end
        self._special = torch.arange(
            max(view.pad, view.eos, view.unk) + 1, device=next(self._model.parameters()).device
        )
        self._forced_steps = 0 if request.prefix_tokens is None else request.prefix_tokens.shape[1]
        self._tokens: Tensor | None = None  # int64 [B*M, W], the columns' tokens
        self._all: Callable[[], Tensor] | None = None  # the scores of all, float32 [B*M, V]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def of(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """The log-probabilities `[B*M, W]` of each row's best tokens, or of all, `[B*M, V]`, where there's need.

        `tokens`: int64 `[B*M, step + 1]`, the hypotheses; `logits`: `[B*M, V]`, changed where n-grams are banned.
        """
        self._tokens = None
        self._view.__dict__["vocab_size"] = self._vocabulary
        step, blocker = tokens.shape[1] - 1, self._view.repeat_ngram_blocker
        if step < self._forced_steps or logits.dtype != torch.float32:  # a prefix may have any token
            return self._normalised(logits)
        if blocker is None:
            self._all = lambda: self._normalised(logits)
            log_probs, best, log_sum_exp = self._ops.topk_log_softmax(logits, self._wanted, self._special)
        else:  # what is banned counts in the sum
            log_sum_exp = self._ops.topk_log_softmax(logits, 1)[2]
            self._all = lambda: logits - log_sum_exp[:, None]
            blocker.ban(tokens, logits, step)
            found, best, _ = self._ops.topk_log_softmax(logits, self._wanted, self._special)
            log_probs = logits.gather(1, best) - log_sum_exp[:, None]
            log_probs.masked_fill_(found == -torch.inf, -torch.inf)  # special ones, where there are no more others
        if not bool(log_sum_exp.isfinite().all()):
            return self._all()
        special = logits[:, : len(self._special)] - log_sum_exp[:, None]
        self._tokens = torch.cat([self._special.expand(len(best), -1), best], dim=1)
        self._view.__dict__["vocab_size"] = self._tokens.shape[1]
        return torch.cat([special, log_probs], dim=1)

    def step(
        self, step: int, lprobs: Tensor, scores: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The host's: scores, tokens and parents of the best 2M candidates, each `[B, 2M]`.

        `lprobs`: `[B, M, W]`, what `of` returned and the loop has changed since; `scores`: `[B, M, step]`.
        """
        if self._tokens is None:
            return self.inner.step(step, lprobs, scores, *args, **kwargs)
        batch, beams, width = lprobs.shape
        totals = lprobs[:, :1] if step == 0 else lprobs + scores[:, :, step - 1, None]  # at first all beams are equal
        best, place = totals.flatten(1).topk(self._wanted)
        # Which of equal scores come first is for the host's own search to say.
        if not bool((best[:, :-1] > best[:, 1:]).all()):
            return self.inner.step(step, self._with_all(lprobs), scores, *args, **kwargs)
        self.steps += 1
        parents = place[:, :-1] // width
        rows = parents + torch.arange(batch, device=place.device)[:, None] * beams
        return best[:, :-1], self._tokens[rows, place[:, :-1] % width], parents

    def _with_all(self, lprobs: Tensor) -> Tensor:
        """The scores of all tokens, `[B, M, V]`, with what the loop has done to these, `[B, M, W]`."""
        assert self._all is not None
        special, rows = len(self._special), lprobs.flatten(0, 1)
        everything = self._all()
        everything.masked_fill_(everything.isnan(), -torch.inf)
        # At the maximal length nothing but the end is allowed.
        everything.masked_fill_((rows[:, special:].max(1).values == -torch.inf)[:, None], -torch.inf)
        everything[:, :special] = rows[:, :special]
        return everything.unflatten(0, lprobs.shape[:2])

    def _normalised(self, logits: Tensor) -> Tensor:
        scores: Tensor = self._model.get_normalized_probs((logits[:, None], None), log_probs=True, sample=None)
        return scores[:, -1]
