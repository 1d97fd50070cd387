"""The steps of several calls of `generate`, run together over one tree."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgen.cache.batch_tree import BatchTree
from fastgen.memory.buffers import Buffers
from fastgen.optimizer.transformers import interception
from fastgen.optimizer.transformers.cache.tree_cache import TreeEncoderDecoderCache, resized
from fastgen.optimizer.transformers.generate.suspended_call import CachesByModule, Call, CallDecoder
from fastgen.optimizer.transformers.model import modules
from fastgen.optimizer.transformers.model.base import NOT_ROWS, selected
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.optimizer.transformers.request import Request
from fastgen.optimizer.transformers.versions import CACHE, CACHE_LENGTH

_POSITIONS = ("position_ids", "decoder_position_ids")
_CLEAR_FROM = 1 / 8  # of the sentences have finished: then it pays to copy the others' keys


class BatchDecoder(TreeDecoder):
    """Runs the model over the sentences of several calls at once."""

    tree: BatchTree

    def __init__(self, request: Request, rows: int, layer_caches: CachesByModule) -> None:
        """`rows`: sentences to make room for at once; `layer_caches`: the attention modules whose caches are slim."""
        tree = BatchTree(rows, request.beams, request.input_ids.device, Buffers(request.model))
        super().__init__(request, tree, layer_caches=layer_caches)
        self._rows = rows
        self.session.patches |= _absolute_positions(self.model)
        self.calls: list[Call] = []  # in the order of their rows
        self.steps = 0

    @torch.no_grad()
    def regroup(self, entering: list[Call]) -> None:
        """Do what the calls' searches have noted, drop the sentences that have left and take in new calls'."""
        beams, device = self.beams, self.tree.ancestry().device
        first, parents, stay = 0, [], []
        for call in self.calls:
            decoder = call.decoder
            if decoder.parents is None:  # it failed before it chose any: its rows leave as they are
                decoder.parents = torch.arange(call.rows, device=device)
            before = len(decoder.parents) // beams
            parents.append(decoder.parents + first * beams)
            if not call.ended:
                stay.append(first + (torch.arange(before, device=device) if decoder.stay is None else decoder.stay))
            decoder.parents = decoder.stay = None
            first += before
        if parents:
            self.tree.reorder(torch.cat(parents))
        staying = torch.cat(stay) if stay else torch.arange(0, device=device)
        if entering or len(staying) < first:
            self.session.products.look_again()  # whoever takes results, or brings calls, may have edited weights
            self._move(staying, [call.decoder for call in entering])
        self.calls = [*(call for call in self.calls if not call.ended), *entering]

    def _move(self, stay: Tensor, newcomers: list[CallDecoder]) -> None:
        self._measure()
        self.tree.regroup(stay, [decoder.tree for decoder in newcomers])
        if isinstance(self.cache, TreeEncoderDecoderCache):
            self._move_sources(self.cache, stay, newcomers)
            self.cache.self_attention_cache.cover()
        else:
            self.cache.cover()
        for decoder in newcomers:
            decoder.moved()

    def _move_sources(self, cache: TreeEncoderDecoderCache, stay: Tensor, newcomers: list[CallDecoder]) -> None:
        """Move the encoder's outputs, and cross-attention's keys and values, to the joint batch."""
        outputs = [decoder.encoder_outputs for decoder in newcomers]
        masks = [decoder.padding() for decoder in newcomers]
        if self.source_mask is not None:
            outputs.insert(0, selected(self.encoder_outputs, stay, len(self.source_mask)))
            masks.insert(0, self.source_mask.index_select(0, stay))
        # No longer than the longest source that is still here: padding costs attention.
        length = max(int(mask.any(0).nonzero().max()) + 1 for mask in masks if len(mask))
        states = [resized(output.last_hidden_state, 1, length) for output in outputs]
        self.encoder_outputs = type(outputs[0])(last_hidden_state=torch.cat(states))
        self.source_mask = torch.cat([resized(mask, 1, length) for mask in masks])
        self._hand_source()
        cache.regroup(stay, [decoder.cache for decoder in newcomers], length, self._rows)

    @torch.no_grad()
    def step_all(self) -> None:
        """One step of the model for all calls, and of each call's search."""
        for call in self.calls:
            call.decoder.tree.steps += 1
        self.session.spans = [(call.rows, call.decoder.tree.length) for call in self.calls]
        inputs = self._inputs()
        self.session.knows_positions = any(isinstance(inputs.get(name), Tensor) for name in _POSITIONS)
        outputs = self.step(inputs)
        self.steps += 1
        # Decided for all: the joint tree is copied once, whoever leaves.
        num_finished = sum(call.decoder.num_finished for call in self.calls)
        is_clearing = num_finished >= max(1, int(self.tree.batch * _CLEAR_FROM))
        logits = outputs.logits.split([call.rows for call in self.calls])
        for call, part in zip(self.calls, logits, strict=True):
            call.decoder.is_clearing = is_clearing
            call.proceed(type(outputs)(logits=part, **{CACHE: call.decoder.cache}))

    def _inputs(self) -> dict[str, Any]:
        """The calls' inputs, one below the other; what has no rows is the same for all."""
        inputs: dict[str, Any] = {}
        for name, value in self.calls[0].inputs.items():
            has_rows = isinstance(value, Tensor) and value.ndim and value.shape[0] == self.calls[0].rows
            if has_rows and name not in NOT_ROWS:
                # Masks are of different lengths, and the tree has its own.
                is_mask = name in ("attention_mask", "decoder_attention_mask")
                value = value if is_mask else torch.cat([call.inputs[name] for call in self.calls])
            inputs[name] = value
        inputs[CACHE] = self.cache
        if inputs.get("cache_position") is not None:
            inputs["cache_position"] = torch.full_like(inputs["cache_position"], self.tree.length)
        return inputs


def _absolute_positions(model: torch.nn.Module) -> dict[tuple[type, str], modules.Wrapper]:
    """Wrappers for the modules that are told how many tokens came before: each call has its own number."""
    return {
        (owner, "forward"): _at_each_position
        for owner in {type(module) for module in model.modules()}
        if CACHE_LENGTH in inspect.signature(owner.forward).parameters
    }


def _at_each_position(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward` once for the rows of each call; it returns `[rows, 1, d]` or, the same for all rows, without them."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def at_each_position(*args: Any, **kwargs: Any) -> Tensor:
        session = interception.current()
        if session is None or session.spans is None:
            return forward(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        total, first, parts = sum(rows for rows, _ in session.spans), 0, []
        for rows, position in session.spans:
            own = {name: _of_rows(value, first, rows, total) for name, value in arguments.items()}
            own[CACHE_LENGTH] = position
            # Not told by the host, the model counts them from the joint clock.
            if isinstance(own.get("position_ids"), Tensor) and not session.knows_positions:
                own["position_ids"] = torch.full_like(own["position_ids"], position)
            part = forward(**own)
            parts.append(part.reshape(-1, 1, part.shape[-1]).expand(rows, -1, -1))
            first += rows
        return torch.cat(parts)

    return at_each_position


def _of_rows(value: Any, first: int, rows: int, total: int) -> Any:
    """The part of a tensor, or of a shape, that belongs to these of all rows."""
    if isinstance(value, Tensor) and value.ndim and value.shape[0] == total:
        return value[first : first + rows]
    if isinstance(value, tuple) and value[:1] == (total,):
        return (rows, *value[1:])
    return value
