"""Models that write or read sounds: the codes of a codec, and tokens that stand for the next sound."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from tiny_models.audio_language_models import CLOSE, HEAR, HOP, OPEN, TEXT, listener, samples, tokenizer
from tiny_models.registry import PAD, SPECIAL, UNUSED, VOCABULARY, configures, feeds, noise, padded, words
from tiny_models.speech import Batches, clips, cut, sizes, valid

CODEBOOKS, CODES = 4, 16  # of the tiny codec


# ------------------------------------------------------------------------------------------------ configurations
def codec() -> dict[str, Any]:
    """Options of a tiny Mimi: 8 samples a frame."""
    return dict(
        model_type="mimi",
        hidden_size=32,
        num_filters=8,
        upsampling_ratios=[2, 2],
        codebook_size=CODES,
        codebook_dim=16,
        vector_quantization_hidden_dimension=16,
        num_quantizers=CODEBOOKS,
        upsample_groups=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        sliding_window=16,
    )


DECODER = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    ffn_dim=48,
    num_codebooks=CODEBOOKS,
    initializer_range=0.3,
)


@configures("KyutaiSpeechToTextForConditionalGeneration")
def kyutai() -> Any:
    return transformers.KyutaiSpeechToTextConfig(
        codec_config=codec(),
        codebook_vocab_size=CODES + 1,
        audio_bos_token_id=CODES,
        audio_pad_token_id=VOCABULARY + CODEBOOKS * (CODES + 1),  # the last of the joint table
        max_position_embeddings=64,
        sliding_window=6,
        **DECODER,
        **SPECIAL,
    )


@configures("MoshiForCausalLM")
def moshi() -> Any:
    return transformers.MoshiConfig(
        audio_encoder_config=codec(),
        depth_decoder_config=dict(DECODER, max_position_embeddings=CODEBOOKS + 1, sliding_window=CODEBOOKS),
        max_position_embeddings=64,
        sliding_window=6,
        **DECODER,
        **SPECIAL,
    )


# These three sample, or take the best token: they refuse beams.
def sounds(config: str) -> Any:
    """Its padding is the token after the codes, and stands for the start too."""
    return getattr(transformers, config)(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_codebooks=CODEBOOKS,
        max_position_embeddings=64,
        initializer_factor=0.3,
        pad_token_id=VOCABULARY,
        bos_token_id=VOCABULARY,
    )


configures("MusicgenForCausalLM")(lambda: sounds("MusicgenDecoderConfig"))
configures("MusicgenMelodyForCausalLM")(lambda: sounds("MusicgenMelodyDecoderConfig"))


@configures("DiaForConditionalGeneration")
def dia() -> Any:
    options = dict(sizes(), vocab_size=VOCABULARY, num_key_value_heads=4, head_dim=8, max_position_embeddings=64)
    decoder = dict(
        options,
        cross_num_attention_heads=4,
        cross_num_key_value_heads=4,
        cross_head_dim=8,
        cross_hidden_size=32,
        num_channels=3,
        **SPECIAL,
    )
    return transformers.DiaConfig(encoder_config=options, decoder_config=decoder, delay_pattern=[0, 1, 2])


@configures("VibeVoiceForConditionalGeneration")
def vibevoice() -> Any:
    return transformers.VibeVoiceConfig(
        audio_config=tokenizer(16),
        semantic_model_config=tokenizer(24),
        text_config=dict(TEXT),
        diffusion_head_config=dict(num_hidden_layers=2, intermediate_size=48, frequency_embedding_size=16),
        pad_token_id=PAD,
        eos_token_id=UNUSED,
        audio_token_id=HEAR,
        audio_bos_token_id=OPEN,
        audio_eos_token_id=CLOSE,
    )


# ------------------------------------------------------------------------------------------------ inputs
@feeds("KyutaiSpeechToTextForConditionalGeneration")
def streams(model: Any) -> Batches:
    # A codec that has not been trained has empty codebooks, and gives all sounds the same code.
    for number, module in enumerate(model.codec_model.modules()):
        if hasattr(module, "embed_sum"):
            module.embed_sum.copy_(noise(*module.embed_sum.shape, seed=number))
            module._embed = None
    longest = 12 * model.config.frame_size
    lengths = cut(longest)
    return [
        ("two clips", {"input_values": clips([longest] * 2, longest)[:, None]}),
        (
            "clips of different lengths",
            {"input_values": clips(lengths, longest)[:, None], "padding_mask": valid(lengths, longest)},
        ),
    ]


@feeds("MoshiForCausalLM")
def monologue(model: Any) -> Batches:
    prompts = words(2, 8)
    ragged = padded([words(1, length, seed=length)[0].tolist() for length in (3, 9, 6)])
    # In the whole model each step is a word with the codes of what is heard and said: the sum of their embeddings.
    spoken = model.get_input_embeddings()(prompts) + noise(2, 8, model.config.hidden_size) * 0.3
    return [
        ("text", {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}),
        ("padded prompts", ragged),
        ("embedded speech", {"inputs_embeds": spoken.detach()}),
    ]


@feeds("MusicgenForCausalLM", "MusicgenMelodyForCausalLM")
def codes(model: Any) -> Batches:
    config, settings = model.config, model.generation_config
    settings.decoder_start_token_id, settings.eos_token_id = config.bos_token_id, None  # as the checkpoints say
    settings.num_return_sequences = 1  # without it Musicgen's own `generate` fails
    # A row for each codebook of each piece; masks have one for each piece.
    start = {"input_ids": torch.full((2 * config.num_codebooks, 1), config.bos_token_id)}
    start["attention_mask"] = torch.ones(2, 1).long()
    texts = {"encoder_hidden_states": clips([5, 3], 5, config.hidden_size), "encoder_attention_mask": valid([5, 3], 5)}
    found = [("two pieces", start)]
    if "Melody" in type(model).__name__:  # Musicgen's own cache mixes up what it has said and what it is told
        found.append(("what two texts say", {**start, **texts}))
    return found


@feeds("DiaForConditionalGeneration")
def dialogues(model: Any) -> Batches:
    delays, decoder = model.config.delay_pattern, model.config.decoder_config
    # Each channel starts later than the one before; where there is padding the model may write.
    start, free = decoder.bos_token_id, decoder.pad_token_id
    channels = torch.tensor([[start] * (1 + delay) + [free] * (max(delays) - delay) for delay in delays])
    spoken = {"decoder_input_ids": channels.T.repeat(2, 1, 1), "decoder_attention_mask": valid([3, 3], 3)}
    texts, mask = words(2, 7), valid([7, 4], 7)
    ragged = {"input_ids": texts.where(mask.bool(), 0), "attention_mask": mask}
    return [
        ("two texts", {"input_ids": texts, "attention_mask": torch.ones_like(texts), **spoken}),
        ("texts of different lengths", {**ragged, **spoken}),
    ]


class Noise:
    """What takes noise away from sounds, in two steps; the checkpoints have one of another library."""

    timesteps = torch.tensor([2, 1])

    def set_timesteps(self, num_inference_steps: int) -> None:
        pass

    def step(self, noise: Tensor, timestep: Tensor, sounds: Tensor) -> SimpleNamespace:
        return SimpleNamespace(prev_sample=sounds - 0.1 * noise)


@feeds("VibeVoiceForConditionalGeneration")
def voices(model: Any) -> Batches:
    model.generation_config.noise_scheduler = Noise()
    source = listener(
        samples, lambda length: math.ceil(length / HOP), 8 * HOP, marked=True, several=True, ending=[OPEN]
    )
    return source(model)
