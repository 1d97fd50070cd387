"""A long prompt in chunks where reading it at once would take too much memory, as the host's `prefill_chunk_size` does.

Every layer keeps what it computes for all tokens it is given; the keys and values that stay are small beside that.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from fastgen import report
from fastgen.config import current
from fastgen.memory import limits
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.families import FAMILIES
from fastgen.optimizer.transformers.request import Request, rotates_by_length

_SHORTEST = 512  # tokens: fewer rows would multiply more slowly
_MOST, _CHUNK = 1 / 2, 1 / 4  # of the free memory: what a prompt may take at once, and a chunk if it may not


def configuration(request: Request) -> Any:
    """The request's generation configuration, in a copy with `prefill_chunk_size` where memory asks for it."""
    config = request.generation_config
    length = request.input_ids.shape[1]
    if config.prefill_chunk_size is not None or length <= _SHORTEST or not versions.PREFILLS:
        return config  # 4.57 has it for some searches only, and counts positions differently
    begins = request.users_cache is not None or current().prefix_cache > 0  # a part of the prompt may be known
    if begins and not versions.chunks_the_rest():
        return config
    family = FAMILIES.get(request.model.config.model_type)
    if family is None or not family.chunks_prompts or not (request.facts.is_hosts_own and request.facts.is_causal):
        return config
    if rotates_by_length(request):
        return config  # a chunk is shorter than the prompt
    if torch.are_deterministic_algorithms_enabled():
        return config  # sums in another order, as the memory of the moment would have it
    free = _free_memory(request.input_ids.device)
    per_token = request.batch * _bytes_per_token(request.model, length)
    if free is None or per_token * length <= _MOST * free:
        return config
    size = _SHORTEST
    while 2 * size < length and per_token * 2 * size <= _CHUNK * free:
        size *= 2
    report.log(f"the prompt of {length} tokens is read {size} at a time: memory is short")
    config = copy.copy(config)
    config.prefill_chunk_size = size
    return config


def _bytes_per_token(model: Any, length: int) -> int:
    """What the widest moment of a layer takes for a token, roughly.

    The residual, the normalised states, queries, keys, values and the attention's output, `d` each; the feed-forward
    part's gate, its activation and their product. Attention adds a mask over the prompt, and eager its scores.
    """
    config = model.config.get_text_config()
    wide = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * config.hidden_size
    numbers = 6 * config.hidden_size + 3 * wide + length
    if getattr(config, "_attn_implementation", None) == "eager":
        numbers += 2 * config.num_attention_heads * length  # before and after the softmax
    return int(numbers * model.dtype.itemsize)


def _free_memory(device: torch.device) -> int | None:
    if device.type == "cpu":
        return limits.free()
    if device.type != "cuda":
        return None
    # What torch keeps for itself is free too.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + kept)
