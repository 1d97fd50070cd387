"""Default configurations made small: every size that is known by name, in sub-configurations too."""

from __future__ import annotations

from typing import Any

import torch
import transformers
import zoo

from tiny_models.registry import CONFIGURATIONS

PARAMETERS = 20_000_000  # more means that shrinking missed a size

_SIZES: dict[int, str] = {
    32: """hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim hidden_dim model_dim
        decoder_hidden_size encoder_hidden_size cross_attention_hidden_size projection_dim mm_hidden_size
        vision_hidden_size out_hidden_size qformer_hidden_size output_dim perceiver_dim audio_hidden_size
        lru_width hidden_size_per_layer_input output_hidden_size mm_embed_dim""",
    48: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size d_inner
        moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        dense_intermediate_size intermediate_size_mlp feed_forward_hidden_size mlp_dim""",
    2: """num_key_value_heads num_kv_heads
        num_key_value_groups num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts
        moe_num_active_experts attn_layer_period
        num_selected_experts encoder_num_key_value_heads decoder_num_key_value_heads moe_top_k""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads num_experts
        decoder_num_attention_heads num_local_experts n_routed_experts moe_num_experts num_codebooks
        speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads patch_size
        linear_num_key_heads linear_num_value_heads mamba_n_heads mamba_num_heads""",
    1: """n_group topk_group n_shared_experts moe_num_shared_experts num_shared_experts num_mtp_modules
        first_k_dense_replace moe_layer_start_index num_nextn_predict_layers attn_layer_offset
        mamba_n_groups n_groups""",
    8: """head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_size kv_channels
        num_mel_bins input_feat_per_channel num_mels linear_key_head_dim linear_value_head_dim
        mamba_chunk_size chunk_size""",
    16: """mamba_d_head mamba_head_dim ssm_state_size q_lora_rank
        kv_lora_rank image_size conv_channels mamba_d_state expert_dim""",
    64: """mamba_d_ssm max_position_embeddings n_positions n_ctx
        max_source_positions max_target_positions max_sequence_length
        seq_length max_seq_len""",
    zoo.VOCAB: "vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size vocab_size_per_layer_input",
}
SMALL: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}
LAYERS = """num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers
    num_decoder_layers encoder_num_layers decoder_num_layers depth vision_layers t2u_encoder_layers
    t2u_decoder_layers speech_encoder_layers adaptor_layers""".split()
SMALL |= dict(
    initializer_range=0.3, init_std=0.3, pad_token_id=zoo.PAD, bos_token_id=zoo.START, eos_token_id=zoo.UNUSED
)
SMALL |= dict(decoder_start_token_id=zoo.START)
WINDOWS = dict(sliding_window=6, attention_window=4)  # only where the default has one


class NotTiny(Exception):
    """The class cannot be tried; the message says why."""


def tiny_config(default: Any, layers: int) -> Any:
    """A configuration of the same class with every size we know of made small, sub-configurations too."""
    known = default.to_dict()
    options = {name: value for name, value in SMALL.items() if known.get(name) is not None}
    options |= {name: layers for name in LAYERS if known.get(name) is not None}
    options |= {name: SMALL[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if known.get("pad_token_id") == 0:  # some take this for granted
        options["pad_token_id"] = 0
    options |= {name: window for name, window in WINDOWS.items() if isinstance(known.get(name), int)}
    options |= {name: None for name in ("forced_bos_token_id", "forced_eos_token_id") if name in known}
    if known.get("num_key_value_heads") == known.get("num_attention_heads") and "num_key_value_heads" in options:
        options["num_key_value_heads"] = options["num_attention_heads"]
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:  # adds up to half the rotated part of a head
        rotated = int(SMALL["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
        options["rope_parameters"] = {**rope, "mrope_section": [rotated - rotated // 2, rotated // 2, 0]}
    for name in getattr(default, "sub_configs", {}):
        part = getattr(default, name, None)
        if part is not None and hasattr(part, "to_dict"):
            options[name] = tiny_config(part, layers)
    return type(default)(**options)


def build(name: str, layers: int) -> Any:
    """A tiny random float32 model of class `name`, or NotTiny."""
    cls = getattr(transformers, name)
    if not hasattr(cls, "generate"):
        raise NotTiny("has no generate")
    try:
        known = CONFIGURATIONS.get(name)
        config = tiny_config(cls.config_class(), layers) if known is None else known()
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in cls(config).parameters())
        if size > PARAMETERS:
            raise NotTiny(f"still has {size / 1e6:.0f}M parameters")
        torch.manual_seed(0)
        model = cls(config).float().eval().requires_grad_(False)
        _fill(model)
        return model
    except (NotTiny, TimeoutError):
        raise
    except Exception as error:  # anything may go wrong in a configuration that nobody has thought of
        raise NotTiny(short(error)) from error


def _fill(model: Any) -> None:
    """Give weights that start at zero something to do: behind them a mistake would not show."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.any():
            parameter.normal_(std=0.1)


def short(error: BaseException) -> str:
    """The message in a line; the last says most where a configuration's validator wraps another error."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1] if "Validation" in type(error).__name__ else lines[0]
    return f"{type(error).__name__}: {line.strip()[:140]}"
