"""ProphetNet's attention over the beam tree: a main stream writes keys and values, a second stream predicts.

`B` sentences, `M` beams, `S` streams (two, the main one first), `H` heads, `D` head size, `C = H * D`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.modules.multihead_attention import MultiheadAttention
from torch import Tensor

from fastgen import phases
from fastgen.layers.attention import stream_attention
from fastgen.optimizer.fairseq.model.attention import TreeSelfAttention

__phase__ = phases.BY_LINE

_HOME = "fastgen.models.prophetnet"  # loaded only by users of such models
STREAMS = 2


def has_streams(decoder: Any) -> bool:
    """Whether the decoder is a ProphetNet's, whose steps have a main stream and one that predicts."""
    home = sys.modules.get(f"{_HOME}.decoder")
    return home is not None and isinstance(decoder, home.NgramTransformerDecoder)


def attends_in_streams(attention: Any) -> bool:
    home = sys.modules.get(f"{_HOME}.attention")
    return home is not None and type(attention) is home.NgramMultiheadAttention


def decoder_class(decoder: Any) -> type:
    """The class whose methods a decoder must have to run over the tree."""
    if has_streams(decoder):
        known: type = sys.modules[f"{_HOME}.decoder"].NgramTransformerDecoder
        return known
    return TransformerDecoderBase


def attention_class(decoder: Any) -> type:
    """The class of self-attention that the decoder's layers must have."""
    if has_streams(decoder):
        known: type = sys.modules[f"{_HOME}.attention"].NgramMultiheadAttention
        return known
    return MultiheadAttention


class TreeStreamAttention(TreeSelfAttention):
    """N-gram self-attention of a step: both streams attend to the tree's slots, which the main stream writes; the
    predicting stream attends to its own key, too, which is not stored."""

    def __call__(self, query: Tensor, **_: Any) -> tuple[Tensor, None]:
        """`query`: `[S, B*M, C]`; the output has the same shape."""
        module, tree = self._module, self._session.tree
        queries, keys, values = [
            projection(query).unflatten(2, (self._heads, self._size)).permute(1, 2, 0, 3)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        ]  # [B*M, H, S, D]
        main = tuple(
            each[:, :, 0].unflatten(0, (tree.batch, tree.beams)).transpose(1, 2) for each in (keys, values)
        )  # [B, H, M, D]
        if self.layer is None:
            self._prefill(*(each[:, :, :0] for each in main))
        assert self.layer is not None
        seen_keys, seen_values = self.layer.append(*main)  # [B, H, width, D]
        bias, own_bias = self._biases(query)
        own_keys, own_values = keys[:, :, 1:], values[:, :, 1:]
        rows = stream_attention(  # [B*M, S, H, D]
            queries, seen_keys, seen_values, own_keys, own_values, bias, own_bias, self._scale
        )
        return module.out_proj(rows.flatten(2).transpose(0, 1)), None

    def _biases(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Biases of the scores of the slots, `[B, H, M, S, width]`, and of the streams' own keys, `[B*M, H, S - 1]`."""
        tree, mask = self._session.tree, self._session.tree.mask(None, query.dtype)
        relative = self._module.relative_linear(query).unflatten(2, (self._module.buckets, self._heads))
        buckets = tree.of_step(("buckets", id(self._module.bucket_of)), self._buckets)
        folded = relative.unflatten(1, (tree.batch, tree.beams)).permute(1, 4, 2, 0, 3)  # [B, H, M, S, buckets]
        index = buckets[:, None, None].expand(tree.batch, self._heads, tree.beams, -1, -1)
        return folded.gather(4, index) + mask[:, :, :, None], relative[1:, :, 0].permute(1, 2, 0)

    def _buckets(self) -> Tensor:
        """The bucket of each slot's distance, by stream, int64 `[B or 1, S, width]`; arbitrary for unseen slots."""
        tree, table = self._session.tree, self._module.bucket_of
        back = tree.position - tree.positions()
        # The predicted token is one position later.
        return table[torch.stack([back, back + 1], dim=1).clamp(0, len(table) - 1)]
