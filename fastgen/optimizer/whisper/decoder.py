"""Runs whisper's text decoder over the beam tree: the prompt at one row per segment, then steps for all rows.

`B` segments, `M` rows of each (beams or samples), `P` tokens of the prompt, `N` positions of the audio, `H` heads, `D`
head size, `V` vocabulary.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgen import locks
from fastgen.cache.tree import BeamTree
from fastgen.cache.tree_layer import TreeLayer
from fastgen.layers.attention import beam_attention
from fastgen.memory.buffers import Buffers
from fastgen.optimizer.whisper.blocks import Blocks, has_blocks

_lock = locks.reentrant_lock()
_heads: weakref.WeakKeyDictionary[nn.Module, nn.Linear] = weakref.WeakKeyDictionary()  # by the embedding they share


class TreeDecoder(Blocks):
    """The state of one decoding, to be closed by `close` when it ends."""

    def __init__(self, model: Any, audio: Tensor, segments: int, rows: int, prompt_length: int) -> None:
        """`audio`: the encoder output, `[B, N, C]`."""
        super().__init__()
        self.model, self._decoder, self._audio, self._rows = model, model.decoder, audio, rows
        steps = max(model.dims.n_text_ctx - prompt_length, 1)
        self.tree = BeamTree(segments, rows, steps, Buffers(model))
        self._source: list[tuple[Tensor, Tensor]] = []  # keys and values by block, [B, H, N, D]
        self._head = _head_of(model.decoder.token_embedding)

    def read(self, tokens: Tensor, wanted: Sequence[int] | None = None) -> Tensor:
        """Read the prompt, int64 `[B*M, P]`, equal in all rows of a segment; returns logits, float32 `[B*M, P, V]`.

        `wanted`: the positions of the prompt at which logits are computed, all if None; elsewhere they are 0.
        """
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
        if wanted is None:
            return self._logits(x).repeat_interleave(self._rows, dim=0)
        logits = _zeros((len(tokens), tokens.shape[1], self._head.out_features), x.device)
        logits[:, wanted] = self._logits(x[:, wanted]).repeat_interleave(self._rows, dim=0)
        return logits

    def step(self, last: Tensor) -> Tensor:
        """Read the last token of each row, int64 `[B*M, 1]`; returns logits, float32 `[B*M, 1, V]`."""
        return step_together([self], [last])[0]

    @property
    def rows(self) -> int:
        return self.tree.batch * self._rows

    def can_reorder(self, sources: list[int]) -> bool:
        """Whether there are as many rows as before, and each continues one of the same segment."""
        segments = [row // self._rows for row in range(self.rows)]
        return [source // self._rows for source in sources] == segments

    def reorder(self, sources: list[int]) -> None:
        if self.tree.steps:  # before the first step, all rows of a segment are equal
            self.tree.reorder(torch.tensor(sources, device=self._audio.device))

    def by_module(self) -> dict[nn.Module, Tensor]:
        """Keys and values, float `[B*M, length, C]` or, of the audio, `[B, N, C]`, by the host's linear layers."""
        paths = self.tree.paths()[:, None, :, None]
        found: dict[nn.Module, Tensor] = {}
        for block, layer, source in zip(self._decoder.blocks, self.tree.layers, self._source, strict=True):
            for module, stored in zip((block.attn.key, block.attn.value), layer.stored(), strict=True):
                rows = stored.repeat_interleave(self._rows, dim=0)
                found[module] = rows.take_along_dim(paths, dim=2).transpose(1, 2).flatten(2)
            for module, stored in zip((block.cross_attn.key, block.cross_attn.value), source, strict=True):
                found[module] = stored.transpose(1, 2).flatten(2)
        return found

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

    def _attended_own(self, query: Tensor, *new: Tensor, index: int) -> Tensor:
        """Self-attention in block `index`, for the query, key and value of a step's rows, each `[B*M, H, 1, D]`."""
        keys, values = self.tree.layers[index].append(*new)
        return _attended(query, keys, values, self.tree.mask(None, query.dtype))

    def _attended_audio(self, query: Tensor, *, index: int) -> Tensor:
        """Cross-attention in block `index`."""
        return _attended(query, *self._source[index], None)

    def _logits(self, x: Tensor) -> Tensor:
        return self._products(self._head, self._decoder.ln(x), _cast).float()


def has_own_layout(decoder: Any) -> bool:
    """Whether a decoder of whisper's classes has the parts that `TreeDecoder` goes by; layers may be any."""
    embedding, mask = decoder.token_embedding, decoder.mask
    # A weight that is computed from others, or changes as it is read, can't be a linear layer's.
    is_plain = isinstance(embedding, nn.Embedding) and "weight" in embedding._parameters and not embedding.max_norm
    is_causal = isinstance(mask, Tensor) and torch.equal(mask, torch.full_like(mask, -torch.inf).triu_(1))
    return is_plain and is_causal and has_blocks(decoder.blocks, with_cross_attention=True)


def step_together(decoders: Sequence[TreeDecoder], last: Sequence[Tensor]) -> list[Tensor]:
    """One step of several decodings of the same model, of any numbers of segments and rows.

    Linear layers see the rows of all; attention is each decoding's own, over the keys where they lie.

    Args:
        last: the last token of each row, int64 `[B*M, 1]`, for each decoding.

    Returns: logits, float32 `[B*M, 1, V]`, for each decoding.
    """
    for decoder in decoders:
        decoder.tree.advance()
    any_one, sizes = decoders[0], [len(tokens) for tokens in last]
    x = _each(lambda one, tokens: one._embedded(tokens, one.tree.length), decoders, last)
    for index, block in enumerate(any_one._decoder.blocks):
        projected = [part.split(sizes) for part in any_one._projected(block.attn, x, block.attn_ln)]
        attended = _each(functools.partial(TreeDecoder._attended_own, index=index), decoders, *projected)
        x = x + any_one._multiplied(block.attn.out, attended)
        query = any_one._query(block.cross_attn, block.cross_attn_ln(x)).split(sizes)
        attended = _each(functools.partial(TreeDecoder._attended_audio, index=index), decoders, query)
        x = x + any_one._multiplied(block.cross_attn.out, attended)
        x = x + any_one._feed_forward(block, x)
    return list(any_one._logits(x).split(sizes))


def _each(run: Callable[..., Tensor], decoders: Sequence[TreeDecoder], *parts: Sequence[Tensor]) -> Tensor:
    """Each decoding's result for that decoding's rows, one below the other."""
    found = [run(*each) for each in zip(decoders, *parts, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _attended(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """`[B*M, H, 1, D]` -> `[B*M, 1, H*D]`."""
    return beam_attention(query, keys, values, bias, query.shape[-1] ** -0.5).flatten(2)


def _cast(layer: nn.Module, rows: Tensor) -> Tensor:
    """Multiply in the dtype of `rows`, as the host does."""
    weight: Any = layer.weight
    return F.linear(rows, weight.to(rows.dtype))


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros in float32; on the CPU they take no memory, and no time, where nobody writes."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.float32))  # torch would write them
    return torch.zeros(shape, dtype=torch.float32, device=device)


def _head_of(embedding: nn.Embedding) -> nn.Linear:
    """The token embedding as a linear layer, which shares the embedding's weight."""
    with _lock:
        head = _heads.get(embedding)
        if head is None or head.weight is not embedding.weight:
            head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False, device="meta")
            head.weight = embedding.weight
            _heads[embedding] = head
        return head
