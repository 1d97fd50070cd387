"""Tries whether a model gives equal logits on the tree, or over the host's own cache with one row per beam.

An untested model may do something in attention that the tree does not know of. So before the first accelerated call a
few steps are run both ways, and the model runs only where the logits are equal. Families of our tests need no trial for
texts. The trial runs on copies of the model, which share only the parameters: what a forward pass writes to a buffer or
an attribute, and the random numbers that it draws, leave no trace.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor

from fastgen import config
from fastgen.memory import limits
from fastgen.optimizer.transformers import expansion, replaced_processors, versions
from fastgen.optimizer.transformers.generate import beam_search
from fastgen.optimizer.transformers.model.base import Decoder, selected, selected_inputs
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.optimizer.transformers.model.row_decoder import RowDecoder
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.versions import CACHE
from fastgen.replay.replayer import NO_MEMORY, Replayer

HOST_FAILED = "a trial with the host failed"
_SENTENCES, _BEAMS, _STEPS = 2, 3, 6
# Largest difference of two logits, relative to the largest logit: rounding in another order stays far below.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.bfloat16: 0.1, torch.float16: 0.02}

_verdicts: weakref.WeakKeyDictionary[Any, dict[Any, str | None]] = weakref.WeakKeyDictionary()


def failed_equivalence(
    request: Request, stock: Callable[..., Any], is_replayed: bool = False, by_rows: bool = False
) -> str | None:
    """Why this model may not run on the tree, or None; tried once for each model and way to run it.

    `is_replayed`: whether the model's steps may be replayed; `by_rows`: over the host's own cache in place of the tree.
    """
    model = request.model
    if request.facts.is_tested and not (request.foreign or request.multimodal or by_rows):
        return None
    if by_rows and (request.foreign or not versions.PREFILLS):
        return "code of yours would see fewer rows" if request.foreign else "this version reads prompts otherwise"
    if rule := request.users_rule:  # the user's rule would see the trial's search, on a copy, too
        return f"{rule}, and a trial would run it"
    if is_replayed and request.generation_config.max_length - request.input_ids.shape[1] < _STEPS:
        return "its first calls were too short to try"
    verdicts = _verdicts.setdefault(model, {})
    is_chunked = request.generation_config.prefill_chunk_size is not None
    attention = getattr(model.config, "_attn_implementation", None)
    found, dtype = tuple(request.foreign), _dtype_of_products(request)
    way = is_replayed, by_rows, request.all_inputs, request.arrangement, request.batch > 1, is_chunked, found
    key = (attention, model.dtype, dtype, request.is_beam_search, request.beams > 1, *way)
    if key not in verdicts:
        if request.generation_config.max_length - request.input_ids.shape[1] < 2:
            return "its first calls were too short to try"  # no step follows the prompt
        devices = [request.input_ids.device] if request.input_ids.is_cuda else []
        with torch.random.fork_rng(devices):  # some models draw numbers in each forward pass
            before = _random_states(request)
            try:
                expected = _on_a_copy(sample_of(request)).run(stock)
            except Exception as error:  # most likely the request is at fault, not the model
                return f"a trial with the host failed ({type(error).__name__}: {_first_line(error)})"
            if not all(bool(logits.isfinite().any()) for logits in expected.logits):
                return "a trial with the host failed (its logits are not finite: there is nothing to compare)"
            after = _random_states(request)
            _set_random_states(request, before)
            try:
                verdict = _try(request, stock, expected, is_replayed, by_rows)
            except MemoryError as error:  # perhaps there is more at the next call
                return f"there was no memory to try it ({_first_line(error)})"
            verdicts[key] = verdict or (None if is_replayed else _drawn_otherwise(request, after))
    return verdicts[key]


def _drawn_otherwise(request: Request, states: list[Tensor]) -> str | None:
    """Why the random states after the trial are not these, the host's; None if they are."""
    if all(torch.equal(*each) for each in zip(states, _random_states(request), strict=True)):
        return None
    return "its forward passes draw other random numbers for fewer rows"


def _random_states(request: Request) -> list[Tensor]:
    device = request.input_ids.device
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_random_states(request: Request, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], request.input_ids.device)


def _try(
    request: Request,
    stock: Callable[..., Any],
    expected: Any,
    is_replayed: bool,
    by_rows: bool,
) -> str | None:
    ours = _on_a_copy(sample_of(request, [_Recorded(expected.scores)]))
    replayer = Replayer(request.input_ids.device) if is_replayed else None
    try:
        made: Decoder = RowDecoder(ours) if by_rows else TreeDecoder(ours, replayer=replayer)
        with config.configured(weights="float32"), contextlib.closing(made) as decoder:
            result = (
                beam_search.fast(ours, decoder) if ours.is_beam_search else beam_search.compat(ours, decoder, stock)
            )
    # Here, and only here, an unknown model's code meets the tree: whatever it raises is the verdict.
    except Exception as error:
        if limits.is_out_of_memory(error):
            raise MemoryError(_first_line(error)) from error
        if by_rows:
            return (
                f"it cannot run with its prompt read once per sentence ({type(error).__name__}: {_first_line(error)})"
            )
        return f"it cannot run on the tree ({type(error).__name__}: {_first_line(error)})"
    if replayer is not None and replayer.failure == NO_MEMORY:
        raise MemoryError(NO_MEMORY)
    if replayer is not None and replayer.failure:
        return replayer.failure
    steps = len(result.scores) - 1
    if isinstance(decoder, TreeDecoder) and not decoder.session.folds:
        return "its attention cannot be reached: it is not looked up in AttentionInterface"
    tolerance = _TOLERANCE.get(_dtype_of_products(request), 1e-4)
    for step, (a, b) in enumerate(zip(expected.logits, result.logits, strict=False)):
        difference = _difference(a, b)
        if not difference <= tolerance:
            return f"its logits differ from the host's, by {difference:.1e} of the largest in step {step} of {steps}"
    if len(expected.logits) != len(result.logits):
        return "its search ends at another step than the host's"
    return None


def _dtype_of_products(request: Request) -> torch.dtype:
    device, dtype = request.input_ids.device.type, request.model.dtype
    if dtype.is_floating_point and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:120]


def _on_a_copy(request: Request) -> Request:
    """The request with a copy of the model, which shares the parameters and nothing else."""
    model = request.model
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    return dataclasses.replace(request, model=copy.deepcopy(model, parameters))


def _difference(expected: Tensor, logits: Tensor) -> float:
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(logits)):
        return float("inf")
    largest = expected[finite].abs().max().clamp(min=1.0)
    return float((expected[finite] - logits[finite]).abs().max() / largest)


class _Recorded(LogitsProcessor):
    """Replaces our scores by the host's, step by step.

    Only logits of the same tokens can be compared, and in half precision the next two beams are often so
    close that another order of sums swaps them.
    """

    def __init__(self, scores: Sequence[Tensor]) -> None:
        self._scores = iter(scores)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return next(self._scores, scores).clone()


def sample_of(request: Request, processors: Sequence[LogitsProcessor] = (), steps: int = _STEPS) -> Request:
    """A request for a few sentences, beams and `steps` of this one, with plain search and these processors alone; the
    two share no state."""
    beams, sentences = min(request.beams, _BEAMS), min(request.batch, _SENTENCES)
    if request.multimodal:  # which of them belong to a sentence, only the model knows
        beams, sentences = request.beams, request.batch
    rows = request.input_ids.shape[0]
    device = request.input_ids.device
    first = torch.arange(sentences, device=device)[:, None] * request.beams + torch.arange(beams, device=device)
    index = first.flatten()

    config = copy.copy(request.generation_config)
    config.num_beams, config.num_return_sequences = (beams, 1) if request.is_beam_search else (1, beams)
    config.do_sample = False
    config.length_penalty, config.early_stopping = 1.0, False
    config.max_length = min(config.max_length, request.input_ids.shape[1] + steps)
    config.return_dict_in_generate = config.output_scores = config.output_logits = True
    config._fastgen_sequence_scores_only = False
    kwargs = selected_inputs({name: it for name, it in request.model_kwargs.items() if name != CACHE}, index, rows)
    for name in request.multimodal:
        kwargs[name] = expansion.copied(kwargs[name])
    # The cache is still empty: only the classes of the layers are copied.
    kwargs[CACHE] = copy.deepcopy(request.model_kwargs[CACHE])
    return Request(
        request.model,
        selected(request.input_ids, index, rows),
        *replaced_processors.for_a_trial(processors, config.max_length),
        config,
        False,
        kwargs,
        is_beam_search=request.is_beam_search,
        unexpanded={name: expansion.copied(value) for name, value in request.unexpanded.items()},
    )
