"""Models that read one image or video per text and say something about it: captions, answers, what is written there."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor

from tiny_models.registry import (
    FIRST_PLACEHOLDER,
    PAD,
    SPECIAL,
    START,
    UNUSED,
    VOCABULARY,
    configures,
    feeds,
    noise,
    padded,
    words,
)

Batches = list[tuple[str, dict[str, Any]]]

IMAGE, IMAGE_BEGINS, IMAGE_ENDS = FIRST_PLACEHOLDER, FIRST_PLACEHOLDER + 7, FIRST_PLACEHOLDER + 8
QUERIES = 4  # tokens that stand for an image in the text, where the model fixes their number
PATCH = 4  # pixels
UNDROPPED = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

DECODER = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    initializer_range=0.3,
    **SPECIAL,
)
VISION = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=16,
    patch_size=PATCH,
    initializer_range=0.3,
)
T5 = dict(
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
    initializer_factor=1.5,
    dropout_rate=0.0,
    vocab_size=VOCABULARY,
    decoder_start_token_id=PAD,
    **SPECIAL,
)
BART = dict(
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
    init_std=0.2,
    scale_embedding=True,
    dropout=0.0,
    decoder_start_token_id=START,
    forced_eos_token_id=None,
    **SPECIAL,
)


# ---------------------------------------------------------------------------------------------- texts and images
def text(length: int, seed: int = 1) -> list[int]:
    return words(1, length, seed)[0].tolist()


def texts(lengths: Iterable[int], seed: int = 1) -> list[list[int]]:
    return [text(length, seed + row) for row, length in enumerate(lengths)]


def pixels(images: int, seed: int = 1, size: int = 16) -> Tensor:
    return noise(images, 3, size, size, seed=seed)


def right_padded(rows: list[list[int]]) -> dict[str, Tensor]:
    """Texts of different lengths as `input_ids` and `attention_mask`, int64 `[rows, longest]`, padded on the right."""
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [PAD] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
    }


def prompts(*rows: tuple[int, list[list[int]]]) -> dict[str, Tensor]:
    """Texts of so many words behind the tokens of these media, padded on the left."""
    said = texts(length for length, _ in rows)
    return padded([[START, *chain(*media), *own] for own, (_, media) in zip(said, rows, strict=True)])


# ---------------------------------------------------------------------------------------------- BLIP
@configures("BlipForConditionalGeneration")
def blip() -> Any:
    ends = dict(sep_token_id=UNUSED)  # rather than at `eos_token_id`
    return transformers.BlipConfig(
        text_config=dict(DECODER, projection_dim=32, initializer_range=0.2, **ends),
        vision_config=dict(VISION, projection_dim=32),
        projection_dim=32,
        image_text_hidden_size=32,
        initializer_range=0.3,
    )


@feeds("BlipForConditionalGeneration")
def images_with_beginnings(model: Any) -> Batches:
    """Its tokenizer closes every text with a separator, which `generate` cuts off."""
    plain = [[START, *own, UNUSED] for own in texts([4, 4])]
    ragged = [[START, *own, UNUSED] for own in texts([5, 2, 3])]
    return [
        ("one image each", {**padded(plain), "pixel_values": pixels(2)}),
        ("prompts padded on the left", {**padded(ragged), "pixel_values": pixels(3)}),
        ("prompts padded on the right", {**right_padded(ragged), "pixel_values": pixels(3)}),
        ("no prompt", {"pixel_values": pixels(2)}),
    ]


def queried(config: str, queries: int, **options: Any) -> Any:
    """Images are read by a few learned queries (Q-Former), whose answers stand in the text of a language model."""
    return getattr(transformers, config)(
        vision_config=VISION,
        qformer_config=dict(DECODER, **UNDROPPED, cross_attention_frequency=2),
        num_query_tokens=queries,
        initializer_range=0.3,
        **options,
    )


@configures("Blip2ForConditionalGeneration")
def blip_2() -> Any:
    opt = dict(DECODER, model_type="opt", word_embed_proj_dim=32, ffn_dim=48, init_std=0.3, dropout=0.0)
    return queried("Blip2Config", QUERIES, text_config=opt, image_token_index=IMAGE, image_text_hidden_size=32)


@feeds("Blip2ForConditionalGeneration")
def images_before_prompts(model: Any) -> Batches:
    return [
        ("one image each", {**behind_images([4, 4], QUERIES), "pixel_values": pixels(2)}),
        ("padded prompts", {**behind_images([5, 2, 3], QUERIES), "pixel_values": pixels(3)}),
        ("no prompt", {"pixel_values": pixels(2)}),
    ]


def behind_images(lengths: list[int], tokens: int) -> dict[str, Tensor]:
    """Prompts of these lengths, padded on the left and only then put behind the tokens of the image."""
    prompts = padded([[START, *own] for own in texts(lengths)])
    rows = len(lengths)
    return {
        "input_ids": torch.cat([torch.full((rows, tokens), IMAGE), prompts["input_ids"]], dim=1),
        "attention_mask": torch.cat([torch.ones(rows, tokens, dtype=torch.long), prompts["attention_mask"]], dim=1),
    }


def asked(lengths: list[int]) -> dict[str, Tensor]:
    """What the Q-Former reads: the prompts once more, by a tokenizer of its own."""
    rows = right_padded([[START, *own, UNUSED] for own in texts((length + 1 for length in lengths), seed=10)])
    return {f"qformer_{name}": tensor for name, tensor in rows.items()}


@configures("InstructBlipForConditionalGeneration")
def instruct_blip() -> Any:
    t5 = dict(T5, model_type="t5", d_model=32, initializer_factor=2.5)
    return queried("InstructBlipConfig", QUERIES, text_config=t5, image_token_index=IMAGE)


@feeds("InstructBlipForConditionalGeneration")
def images_with_instructions(model: Any) -> Batches:
    def batch(lengths: list[int]) -> dict[str, Tensor]:
        rows = [[IMAGE] * QUERIES + [*own, UNUSED] for own in texts(lengths)]
        return {**right_padded(rows), **asked(lengths), "pixel_values": pixels(len(lengths))}

    return [("one image each", batch([4, 4])), ("padded prompts", batch([5, 2, 3]))]


@configures("InstructBlipVideoForConditionalGeneration")
def instruct_blip_video() -> Any:
    llama = dict(DECODER, model_type="llama", num_key_value_heads=2)
    return queried("InstructBlipVideoConfig", 2, text_config=llama, video_token_index=IMAGE)


@feeds("InstructBlipVideoForConditionalGeneration")
def videos_with_instructions(model: Any) -> Batches:
    def batch(lengths: list[int]) -> dict[str, Tensor]:
        frames, queries = 4, model.config.num_query_tokens  # its processor expects four frames
        videos = noise(len(lengths), frames, 3, 16, 16)
        return {**behind_images(lengths, frames * queries), **asked(lengths), "pixel_values": videos}

    return [("one video each", batch([4, 4])), ("padded prompts", batch([5, 2, 3]))]


# ---------------------------------------------------------------------------------------------- other captioners
@configures("GitForCausalLM")
def git() -> Any:
    return transformers.GitConfig(vision_config=VISION, **DECODER, **UNDROPPED)


@feeds("GitForCausalLM")
def images_beside_texts(model: Any) -> Batches:
    """The image is no part of the text: its patches come before it."""
    ragged = [[START, *own] for own in texts([5, 1, 3])]
    return [
        ("one image each", {**padded([[START, *own] for own in texts([3, 3])]), "pixel_values": pixels(2)}),
        ("padded prompts", {**padded(ragged), "pixel_values": pixels(3)}),
        ("an image each and the beginning only", {"input_ids": torch.tensor([[START]] * 2), "pixel_values": pixels(2)}),
    ]


KOSMOS = dict(
    vocab_size=VOCABULARY,
    embed_dim=32,
    layers=2,
    ffn_dim=48,
    attention_heads=4,
    max_position_embeddings=128,
    init_std=0.5,
    dropout=0.0,
    attention_dropout=0.0,
    tie_word_embeddings=False,
    **SPECIAL,
)


@configures("Kosmos2ForConditionalGeneration")
def kosmos_2() -> Any:
    return transformers.Kosmos2Config(
        text_config=KOSMOS, vision_config=VISION, latent_query_num=QUERIES, tie_word_embeddings=False
    )


@feeds("Kosmos2ForConditionalGeneration")
def marked_images(model: Any) -> Batches:
    """A mask says where in the text the image is; the tokens there are all different."""
    head = [START, IMAGE_BEGINS, *range(IMAGE, IMAGE + QUERIES), IMAGE_ENDS]

    def batch(lengths: list[int]) -> dict[str, Tensor]:
        tensors = padded([head + own for own in texts(lengths)])
        begins = tensors["attention_mask"].argmax(dim=1)
        mask = torch.zeros_like(tensors["attention_mask"])
        for row, begin in enumerate(begins.tolist()):
            mask[row, begin + 2 : begin + 2 + QUERIES] = 1
        return {**tensors, "image_embeds_position_mask": mask, "pixel_values": pixels(len(lengths))}

    return [("one image each", batch([4, 4])), ("padded prompts", batch([5, 2, 3]))]


@configures("Florence2ForConditionalGeneration")
def florence_2() -> Any:
    stages = dict(patch_size=[3, 3], patch_stride=[2, 2], patch_padding=[1, 1], patch_prenorm=[False, True])
    vision = dict(depths=[1, 1], embed_dim=[16, 32], num_heads=[2, 4], num_groups=[2, 4], window_size=2, **stages)
    vision |= dict(projection_dim=32, drop_path_rate=0.0, initializer_range=0.3)
    return transformers.Florence2Config(text_config=BART, vision_config=vision, image_token_id=IMAGE)


@feeds("Florence2ForConditionalGeneration")
def images_before_tasks(model: Any) -> Batches:
    tokens = 1 + 2 * 2  # their mean, and each patch that is left of 8 x 8 pixels after both stages

    def batch(lengths: list[int]) -> dict[str, Tensor]:
        rows = [[IMAGE] * tokens + [START, *own, UNUSED] for own in texts(lengths)]
        return {**right_padded(rows), "pixel_values": pixels(len(lengths), size=8)}

    return [("one image each", batch([4, 4])), ("padded prompts", batch([5, 2, 3]))]


# ---------------------------------------------------------------------------------------------- images only
@configures("VisionEncoderDecoderModel")
def vision_encoder_decoder() -> Any:
    decoder = dict(DECODER, model_type="bert", initializer_range=0.2, is_decoder=True, add_cross_attention=True)
    return transformers.VisionEncoderDecoderConfig(
        encoder=dict(VISION, model_type="vit"),
        decoder=decoder | UNDROPPED,
        decoder_start_token_id=START,
        pad_token_id=PAD,
    )


@feeds("VisionEncoderDecoderModel")
def images_with_tasks(model: Any) -> Batches:
    task = torch.tensor([[START, *text(2)]] * 3)
    return [
        ("one image each", {"pixel_values": pixels(2)}),
        ("the beginning of the answer given", {"pixel_values": pixels(3), "decoder_input_ids": task}),
    ]
