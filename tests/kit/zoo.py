"""Tiny random models of every family, in float32, and inputs for them.

Weights are drawn wide enough that beams cross each other all the time. Which token ends a sentence is then
chosen by looking at the stock search: the one that ends hypotheses at many different steps (`_choose_eos`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from transformers.models.fsmt.modeling_fsmt import SinusoidalPositionalEmbedding

from fastgen.optimizer.transformers.versions import CACHE_LENGTH

MAJOR = int(transformers.__version__.split(".")[0])
VOCAB = 61
START, PAD, UNUSED = 2, 1, 3  # UNUSED stands in as eos where a config insists on one
FIRST_WORD = 5  # ids below are special

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    name: str
    build: Callable[[], Any]
    inputs: Callable[..., Inputs]
    expected: str = "accelerated"  # or "rows" of the host's cache, or "fallback"
    generate: dict[str, Any] = field(default_factory=dict)  # generate() arguments the family needs


def _get(name: str) -> Any:
    return getattr(transformers, name)


# ---------------------------------------------------------------------------------------------- configurations
SPECIAL = dict(pad_token_id=PAD, bos_token_id=0, eos_token_id=UNUSED)
ENCODER_DECODER = dict(
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    vocab_size=VOCAB,
    max_position_embeddings=64,
    init_std=0.4,
    decoder_start_token_id=START,
    forced_eos_token_id=None,
    **SPECIAL,
)
T5 = dict(
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    vocab_size=VOCAB,
    decoder_start_token_id=PAD,
    initializer_factor=1.5,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
    pad_token_id=PAD,
    eos_token_id=UNUSED,
)
CAUSAL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    initializer_range=0.4,
    **SPECIAL,
)
GROUPED = dict(CAUSAL, num_key_value_heads=2, head_dim=8)
GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.4, **SPECIAL)
VIT = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    image_size=16,
    patch_size=4,
    initializer_range=0.2,
)
AS_DECODER = dict(is_decoder=True, add_cross_attention=True)


def _model(cls: str, config: str, base: dict[str, Any], **options: Any) -> Callable[[], Any]:
    return lambda: _get(cls)(_get(config)(**{**base, **options}))


def _pair(cls: str, encoder: Callable[[], Any], decoder: Callable[[], Any]) -> Callable[[], Any]:
    def build() -> Any:
        model = _get(cls)(encoder=encoder(), decoder=decoder())
        for settings in (model.config, model.generation_config):
            settings.decoder_start_token_id, settings.pad_token_id = START, PAD
        return model

    return build


def _whisper() -> Any:
    options = dict(num_mel_bins=8, max_source_positions=12, max_target_positions=64, begin_suppress_tokens=None)
    model = _model("WhisperForConditionalGeneration", "WhisperConfig", ENCODER_DECODER, **options)()
    # Whisper's own `generate` reads these: the last 24 ids are time stamps of 0.02 s
    model.generation_config.no_timestamps_token_id = VOCAB - 25
    model.generation_config.is_multilingual = False
    model.generation_config.return_timestamps = False
    model.generation_config.max_initial_timestamp_index = 5
    return model


# ---------------------------------------------------------------------------------------------- inputs
def _lengths(batch: int, length: int, ragged: bool) -> list[int]:
    return [max(1, length - (3 * row) % 7) if ragged else length for row in range(batch)]


def text(
    model: Any,
    seed: int = 0,
    batch: int = 3,
    length: int = 9,
    padding: str | None = None,
    ragged: bool = True,
) -> Inputs:
    """Ragged token ids; decoder-only models are padded on the left unless told otherwise."""
    padding = padding or ("right" if model.config.is_encoder_decoder else "left")
    generator = torch.Generator().manual_seed(seed + 7)
    ids = torch.randint(FIRST_WORD, VOCAB - 1, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, used in enumerate(_lengths(batch, length, ragged)):
        unused = slice(0, length - used) if padding == "left" else slice(used, length)
        mask[row, unused] = 0
    pad = model.generation_config.pad_token_id
    return dict(input_ids=ids.masked_fill(mask == 0, PAD if pad is None else pad), attention_mask=mask)


def features(model: Any, seed: int = 0, batch: int = 3, length: int = 24, **_: Any) -> Inputs:
    generator = torch.Generator().manual_seed(seed + 7)
    return dict(input_features=torch.randn(batch, 8, length, generator=generator))


def speech(model: Any, seed: int = 0, batch: int = 3, length: int = 32, **_: Any) -> Inputs:
    generator = torch.Generator().manual_seed(seed + 7)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - 12 :] = 0
    return dict(input_features=torch.randn(batch, length, 8, generator=generator), attention_mask=mask)


def pixels(model: Any, seed: int = 0, batch: int = 3, **_: Any) -> Inputs:
    generator = torch.Generator().manual_seed(seed + 7)
    return dict(pixel_values=torch.randn(batch, 3, 16, 16, generator=generator))


# ---------------------------------------------------------------------------------------------- families
def _families() -> list[Family]:
    bart = functools.partial(_model, "BartForConditionalGeneration", "BartConfig", ENCODER_DECODER)
    bert = dict(CAUSAL)
    vit = _model("ViTModel", "ViTConfig", VIT)
    bert_encoder = _model("BertModel", "BertConfig", bert)
    bert_decoder = _model("BertLMHeadModel", "BertConfig", bert, **AS_DECODER)
    calmer_bert = _model("BertLMHeadModel", "BertConfig", bert, **AS_DECODER, initializer_range=0.35)  # for pixels
    gpt2_decoder = _model("GPT2LMHeadModel", "GPT2Config", GPT2, add_cross_attention=True)
    windows = ["sliding_attention", "full_attention"]
    return [
        Family("bart", bart(), text),
        Family("bart_eager", bart(attn_implementation="eager"), text),
        Family("bart_distilled", bart(encoder_layers=4), text),
        Family("mbart", _model("MBartForConditionalGeneration", "MBartConfig", ENCODER_DECODER), text),
        Family("marian", _model("MarianMTModel", "MarianConfig", ENCODER_DECODER, pad_token_id=VOCAB - 1), text),
        Family("m2m_100", _model("M2M100ForConditionalGeneration", "M2M100Config", ENCODER_DECODER), text),
        Family("pegasus", _model("PegasusForConditionalGeneration", "PegasusConfig", ENCODER_DECODER), text),
        Family("blenderbot", _model("BlenderbotForConditionalGeneration", "BlenderbotConfig", ENCODER_DECODER), text),
        Family("t5", _model("T5ForConditionalGeneration", "T5Config", T5), text),
        Family("mt5", _model("MT5ForConditionalGeneration", "MT5Config", T5, initializer_factor=1.3), text),
        Family("umt5", _model("UMT5ForConditionalGeneration", "UMT5Config", T5, initializer_factor=1.3), text),
        Family("whisper", _whisper, features, generate=dict(decoder_input_ids=torch.full((3, 1), START))),
        Family(
            "speech_to_text",
            _model(
                "Speech2TextForConditionalGeneration",
                "Speech2TextConfig",
                ENCODER_DECODER,
                input_feat_per_channel=8,
                conv_channels=16,
                max_source_positions=64,
                max_target_positions=64,
                num_conv_layers=2,
                conv_kernel_sizes=[3, 3],
                input_channels=1,
            ),
            speech,
        ),
        Family("bert2bert", _pair("EncoderDecoderModel", bert_encoder, bert_decoder), text),
        Family("bert2gpt2", _pair("EncoderDecoderModel", bert_encoder, gpt2_decoder), text),
        Family(
            "bert_generation",
            _pair(
                "EncoderDecoderModel",
                _model("BertGenerationEncoder", "BertGenerationConfig", bert),
                _model("BertGenerationDecoder", "BertGenerationConfig", bert, **AS_DECODER),
            ),
            text,
        ),
        Family(
            "trocr",
            _pair(
                "VisionEncoderDecoderModel",
                vit,
                _model(
                    "TrOCRForCausalLM",
                    "TrOCRConfig",
                    SPECIAL,
                    vocab_size=VOCAB,
                    d_model=32,
                    decoder_layers=2,
                    decoder_attention_heads=4,
                    decoder_ffn_dim=48,
                    max_position_embeddings=64,
                    init_std=0.4,
                    cross_attention_hidden_size=32,
                ),
            ),
            pixels,
        ),
        Family("vit2gpt2", _pair("VisionEncoderDecoderModel", vit, gpt2_decoder), pixels),
        Family("vit2bert", _pair("VisionEncoderDecoderModel", vit, calmer_bert), pixels),
        Family(
            "led",
            _model(
                "LEDForConditionalGeneration",
                "LEDConfig",
                ENCODER_DECODER,
                attention_window=4,
                max_encoder_position_embeddings=64,
                max_decoder_position_embeddings=64,
            ),
            text,
        ),
        Family("gpt2", _model("GPT2LMHeadModel", "GPT2Config", GPT2), text),
        Family(
            "opt", _model("OPTForCausalLM", "OPTConfig", CAUSAL, ffn_dim=48, word_embed_proj_dim=32, init_std=0.4), text
        ),
        Family("gpt_neox", _model("GPTNeoXForCausalLM", "GPTNeoXConfig", CAUSAL), text),
        Family("llama", _model("LlamaForCausalLM", "LlamaConfig", GROUPED), text),
        Family("olmo", _model("OlmoForCausalLM", "OlmoConfig", CAUSAL), text),
        Family("qwen3", _model("Qwen3ForCausalLM", "Qwen3Config", GROUPED), text),
        Family("phi3", _model("Phi3ForCausalLM", "Phi3Config", CAUSAL, num_key_value_heads=2), text),
        Family("gemma", _model("GemmaForCausalLM", "GemmaConfig", GROUPED), text),
        Family(
            "gemma2",
            _model(
                "Gemma2ForCausalLM",
                "Gemma2Config",
                GROUPED,
                sliding_window=4,
                query_pre_attn_scalar=8,
                attn_logit_softcapping=5.0,
                attn_implementation="eager",
            ),
            text,
        ),
        Family(
            "gpt_oss",
            _model(
                "GptOssForCausalLM",
                "GptOssConfig",
                GROUPED,
                num_local_experts=2,
                num_experts_per_tok=1,
                sliding_window=4,
                layer_types=windows,
                attn_implementation="eager",
            ),
            text,
        ),
        Family("mistral", _model("MistralForCausalLM", "MistralConfig", GROUPED, sliding_window=4), text),
        Family(
            "prophetnet",
            _model(
                "ProphetNetForConditionalGeneration",
                "ProphetNetConfig",
                {},
                vocab_size=VOCAB,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=UNUSED,
                hidden_size=32,
                encoder_ffn_dim=48,
                decoder_ffn_dim=48,
                num_encoder_layers=2,
                num_decoder_layers=2,
                num_encoder_attention_heads=4,
                num_decoder_attention_heads=4,
                max_position_embeddings=64,
                num_buckets=8,
                relative_max_distance=12,
                decoder_start_token_id=START,
                init_std=0.4,
            ),
            text,
        ),
        Family(
            "fsmt",
            _model(
                "FSMTForConditionalGeneration",
                "FSMTConfig",
                ENCODER_DECODER,
                langs=["a", "b"],
                src_vocab_size=VOCAB,
                tgt_vocab_size=VOCAB,
                tie_word_embeddings=False,
            ),
            text,
        ),
    ]


FAMILIES: dict[str, Family] = {family.name: family for family in _families()}
# Of families above, with a key head for each query head: what slim caches of keys alone need.
MULTI_HEAD = dict(CAUSAL, num_key_value_heads=4)
VARIANTS: dict[str, Family] = {
    "llama_multi_head": Family("llama_multi_head", _model("LlamaForCausalLM", "LlamaConfig", MULTI_HEAD), text),
    "llama_biased": Family(
        "llama_biased", _model("LlamaForCausalLM", "LlamaConfig", MULTI_HEAD, attention_bias=True), text
    ),
    "phi3_multi_head": Family("phi3_multi_head", _model("Phi3ForCausalLM", "Phi3Config", MULTI_HEAD), text),
    "phi3_partly_rotary": Family(
        "phi3_partly_rotary",
        _model("Phi3ForCausalLM", "Phi3Config", MULTI_HEAD, partial_rotary_factor=0.5),
        text,
    ),
    # Keys hold more numbers than the layer's input, as CodeGemma's do.
    "gemma_wide": Family("gemma_wide", _model("GemmaForCausalLM", "GemmaConfig", MULTI_HEAD, head_dim=16), text),
    "t5_wide": Family("t5_wide", _model("T5ForConditionalGeneration", "T5Config", T5, d_kv=16), text),
}
# Attention written out in the module, so that each beam has a row of the host's own cache.
BLOOM = dict(SPECIAL, vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
FALCON = dict(BLOOM, alibi=False, num_hidden_layers=2, num_attention_heads=4, bos_token_id=START)
BY_ROWS = {
    "bloom": Family("bloom", _model("BloomForCausalLM", "BloomConfig", BLOOM), text),
    "falcon": Family("falcon", _model("FalconForCausalLM", "FalconConfig", FALCON), text),
    "mvp": Family("mvp", _model("MvpForConditionalGeneration", "MvpConfig", ENCODER_DECODER), text),
}
# Recurrent states, one row per beam, beside attention on the tree.
MAMBA = dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=4, mamba_n_groups=1)
DELTA = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
EXPERTS = dict(moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
MIXED_LAYERS = ["linear_attention", "full_attention"]
HYBRIDS = {
    "qwen3_next": Family(
        "qwen3_next",
        _model("Qwen3NextForCausalLM", "Qwen3NextConfig", GROUPED, **DELTA, **EXPERTS, layer_types=MIXED_LAYERS),
        text,
    ),
    "falcon_h1": Family("falcon_h1", _model("FalconH1ForCausalLM", "FalconH1Config", GROUPED, **MAMBA), text),
    "lfm2": Family(
        "lfm2",
        _model(
            "Lfm2ForCausalLM",
            "Lfm2Config",
            GROUPED,
            layer_types=["conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
        ),
        text,
    ),
}
VARIANTS |= BY_ROWS | HYBRIDS
# transformers 4.57 asks nobody for eager attention, and T5's and Bert's are written out in their modules.
if MAJOR < 5:
    for name in """bart_eager bert2bert bert2gpt2 bert_generation fsmt gemma2 gpt_oss led mt5 prophetnet
            speech_to_text t5 trocr umt5 vit2bert""".split():
        FAMILIES[name] = replace(FAMILIES[name], expected="fallback")
# Before 5.23 or so it reads all tokens again in each step, for their positions.
elif CACHE_LENGTH not in inspect.signature(SinusoidalPositionalEmbedding.forward).parameters:
    FAMILIES["fsmt"] = replace(FAMILIES["fsmt"], expected="rows")
ACCELERATED = [name for name, family in FAMILIES.items() if family.expected == "accelerated"]
FALLBACK = [name for name, family in FAMILIES.items() if family.expected == "fallback"]
DECODERS = "gpt2 opt gpt_neox llama qwen3 phi3 gemma gemma2 gpt_oss mistral".split()  # whose prompt is the source


def _roughen(model: Any) -> None:
    """Give norms and biases, which start at one and zero, something to do."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def _choose_eos(family: Family, model: Any) -> bool:
    """Let a token end sentences at which the stock search ends hypotheses at three different steps or more."""
    inputs = {**family.inputs(model, seed=0), **family.generate}
    options: dict[str, Any] = dict(num_beams=4, num_return_sequences=4, max_new_tokens=16)
    model.generation_config.eos_token_id = None
    endless = generate(model, inputs, **options)[:, -16:]
    spread = {token: _first_steps(endless == token) for token in range(FIRST_WORD, VOCAB - 1)}
    for token in sorted(spread, key=lambda token: -len(spread[token]))[:6]:
        model.generation_config.eos_token_id = token
        output = generate(model, inputs, return_dict_in_generate=True, **options)
        steps = finishing_steps(output)
        if len(set(steps)) >= 3 and max(steps) == 16 and crossings(output, 4) >= 5:
            return True
    return False


def _first_steps(hit: torch.Tensor) -> set[int]:
    return {int(row.nonzero()[0]) for row in hit if row.any()}


def finishing_steps(output: Any) -> list[int]:
    """Tokens generated in each returned hypothesis."""
    return (output.beam_indices >= 0).sum(1).tolist()


def crossings(output: Any, beams: int) -> int:
    """How often the returned hypotheses change beams."""
    parents = output.beam_indices % beams
    return int(((parents[:, 1:] != parents[:, :-1]) & (output.beam_indices[:, 1:] >= 0)).sum())


def generate(model: Any, inputs: Inputs, **options: Any) -> Any:
    """`model.generate`, but Whisper's own (tested apart) rewrites inputs and outputs: call what it builds on."""
    if model.config.model_type == "whisper":
        return transformers.GenerationMixin.generate(model, **inputs, **options)
    return model.generate(**inputs, **options)


_shared: dict[str, Any] = {}


def load(name: str) -> Any:
    """The family's model: built once, shared by all tests, which must leave it as it was."""
    if name not in _shared:
        _shared[name] = fresh(name)
    return _shared[name]


def forget_hooked() -> list[str]:
    """Share no longer the models that a test has left with hooks, and name them: no step of a hooked model is kept."""
    found = [
        name
        for name, model in _shared.items()
        if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    ]
    for name in found:
        del _shared[name]
    return found


def fresh(name: str) -> Any:
    """The family's model as nobody has called it: the host leaves hooks on one that was asked for attentions."""
    import fastgen

    family = FAMILIES.get(name) or VARIANTS[name]
    with torch.random.fork_rng(devices=[]), fastgen.disabled():
        for seed in range(8):
            torch.manual_seed(seed)
            model = family.build().eval().requires_grad_(False)
            _roughen(model)
            if _choose_eos(family, model):
                return model
    raise AssertionError(f"no seed gives a {name} whose beams cross and whose sentences end at different steps")


def inputs_for(name: str, seed: int = 0, **shape: Any) -> Inputs:
    return (FAMILIES.get(name) or VARIANTS[name]).inputs(load(name), seed=seed, **shape)
