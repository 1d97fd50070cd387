"""Tiny configurations of language models whose layers are all of attention."""

from __future__ import annotations

from typing import Any

import transformers

from tiny_models.registry import FIRST_PLACEHOLDER, SPECIAL, VOCABULARY, configures

TEXT = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    **SPECIAL,
)
GPT = dict(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, **SPECIAL)
UNTIED = dict(tie_word_embeddings=False)  # tied, some random models say their last word again and again
WINDOWS = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6)
# Multi-head latent attention: queries, keys and values come from a narrow state, and positions turn a part of a head.
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
LATENT |= dict(num_key_value_heads=4)
# The first layer is dense, the second a mixture.
MIXTURE = dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=24)
MIXTURE |= dict(first_k_dense_replace=1)


# ---------------------------------------------------------------------------------------------- mixtures of experts
@configures("DeepseekV2ForCausalLM")
def deepseek_v2() -> Any:
    return transformers.DeepseekV2Config(**{**TEXT, **LATENT, **MIXTURE})


@configures("Mistral4ForCausalLM")
def mistral4() -> Any:
    rope = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=8)
    rope |= dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)  # scales queries from position 8 on
    return transformers.Mistral4Config(**{**TEXT, **LATENT, **MIXTURE}, rope_parameters=rope)


@configures("Dots1ForCausalLM")
def dots1() -> Any:
    return transformers.Dots1Config(**TEXT, **MIXTURE, sliding_window=6, max_window_layers=1)


@configures("DbrxForCausalLM")
def dbrx() -> Any:
    return transformers.DbrxConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        initializer_range=0.3,
        attn_config=dict(kv_n_heads=2, clip_qkv=4.0, rope_theta=10000.0),  # it has no default of the last
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
        **SPECIAL,
    )


@configures("HunYuanMoEV1ForCausalLM")
def hunyuan_mixture() -> Any:
    return transformers.HunYuanMoEV1Config(**TEXT, head_dim=8, num_experts=4, moe_topk=2)


# ---------------------------------------------------------------------------------------------- dense
@configures("HunYuanDenseV1ForCausalLM")
def hunyuan() -> Any:
    return transformers.HunYuanDenseV1Config(**TEXT, head_dim=8)


@configures("MinistralForCausalLM")
def ministral() -> Any:
    return transformers.MinistralConfig(**TEXT, **WINDOWS, head_dim=8)


@configures("NemotronForCausalLM")
def nemotron() -> Any:
    return transformers.NemotronConfig(**TEXT)


@configures("CohereCompassForCausalLM")
def cohere_compass() -> Any:
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1])
    ropes = dict(sliding_attention=rope, full_attention=None)  # the full layers know no positions
    return transformers.CohereCompassTextConfig(**TEXT, **WINDOWS, **UNTIED, rope_parameters=ropes)


@configures("DoryForCausalLM")
def dory() -> Any:
    """The two layers in the middle run twice, each time with keys and values of their own."""
    return transformers.DoryConfig(
        **{**TEXT, "num_hidden_layers": 4, "initializer_range": 2.0},  # the last state is a unit vector
        head_dim=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        sliding_window=6,
        ngpt_alpha_init=0.5,
        n_input_layers=1,
        n_output_layers=1,
        n_recurrent_loops=2,
    )


@configures("GPTJForCausalLM")
def gptj() -> Any:
    return transformers.GPTJConfig(**GPT, rotary_dim=4)


@configures("CodeGenForCausalLM")
def codegen() -> Any:
    return transformers.CodeGenConfig(**GPT, n_ctx=64, rotary_dim=4)


@configures("GPTNeoForCausalLM")
def gpt_neo() -> Any:
    kinds = [[["global", "local"], 1]]
    options = {name: value for name, value in TEXT.items() if name != "num_key_value_heads"}
    options |= dict(num_layers=options.pop("num_hidden_layers"), num_heads=options.pop("num_attention_heads"))
    return transformers.GPTNeoConfig(**options, attention_types=kinds, window_size=6)


@configures("XmodForCausalLM")
def xmod() -> Any:
    options = {name: value for name, value in TEXT.items() if name != "num_key_value_heads"}
    options |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.5, is_decoder=True)
    return transformers.XmodConfig(**options, languages=["en_XX", "de_DE"], default_language="en_XX")


@configures("XLMWithLMHeadModel")
def xlm() -> Any:
    return transformers.XLMConfig(
        vocab_size=VOCABULARY,
        emb_dim=32,
        n_layers=2,
        n_heads=4,
        dropout=0.0,
        attention_dropout=0.0,
        n_langs=2,
        lang_id=1,
        max_position_embeddings=64,
        embed_init_std=1.0,
        init_std=1.0,
        mask_token_id=FIRST_PLACEHOLDER,
        **SPECIAL,
    )


@configures("ReformerModelWithLMHead")
def reformer() -> Any:
    return transformers.ReformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        feed_forward_size=48,
        num_attention_heads=2,  # with as many as a chunk has tokens, the host hashes cached states twice, and fails
        attention_head_size=16,
        attn_layers=["local", "lsh"],
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=2,
        hash_seed=0,  # else it hashes at random, anew at each step
        axial_pos_shape=(8, 8),
        axial_pos_embds_dim=(8, 24),
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
        is_decoder=True,
        **SPECIAL,
    )


# ---------------------------------------------------------------------------------------------- Gemma
@configures("Gemma3nForCausalLM")
def gemma3n() -> Any:
    """Two layers of each kind: the last two use the keys and values of the first two."""
    return transformers.Gemma3nTextConfig(
        **{**TEXT, "num_hidden_layers": 4},
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=6,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
        **UNTIED,
    )


GEMMA4 = {**TEXT, **WINDOWS, "head_dim": 8, "global_head_dim": 16}


@configures("Gemma4AssistantForCausalLM")
def gemma4_assistant() -> Any:
    text = transformers.Gemma4TextConfig(**GEMMA4, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
    return transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32, **SPECIAL)


@configures("Gemma4UnifiedAssistantForCausalLM")
def gemma4_unified_assistant() -> Any:
    text = transformers.Gemma4UnifiedTextConfig(**GEMMA4)
    return transformers.Gemma4UnifiedAssistantConfig(text_config=text, backbone_hidden_size=32, **SPECIAL)


# ---------------------------------------------------------------------------------------------- bytes
@configures("BltForCausalLM")
def blt() -> Any:
    """Byte latent transformer: a small model divides bytes into patches, which the largest of four models sees."""
    size = dict(num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
    local = dict(size, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, hidden_size_global=48)
    patcher = dict(size, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, sliding_window=6)
    return transformers.BltConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=2,  # of the cache: the host has no default
        max_position_embeddings=64,
        local_attention_window_len=6,
        patching_threshold=4.15,  # of the entropy of a byte: about half of them begin a patch
        encoder_hash_byte_group_size=[3, 4],
        encoder_hash_byte_group_vocab=50,
        patcher_config=patcher,
        encoder_config=local,
        decoder_config=local,
        global_config=dict(size, hidden_size=48, intermediate_size=64),
        **SPECIAL,
    )


@configures("MptForCausalLM")
def mpt() -> Any:
    """With a cache, which its configuration leaves off by default."""
    return transformers.MptConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        initializer_range=0.3,
        use_cache=True,
        **SPECIAL,
    )
