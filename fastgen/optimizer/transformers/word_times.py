"""Times of Whisper's tokens without attentions of each step: the cross-attention is read once the tokens are chosen.

The host aligns tokens with the audio by the cross-attention of a few heads (Radford et al. 2022,
https://arxiv.org/abs/2212.04356, and openai-whisper's `timing.py`), and so asks each decode step of each beam for the
attentions of all heads. The chosen hypotheses alone are needed: one forward pass of their tokens has the same rows.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastgen.patching.patch_set import PatchSet, require_signature

if TYPE_CHECKING:
    from fastgen.optimizer.transformers.request import Request

_FOR_TIMES = "_fastgen_attentions_for_times"  # of a generation config: the user did not ask for the attentions
_SOURCE = "_fastgen_source"  # of an output: what its tokens attend to, [rows, N, width]
_ROWS = 4  # so many hypotheses are read at once: all heads of a layer take memory


def install(patches: PatchSet, module: ModuleType) -> None:
    """Patch `module`, transformers.models.whisper.generation_whisper.

    Raises SeamMismatch if this version's functions differ from those that this was written for.
    """
    mixin = module.WhisperGenerationMixin
    asks, extract = (patches.stock(mixin, name) for name in ("_set_return_outputs", "_extract_token_timestamps"))
    options = ("return_dict_in_generate", "return_token_timestamps", "logprob_threshold", "generation_config")
    require_signature(asks, options)
    names = ("self", "generate_outputs", "alignment_heads", "time_precision", "num_frames", "num_input_ids")
    require_signature(extract, names)
    patches.replace(mixin, "_set_return_outputs", staticmethod(_noting(asks)))
    patches.replace(mixin, "_extract_token_timestamps", _reading(extract))


def _noting(asks: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(asks)
    def _set_return_outputs(
        return_dict_in_generate: Any, return_token_timestamps: Any, logprob_threshold: Any, generation_config: Any
    ) -> Any:
        is_users = bool(generation_config.output_attentions)
        result = asks(return_dict_in_generate, return_token_timestamps, logprob_threshold, generation_config)
        setattr(generation_config, _FOR_TIMES, bool(generation_config.output_attentions) and not is_users)
        return result

    return _set_return_outputs


def _reading(extract: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(extract)
    def _extract_token_timestamps(
        self: Any, generate_outputs: Any, alignment_heads: Any, *args: Any, **kwargs: Any
    ) -> Any:
        source = getattr(generate_outputs, _SOURCE, None)
        if source is not None:
            layers = {layer for layer, _ in alignment_heads}
            read = cross_attentions(self, generate_outputs.sequences[:, :-1], source, layers)
            # Of the returned hypotheses themselves, not of the beams that they were at each step.
            generate_outputs = type(generate_outputs)(sequences=generate_outputs.sequences, cross_attentions=(read,))
        return extract(self, generate_outputs, alignment_heads, *args, **kwargs)

    return _extract_token_timestamps


def without_attentions(request: Request) -> Request:
    """The request without the attentions that the host wants for times alone; itself if it wants none."""
    from fastgen.optimizer.transformers.versions import PREFILLS  # brings the host with it

    config, mask = request.generation_config, request.model_kwargs.get("decoder_attention_mask")
    if not getattr(config, _FOR_TIMES, False) or not PREFILLS:  # 4.57 asks the model by name, too
        return request
    if mask is not None and not bool(mask.all()):  # prompts of several lengths: tokens count from other places
        return request
    config = copy.copy(config)
    config.output_attentions = False
    inputs = {name: value for name, value in request.model_kwargs.items() if name != "output_attentions"}
    return dataclasses.replace(request, generation_config=config, model_kwargs=inputs)


def note_source(result: Any, request: Request) -> None:
    """Keep with the `result` of a request without attentions what its tokens attend to."""
    hidden: Tensor = request.model_kwargs["encoder_outputs"][0]  # [B or B*M, N, width]: a sentence's rows are alike
    each = len(result.sequences) // request.batch
    rows = torch.arange(request.batch, device=hidden.device) * (len(hidden) // request.batch)
    setattr(result, _SOURCE, hidden.index_select(0, rows.repeat_interleave(each)))


@torch.no_grad()
def cross_attentions(model: Any, tokens: Tensor, source: Tensor, layers: set[int]) -> tuple[Tensor, ...]:
    """The cross-attention of each token in these layers, `[rows, H, L, N]`; of the others a placeholder.

    Args:
        model: WhisperForConditionalGeneration, with eager attention.
        tokens: int64 `[rows, L]`; source: the encoder's states, `[rows, N, width]`.
    """
    decoder, found = model.get_decoder(), []
    for first in range(0, len(tokens), _ROWS):
        some = slice(first, first + _ROWS)
        output = decoder(
            input_ids=tokens[some],
            encoder_hidden_states=source[some],
            use_cache=False,
            output_attentions=True,
            return_dict=True,
        )
        found.append({layer: output.cross_attentions[layer] for layer in layers})
    nothing = source.new_zeros(1, 1, 1, 1).expand(len(tokens), 1, tokens.shape[1], 1)
    count = len(decoder.layers)
    return tuple(torch.cat([each[n] for each in found]) if n in layers else nothing for n in range(count))
