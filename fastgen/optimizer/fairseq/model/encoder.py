"""Runs the encoder with our linear layers: on a CPU it takes half of the time for long sources."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models.transformer import TransformerEncoderBase
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor

from fastgen.layers.linear import LinearDispatcher
from fastgen.optimizer.fairseq.foreign_code import CONTAINERS, layers_of, own_name
from fastgen.optimizer.fairseq.model.views import (
    has_hooks,
    is_plain,
    replaced,
    standing_in,
    with_layers,
    with_products,
)
from fastgen.optimizer.fairseq.request import has_own_scale, own_method, unsupported_attention


def with_own_products(ensemble: Any) -> Any:
    """A view of the host's ensemble whose Transformer encoders use our linear layers."""
    if not ensemble.has_encoder():
        return ensemble
    models = [standing_in(model, encoder=_encoder(model.encoder)) for model in ensemble.models]
    return replaced(ensemble, models=models)


def _encoder(encoder: Any) -> Any:
    if not isinstance(encoder, TransformerEncoderBase):
        return encoder
    if own_method(encoder, TransformerEncoderBase, "forward", "forward_scriptable") or own_name(encoder):
        return encoder
    if type(encoder.layers) not in CONTAINERS or hasattr(type(encoder), "layers") or own_name(encoder.layers):
        return encoder
    products = LinearDispatcher.configured()
    return replaced(encoder, layers=with_layers(encoder, [_layer(layer, products) for layer in layers_of(encoder)]))


def _layer(layer: Any, products: LinearDispatcher) -> Any:
    if own_method(layer, TransformerEncoderLayerBase, "forward") or own_name(layer) or has_hooks(layer):
        return layer
    view, attention = with_products(layer, products), layer.self_attn
    if _is_known(attention) and not _drops(attention) and _has_plain_projections(attention):
        view = replaced(view, self_attn=_Attention(attention, products))
    return view


def _is_known(attention: Any) -> bool:
    return unsupported_attention(attention) is None and own_name(attention) is None and not has_own_scale(attention)


def _drops(attention: Any) -> bool:
    return bool(attention.training or attention.dropout_module.apply_during_inference)


def _has_plain_projections(attention: Any) -> bool:
    """Whether all projections are plain linear layers: the host reads their weights without calling them."""
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    return all(is_plain(getattr(attention, name, None)) for name in names)


class _Attention:
    """Replaces an encoder's self-attention: the host's reads weights without calling the linear layers."""

    def __init__(self, module: Any, products: LinearDispatcher) -> None:
        self._host, self._module = module, with_products(module, products)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """All tensors `[N, B, C]`; `key_padding_mask`: nonzero `[B, N]` = padding."""
        if need_weights or attn_mask is not None:
            answer: tuple[Tensor, Tensor | None] = self._host(
                query, key, value, key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask
            )
            return answer
        module = self._module
        queries, keys, values = [
            projection(x).unflatten(2, (module.num_heads, module.head_dim)).permute(1, 2, 0, 3)
            for projection, x in ((module.q_proj, query), (module.k_proj, key), (module.v_proj, value))
        ]  # [B, H, N, D]
        bias = None
        if key_padding_mask is not None:
            hidden = key_padding_mask.bool()[:, None, None]
            bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
        output = F.scaled_dot_product_attention(queries, keys, values, bias, scale=module.scaling)
        return module.out_proj(output.permute(2, 0, 1, 3).flatten(2)), None
