"""Runs whisper's text decoder over the beam tree: the prompt at one row per segment, then steps for all rows.

`B` segments, `M` rows of each (beams or samples), `P` tokens of the prompt, `N` positions of the audio, `H` heads, `D`
head size, `V` vocabulary.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgen.cache.tree import BeamTree
from fastgen.cache.tree_layer import TreeLayer
from fastgen.layers.attention import beam_attention
from fastgen.layers.linear import LinearDispatcher
from fastgen.memory.buffers import Buffers

_lock = threading.Lock()
_heads: weakref.WeakKeyDictionary[nn.Module, nn.Linear] = weakref.WeakKeyDictionary()  # by the embedding they share


class TreeDecoder:
    """The state of one decoding, to be closed by `close` when it ends."""

    def __init__(self, model: Any, audio: Tensor, segments: int, rows: int, prompt_length: int) -> None:
        """`audio`: the encoder output, `[B, N, C]`."""
        self._decoder, self._audio, self._rows = model.decoder, audio, rows
        steps = max(model.dims.n_text_ctx - prompt_length, 1)
        self.tree = BeamTree(segments, rows, steps, Buffers(model))
        self._products = LinearDispatcher.configured()
        self._source: list[tuple[Tensor, Tensor]] = []  # keys and values by block, [B, H, N, D]
        self._head = _head_of(model.decoder.token_embedding)

    def read(self, tokens: Tensor) -> Tensor:
        """Read the prompt, int64 `[B*M, P]`, equal in all rows of a segment; returns logits, float32 `[B*M, P, V]`."""
        x = self._embedded(tokens[:: self._rows], 0)
        for block in self._decoder.blocks:
            layer = TreeLayer(self.tree)
            query, keys, values = self._projected(block.attn, x, block.attn_ln)
            layer.prefill(keys, values)
            self.tree.layers.append(layer)
            attended = F.scaled_dot_product_attention(query, keys, values, is_causal=tokens.shape[1] > 1)
            x = x + self._out(block.attn, attended)
            self._source.append(self._keys_and_values(block.cross_attn, self._audio))
            query = self._query(block.cross_attn, block.cross_attn_ln(x))
            x = x + self._out(block.cross_attn, F.scaled_dot_product_attention(query, *self._source[-1]))
            x = x + self._feed_forward(block, x)
        self.tree.begin_decoding()
        return self._logits(x).repeat_interleave(self._rows, dim=0)

    def step(self, last: Tensor) -> Tensor:
        """Read the last token of each row, int64 `[B*M, 1]`; returns logits, float32 `[B*M, 1, V]`."""
        self.tree.advance()
        x = self._embedded(last, self.tree.length)
        bias = self.tree.mask(None, x.dtype)
        for block, layer, source in zip(self._decoder.blocks, self.tree.layers, self._source, strict=True):
            query, keys, values = self._projected(block.attn, x, block.attn_ln)
            x = x + self._attended(block.attn, query, layer.append(keys, values), bias)
            query = self._query(block.cross_attn, block.cross_attn_ln(x))
            x = x + self._attended(block.cross_attn, query, source, None)
            x = x + self._feed_forward(block, x)
        return self._logits(x)

    def reorder(self, sources: list[int]) -> None:
        if self.tree.steps:  # before the first step, all rows of a segment are equal
            self.tree.reorder(torch.tensor(sources, device=self._audio.device))

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes + sum(keys.nbytes + values.nbytes for keys, values in self._source)

    def close(self) -> None:
        """Free all keys and values."""
        self.tree.close()
        self._source.clear()

    def _embedded(self, tokens: Tensor, position: int) -> Tensor:
        decoder = self._decoder
        positions = decoder.positional_embedding[position : position + tokens.shape[1]]
        return (decoder.token_embedding(tokens) + positions).to(self._audio.dtype)

    def _multiplied(self, layer: Any, rows: Tensor) -> Tensor:
        return self._products(layer, rows, type(layer).forward)

    def _by_head(self, x: Tensor, heads: int) -> Tensor:
        """`[rows, length, H*D]` -> `[rows, H, length, D]`."""
        return x.unflatten(2, (heads, -1)).transpose(1, 2)

    def _query(self, attention: Any, x: Tensor) -> Tensor:
        return self._by_head(self._multiplied(attention.query, x), attention.n_head)

    def _keys_and_values(self, attention: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        layers = attention.key, attention.value
        keys, values = (self._by_head(self._multiplied(layer, x), attention.n_head) for layer in layers)
        return keys.contiguous(), values.contiguous()

    def _projected(self, attention: Any, x: Tensor, norm: Any) -> tuple[Tensor, Tensor, Tensor]:
        x = norm(x)
        return self._query(attention, x), *self._keys_and_values(attention, x)

    def _attended(self, attention: Any, query: Tensor, stored: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
        keys, values = stored
        attended = beam_attention(query, keys, values, bias, query.shape[-1] ** -0.5)  # [B*M, 1, H, D]
        return self._multiplied(attention.out, attended.flatten(2))

    def _out(self, attention: Any, attended: Tensor) -> Tensor:
        """Project the heads' output of attention, `[B, H, P, D]`, to `[B, P, C]`."""
        return self._multiplied(attention.out, attended.transpose(1, 2).flatten(2))

    def _feed_forward(self, block: Any, x: Tensor) -> Tensor:
        wide, activation, narrow = block.mlp
        return self._multiplied(narrow, activation(self._multiplied(wide, block.mlp_ln(x))))

    def _logits(self, x: Tensor) -> Tensor:
        return self._products(self._head, self._decoder.ln(x), _cast).float()


def _cast(layer: nn.Module, rows: Tensor) -> Tensor:
    """Multiply in the dtype of `rows`, as the host does."""
    weight: Any = layer.weight
    return F.linear(rows, weight.to(rows.dtype))


def _head_of(embedding: nn.Embedding) -> nn.Linear:
    """The token embedding as a linear layer, which shares the embedding's weight."""
    with _lock:
        head = _heads.get(embedding)
        if head is None or head.weight is not embedding.weight:
            head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False, device="meta")
            head.weight = embedding.weight
            _heads[embedding] = head
        return head
