"""Tiny configurations of language models with recurrent or convolutional layers, most beside ones of attention."""

from __future__ import annotations

from typing import Any

import transformers

from tiny_models.language_models import LATENT, TEXT
from tiny_models.registry import SPECIAL, VOCABULARY, configures

BOTH = ["linear_attention", "full_attention"]
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=4)


# ---------------------------------------------------------------------------------------------- Mamba
@configures("BambaForCausalLM")
def bamba() -> Any:
    return transformers.BambaConfig(**TEXT, **MAMBA2, attn_layer_indices=[1])


@configures("GraniteMoeHybridForCausalLM")
def granite_hybrid() -> Any:
    return transformers.GraniteMoeHybridConfig(
        **TEXT,
        **MAMBA2,
        layer_types=BOTH,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        attention_multiplier=8**-0.5,
    )


@configures("ZambaForCausalLM")
def zamba() -> Any:
    """The last two layers share an attention block."""
    return transformers.ZambaConfig(
        **{**TEXT, "num_hidden_layers": 3, "num_key_value_heads": 4},
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        n_mamba_heads=2,
        mamba_d_state=8,
        mamba_dt_rank=2,
    )


@configures("Zamba2ForCausalLM")
def zamba2() -> Any:
    """Two attention blocks in turn: the first serves two layers, each with an adapter of its own."""
    return transformers.Zamba2Config(
        **{**TEXT, "num_hidden_layers": 4, "num_key_value_heads": 4},
        layers_block_type=["linear_attention", "hybrid", "hybrid", "hybrid"],
        n_mamba_heads=4,
        mamba_d_state=8,
        chunk_size=4,
        num_mem_blocks=2,
        use_shared_attention_adapter=True,
        adapter_rank=4,
        use_mem_rope=True,
    )


# ---------------------------------------------------------------------------------------------- delta rules
@configures("BailingHybridForCausalLM")
def bailing() -> Any:
    return transformers.BailingHybridConfig(
        **{**TEXT, **LATENT},
        layer_types=BOTH,
        mlp_layer_types=["dense", "sparse"],
        head_dim=8,
        moe_intermediate_size=24,
        num_local_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
    )


@configures("KimiLinearForCausalLM")
def kimi_linear() -> Any:
    return transformers.KimiLinearConfig(
        **{**TEXT, **LATENT, "q_lora_rank": None},
        layer_types=BOTH,
        mlp_layer_types=["dense", "sparse"],
        linear_head_dim=8,
        linear_num_heads=4,
        moe_intermediate_size=24,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


@configures("Qwen4ExpForCausalLM")
def qwen4_exp() -> Any:
    """Its attention sees the most similar two of the blocks of two tokens; its first layer embeds pairs and triples."""
    options = {name: value for name, value in TEXT.items() if name != "intermediate_size"}
    rope = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1])
    return transformers.Qwen4ExpTextConfig(
        **options,
        head_dim=16,
        rope_parameters=rope,
        layer_types=["linear_attention", "indexed_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        hc_count=2,
        hc_lowrank=8,
        ple_layer_ids=[1],
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=1,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=4,
        indexer_compress_ratio=2,
    )


# ---------------------------------------------------------------------------------------------- convolutions
@configures("Lfm2MoeForCausalLM")
def lfm2_mixture() -> Any:
    return transformers.Lfm2MoeConfig(
        **TEXT,
        layer_types=["conv", "full_attention"],
        num_dense_layers=1,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
    )


@configures("ZayaForCausalLM")
def zaya() -> Any:
    options = {name: value for name, value in TEXT.items() if name != "intermediate_size"}
    return transformers.ZayaConfig(
        **{**options, "initializer_range": 0.5},
        layer_types=["hybrid_sliding", "hybrid"],
        sliding_window=6,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=4,
        router_hidden_size=16,
    )


def inkling(layers: list[str], **options: Any) -> dict[str, Any]:
    """What both kinds of Inkling 2 have in common; the embeddings have rows that no token uses."""
    known = dict(TEXT, vocab_size=VOCABULARY + 5, unpadded_vocab_size=VOCABULARY, num_hidden_layers=len(layers))
    del known["intermediate_size"]
    sizes = dict(head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, d_rel=4)
    reach = dict(sliding_window_size=6, rel_extent=8, log_scaling_n_floor=8)
    experts = dict(moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2)
    return {**known, **sizes, **reach, **experts, "layer_types": layers, **options}


@configures("Inkling2ForCausalLM")
def inkling2() -> Any:
    layers = ["hybrid_sliding", "hybrid", "hybrid_sliding"]
    return transformers.Inkling2TextConfig(**inkling(layers, n_layers_per_attn_res_block=2))


@configures("Inkling2LoopForCausalLM")
def inkling2_loop() -> Any:
    """The two layers in the middle run twice, each time with states of their own."""
    layers = ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid"]
    loop = dict(loop_layer_index_start=1, loop_layer_index_end=3, loop_num_passes=2, loop_gate_rank=4)
    return transformers.Inkling2LoopTextConfig(**inkling(layers, n_layers_per_attn_res_block=1, **loop))


# ---------------------------------------------------------------------------------------------- without attention
@configures("Mamba2ForCausalLM")
def mamba2() -> Any:
    return transformers.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=2,
        chunk_size=4,
        initializer_range=0.3,
        **SPECIAL,
    )


@configures("RwkvForCausalLM")
def rwkv() -> Any:
    return transformers.RwkvConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, context_length=64, **SPECIAL
    )


@configures("xLSTMForCausalLM")
def xlstm() -> Any:
    """The host rounds the sizes of the states up to multiples of 64, but not those of the layers."""
    return transformers.xLSTMConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_heads=8,
        chunk_size=8,
        ffn_proj_factor=1.0,
        autocast_kernel_dtype="float32",
        **SPECIAL,
    )
