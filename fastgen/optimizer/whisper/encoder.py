"""Whisper's encoder with weights in fewer bits, where the user has chosen them; in float32 the encoder is whisper's."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastgen.memory import arena
from fastgen.optimizer.whisper.blocks import Blocks


def encode(model: Any, mel: Tensor) -> Tensor:
    """Encode spectrograms, float32 `[B, bands, 2*N]`; returns float32 `[B, N, C]`."""
    with arena.of(model):
        return _Encoder().run(model.encoder, mel)


class _Encoder(Blocks):
    def run(self, encoder: Any, mel: Tensor) -> Tensor:
        x = F.gelu(encoder.conv2(F.gelu(encoder.conv1(mel)))).transpose(1, 2)
        x = x + encoder.positional_embedding
        for block in encoder.blocks:
            query, keys, values = self._projected(block.attn, x, block.attn_ln)
            x = x + self._out(block.attn, F.scaled_dot_product_attention(query, keys, values))
            x = x + self._feed_forward(block, x)
        output: Tensor = encoder.ln_post(x)
        return output
