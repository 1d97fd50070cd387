"""Requests that cannot share a batch, by the host's own `generate`."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from fastgen.pipeline.transformers.hypotheses import Hypotheses, hypotheses_of
from fastgen.serving.generation_request import GenerationRequest


def generate_apart(
    model: Any, tokenizer: Any, call: dict[str, Any], requests: list[GenerationRequest]
) -> list[Hypotheses]:
    """The hypotheses of each input, by the host, to the end or until nobody waits for them.

    Args:
        tokenizer: for requests with texts that end a hypothesis.
        call: arguments of `model.generate`, among them `input_ids` int64 `[B, N]`.
        requests: the request of each input; all have the same options and, if these sample, the same seed.
    """
    request = requests[0]
    if request.config.do_sample:
        torch.manual_seed(request.seed)
    longest = call["input_ids"].shape[1]
    criteria = StoppingCriteriaList([_Unwanted(requests)])
    if request.stop:
        criteria.append(_StopText(tokenizer, request.stop, 1 if model.config.is_encoder_decoder else longest))
    output = model.generate(**call, stopping_criteria=criteria)
    return hypotheses_of(model, request.config, output, longest)


class _Unwanted(StoppingCriteria):
    """A stopping criterion that ends the host's `generate` when nobody waits for the result any more."""

    def __init__(self, requests: list[GenerationRequest]) -> None:
        self._requests = requests

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        now = time.monotonic()
        is_unwanted = all(request.is_over or request.deadline < now for request in self._requests)
        return torch.full((input_ids.shape[0],), is_unwanted, dtype=torch.bool, device=input_ids.device)


class _StopText(StoppingCriteria):
    """A stopping criterion that ends a hypothesis when its text has one of some strings.

    It decodes the hypotheses: transformers' own criterion compares with the vocabulary, and fails with tokenizers whose
    tokens are not written as the text is.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], begin: int) -> None:
        """`begin`: where the generated tokens begin."""
        self._tokenizer, self._stop, self._begin = tokenizer, stop, begin

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._begin :], skip_special_tokens=True)  # of [rows, L]
        has_stop = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(has_stop, device=input_ids.device)
