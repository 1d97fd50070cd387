"""Attention over the beam tree, called the way fairseq's layers call `MultiheadAttention`.

`B` sentences, `M` beams, `N` source positions, `P` prompt positions, `H` heads, `D` head size, `C = H * D`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.attention import beam_attention, fold_beams, unfold_beams
from fastgen.cache.tree import BeamTree, TreeLayer, additive_mask
from fastgen.optimizer.fairseq.session import Session, Source


class _TreeAttention:
    """Stands in for one attention module during one call: its projections, the tree's keys and values."""

    def __init__(self, module: Any, session: Session) -> None:
        self._module, self._session = module, session
        self._heads, self._size, self._scale = module.num_heads, module.head_dim, module.scaling

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _get_input_buffer(self, incremental_state: Any) -> dict[str, Any]:
        """What the host's cache holds: nothing."""
        return {}

    def _queries(self, query: Tensor) -> Tensor:
        """`[1, B*M, C]` -> `[B*M, H, 1, D]`."""
        return self._module.q_proj(query).view(-1, self._heads, 1, self._size)

    def _output(self, rows: Tensor) -> Tensor:
        """`[B*M, 1, H, D]` -> `[1, B*M, C]`."""
        return self._module.out_proj(rows.flatten(2).transpose(0, 1))

    def _by_head(self, x: Tensor) -> Tensor:
        """`[length, B, C]` -> `[B, H, length, D]`."""
        return x.unflatten(2, (self._heads, self._size)).permute(1, 2, 0, 3)


class TreeSelfAttention(_TreeAttention):
    """Self-attention: of all positions of a prompt at first, then of the tokens that the beams have chosen."""

    def __init__(self, module: Any, session: Session) -> None:
        super().__init__(module, session)
        self.layer: TreeLayer | None = None

    def __call__(self, query: Tensor, **_: Any) -> tuple[Tensor, None]:
        """`query`: `[1, B*M, C]` in a step, `[P, B, C]` for the prompt; the output has its shape."""
        tree, module = self._session.tree, self._module
        if not tree.steps:
            return self._prompt(query), None
        queries = self._queries(query)
        keys, values = (
            projection(query).view(tree.batch, tree.beams, self._heads, self._size).transpose(1, 2)
            for projection in (module.k_proj, module.v_proj)
        )  # [B, H, M, D]
        if self.layer is None:
            self._prefill(keys[:, :, :0], values[:, :, :0])
        assert self.layer is not None
        keys, values = self.layer.append(keys, values)
        return self._output(beam_attention(queries, keys, values, tree.mask(None, query.dtype), self._scale)), None

    def begin(self, tree: BeamTree, like: Tensor) -> None:
        """Give `tree`, whose sentences have no token yet, its next layer."""
        layer = TreeLayer(tree)
        layer.keys = layer.values = like.new_empty(tree.batch, self._heads, 0, self._size)
        tree.layers.append(layer)

    def _prompt(self, query: Tensor) -> Tensor:
        queries, keys, values = (
            self._by_head(projection(query))
            for projection in (self._module.q_proj, self._module.k_proj, self._module.v_proj)
        )
        self._prefill(keys, values)
        output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=self._scale)
        return self._module.out_proj(output.permute(2, 0, 1, 3).flatten(2))

    def _prefill(self, keys: Tensor, values: Tensor) -> None:
        self.layer = TreeLayer(self._session.tree)
        self.layer.prefill(keys, values)
        self._session.tree.layers.append(self.layer)


class TreeCrossAttention(_TreeAttention):
    """Attention to the source, one row of keys for all beams of a sentence."""

    def __init__(self, module: Any, session: Session, biases: dict[int, Tensor | None]) -> None:
        """`biases`: what padding masks become, by the mask's id; the layers of a model share them."""
        super().__init__(module, session)
        self.source: Source | None = None
        self._biases = biases

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        need_head_weights: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` `[1, B*M, C]`.

        `key`, the source `[N, B, C]`, and its padding, nonzero `[B, N]`, are looked at in the first step only.
        Returns the output and the weights of each head, `[H, B*M, 1, N]`, if they are wanted. Weights averaged
        over the heads, which the host asks every layer for, are looked at by nobody.
        """
        self.see(key, key_padding_mask)
        assert self.source is not None
        queries, source = self._queries(query), self.source
        if not need_head_weights:
            output = beam_attention(queries, source.keys, source.values, source.bias, self._scale)
            return self._output(output), None
        queries = fold_beams(queries, self._session.tree.batch, self._heads)
        scores = (queries[:, :, 0] * self._scale) @ source.keys.transpose(2, 3)  # [B, H, M, N]
        if source.bias is not None:
            scores += source.bias
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        output = unfold_beams((weights @ source.values)[:, :, None])
        return self._output(output), weights.transpose(0, 1).flatten(1, 2)[:, :, None]

    def see(self, source: Tensor, padding: Tensor | None, is_masked: bool = False) -> None:
        """Attend to this source, `[N, B, C]`, from now on, unless there is one already; see `project`."""
        if self.source is None:
            self.source = self.project(source, padding, is_masked)
            self._session.sources.append(self.source)

    def project(self, source: Tensor, padding: Tensor | None, is_masked: bool = False) -> Source:
        """The keys and values of `source`, `[N, B, C]`; see `__call__`.

        `is_masked`: with a mask, even if that hides nothing.
        """
        keys, values = (
            self._by_head(projection(source)).contiguous() for projection in (self._module.k_proj, self._module.v_proj)
        )
        if padding is None:
            return Source(keys, values, None)
        if id(padding) not in self._biases:
            hidden = padding.bool()
            has_any = is_masked or bool(hidden.any())
            bias = additive_mask(~hidden, keys.dtype)[:, None, None] if has_any else None
            self._biases[id(padding)] = bias
        return Source(keys, values, self._biases[id(padding)])
