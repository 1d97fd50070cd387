"""The state of a running decode: the tree, this step's masks and biases; folds attention calls of the model."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: F401  torch.jit.script looks it up here where `Linear.forward` is wrapped
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface
from transformers.pytorch_utils import Conv1D

from fastgen import phases
from fastgen.cache.tree import BeamTree, additive_mask
from fastgen.cache.tree_layer import TreeLayer
from fastgen.cache.wide_tree import WideTree, sees_paths
from fastgen.layers.attention import as_beams, beam_attention, fold_beams
from fastgen.layers.linear import LinearDispatcher, multiply, using
from fastgen.memory import arena
from fastgen.ops import path_attention
from fastgen.optimizer.transformers import interception, versions
from fastgen.optimizer.transformers.cache import slim
from fastgen.optimizer.transformers.cache.slim import LayerCaches, SlimCaches
from fastgen.optimizer.transformers.interception import Wrapper, redirected
from fastgen.optimizer.transformers.model.facts import ModelFacts
from fastgen.patching.replaced_code import is_of


class SourceMask(NamedTuple):
    """The mask of the source's padding, with the biases derived from it."""

    mask: Tensor | None  # bool [B, 1, 1, N]
    biases: dict[torch.dtype, Tensor]  # made from that mask, the same at every step


class Session:
    """The state that one decode step needs: the tree, and this step's masks and biases.

    While it is `active`, attention functions that a model of this thread looks up are wrapped: a call whose
    query has one row per beam and whose keys have one row per sentence is folded, any other passes through. Where the
    tree reads several tokens of one sentence in a step, the query may have one row with all of them.
    """

    def __init__(
        self, tree: BeamTree, facts: ModelFacts, layer_caches: Mapping[torch.nn.Module, LayerCaches] | None = None
    ) -> None:
        """`layer_caches`: the attention modules that have slim caches, with the caches."""
        self.tree = tree
        self.products = LinearDispatcher.configured()
        self.slim = SlimCaches()
        if layer_caches:
            self.slim.install(layer_caches, self.products)
        self.patches = {**facts.folding, **_PRODUCTS}
        rotating = slim.rotary_seams(layer_caches) if layer_caches else {}
        self._reading = {**_ATTENTION, **rotating}
        self.patches |= rotating
        if tree.is_static:
            self.patches |= facts.replayable
        # Rows and position (number of earlier tokens) of each call; None if all rows are at the same position.
        self.spans: list[tuple[int, int]] | None = None
        self.knows_positions = False  # with `spans`: the host has told the positions of all rows
        self.folds = 0  # calls folded so far: proof that the path ran
        self.held: list[Tensor] = []  # tensors that a captured step reads, and that perhaps nothing else keeps alive
        # Of positions, where a module's own may be too short; steps that are kept must not keep the model.
        self.tables: weakref.WeakKeyDictionary[torch.nn.Module, Tensor] = weakref.WeakKeyDictionary()
        self.is_active = False
        self._appended: TreeLayer | None = None  # a layer that has appended, and that no attention has used yet
        self.source_mask = SourceMask(None, {})
        self._derived: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def appended(self, layer: TreeLayer) -> None:
        """Note that a layer has appended to the tree: the next folded call is its self-attention."""
        self._check()
        self._appended = layer

    def _check(self) -> None:
        if self._appended is not None:
            raise RuntimeError(
                "an attention of this model did not go through its attention function, so fastgen could not fold it; "
                "call fastgen.disable() for this model"
            )

    def folded(self) -> TreeLayer | None:
        """Count a folded call; returns the layer whose self-attention it is, None for cross-attention."""
        self.folds += 1
        layer, self._appended = self._appended, None
        return layer

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Fold the attention of this thread inside the block."""
        self.is_active = self.slim.is_stepping = True
        self._derived.clear()
        self.tree.forget_masks()
        try:
            with interception.entered(self), redirected(_ATTENTION | self.patches), using(self.products):
                yield
            self._check()
        finally:
            self.is_active = self.slim.is_stepping = False
            self._derived.clear()
            self._appended = None

    @contextlib.contextmanager
    def reading(self, model: torch.nn.Module) -> Iterator[None]:
        """Inside the block, the forward pass of the prompt runs: nothing is folded."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(multiplying(self.products, model))
            if self.slim.is_needed:
                stack.enter_context(interception.entered(self))
                stack.callback(self._derived.clear)
                stack.enter_context(redirected(self._reading))
            yield

    def folds_rows(self, rows: int) -> bool:
        return rows == self.tree.batch * self.tree.beams

    @phases.marked(phases.ATTENTION)
    def attend(
        self,
        inner: Callable[..., Any],
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Called in place of an attention function of the host; returns `[B*M, 1, H, D]`, or `[1, M, H, D]` for tokens
        of one sentence, and no weights."""
        if not self.is_active:
            if (encoded := self.slim.encoded_layer(module)) is not None:
                if is_of(inner, "transformers"):
                    bias = self._bias(module, None, query.dtype, attention_mask, kwargs)
                    output = encoded.slim.attend(as_beams(query), encoded.spanned(), bias, scale_of(query, kwargs))
                    return output.view(query.shape[0], query.shape[2], *output.shape[2:]), None
                key, value = encoded.slim.keys_and_values(encoded.spanned())
            return inner(module, query, key, value, attention_mask, *args, **kwargs)
        tokens = query.shape[2] if self.tree.reads_several else 1  # of one sentence: rows of the tree
        if not self.folds_rows(query.shape[0] * tokens) or key.shape[0] != self.tree.batch:
            return inner(module, query, key, value, attention_mask, *args, **kwargs)
        if tokens > 1:
            rows, _ = self.attend(inner, module, as_beams(query), key, value, attention_mask, *args, **kwargs)
            return rows.view(query.shape[0], tokens, *rows.shape[2:]), None
        layer, scale = self.folded(), scale_of(query, kwargs)
        if inner is sdpa_attention_forward and sees_paths(self.tree, layer, query, key, value):
            return self._attend_to_paths(layer, query, key, value, scale, kwargs), None
        bias = self._bias(module, layer, query.dtype, attention_mask, kwargs)
        if (attended := self.slim.source_layer(module) if layer is None else layer) and attended.slim is not None:
            if is_of(inner, "transformers"):
                return attended.slim.attend(query, attended.spanned(), bias, scale), None
            key, value = attended.slim.keys_and_values(attended.spanned())  # a user's own may do anything with them
        if inner is sdpa_attention_forward:
            return beam_attention(query, key, value, bias, scale), None
        # The model's own function does the rest of its attention: soft-capping, sinks.
        kwargs = {name: option for name, option in kwargs.items() if name not in ("position_bias", "is_causal")}
        rows = fold_beams(query, self.tree.batch, key.shape[1]).flatten(1, 2)  # [B, H, M, D]
        output, _ = inner(module, rows, key, value, bias, *args, **kwargs)  # [B, M, H, D]
        return output.flatten(0, 1)[:, None].contiguous(), None

    def _attend_to_paths(
        self, layer: TreeLayer | None, query: Tensor, key: Tensor, value: Tensor, scale: float, kwargs: dict[str, Any]
    ) -> Tensor:
        """The attention of many beams, each to the slots on its own path, in a `WideTree`."""
        tree = self.tree
        assert isinstance(tree, WideTree) and layer is not None
        bias, position_bias = tree.path_bias(layer.window, query.dtype), kwargs.get("position_bias")
        if position_bias is not None:  # for consecutive positions, which those on a path are
            mask = bias
            bias = self._once("path", position_bias, lambda: position_bias[..., : mask.shape[-1]] + mask)
        return path_attention(query, key, value, tree.slots_on_paths(), bias, scale, tree.prompt_length)

    def self_bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        return self.tree.mask(window, dtype)

    def cross_bias(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The source's padding mask as an additive mask, `[B, 1, 1, N]`."""
        if mask is None:
            return None
        if mask.dtype != torch.bool:
            return mask
        if mask is not self.source_mask.mask:
            return self._once(("cross", dtype), mask, lambda: additive_mask(mask, dtype))
        if dtype not in self.source_mask.biases:
            self.source_mask.biases[dtype] = additive_mask(mask, dtype)
        return self.source_mask.biases[dtype]

    def set_source_mask(self, mask: Tensor) -> None:
        """Set the source's mask, bool `[B, 1, 1, N]`, and forget the biases derived from the last one."""
        self.source_mask = SourceMask(mask, {})

    def write_source_mask(self, mask: Tensor) -> None:
        """Write new values to the source's mask and to the biases derived from it, in place."""
        if self.source_mask.mask is not None:
            self.source_mask.mask.copy_(mask)
            for dtype, bias in self.source_mask.biases.items():
                bias.copy_(additive_mask(self.source_mask.mask, dtype))

    def position_bias(self, bias: Tensor) -> Tensor:
        """T5: turn a bias for consecutive positions into one for the positions of the slots."""
        return self._once(
            "position", bias, lambda: torch.take_along_dim(bias, self.tree.positions()[:, None, None], -1)
        )

    def _bias(
        self,
        module: torch.nn.Module,
        layer: TreeLayer | None,
        dtype: torch.dtype,
        attention_mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor | None:
        position_bias = kwargs.get("position_bias")
        if layer is None:
            bias = self.cross_bias(attention_mask, dtype)
            if position_bias is None or not getattr(module, "has_relative_attention_bias", True):
                return bias  # T5's cross-attention passes zeros on
            return position_bias if bias is None else position_bias + bias
        bias = self.self_bias(layer.window, dtype)
        if position_bias is None:
            return bias
        return self._once("sum", position_bias, lambda: self.position_bias(position_bias) + bias)

    def _once(self, what: Hashable, tensor: Tensor, derive: Callable[[], Tensor]) -> Tensor:
        """Derive a tensor from `tensor` once a step: layers share masks and biases, as objects."""
        key = (what, id(tensor))
        if key not in self._derived:
            self._derived[key] = (derive(), tensor)  # keeps `tensor` alive, so that no other gets the same id
        return self._derived[key][0]


def scale_of(query: Tensor, kwargs: dict[str, Any]) -> float:
    """The factor of the scores, from the arguments of an attention function."""
    scale: float | None = kwargs.get("scaling")
    return query.shape[-1] ** -0.5 if scale is None else scale


def _wrap_product(stock: Callable[..., Any], transposed: bool = False) -> Callable[..., Any]:
    if not is_of(stock, "torch", "transformers"):  # somebody has replaced it
        return stock

    @functools.wraps(stock)
    def forward(self: torch.nn.Module, input: Tensor) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return stock(self, input)
        return multiply(self, input, stock, transposed)

    return forward


_PRODUCTS: dict[tuple[type, str], Wrapper] = {
    (torch.nn.Linear, "forward"): _wrap_product,
    (Conv1D, "forward"): functools.partial(_wrap_product, transposed=True),
}


@contextlib.contextmanager
def multiplying_one_step(products: LinearDispatcher, model: torch.nn.Module) -> Iterator[None]:
    """As `multiplying`, for one of many passes."""
    with arena.of(model), redirected(_PRODUCTS), using(products):
        yield


@contextlib.contextmanager
def multiplying(products: LinearDispatcher, model: torch.nn.Module) -> Iterator[None]:
    """Inside the block, this thread's linear layers multiply by `products`, in the model's arena; nothing is folded."""
    try:
        with multiplying_one_step(products, model):
            yield
    finally:
        arena.settle()  # the activations are free now


def _wrap_lookup(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def lookup(self: AttentionInterface, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        inner = stock(self, *args, **kwargs)
        session = interception.current()
        return inner if session is None else functools.partial(session.attend, inner)

    return lookup


_ATTENTION: dict[tuple[type, str], Wrapper] = {(AttentionInterface, versions.ATTENTION_SEAM): _wrap_lookup}
