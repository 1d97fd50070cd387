"""Speech recognition and spoken translation: models that encode one clip of each sentence and write its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from tiny_models.registry import (
    PAD,
    SPECIAL,
    START,
    UNUSED,
    VOCABULARY,
    configures,
    feeds,
    noise,
)

MELS = 8

Batch = dict[str, Any]
Batches = list[tuple[str, Batch]]


def valid(lengths: list[int], longest: int) -> Tensor:
    """Which frames or samples of padded clips belong to the clip, int64 `[clips, longest]`."""
    return (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()


def clips(lengths: list[int], longest: int, *bins: int) -> Tensor:
    """Clips of these lengths, float32 `[clips, longest, *bins]`, silent after their end."""
    mask = valid(lengths, longest)
    return noise(len(lengths), longest, *bins) * mask.reshape(*mask.shape, *[1] * len(bins))


def cut(longest: int) -> list[int]:
    """Three lengths, the longest first."""
    return [longest, longest * 5 // 8, longest * 3 // 8]


# ------------------------------------------------------------------------------------------------ configurations
def sizes(spread: float = 0.3) -> dict[str, Any]:
    """The options that most configurations have, with weights of this standard deviation."""
    return dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, initializer_range=spread
    )


PARTS = dict(
    vocab_size=VOCABULARY,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    decoder_start_token_id=START,
    **SPECIAL,
)
# Convolutions of waveforms, of Wav2Vec2 and its like: a frame for 32 samples.
WAVES = dict(
    conv_dim=(16, 16),
    conv_kernel=(8, 4),
    conv_stride=(8, 4),
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
)


@configures("CanaryForConditionalGeneration")
def canary() -> Any:
    encoder = dict(
        sizes(0.6), num_mel_bins=MELS, subsampling_conv_channels=8, conv_kernel_size=5, max_position_embeddings=64
    )
    decoder = dict(
        sizes(0.6), vocab_size=VOCABULARY, num_key_value_heads=4, head_dim=8, max_position_embeddings=64, **SPECIAL
    )
    return transformers.CanaryConfig(
        encoder_config=encoder,
        decoder_config=decoder,
        vocab_size=VOCABULARY,
        decoder_start_token_id=START,
        initializer_range=0.6,
        **SPECIAL,
    )


@configures("MoonshineForConditionalGeneration")
def moonshine() -> Any:
    parts = [f"{part}_num" for part in ("encoder", "decoder")]
    options = {f"{part}_hidden_layers": 2 for part in parts}
    # As many heads of keys as of queries: the model shapes its queries by the former.
    options |= {f"{part}_{kind}": 4 for part in parts for kind in ("attention_heads", "key_value_heads")}
    return transformers.MoonshineConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
        decoder_start_token_id=START,
        **options,
        **SPECIAL,
    )


@configures("MoonshineStreamingForConditionalGeneration")
def moonshine_streaming() -> Any:
    # The checkpoints say how many heads of keys there are, the class's own defaults do not.
    options = dict(sizes(), num_key_value_heads=4, max_position_embeddings=64)
    encoder = dict(options, sliding_windows=[[4, 1], [4, 0]])
    return transformers.MoonshineStreamingConfig(
        encoder_config=encoder, vocab_size=VOCABULARY, decoder_start_token_id=START, **options, **SPECIAL
    )


@configures("Pop2PianoForConditionalGeneration")
def pop2piano() -> Any:
    return transformers.Pop2PianoConfig(
        vocab_size=VOCABULARY,
        composer_vocab_size=3,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        initializer_factor=1.5,
        pad_token_id=PAD,
        eos_token_id=UNUSED,
        decoder_start_token_id=PAD,
    )


def seamless() -> dict[str, Any]:
    return dict(
        PARTS,
        hidden_size=32,
        speech_encoder_layers=2,
        speech_encoder_attention_heads=4,
        speech_encoder_intermediate_size=48,
        feature_projection_input_dim=2 * MELS,
        conv_depthwise_kernel_size=5,
        max_position_embeddings=64,
        max_source_positions=64,
        initializer_range=0.7,
        scale_embedding=False,  # else each token is followed by itself
    )


configures("SeamlessM4TForSpeechToText")(lambda: transformers.SeamlessM4TConfig(**seamless()))
configures("SeamlessM4Tv2ForSpeechToText")(lambda: transformers.SeamlessM4Tv2Config(**seamless()))


@configures("Speech2TextForConditionalGeneration")
def speech2text() -> Any:
    return transformers.Speech2TextConfig(
        **PARTS,
        d_model=32,
        input_feat_per_channel=MELS,
        conv_channels=16,
        max_source_positions=64,
        max_target_positions=64,
        init_std=0.5,
        scale_embedding=False,  # else each token is followed by itself
    )


@configures("SpeechT5ForSpeechToText")
def speecht5() -> Any:
    return transformers.SpeechT5Config(
        **PARTS,
        **WAVES,
        hidden_size=32,
        max_speech_positions=64,
        max_text_positions=64,
        encoder_max_relative_position=8,
        initializer_range=0.6,
    )


@configures("SpeechEncoderDecoderModel")
def wav2vec2_to_bert() -> Any:
    encoder = transformers.Wav2Vec2Config(**sizes(0.6), **WAVES)
    decoder = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes(0.6), **SPECIAL)
    return transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, decoder, decoder_start_token_id=START, **SPECIAL
    )


# ------------------------------------------------------------------------------------------------ inputs
def speaker(name: str, longest: int, *bins: int, rows_of_words: int = 0) -> Callable[[Any], Batches]:
    """A source of clips under this name, float32 `[clips, longest, *bins]`, with the start of the text if asked."""

    def batches(_: Any) -> Batches:
        def text(rows: int) -> Batch:
            # Decoders' prompts: languages and tasks, tokens that the smallest vocabulary has.
            prompt = [[START, *(5 + row + number for number in range(rows_of_words))] for row in range(rows)]
            return {"decoder_input_ids": torch.tensor(prompt)} if rows_of_words else {}

        lengths = cut(longest)
        ragged = {name: clips(lengths, longest, *bins), "attention_mask": valid(lengths, longest)}
        return [
            ("two clips", {name: clips([longest] * 2, longest, *bins), **text(2)}),
            ("clips of different lengths", {**ragged, **text(3)}),
        ]

    return batches


feeds("CanaryForConditionalGeneration", "CohereAsrForConditionalGeneration")(
    speaker("input_features", 64, MELS, rows_of_words=3)
)
feeds("MoonshineForConditionalGeneration")(speaker("input_values", 3200))
feeds("MoonshineStreamingForConditionalGeneration")(speaker("input_values", 80 * 16))
feeds("Speech2TextForConditionalGeneration")(speaker("input_features", 32, MELS))
feeds("SpeechEncoderDecoderModel")(speaker("input_values", 256))
feeds("SpeechT5ForSpeechToText")(speaker("input_values", 3200))


@feeds("SeamlessM4TForSpeechToText", "SeamlessM4Tv2ForSpeechToText")
def spoken_translation(model: Any) -> Batches:
    batches = speaker("input_features", 24, model.config.feature_projection_input_dim)(model)
    languages = torch.tensor([[6], [7], [6]])
    return [*batches, ("target languages", {**batches[1][1], "decoder_input_ids": languages})]


@feeds("WhisperForConditionalGeneration")
def whisper(model: Any) -> Batches:
    settings, vocabulary = model.generation_config, model.config.vocab_size
    # What the checkpoints' generation_config.json says: special tokens come after the words; no time stamps here.
    settings.no_timestamps_token_id = vocabulary - 1
    settings.task_to_id = {"transcribe": vocabulary - 2, "translate": vocabulary - 3}
    settings.lang_to_id = {"<|en|>": vocabulary - 4, "<|de|>": vocabulary - 5}
    settings.is_multilingual = True
    longest = 2 * model.config.max_source_positions
    spoken = {"input_features": clips([longest] * 2, longest, model.config.num_mel_bins).mT.contiguous()}
    lengths = cut(longest)
    ragged = {
        "input_features": clips(lengths, longest, model.config.num_mel_bins).mT.contiguous(),
        "attention_mask": valid(lengths, longest),
    }
    return [
        ("two clips", spoken),
        ("clips of different lengths", ragged),
        ("a language for each", {**spoken, "language": ["en", "de"]}),
    ]


@feeds("Pop2PianoForConditionalGeneration")
def music(model: Any) -> Batches:
    # What the checkpoint's generation_config.json says: which token stands for which composer.
    model.generation_config.composer_to_feature_token = {f"composer{number}": 40 + number for number in range(1, 4)}
    width = model.config.d_model
    # A row for each bar; after the bars of every recording comes an empty one.
    lengths = [12, 12, 0, 7, 7, 7, 0]
    ragged = {"input_features": clips(lengths, 12, width), "attention_mask": valid(lengths, 12)}
    return [
        ("two bars", {"input_features": clips([12, 12], 12, width)}),
        ("two recordings", ragged),
        ("another composer", {"input_features": clips([12, 12], 12, width), "composer": "composer3"}),
    ]
