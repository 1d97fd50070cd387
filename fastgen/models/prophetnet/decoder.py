"""ProphetNet's decoder: a main stream that reads the target, and streams beside it that predict the next tokens.

`B` rows, `T` positions, `S` streams (the main one first), `C` model size.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.modules import LearnedPositionalEmbedding
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn

from fastgen.models.prophetnet.attention import NgramMultiheadAttention
from fastgen.models.prophetnet.checkpoints import rename


class StreamPositions(LearnedPositionalEmbedding):
    """Learned position embeddings of all streams: predicting streams are one position after the main stream."""

    def __init__(self, positions: int, embed_dim: int, padding_idx: int, ngram: int) -> None:
        """`positions`: the most positions of the main stream."""
        super().__init__(positions + 2 + padding_idx, embed_dim, padding_idx)
        self.ngram = ngram

    def forward(self, input: Tensor, incremental_state: Any = None, positions: Tensor | None = None) -> Tensor:
        """Embeddings `[B, S*T, C]`, stream by stream, for tokens `[B, T]`; in a step `[1, 2, C]`, of the last token."""
        if incremental_state is not None:
            last = self.padding_idx + input.shape[1]
            positions = torch.arange(last, last + 2, device=input.device)[None]
        else:
            main = positions
            if main is None:
                words = input.ne(self.padding_idx).long()
                main = words.cumsum(1) * words + self.padding_idx
            positions = torch.cat([main, *[main + 1] * self.ngram], dim=1)
        return nn.functional.embedding(positions, self.weight, self.padding_idx)


class NgramTransformerDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with n-gram self-attention; all streams share the cross-attention."""

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> NgramMultiheadAttention:
        return NgramMultiheadAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            cfg.ngram,
            cfg.num_buckets,
            cfg.relative_max_distance,
            dropout=cfg.attention_dropout,
        )


class NgramTransformerDecoder(TransformerDecoderBase):
    """ProphetNet's decoder: reads whole targets with all streams, steps with only the first predicting stream.

    That is exact, as predicting streams don't see one another. The first one has the features of the next token.
    """

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        super().__init__(cfg, dictionary, embed_tokens)
        self.ngram = int(cfg.ngram)
        self.embed_positions = StreamPositions(cfg.max_target_positions, self.embed_dim, self.padding_idx, self.ngram)
        self.ngram_input_embed = nn.Embedding(self.ngram, self.embed_dim)

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> NgramTransformerDecoderLayer:
        return NgramTransformerDecoderLayer(cfg, no_encoder_attn)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: Any = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Features of the next token at each position, `[B, T, C]`, for the tokens before, int64 `[B, T]`.

        If a whole target is read, `ngram_features` holds the features of the other predicting streams, which predict
        the same token without having seen the latest tokens before it. `attn` holds the cross-attention weights of the
        first predicting stream in `alignment_layer`, by default the last, averaged over heads: `[B, T, N]`.

        Raises NotImplementedError for `full_context_alignment`: no stream may see the whole target.
        """
        if full_context_alignment:
            raise NotImplementedError("Predicting streams must not see what they predict.")
        positions = self.embed_positions(prev_output_tokens, incremental_state=incremental_state)
        is_step = incremental_state is not None
        x = self.embed_tokens(prev_output_tokens[:, -1:] if is_step else prev_output_tokens)
        streams = 2 if is_step else 1 + self.ngram
        # The first predicting stream has the last of these embeddings, as checkpoints were trained.
        own = self.ngram_input_embed.weight.roll(1, 0)[: streams - 1]
        x = torch.cat([x, *(each.expand_as(x) for each in own)], dim=1) + positions
        x = self.dropout_module(self.layernorm_embedding(x)).transpose(0, 1)  # [S*T, B, C]

        source = next(iter(encoder_out["encoder_out"]), None) if encoder_out else None
        padding = next(iter(encoder_out["encoder_padding_mask"]), None) if encoder_out else None
        aligned = self.num_layers - 1 if alignment_layer is None else alignment_layer
        weights, inner_states = None, [x]
        for number, layer in enumerate(self.layers):
            is_aligned = number == aligned
            x, its, _ = layer(x, source, padding, incremental_state, need_attn=is_aligned, need_head_weights=is_aligned)
            inner_states.append(x)
            weights = its if is_aligned else weights
        _, features, *further = x.transpose(0, 1).chunk(streams, dim=1)
        if weights is not None:  # [H, B, S*T, N]
            weights = weights[:alignment_heads].float().to(x).mean(0).chunk(streams, dim=1)[1]
        return features, {"attn": [weights], "inner_states": inner_states, "ngram_features": further}

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        rename(state_dict, f"{name}.", {"emb_layer_norm.": "layernorm_embedding."})
        for number in range(self.num_layers):  # these hold q, k and v in one; the attention module splits them
            rename(state_dict, f"{name}.layers.{number}.", {"ngram_self_attn.": "self_attn."})
        upgraded: dict[str, Any] = super().upgrade_state_dict_named(state_dict, name)
        return upgraded
