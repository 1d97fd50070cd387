"""Diverse beam search as a decoding method of the host, which has moved its own to the Hub.

Written as the host writes its loops, so that it runs over the tree as they do, and over the host's cache elsewhere.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput

from fastgen import phases
from fastgen.decoding.diverse_beam_search import DiversePolicy, DiverseSearch
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.generate import tries
from fastgen.optimizer.transformers.replaced_processors import original_of

__phase__ = phases.LOOP

# Of the host's processors the one that it had before the penalty for what other groups have chosen.
_BEFORE = logits_process.SequenceBiasLogitsProcessor


def group_beam_search(
    self: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """The host's options `num_beam_groups` and `diversity_penalty`, see `fastgen.decoding.diverse_beam_search`.

    Arguments and result are those of the host's `_beam_search`, without attentions and hidden states. Where a group of
    a sentence is done, its rows of `scores` and `logits` mean nothing.
    """
    config = generation_config
    policy = DiversePolicy(
        groups=config.num_beam_groups,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        max_length=config.max_length,
        prompt_length=input_ids.shape[1],
        ends=tuple(() if config._eos_token_tensor is None else config._eos_token_tensor.tolist()),
        pad=0 if config._pad_token_tensor is None else int(config._pad_token_tensor),
    )
    search = DiverseSearch(input_ids, config.num_beams, policy)
    process = _Processing(logits_processor, config)
    keeps = config.return_dict_in_generate
    all_scores: Any = () if keeps and config.output_scores else None
    all_logits: Any = () if keeps and config.output_logits else None
    kwargs = versions.started(self, input_ids, model_kwargs)
    outputs = versions.prefill(self, input_ids, config, kwargs)
    while True:
        kwargs = self._update_model_kwargs_for_generation(
            outputs, kwargs, is_encoder_decoder=self.config.is_encoder_decoder
        )
        logits = outputs.logits[:, -1, :].to(copy=True, dtype=torch.float32, device=input_ids.device)
        del outputs
        scores = logits.log_softmax(-1)
        parents = search.choose(scores, process)
        if all_logits is not None:
            all_logits += (logits,)
        if all_scores is not None:
            all_scores += (scores,)
        if kwargs.get(versions.CACHE) is not None:
            kwargs[versions.CACHE] = _reordered(self, kwargs[versions.CACHE], parents)
        if search.done or bool(torch.all(stopping_criteria(search.running(), all_scores))):
            break
        outputs = self(**versions.next_inputs(self, search.running(), kwargs), return_dict=True)

    found = search.result(config.num_return_sequences, getattr(stopping_criteria, "max_length", None))
    tokens = found.tokens.flatten(0, 1)
    if not keeps:
        return tokens
    kind = GenerateBeamEncoderDecoderOutput if self.config.is_encoder_decoder else GenerateBeamDecoderOnlyOutput
    return kind(
        sequences=tokens,
        sequences_scores=found.scores.flatten() if config.output_scores else None,
        scores=all_scores,
        logits=all_logits,
        beam_indices=found.rows.flatten(0, 1),
        **{versions.CACHE: kwargs.get(versions.CACHE)},
    )


def check(config: Any, synced_gpus: bool, streamer: Any) -> None:
    """Raise ValueError if options contradict each other."""
    beams, groups, penalty = config.num_beams, config.num_beam_groups, config.diversity_penalty
    if config.do_sample:
        raise ValueError("num_beam_groups > 1 is diverse beam search, which draws nothing: set do_sample=False.")
    if beams % groups:
        raise ValueError(f"num_beams={beams} is not divisible by num_beam_groups={groups}.")
    if not penalty or penalty < 0:
        raise ValueError(f"diversity_penalty={penalty} should be greater than 0, or all groups would be the same.")
    if config.num_return_sequences > beams:
        raise ValueError(f"num_return_sequences={config.num_return_sequences} exceeds num_beams={beams}.")
    missing = {
        "output_attentions": config.output_attentions and config.return_dict_in_generate,
        "output_hidden_states": config.output_hidden_states and config.return_dict_in_generate,
        "guidance_scale": config.guidance_scale not in (None, 1),
        "synced_gpus": synced_gpus,
        "streamer": streamer is not None,
    }
    if options := [name for name, is_asked_for in missing.items() if is_asked_for]:
        raise ValueError(f"{', '.join(options)}: not available with num_beam_groups > 1.")


class _Processing:
    """The host's processors for the rows of one group, with the penalty where the host had it."""

    def __init__(self, processors: Any, config: Any) -> None:
        self._penalty, self._beams = float(config.diversity_penalty), config.num_beams
        self._size = config.num_beams // config.num_beam_groups
        processors = [_of_groups(original_of(one), config.num_beams, self._size) for one in processors]
        first = next((i for i, one in enumerate(processors) if type(one) is not _BEFORE), len(processors))
        self._before, self._after = LogitsProcessorList(processors[:first]), LogitsProcessorList(processors[first:])

    def __call__(self, group: int, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """See `fastgen.decoding.diverse_beam_search.Process`."""
        scores = self._before(tokens, scores)
        others = chosen.view(-1, self._beams)[:, : group * self._size]
        if group:
            counts = torch.zeros(len(others), scores.shape[1], device=scores.device)
            counts.scatter_add_(1, others, torch.ones_like(others, dtype=counts.dtype))
            penalty = (self._penalty * counts).repeat_interleave(self._size, dim=0)
            scores = (scores - penalty).to(scores.dtype)  # counts have the default dtype, as in the host
        # A processor of the user's may look at what other groups have chosen, too.
        processed: Tensor = self._after(tokens, scores, current_tokens=chosen, beam_group_idx=group)
        return processed


def _of_groups(processor: Any, beams: int, size: int) -> Any:
    """The processor for `size` rows of a sentence in place of `beams`, if the processor knows how many there are."""
    if tries.constrains(processor):
        processor = copy.copy(processor)
        processor._num_beams = size
        return processor
    ignored = getattr(processor, "prompt_ignore_length", None)  # of each row
    if type(processor) is logits_process.RepetitionPenaltyLogitsProcessor and isinstance(ignored, Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored.view(-1, beams)[:, :size].flatten()
    return processor


def _reordered(model: Any, cache: Any, parents: Tensor) -> Any:
    if hasattr(model, "_reorder_cache"):
        return model._reorder_cache(cache, parents)
    cache.reorder_cache(parents)
    return cache
