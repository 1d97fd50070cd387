"""Models whose images come by sentence, with an axis for the images of one: the Idefics family."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tiny_models.image_tokens import (
    CLOSE,
    COLUMN,
    IMAGE,
    LAYOUTS,
    MARK,
    OPEN,
    ROW,
    TEXT,
    VIDEOS,
    VISION,
    Batches,
    batches,
    count_tiles,
)
from tiny_models.registry import FIRST_PLACEHOLDER, SPECIAL, VOCABULARY, configures, feeds, noise

TILE = [IMAGE] * 4
WHOLE = [OPEN, MARK, *TILE, OPEN]  # an image that is a single tile
SPLIT = [OPEN, ROW, *TILE, OPEN, COLUMN, *TILE, *WHOLE]  # one of two tiles and the whole
FRAMES = [ROW, *WHOLE] * 2  # of a video, each after its time


def tiles_of(parts: dict[str, list[int]], each: int, sentences: list[str], size: int = 16) -> tuple[Tensor, Tensor]:
    """Tiles `[sentences, most tiles of one, 3, size, size]`, zero where a sentence has fewer, and which are not."""
    counts = torch.tensor([count_tiles(parts, each, [sentence]) for sentence in sentences])
    there = torch.arange(int(counts.max())) < counts[:, None]
    return noise(*there.shape, 3, size, size) * there[:, :, None, None, None], there


def with_masks_of_pixels(parts: dict[str, list[int]], layouts: dict[str, list[str]]) -> Batches:
    def pixels(sentences: list[str]) -> dict[str, Any]:
        tiles, there = tiles_of(parts, 4, sentences)
        mask = there[:, :, None, None].long().expand(-1, -1, *tiles.shape[-2:])
        return {"pixel_values": tiles, "pixel_attention_mask": mask.contiguous()}

    return batches(parts, pixels, layouts)


@configures("IdeficsForVisionText2Text")
def idefics() -> Any:
    text = {**TEXT, "vocab_size": FIRST_PLACEHOLDER, "additional_vocab_size": VOCABULARY - FIRST_PLACEHOLDER}
    del text["num_key_value_heads"], text["head_dim"]
    return transformers.IdeficsConfig(
        **text,
        vision_config=dict(VISION, embed_dim=32),
        perceiver_config=dict(
            use_resampler=True, resampler_n_latents=4, resampler_depth=1, resampler_n_heads=4, resampler_head_dim=8
        ),
        use_resampler=True,
        alpha_initializer="ones",  # gates of attention to images: shut where they are zero
    )


@feeds("IdeficsForVisionText2Text")
def images_for_later_tokens(model: Any) -> Batches:
    parts = {part: [OPEN, IMAGE, OPEN] for part in "iI"}
    found = batches(parts, lambda sentences: {"pixel_values": tiles_of(parts, 1, sentences)[0]})
    for _, batch in found:
        last = (batch["input_ids"] == IMAGE).cumsum(1) - 1  # which image of the sentence comes before a token
        images = torch.arange(batch["pixel_values"].shape[1])
        batch["image_attention_mask"] = (last[:, :, None] == images).long()
    return found


@configures("Idefics2ForConditionalGeneration")
def idefics2() -> Any:
    resampler = dict(resampler_n_latents=4, resampler_depth=1, resampler_n_heads=4, resampler_head_dim=8)
    return transformers.Idefics2Config(
        text_config=dict(TEXT, model_type="mistral", sliding_window=8),
        vision_config=VISION,
        perceiver_config=dict(resampler, num_key_value_heads=2, hidden_size=32, initializer_range=0.3),
        image_token_id=IMAGE,
    )


@feeds("Idefics2ForConditionalGeneration")
def images_split_or_with_margins(model: Any) -> Batches:
    parts = {"i": [OPEN, *TILE, OPEN], "I": [*[OPEN, *TILE] * 5, OPEN]}
    found = with_masks_of_pixels(parts, {**LAYOUTS, "images of two sizes": ["wiwww", "wiww"]})
    smaller = found[-1][1]
    for name in ("pixel_values", "pixel_attention_mask"):
        smaller[name][1, ..., 8:, :] = 0
    return found


@configures("Idefics3ForConditionalGeneration")
def idefics3() -> Any:
    return transformers.Idefics3Config(
        text_config=dict(TEXT, model_type="llama"),
        vision_config=VISION,
        image_token_id=IMAGE,
        pad_token_id=SPECIAL["pad_token_id"],
    )


@feeds("Idefics3ForConditionalGeneration")
def images_split_or_whole(model: Any) -> Batches:
    return with_masks_of_pixels({"i": WHOLE, "I": SPLIT}, LAYOUTS)


@configures("SmolVLMForConditionalGeneration")
def smol_vlm() -> Any:
    return transformers.SmolVLMConfig(
        text_config=dict(TEXT, model_type="llama"),
        vision_config=VISION,
        image_token_id=IMAGE,
        pad_token_id=SPECIAL["pad_token_id"],
    )


@feeds("SmolVLMForConditionalGeneration")
def images_or_frames(model: Any) -> Batches:
    video = {name: sentences for name, sentences in VIDEOS.items() if name == "a video each"}
    return with_masks_of_pixels({"i": WHOLE, "I": SPLIT, "v": FRAMES}, {**LAYOUTS, **video})


@configures("GraniteDoclingForConditionalGeneration")
def granite_docling() -> Any:
    return transformers.GraniteDoclingConfig(
        text_config=dict(
            TEXT, embedding_multiplier=0.5, residual_multiplier=0.9, attention_multiplier=0.35, logits_scaling=0.5
        ),
        vision_config=dict(VISION, out_hidden_size=32, scale_factor=2, deepstack_visual_indexes=[0]),
        image_token_id=IMAGE,
        pad_token_id=SPECIAL["pad_token_id"],
    )


@feeds("GraniteDoclingForConditionalGeneration")
def coarse_or_fine_tiles(model: Any) -> Batches:
    def pages(each: int, layouts: dict[str, list[str]]) -> Batches:
        tile = [IMAGE] * each
        parts = {"i": [OPEN, ROW, *tile], "I": [OPEN, ROW, *tile, OPEN, COLUMN, *tile, CLOSE, OPEN, MARK, *tile, OPEN]}

        def pixels(sentences: list[str]) -> dict[str, Any]:
            tiles, there = tiles_of(parts, each, sentences)
            fine = {"tile_fine_mask": torch.ones(len(sentences), dtype=torch.bool)} if each > 4 else {}
            return {"pixel_values": tiles, "pixel_attention_mask": there, **fine}

        return batches(parts, pixels, layouts)

    return [*pages(4, LAYOUTS), *pages(16, {"fine tiles": ["wiwww", "wIw"]})]
