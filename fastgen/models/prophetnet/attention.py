"""N-gram self-attention of ProphetNet: a main stream, and streams beside it that predict.

`S` streams (the main one comes first), `T` positions, `K` positions so far, `B` rows, `H` heads, `D` head size.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fastgen import phases
from fastgen.models.prophetnet.relative import bucket_table, stream_buckets

__phase__ = phases.BY_LINE


class NgramMultiheadAttention(MultiheadAttention):
    """N-gram self-attention (section 3.2 of the paper): all streams attend to the main stream's keys, and each
    predicting stream to its own key of the same position, too. Predicting streams don't see one another."""

    def __init__(
        self, embed_dim: int, num_heads: int, ngram: int, buckets: int, max_distance: int, dropout: float = 0.0
    ) -> None:
        """`ngram`: number of predicting streams while a whole target is read; in incremental steps there is only the
        first, as the output of the others is not used."""
        super().__init__(embed_dim, num_heads, dropout=dropout, self_attention=True)
        self.ngram, self.buckets = ngram, buckets
        self.relative_linear = nn.Linear(embed_dim, buckets * num_heads)
        self.register_buffer("bucket_of", bucket_table(buckets, max_distance), persistent=False)

    def forward(
        self, query: Tensor, key: Any = None, value: Any = None, incremental_state: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """The output for `query`, `[S*T, B, C]` stream by stream; both have the same shape.

        In a step (`incremental_state`) `T` is 1 and `S` is 2. Keys and values are the query's, whatever is passed.
        Padding has no mask: targets are padded on the right.
        """
        streams = 1 + self.ngram if incremental_state is None else 2
        queries, keys, values = (
            projection(query).unflatten(2, (self.num_heads, -1)).unflatten(0, (streams, -1)).permute(2, 3, 0, 1, 4)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # [B, H, S, T, D]
        main_keys, main_values = self._main(keys[:, :, 0], values[:, :, 0], incremental_state)  # [B, H, K, D]
        relative = self.relative_linear(query).unflatten(2, (self.buckets, -1)).unflatten(0, (streams, -1))
        relative = relative.permute(2, 4, 0, 1, 3)  # [B, H, S, T, buckets]

        queries = queries * self.scaling
        written, length = main_keys.shape[2], queries.shape[3]
        last = torch.arange(written - length, written, device=query.device)
        back = last[:, None] - torch.arange(written, device=query.device)  # [T, K]
        scores = queries @ main_keys[:, :, None].transpose(3, 4)  # [B, H, S, T, K]
        buckets = stream_buckets(self.bucket_of, back, streams)
        scores = scores + relative.gather(4, buckets.expand(*scores.shape[:2], -1, -1, -1))
        if length > 1:
            scores = scores.masked_fill(~_visible(back, streams), -torch.inf)
        own = (queries * keys).sum(4) + relative[..., 0]  # [B, H, S, T]
        own = torch.cat([torch.full_like(own[:, :, :1], -torch.inf), own[:, :, 1:]], dim=2)
        scores = torch.cat([scores, own[..., None]], dim=4)
        weights = self.dropout_module(scores.softmax(4, dtype=torch.float32).to(scores.dtype))
        output = weights[..., :-1] @ main_values[:, :, None] + weights[..., -1:] * values
        return self.out_proj(output.permute(2, 3, 0, 1, 4).flatten(3).flatten(0, 1)), None

    def _main(self, keys: Tensor, values: Tensor, incremental_state: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values of the main stream, `[B, H, T, D]`, to those of earlier steps, and return all."""
        if incremental_state is None:
            return keys, values
        before = self._get_input_buffer(incremental_state)
        if before:
            keys = torch.cat([before["prev_key"], keys], dim=2)
            values = torch.cat([before["prev_value"], values], dim=2)
        self._set_input_buffer(incremental_state, {"prev_key": keys, "prev_value": values})
        return keys, values


def _visible(back: Tensor, streams: int) -> Tensor:
    """Which of the main stream's keys each stream may see, bool `[S, T, K]`; `back`: see `stream_buckets`.

    The stream that predicts the nth token ahead must not see the n - 1 latest tokens. All streams see the first key.
    """
    hidden = (torch.arange(streams, device=back.device) - 1).clamp(min=0)
    visible = back >= hidden[:, None, None]
    visible[:, :, 0] = True
    return visible
