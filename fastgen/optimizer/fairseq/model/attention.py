"""Attention over the beam tree, called the way fairseq's layers call `MultiheadAttention`.

`B` sentences, `M` beams, `N` source positions, `P` prompt positions, `H` heads, `D` head size, `C = H * D`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import phases
from fastgen.cache.slim.latent import Slim, attend, keys_and_values
from fastgen.cache.tree import BeamTree, additive_mask
from fastgen.cache.tree_layer import TreeLayer
from fastgen.cache.wide_tree import WideTree, sees_paths
from fastgen.layers.attention import fold_beams, unfold_beams
from fastgen.ops import path_attention
from fastgen.optimizer.fairseq.model.session import Session, Source

__phase__ = phases.BY_LINE


class _TreeAttention:
    """Replaces one attention module during one call: uses the module's projections and the tree's keys and values."""

    def __init__(self, module: Any, session: Session, slim: Slim | None) -> None:
        """`slim`: the slim cache of this module; None if keys and values are stored."""
        self._module, self._session, self.slim = module, session, slim
        self._heads, self._size, self._scale = module.num_heads, module.head_dim, module.scaling

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @property
    def stores(self) -> int:
        """How many tensors are stored for each position."""
        return 2 if self.slim is None else 1

    def _get_input_buffer(self, incremental_state: Any) -> dict[str, Any]:
        """The content of the host's cache: nothing, as the tree holds all."""
        return {}

    def _queries(self, query: Tensor) -> Tensor:
        """Project queries, `[1, B*M, C]` -> `[B*M, H, 1, D]`; ProphetNet's streams of a beam become adjacent rows."""
        return self._module.q_proj(query).transpose(0, 1).reshape(-1, self._heads, 1, self._size)

    def _output(self, rows: Tensor, streams: int = 1) -> Tensor:
        """Project the output, `[B*M, 1, H, D]` -> `[1, B*M, C]`."""
        return self._module.out_proj(rows.flatten(1).unflatten(0, (-1, streams)).transpose(0, 1))

    def _latent(self, inputs: Tensor) -> Tensor:
        """What a slim cache stores for the layer's `inputs`, `[length, rows, C]`: the inputs, keys or values."""
        projection = {"k": "k_proj", "v": "v_proj"}.get(self.slim.kind) if self.slim is not None else None
        return inputs if projection is None else getattr(self._module, projection)(inputs)

    def _by_head(self, x: Tensor) -> Tensor:
        """`[length, B, C]` -> `[B, H, length, D]`."""
        return x.unflatten(2, (self._heads, self._size)).permute(1, 2, 0, 3)


class TreeSelfAttention(_TreeAttention):
    """Self-attention over the tree: of all prompt positions at first, then of one token of each beam in each step."""

    def __init__(self, module: Any, session: Session, slim: Slim | None = None) -> None:
        super().__init__(module, session, slim)
        self.layer: TreeLayer | None = None

    def __call__(self, query: Tensor, **_: Any) -> tuple[Tensor, None]:
        """`query`: `[1, B*M, C]` in a step, `[P, B, C]` for the prompt; the output has the same shape."""
        tree = self._session.tree
        if not tree.steps:
            return self._prompt(query), None
        queries, new = self._queries(query), self._new(query)
        if self.layer is None:
            self._prefill(*(each[:, :, :0] for each in new))
        assert self.layer is not None
        stored = self.layer.append(*new)
        if isinstance(tree, WideTree) and self.slim is None and sees_paths(tree, self.layer, queries, *stored):
            (keys, values), paths = stored, tree.slots_on_paths()
            bias = tree.path_bias(None, query.dtype)
            rows = path_attention(queries, keys, values, paths, bias, self._scale, tree.prompt_length)
            return self._output(rows), None
        return self._output(attend(queries, stored, self.slim, tree.mask(None, query.dtype), self._scale)), None

    def _new(self, query: Tensor) -> tuple[Tensor, ...]:
        """The tensors that a step stores, each `[B, H, M, D]`."""
        tree, module = self._session.tree, self._module
        if self.slim is not None:
            return (self._latent(query).view(tree.batch, 1, tree.beams, -1),)
        keys, values = [
            projection(query).view(tree.batch, tree.beams, self._heads, self._size).transpose(1, 2)
            for projection in (module.k_proj, module.v_proj)
        ]
        return keys, values

    def begin(self, tree: BeamTree, like: Tensor) -> None:
        """Add the next layer to `tree`, whose sentences have no token yet."""
        layer, heads, size = TreeLayer(tree, slim=self.slim), self._heads, self._size
        shape = (tree.batch, heads, 0, size) if self.slim is None else (tree.batch, 1, 0, heads * size)
        layer.prefill(*(like.new_empty(shape) for _ in range(self.stores)))
        tree.layers.append(layer)

    def _prompt(self, query: Tensor) -> Tensor:
        queries, keys, values = [
            self._by_head(projection(query))
            for projection in (self._module.q_proj, self._module.k_proj, self._module.v_proj)
        ]
        if self.slim is None:
            self._prefill(keys, values)
        else:
            self._prefill(self._latent(query).transpose(0, 1)[:, None])
        output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=self._scale)
        return self._module.out_proj(output.permute(2, 0, 1, 3).flatten(2))

    def _prefill(self, *tensors: Tensor) -> None:
        self.layer = TreeLayer(self._session.tree, slim=self.slim)
        self.layer.prefill(*tensors)
        self._session.tree.layers.append(self.layer)


class TreeCrossAttention(_TreeAttention):
    """Cross-attention, with one row of keys for all beams of a sentence."""

    def __init__(self, module: Any, session: Session, shared: Shared, slim: Slim | None = None) -> None:
        """`shared`: tensors that the layers of a model share."""
        super().__init__(module, session, slim)
        self.source: Source | None = None
        self.shared = shared

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        need_head_weights: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` `[1, B*M, C]`, or `[S, B*M, C]` of `S` streams.

        `key`, the encoder output `[N, B, C]`, and the padding mask, nonzero `[B, N]`, are read in the first step only.
        Returns the output and the weights of each head, `[H, B*M, S, N]`, if they are wanted. The host also asks
        every layer for weights averaged over the heads, but never reads them.
        """
        self.see(key, key_padding_mask)
        assert self.source is not None
        queries, source, streams = self._queries(query), self.source, len(query)
        if not need_head_weights:
            return self._output(attend(queries, source.stored, self.slim, source.bias, self._scale), streams), None
        keys, values = keys_and_values(source.stored, self.slim)
        queries = fold_beams(queries, self._session.tree.batch, self._heads)
        scores = (queries[:, :, 0] * self._scale) @ keys.transpose(2, 3)  # [B, H, M*S, N]
        if source.bias is not None:
            scores += source.bias
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        output = unfold_beams((weights @ values)[:, :, None])
        return self._output(output, streams), weights.transpose(0, 1).flatten(1, 2).unflatten(1, (-1, streams))

    def see(self, source: Tensor, padding: Tensor | None, is_masked: bool = False) -> None:
        """Attend to this encoder output, `[N, B, C]`, from now on, unless there is one already; see `project`."""
        if self.source is None:
            self.source = self.project(source, padding, is_masked)
            self._session.sources.append(self.source)

    def project(self, source: Tensor, padding: Tensor | None, is_masked: bool = False) -> Source:
        """Project the encoder output `source`, `[N, B, C]`, to what is stored of it; see `__call__`.

        `is_masked`: make a mask even if nothing is padding.
        """
        bias = None if padding is None else self.shared.bias(padding, source.dtype, is_masked)
        if self.slim is not None:
            is_shared = self.slim.kind == "x"
            latent = self.shared.latent(source) if is_shared else self._latent(source).transpose(0, 1)[:, None]
            return Source((latent,), bias, self.slim)
        projections = self._module.k_proj, self._module.v_proj
        keys, values = [self._by_head(projection(source)).contiguous() for projection in projections]
        return Source((keys, values), bias)


class Shared:
    """Tensors that a model's layers derive from the encoder output and the padding mask, made once for all layers."""

    def __init__(self) -> None:
        self._derived: dict[int, tuple[Tensor, Tensor | None]] = {}  # by id of the tensor that comes first

    def bias(self, padding: Tensor, dtype: torch.dtype, is_masked: bool) -> Tensor | None:
        """The mask added to scores, `[B, 1, 1, N]`, made from `padding` `[B, N]`; None if nothing is padding, unless it
        `is_masked` in any case."""
        if id(padding) not in self._derived:
            hidden = padding.bool()
            has_any = is_masked or bool(hidden.any())
            self._derived[id(padding)] = padding, additive_mask(~hidden, dtype)[:, None, None] if has_any else None
        return self._derived[id(padding)][1]

    def latent(self, source: Tensor) -> Tensor:
        """The encoder output `source`, `[N, B, C]`, as a slim cache stores it, `[B, 1, N, C]`."""
        if id(source) not in self._derived:
            self._derived[id(source)] = source, source.transpose(0, 1)[:, None]
        latent = self._derived[id(source)][1]
        assert latent is not None
        return latent

    def release_shared(self) -> None:
        """Free all shared tensors."""
        self._derived.clear()
