"""Begins a call with keys and values that an earlier call has computed for the same tokens, and keeps this call's.

Keys and values of a token depend on the tokens before it, on the positions and on the model: on no other sentence, and
not on padding on the left. So they are stored without padding, for each sentence apart, and each call takes the longest
beginning that is stored. The rest is read as the next part of a prompt that is read in chunks: the products have other
shapes then, and may round otherwise, by 1e-6 or so.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastgen import phases
from fastgen.cache import by_model
from fastgen.cache.prefix_cache import Found
from fastgen.cache.tree_layer import TreeLayer
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.cache import users_cache
from fastgen.optimizer.transformers.cache.state import are_plain, state_of
from fastgen.optimizer.transformers.cache.tree_cache import TreeCache
from fastgen.optimizer.transformers.families import FAMILIES
from fastgen.optimizer.transformers.request import Request

if TYPE_CHECKING:
    from fastgen.cache.tree import BeamTree

SHORTEST = 16  # tokens: looking for edits of the weights reads all of them once, as a few tokens do
_FIXED_ROTATIONS = frozenset("default linear llama3 yarn proportional".split())  # the same whatever the length


@dataclass
class Prefixes:
    """What one call takes from the prefix cache, and gives to it."""

    key: Hashable
    sentences: list[list[int]]  # the tokens of each, without padding
    length: int  # of the prompts, with padding

    def fill(self, cache: TreeCache) -> None:
        """Store what is known of the prompts in the tree, before the rest is read."""
        found = [by_model.prefixes.find(self.key, tokens[:-1]) for tokens in self.sentences]  # one is left to read
        paddings = [self.length - len(tokens) for tokens in self.sentences]
        known = min(padding + each.length for padding, each in zip(paddings, found, strict=True))
        saved = sum(max(0, known - padding) for padding in paddings)
        if known < SHORTEST or saved < SHORTEST:
            by_model.note(0)
            return
        tree, like = cache.session.tree, next(each.parts[0] for each in found if each.parts)
        for number in range(len(like) // 2):
            window = cache.windows[number] if number < len(cache.windows) else None
            layer = TreeLayer(tree, window)
            layer.prefill(*(_joined(found, paddings, 2 * number + which, known) for which in range(2)))
            tree.layers.append(layer)
        cache.cover()
        by_model.note(saved)

    def keep(self, tree: BeamTree) -> None:
        """Keep the prompts' keys and values, which the tree holds now."""
        layers = [layer.stored() for layer in tree.layers]
        if not all(layers):  # the model has skipped some
            return
        for row, tokens in enumerate(self.sentences):
            first = self.length - len(tokens)
            tensors = tuple(tensor[row, :, first : self.length] for stored in layers for tensor in stored)
            by_model.keep(self.key, tokens, tensors)


def _joined(found: Sequence[Found], paddings: Sequence[int], number: int, length: int) -> Tensor:
    """Keys or values of the prompts' first slots, `[B, H, length, D]`; zeros for padding, to which nothing attends."""
    like = next(each.parts[0][number] for each in found if each.parts)
    joined = like.new_zeros(len(found), like.shape[0], length, like.shape[2])
    for row, (each, start) in enumerate(zip(found, paddings, strict=True)):
        for part in each.parts:
            end = min(start + part[number].shape[1], length)
            if end > start:
                joined[row, :, start:end] = part[number][:, : end - start]
            start += part[number].shape[1]
    return joined


@phases.marked(phases.CACHE)
def begun(request: Request, cache: Any) -> Prefixes | None:
    """Begin a call with what the user has passed of its prompts, or earlier calls have kept.

    `cache`: of the call, empty. Returns where to keep the prompts once they are read; None if nowhere.
    """
    if request.users_cache is not None:
        users_cache.fill(cache, request.users_cache, request.beams)
        return None
    prefixes = prefixes_of(request, cache)
    if prefixes is not None:
        prefixes.fill(cache)
    return prefixes


def prefixes_of(request: Request, cache: Any) -> Prefixes | None:
    """What a call may take from the prefix cache, and give to it; None if nothing. `cache`: of the call, empty."""
    if not by_model.is_on() or request.model.config.is_encoder_decoder:  # its encoder's output is kept: `encoded`
        return None
    name = type(request.model).__name__
    if (reason := unusable(request, cache)) is not None:
        by_model.note_unused(name, reason)
        return None
    sentences = _sentences(request)
    if max(map(len, sentences)) <= SHORTEST:
        return None
    key = by_model.key_of(request.model, state_of(request.model, request.model, request.facts))
    return Prefixes(key, sentences, request.input_ids.shape[1])


def unusable(request: Request, cache: Any) -> str | None:
    """Why a call can neither take prefixes nor give any, in words for the user; None if it can."""
    model, kwargs = request.model, request.model_kwargs
    if not isinstance(cache, TreeCache) or cache.hosts:
        return "only models that decode over the tree, without recurrent states, keep prefixes of prompts"
    family = FAMILIES.get(model.config.model_type)
    if family is None or not family.chunks_prompts or not versions.PREFILLS:
        return "its family has not been compared with stock where a prompt is read in parts"
    if not request.facts.is_causal:
        return "tokens of its prompts attend to later ones"
    if request.facts.foreign or request.facts.is_watched or request.changed_rule:
        return "code of yours runs in its forward pass"
    if not are_plain(model):
        return "some of its weights are of a class of their own"
    if cache.session.slim.is_needed:
        return "a slim cache stores no keys and values"
    if torch.is_autocast_enabled(request.input_ids.device.type):
        return "autocast is on"
    if unknown := [name for name in ("inputs_embeds", "token_type_ids") if kwargs.get(name) is not None]:
        return f"the prompt is more than its tokens ({unknown[0]})"
    if request.multimodal:
        return f"the prompt is more than its tokens ({request.multimodal[0]})"
    if not _rotations(model.config) <= _FIXED_ROTATIONS:
        return "its position embeddings depend on the length of the text"
    if request.generation_config.prefill_chunk_size is not None and not versions.chunks_the_rest():
        return "this version of transformers reads the whole prompt in chunks"
    if not users_cache.takes_up(request):
        return "called without generate and without a mask, the host would read the whole prompt again"
    if not _has_plain_positions(request):
        return "its positions do not count the prompt's tokens from 0, or padding is elsewhere than on the left"
    return None


def _rotations(settings: Any) -> set[str]:
    """The kinds of rotary position embeddings of a model, by its configuration."""
    text = settings.get_text_config(decoder=True)
    found: set[str] = set()
    waiting = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            found |= {value[name] for name in ("rope_type", "type") if isinstance(value.get(name), str)}
            waiting += value.values()
    return found


def _mask(request: Request) -> Tensor | None:
    """The padding mask, one row for each sentence, `[B, P]`; None if there is no padding."""
    mask = request.model_kwargs.get("attention_mask")
    return None if mask is None else mask[:: request.beams]


def _has_plain_positions(request: Request) -> bool:
    """Whether padding is on the left alone, and tokens are at the positions 0, 1, ..."""
    tokens, mask = request.input_ids[:: request.beams], _mask(request)
    positions = request.model_kwargs.get("position_ids")
    if mask is None:
        mask = torch.ones_like(tokens)
    elif mask.shape != tokens.shape or (positions is None and not bool(mask.all())):
        return False  # without positions they may count padding, too
    attend = mask.bool()
    if not bool((attend[:, 1:] >= attend[:, :-1]).all() & attend[:, -1].all() & (mask == attend).all()):
        return False
    if positions is None:
        return True
    if positions.ndim != 2 or positions.shape[1] != tokens.shape[1]:
        return False
    positions = positions[:: request.beams]
    return bool(((positions == attend.cumsum(1) - 1) | ~attend).all())


def _sentences(request: Request) -> list[list[int]]:
    tokens, mask = request.input_ids[:: request.beams].tolist(), _mask(request)
    paddings = [0] * len(tokens) if mask is None else (mask == 0).sum(1).tolist()
    return [row[padding:] for row, padding in zip(tokens, paddings, strict=True)]
