"""The parts of whisper's blocks, with fastgen's linear layers.

`rows` sequences of `length`, `C` numbers wide, of which `H` heads have `D` each.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from whisper.model import MultiHeadAttention, ResidualAttentionBlock

from fastgen.layers.linear import LinearDispatcher


class Blocks:
    """Runs parts of blocks, for one call."""

    def __init__(self) -> None:
        self._products = LinearDispatcher.configured()

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

    def _out(self, attention: Any, attended: Tensor) -> Tensor:
        """Project the heads' output of attention, `[B, H, P, D]`, to `[B, P, C]`."""
        return self._multiplied(attention.out, attended.transpose(1, 2).flatten(2))

    def _feed_forward(self, block: Any, x: Tensor) -> Tensor:
        wide, activation, narrow = block.mlp
        return self._multiplied(narrow, activation(self._multiplied(wide, block.mlp_ln(x))))


def has_blocks(blocks: Any, with_cross_attention: bool) -> bool:
    """Whether all of these have the parts that whisper's blocks have."""
    cross = MultiHeadAttention if with_cross_attention else type(None)
    kinds = [ResidualAttentionBlock, MultiHeadAttention, cross, nn.Sequential]
    return all(
        [type(part) for part in (block, block.attn, block.cross_attn, block.mlp)] == kinds and len(block.mlp) == 3
        for block in blocks
    )
