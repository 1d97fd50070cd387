"""ProphetNet's encoder, a BERT: fairseq's Transformer encoder, loaded from the names of published checkpoints."""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer import TransformerEncoderBase

from fastgen.models.prophetnet.checkpoints import rename


class ProphetNetEncoder(TransformerEncoderBase):
    """A post-norm Transformer encoder, with a layer norm after the embeddings, which are not scaled."""

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        rename(state_dict, f"{name}.", {"emb_layer_norm.": "layernorm_embedding."})
        upgraded: dict[str, Any] = super().upgrade_state_dict_named(state_dict, name)
        return upgraded
