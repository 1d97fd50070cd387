"""Language models that hear: clips of audio in the place of placeholder tokens in the prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from tiny_models import language_models
from tiny_models.registry import (
    FIRST_PLACEHOLDER,
    SPECIAL,
    START,
    configures,
    feeds,
    padded,
    words,
)
from tiny_models.speech import MELS, WAVES, Batch, Batches, clips, cut, sizes, valid

HEAR, OPEN, CLOSE = FIRST_PLACEHOLDER, FIRST_PLACEHOLDER + 1, FIRST_PLACEHOLDER + 2
FRAMES = 32  # of a window of Whisper's encoder, 3000 in its checkpoints
HOP = 16  # samples of a token of VibeVoice
TEXT = dict(language_models.TEXT, head_dim=8, max_position_embeddings=128)
SIZES = sizes()
WHISPER = dict(SIZES, num_mel_bins=MELS, max_source_positions=FRAMES // 2)
QWEN = dict(
    d_model=32,
    encoder_layers=2,
    encoder_attention_heads=4,
    encoder_ffn_dim=48,
    num_mel_bins=MELS,
    initializer_range=0.3,
)


# ------------------------------------------------------------------------------------------------ configurations
@configures("AudioFlamingo3ForConditionalGeneration")
def audio_flamingo() -> Any:
    return transformers.AudioFlamingo3Config(audio_config=dict(WHISPER), text_config=dict(TEXT), audio_token_id=HEAR)


@configures("MusicFlamingoForConditionalGeneration")
def music_flamingo() -> Any:
    return transformers.MusicFlamingoConfig(
        audio_config=dict(WHISPER, model_type="audioflamingo3_encoder"),
        text_config=dict(TEXT),
        audio_token_id=HEAR,
        audio_bos_token_id=OPEN,
        audio_eos_token_id=CLOSE,
    )


@configures("GlmAsrForConditionalGeneration")
def glm() -> Any:
    # Four frames are joined, and the width of the feed-forward layers is what that gives.
    encoder = dict(SIZES, intermediate_size=128, num_mel_bins=MELS, max_position_embeddings=FRAMES // 2)
    return transformers.GlmAsrConfig(audio_config=encoder, text_config=dict(TEXT), audio_token_id=HEAR)


@configures("VoxtralForConditionalGeneration")
def voxtral() -> Any:
    encoder = dict(WHISPER, intermediate_size=128)  # as in glm
    return transformers.VoxtralConfig(audio_config=encoder, text_config=dict(TEXT), audio_token_id=HEAR)


@configures("MossTranscribeDiarizeForConditionalGeneration")
def moss() -> Any:
    return transformers.MossTranscribeDiarizeConfig(
        audio_config=dict(WHISPER), text_config=dict(TEXT), audio_token_id=HEAR, audio_chunk_size=10 * FRAMES
    )


@configures("Qwen2AudioForConditionalGeneration")
def qwen2_audio() -> Any:
    encoder = dict(QWEN, max_source_positions=FRAMES // 2)
    return transformers.Qwen2AudioConfig(audio_config=encoder, text_config=dict(TEXT), audio_token_index=HEAR)


@configures("Qwen3ASRForConditionalGeneration")
def qwen3_asr() -> Any:
    encoder = dict(QWEN, output_dim=32, downsample_hidden_size=8, n_window_infer=100)
    return transformers.Qwen3ASRConfig(
        audio_config=encoder,
        text_config=dict(TEXT),
        audio_token_id=HEAR,
        timestamp_token_id=CLOSE + 1,
        initializer_range=0.3,
        **SPECIAL,
    )


@configures("FunAsrNanoForConditionalGeneration")
def fun_asr() -> Any:
    encoder = dict(
        SIZES,
        num_hidden_layers=3,
        num_timestamp_prediction_layers=1,
        num_mel_bins=MELS,
        num_stacked_frames=2,
        fsmn_kernel_size=3,
        max_position_embeddings=64,
    )
    adaptor = dict(hidden_size=32, num_attention_heads=4, intermediate_size=8, projector_hidden_size=48)
    return transformers.FunAsrNanoConfig(
        audio_config=encoder, adaptor_config=adaptor, text_config=dict(TEXT), audio_token_id=HEAR, initializer_range=0.3
    )


def granite(plus: bool) -> Any:
    encoder = dict(
        input_dim=MELS,
        num_layers=2,
        hidden_dim=32,
        num_heads=4,
        output_dim=10,
        context_size=8,
        max_pos_emb=16,
        conv_kernel_size=5,
        dropout=0.0,
    )
    options = dict(
        projector_config=dict(SIZES, encoder_hidden_size=64 if plus else 32, max_position_embeddings=64),
        text_config=dict(TEXT),
        audio_token_index=HEAR,
        initializer_range=0.3,
        has_lora_adapter=False,
        downsample_rate=3,
        window_size=6,
    )
    if plus:  # the projector reads the first layer too
        return transformers.GraniteSpeechPlusConfig(encoder_config=dict(encoder, cat_hidden_layers=[1]), **options)
    return transformers.GraniteSpeechConfig(encoder_config=encoder, **options)


configures("GraniteSpeechForConditionalGeneration")(lambda: granite(plus=False))
configures("GraniteSpeechPlusForConditionalGeneration")(lambda: granite(plus=True))


@configures("Nemotron3_5TranscribeForConditionalGeneration")
def nemotron() -> Any:
    encoder = dict(SIZES, num_mel_bins=MELS, subsampling_factor=4, max_position_embeddings=64)
    speakers = dict(num_speakers=2, subsampling_factor=4)
    text = dict(
        TEXT,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    )
    del text["num_hidden_layers"]  # the list of layers says it
    return transformers.Nemotron3_5TranscribeConfig(
        audio_config=dict(
            asr_config=encoder,
            diarization_config=dict(
                audio_config=dict(encoder),
                head_config=dict(speakers, hidden_size=16, audio_hidden_size=32),
                streaming_config=dict(speakers),
            ),
        ),
        text_config=text,
        word_timestamp_config=dict(SIZES, vocab_size=20, blank_token_id=19, max_position_embeddings=64),
        audio_token_id=HEAR,
    )


@configures("OmniASRForConditionalGeneration")
def omni_asr() -> Any:
    return transformers.OmniASRConfig(
        audio_config=dict(SIZES, **WAVES), text_config=dict(TEXT), audio_token_id=HEAR, initializer_range=0.3, **SPECIAL
    )


def tokenizer(width: int) -> dict[str, Any]:
    """Options of VibeVoice's tiny encoder of sounds; its noise is off, for results that can be repeated."""
    return dict(
        hidden_size=width,
        num_filters=4,
        downsampling_ratios=[4, 4],
        depths=[1, 1, 1],
        layer_scale_init_value=0.5,
        initializer_range=0.3,
        vae_std=0.0,
    )


@configures("VibeVoiceAsrForConditionalGeneration")
def vibevoice_asr() -> Any:
    return transformers.VibeVoiceAsrConfig(
        acoustic_tokenizer_encoder_config=tokenizer(16),
        semantic_tokenizer_encoder_config=tokenizer(24),
        text_config=dict(TEXT),
        audio_token_id=HEAR,
        audio_bos_token_id=OPEN,
        audio_eos_token_id=CLOSE,
        acoustic_tokenizer_chunk_size=4 * HOP,
    )


@configures("VoxtralRealtimeForConditionalGeneration")
def voxtral_realtime() -> Any:
    encoder = dict(SIZES, head_dim=8, num_mel_bins=MELS, max_position_embeddings=64, sliding_window=6)
    return transformers.VoxtralRealtimeConfig(
        audio_config=encoder, text_config=dict(TEXT, sliding_window=6), default_num_delay_tokens=6
    )


# ------------------------------------------------------------------------------------------------ inputs
def prompts(counts: list[list[int]], tails: tuple[int, ...], marked: bool, ending: list[int]) -> Batch:
    """Texts with so many placeholders for each clip, and so many words after the last one."""
    rows = []
    for number, (sentence, tail) in enumerate(zip(counts, tails, strict=True)):
        text = words(1, tail + 2 * len(sentence), seed=number + 1)[0].tolist()
        row = [START]
        for count in sentence:
            heard = [HEAR] * count
            row += [text.pop(), text.pop(), *([OPEN, *heard, CLOSE] if marked else heard)]
        rows.append(row + text + ending)
    return padded(rows)


def listener(
    audio: Callable[[list[int]], Batch],
    count: Callable[[int], int],
    window: int,
    *,
    marked: bool = False,
    long: bool = False,
    several: bool = False,
    ending: list[int] | None = None,
) -> Callable[[Any], Batches]:
    """A source of clips in prompts.

    `audio` makes the tensors of clips of these lengths, and `count` says how many tokens stand for one. Some models
    take clips that are `long`er than a window, some `several` in a sentence or none beside other sentences' ones.
    """

    def batch(lengths: list[list[int]], *tails: int) -> Batch:
        counts = [[count(length) for length in sentence] for sentence in lengths]
        return {
            **prompts(counts, tails, marked, ending or []),
            **audio([length for sentence in lengths for length in sentence]),
        }

    def batches(model: Any) -> Batches:
        full, half, third = cut(window)
        found = [
            ("a clip each", batch([[full], [full]], 3, 3)),
            ("clips and prompts of different lengths", batch([[full], [half], [third]], 2, 5, 3)),
        ]
        if long:
            found.append(("a clip of two windows", batch([[full + half], [third]], 2, 4)))
        if several:
            found.append(("two clips in one sentence", batch([[full, half], [third]], 2, 4)))
            found.append(("a sentence without a clip", batch([[half], []], 2, 5)))
        return found

    return batches


def windows(mask: str | None) -> Callable[[list[int]], Batch]:
    """Spectrograms as Whisper's encoder takes them: cut and padded to windows, with a mask under this name."""

    def audio(lengths: list[int]) -> Batch:
        parts = [min(FRAMES, length - start) for length in lengths for start in range(0, length, FRAMES)]
        batch: Batch = {"input_features": clips(parts, FRAMES, MELS).mT.contiguous()}
        return {**batch, mask: valid(parts, FRAMES)} if mask else batch

    return audio


def frames(bins: int, multiple: int = 1) -> Callable[[list[int]], Batch]:
    """Spectrograms padded to the longest, a frame after the other."""

    def audio(lengths: list[int]) -> Batch:
        longest = -(-max(lengths) // multiple) * multiple
        mask = valid(lengths, longest)
        return {"input_features": clips(lengths, longest, bins), "input_features_mask": mask}

    return audio


def samples(lengths: list[int]) -> Batch:
    """Waveforms padded to the longest."""
    longest = max(lengths)
    return {"input_values": clips(lengths, longest)[:, None], "padding_mask": valid(lengths, longest)}


def moss_audio(lengths: list[int]) -> Batch:
    """Windows, and the samples of each whole clip."""
    waves = [10 * length for length in lengths]
    return {**windows("input_features_mask")(lengths), "padding_mask": valid(waves, max(waves))}


def qwen3_audio(lengths: list[int]) -> Batch:
    """Spectrograms in seconds of 100 frames."""
    batch = frames(MELS, 100)(lengths)
    return {**batch, "input_features": batch["input_features"].mT.contiguous()}


def granite_audio(lengths: list[int]) -> Batch:
    """Spectrograms, and a mask of what the projector makes of them."""
    counts = [granite_count(length) for length in lengths]
    return {**frames(MELS)(lengths), "input_features_mask": valid(counts, max(counts)).bool()}


def granite_count(length: int) -> int:
    return math.ceil(length / 6) * 2


def halved(length: int, times: int) -> int:
    """Frames after so many convolutions of stride two."""
    return halved((length - 1) // 2 + 1, times - 1) if times else length


def pooled(length: int) -> int:
    """Frames after Whisper's convolutions and a pooling over two."""
    return (halved(length, 1) - 2) // 2 + 1


def joined(length: int) -> int:
    """Frames after Whisper's convolutions, four of them joined."""
    return (halved(length, 1) - 4) // 4 + 1


def moss_count(length: int) -> int:
    parts = [min(FRAMES, length - start) for start in range(0, length, FRAMES)]
    return sum(math.ceil(halved(part, 1) / 4) for part in parts)


feeds("AudioFlamingo3ForConditionalGeneration")(listener(windows("input_features_mask"), pooled, FRAMES, long=True))
feeds("MusicFlamingoForConditionalGeneration")(
    listener(windows("input_features_mask"), pooled, FRAMES, marked=True, long=True)
)
feeds("GlmAsrForConditionalGeneration")(
    listener(windows("input_features_mask"), joined, FRAMES, marked=True, long=True)
)
feeds("Qwen2AudioForConditionalGeneration")(
    listener(windows("feature_attention_mask"), pooled, FRAMES, marked=True, several=True)
)
feeds("VoxtralForConditionalGeneration")(
    listener(windows(None), lambda length: 4 * math.ceil(length / FRAMES), FRAMES, marked=True, long=True, several=True)
)
feeds("MossTranscribeDiarizeForConditionalGeneration")(listener(moss_audio, moss_count, FRAMES, marked=True, long=True))
feeds("Qwen3ASRForConditionalGeneration")(
    listener(qwen3_audio, lambda n: 13 * (n // 100) + halved(n % 100, 3), 100, marked=True, long=True)
)
feeds("FunAsrNanoForConditionalGeneration")(listener(frames(2 * MELS), lambda length: length, 8))
feeds("GraniteSpeechForConditionalGeneration", "GraniteSpeechPlusForConditionalGeneration")(
    listener(granite_audio, granite_count, 16, several=True)
)
feeds("Nemotron3_5TranscribeForConditionalGeneration")(listener(frames(MELS, 4), lambda n: math.ceil(n / 4), 32))
feeds("OmniASRForConditionalGeneration")(
    listener(samples, lambda length: ((length - 8) // 8 + 1 - 4) // 4 + 1, 256, ending=[START])
)
feeds("VibeVoiceAsrForConditionalGeneration")(
    listener(samples, lambda length: math.ceil(length / HOP), 8 * HOP, marked=True)
)


@feeds("VoxtralRealtimeForConditionalGeneration")
def dictation(model: Any) -> Batches:
    def batch(lengths: list[int]) -> Batch:
        # A prompt stands for the silence before the speech; each token hears the next 8 frames.
        prompt = torch.tensor([[START, *[HEAR] * 5]] * len(lengths))
        features: Tensor = clips(lengths, 128, MELS).mT.contiguous()
        return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "input_features": features}

    return [
        ("a clip each", batch([128, 128])),
        ("clips of different lengths", batch(cut(128))),
        ("a delay of two tokens", {**batch([128, 128]), "num_delay_tokens": 2}),
    ]
