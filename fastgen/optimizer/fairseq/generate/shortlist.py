"""Gives the host's loop only the best tokens of each row, so that it works on a handful of columns.

Besides the model, a step of the host's loop makes some ten passes over the scores `[B*M, V]`: normalise, look for NaN,
add the beams' scores, choose the best of `M * V`. The chosen tokens are among the best `2M` of each row and those that
the loop treats apart (padding, the end token, the unknown word).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from fairseq import search
from fairseq.models import fairseq_decoder, fairseq_model
from fairseq.models.transformer import transformer_base
from torch import Tensor

from fastgen import ops, phases
from fastgen.optimizer.fairseq.model.views import standing_in
from fastgen.optimizer.fairseq.request import Request, has_own_blocker, is_own, own_rule

__phase__ = phases.CHOICE

_MOST_SPECIAL = 16  # tokens that have a column whatever their score
_SOFTMAX = ("get_normalized_probs", "get_normalized_probs_scriptable")
_HOMES = (fairseq_model, fairseq_decoder, transformer_base)  # modules whose softmax is a plain one


def is_shortened(generator: Any) -> bool:
    """Whether this generator can use a shortlist: plain beam search with one model and a plain softmax."""
    model, special = generator.model.single_model, max(generator.pad, generator.eos, generator.unk) + 1
    return (
        type(generator.search) is search.BeamSearch
        and is_own(generator.search, search, "step")
        and generator.model.models_size == 1
        and generator.lm_model is None
        and own_rule(generator) is None
        and not has_own_blocker(generator)
        and generator.token_indices_to_suppress is None
        and 2 * generator.beam_size + special < generator.vocab_size
        and special <= _MOST_SPECIAL
        and _is_softmax(model)
        and ops.is_native(next(model.parameters()).device)
    )


def _is_softmax(model: Any) -> bool:
    parts = (model, model.decoder)
    is_hosts = all(any(is_own(part, home, name) for home in _HOMES) for part in parts for name in _SOFTMAX)
    return is_hosts and model.decoder.adaptive_softmax is None


def unnormalised(model: Any) -> Any:
    """A view of the model that returns logits without normalising them."""
    return standing_in(model, get_normalized_probs=lambda output, log_probs, sample: output[0])


class Shortlist:
    """Replaces the generator's `search`, and the n-gram blocker, during one call."""

    def __init__(self, request: Request, view: Any) -> None:
        """`view`: this call's view of the request's generator, which will use this shortlist."""
        from fastgen import ops

        self.inner, self.steps = request.generator.search, 0  # steps: number of shortened ones
        self._ops, self._model, self._blocker = ops, request.generator.model.single_model, view.repeat_ngram_blocker
        self._view = weakref.ref(view)  # weakly, as it refers to us: a call's memory is to be freed with the view
        self._vocabulary, self._beams = view.vocab_size, request.beams
        self._wanted = 2 * request.beams + 1  # one more, to see a tie at the end
        device = next(self._model.parameters()).device
        self._special = torch.arange(max(view.pad, view.eos, view.unk) + 1, device=device)
        self._prefix = request.prefix_tokens
        self._forced_steps = 0 if self._prefix is None else self._prefix.shape[1]
        self._is_forced = False  # whether every row of this step has one token that it may choose
        self._force = type(request.generator)._prefix_tokens
        self._tokens: Tensor | None = None  # int64 [B*M, W], the columns' tokens; None for all tokens
        self._all: Callable[[], Tensor] | None = None  # the scores of all tokens, float32 [B*M, V]
        view.__dict__.update(search=self, _prefix_tokens=self.force)
        if self._blocker is not None:
            view.__dict__["repeat_ngram_blocker"] = self.block

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def of(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """The log-probabilities `[B*M, W]` of each row's best tokens, or of all tokens, `[B*M, V]`, where needed.

        `tokens`: int64 `[B*M, step + 1]`, the hypotheses; `logits`: `[B*M, V]`, changed where n-grams are banned.
        """
        self._take(None)
        step, is_plain = tokens.shape[1] - 1, logits.dtype == torch.float32 and logits.shape[1] == self._vocabulary
        if step < self._forced_steps or not is_plain:  # a prefix may have any token
            return _normalised(self._model, logits)
        count = self._wanted + len(self._special)
        if self._blocker is None:
            self._all = functools.partial(_normalised, self._model, logits)
            log_probs, best, log_sum_exp = self._ops.topk_log_softmax(logits, count)
            highest, first = log_probs[:, :1], logits.gather(1, best[:, :1])
        else:  # banned tokens count in the log-sum-exp
            highest, best, log_sum_exp = self._ops.topk_log_softmax(logits, 1)
            first = logits.gather(1, best)
            self._blocker.ban(tokens, logits, step)
            self._all = functools.partial(_beside, logits, first, highest)
            best = self._ops.topk_log_softmax(logits, count)[1]
            log_probs = _beside(logits.gather(1, best), first, highest)
        if not bool(log_sum_exp.isfinite().all()):
            return self._all()
        special = _beside(logits[:, : len(self._special)], first, highest)
        log_probs = log_probs.masked_fill(best < len(self._special), -torch.inf)  # these have own columns
        self._take(torch.cat([self._special.expand(len(best), -1), best], dim=1))
        return torch.cat([special, log_probs], dim=1)

    def of_prompt(self, step: int, log_probs: Tensor, is_forced: bool) -> Tensor:
        """The log-probabilities `[B*M, W]` where each sentence's next token is forced, else all, `[B*M, V]`.

        `log_probs`: `[B, V]`, of a prompt that all beams share. While it is forced, a sentence has one possible
        candidate, of the first beam: the others wait for the end of the prefix, with a score of minus infinity.
        """
        self._take(None)
        is_whole = log_probs.shape[1] == self._vocabulary
        if is_forced and is_whole and self._prefix is not None and self._blocker is None:
            forced = self._prefix[:, step, None]
            scores = log_probs.gather(1, forced)
            # What becomes of a special token's score is the loop's to say.
            if bool(((forced >= len(self._special)) & scores.isfinite()).all()):
                width = len(self._special) + self._wanted
                shortened = log_probs.new_full((len(log_probs), self._beams, width), -torch.inf)
                shortened[:, :, -1] = scores
                self._take(forced.repeat_interleave(self._beams, dim=0).expand(-1, width), is_forced=True)
                return shortened.flatten(0, 1)
        return log_probs.repeat_interleave(self._beams, dim=0)

    def force(self, step: int, lprobs: Tensor, scores: Tensor, tokens: Tensor, *args: Any) -> Any:
        """Replaces the host's `_prefix_tokens`; `of_prompt` may have forced the token already."""
        if self._is_forced:
            return lprobs, tokens, scores
        return self._force(self._view(), step, lprobs, scores, tokens, *args)

    def _take(self, columns: Tensor | None, is_forced: bool = False) -> None:
        self._tokens, self._is_forced = columns, is_forced
        view = self._view()
        assert view is not None
        view.__dict__["vocab_size"] = self._vocabulary if columns is None else columns.shape[1]

    def block(self, tokens: Tensor, lprobs: Tensor, *args: Any) -> Tensor:
        """Replaces the host's n-gram blocker: returns `lprobs`, `[B*M, W or V]`, with repeated n-grams banned."""
        if self._tokens is not None:  # `of` has banned them
            return lprobs
        banned: Tensor = self._blocker(tokens, lprobs, *args)
        return banned

    def step(
        self, step: int, lprobs: Tensor, scores: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Replaces the host's `step`: scores, tokens and parents of the best 2M candidates, each `[B, 2M]`.

        `lprobs`: `[B, M, W]`, the result of `of`, which the loop may have changed; `scores`: `[B, M, step]`.
        """
        if self._tokens is None:
            return self.inner.step(step, lprobs, scores, *args, **kwargs)
        batch, beams, width = lprobs.shape
        totals = lprobs[:, :1] if step == 0 else lprobs + scores[:, :, step - 1, None]  # at first all beams are equal
        best, place = totals.flatten(1).topk(self._wanted)
        # The host's own search decides which of equal scores come first. Those of beams that wait are all equal.
        if not self._is_forced and not bool((best[:, :-1] > best[:, 1:]).all()):
            return self.inner.step(step, self._with_all(lprobs), scores, *args, **kwargs)
        self.steps += 1
        parents = place[:, :-1] // width
        rows = parents + torch.arange(batch, device=place.device)[:, None] * beams
        return best[:, :-1], self._tokens[rows, place[:, :-1] % width], parents

    def _with_all(self, lprobs: Tensor) -> Tensor:
        """The scores of all tokens, `[B, M, V]`, with the loop's changes to the shortened `lprobs`, `[B, M, W]`."""
        assert self._all is not None
        special, rows = len(self._special), lprobs.flatten(0, 1)
        everything = self._all()
        everything.masked_fill_(everything.isnan(), -torch.inf)
        # At the maximal length nothing but the end is allowed.
        everything.masked_fill_((rows[:, special:].max(1).values == -torch.inf)[:, None], -torch.inf)
        everything[:, :special] = rows[:, :special]
        return everything.unflatten(0, lprobs.shape[:2])


def _normalised(model: Any, logits: Tensor) -> Tensor:
    """Log-probabilities `[B*M, V]`, computed from logits by the host."""
    scores: Tensor = model.get_normalized_probs((logits[:, None], None), log_probs=True, sample=None)
    return scores[:, -1]


def _beside(logits: Tensor, first: Tensor, highest: Tensor) -> Tensor:
    """Log-probabilities of logits, from one logit and its own, `[B*M, 1]`: less a large sum, digits would be lost."""
    return highest + (logits - first)
