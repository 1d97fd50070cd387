"""The configuration of UniLM for transformers."""

from __future__ import annotations

from typing import Any

from transformers import BertConfig


class UnilmConfig(BertConfig):
    """BERT's configuration, with the segments of source and target and the token at which the next word is predicted.

    Args:
        type_vocab_size: rows of the table of segments: 6 as published; 7 with `s2s_add_segment`, 2 without
            `new_segment_ids`.
        source_type_id, target_type_id: 0 and 1 in s2s-ft and in UniLM v1 without `--new_segment_ids`, 4 and 5 with it,
            as in all published commands of v1. Checkpoints of v1 don't say which.
        mask_token_id: `[MASK]`, 103 in BERT's English vocabularies.
        layer_norm_eps: 1e-5 as in the published decoder, which always uses it; configurations of s2s-ft hold the 1e-12
            of the training, which is used then.
        **kwargs: other options of BERT; the end token is `[SEP]`, 102.
    """

    model_type = "unilm"

    def __init__(
        self,
        type_vocab_size: int = 6,
        source_type_id: int = 0,
        target_type_id: int = 1,
        mask_token_id: int = 103,
        layer_norm_eps: float = 1e-5,
        pad_token_id: int = 0,
        bos_token_id: int = 101,
        eos_token_id: int | list[int] = 102,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            type_vocab_size=type_vocab_size,
            layer_norm_eps=layer_norm_eps,
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            **kwargs,
        )
        self.source_type_id = source_type_id
        self.target_type_id = target_type_id
        self.mask_token_id = mask_token_id

    def check(self) -> None:
        """Raise an error for options that UniLM does not have.

        Raises:
            ValueError: if relative positions (UniLM v2) are asked for, a segment is not in the table, or the heads
                don't share the hidden size evenly.
        """
        segments, heads = (self.source_type_id, self.target_type_id), self.num_attention_heads
        if getattr(self, "rel_pos_bins", 0):
            raise ValueError("UniLM v2's relative positions (rel_pos_bins) are not supported.")
        if not all(0 <= segment < self.type_vocab_size for segment in segments):
            raise ValueError(f"source_type_id, target_type_id={segments} are not both below {self.type_vocab_size=}.")
        if self.hidden_size % heads:
            raise ValueError(f"hidden_size={self.hidden_size} is no multiple of num_attention_heads={heads}.")
