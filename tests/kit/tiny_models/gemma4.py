"""Gemma 4's models, which read images, videos and speech of any size: patches with their positions, and features."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tiny_models.image_sizes import FRAME, WITH_VIDEOS
from tiny_models.image_tokens import (
    AUDIO,
    CLOSE,
    COLUMN,
    GRID,
    IMAGE,
    OPEN,
    TEXT,
    VIDEO,
    WINDOWS,
    Batches,
    around,
    batches,
    shown,
    typed,
)
from tiny_models.registry import VOCABULARY, configures, feeds, noise

SPEECH = {
    "a clip of speech each": ["wawww", "wawww"],
    "clips of two lengths": ["wAwwwww", "aww", "wAwww"],
    "an image beside a clip": ["wiwww", "wawwww"],
}
GEMMA = {**TEXT, **WINDOWS, "global_head_dim": 16, "initializer_range": 0.05}  # words outweigh layers where it is more
SEEN = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    patch_size=4,
    pooling_kernel_size=2,
    position_embedding_size=8,
    initializer_range=0.3,
)
AROUND = dict(boi_token_id=OPEN, eoi_token_id=CLOSE, image_token_id=IMAGE, initializer_range=0.3)
SOUNDS = dict(video_token_id=VIDEO, audio_token_id=AUDIO, boa_token_id=COLUMN, eoa_token_index=GRID)


@configures("Gemma4ForConditionalGeneration")
def gemma4() -> Any:
    kinds = WINDOWS["layer_types"] * 2
    heard = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, subsampling_conv_channels=[8, 4])
    return transformers.Gemma4Config(
        text_config={
            **GEMMA,
            "num_hidden_layers": 4,
            "layer_types": kinds,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        vision_config=SEEN,
        audio_config=dict(heard, output_proj_dims=32, attention_chunk_size=4, attention_context_left=5),
        **AROUND,
        **SOUNDS,
    )


@configures("Gemma4UnifiedForConditionalGeneration")
def gemma4_unified() -> Any:
    return transformers.Gemma4UnifiedConfig(
        text_config=GEMMA,
        vision_config=dict(patch_size=4, pooling_kernel_size=2, mm_embed_dim=32, mm_posemb_size=8, output_proj_dims=32),
        audio_config=dict(audio_embed_dim=16),
        **AROUND,
        **SOUNDS,
    )


@configures("DiffusionGemmaForBlockDiffusion")
def diffusion_gemma() -> Any:
    experts = dict(num_experts=2, top_k_experts=1, moe_intermediate_size=16)
    return transformers.DiffusionGemmaConfig(
        text_config={**GEMMA, **experts},
        vision_config=dict(SEEN, model_type="gemma4_vision"),
        canvas_length=16,
        **AROUND,
    )


def positioned(grids: list[tuple[int, int]], most: int, values: int) -> tuple[Tensor, Tensor]:
    """Patches `[images, most, values]` of images of these sizes, and the column and row of each, -1 past their ends."""
    positions = torch.full((len(grids), most, 2), -1)
    for image, (rows, columns) in zip(positions, grids, strict=True):
        image[: rows * columns] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    there = (positions >= 0).all(-1, keepdim=True)
    return noise(len(grids), most, values).sigmoid() * there, positions


def seen(sentences: list[str], side: int, values: int) -> dict[str, Tensor]:
    """Images and videos, a placeholder for each `side` x `side` patches."""
    grids = {"i": (2 * side, 2 * side), "I": (side, 2 * side)}
    found = {}
    if images := shown(sentences):
        found["pixel_values"], found["image_position_ids"] = positioned(
            [grids[image] for image in images], 6 * side * side, values
        )
    if videos := len(shown(sentences, "v")):
        found["pixel_values_videos"], found["video_position_ids"] = positioned(
            [grids["i"]] * 2 * videos, 6 * side * side, values
        )
        found["num_frames_per_video"] = torch.full((videos,), 2)
    return found


def heard(sentences: list[str], lengths: dict[str, int], values: int) -> dict[str, Tensor]:
    clips = [lengths[part] for part in shown(sentences, lengths)]
    if not clips:
        return {}
    mask = torch.arange(max(lengths.values())) < torch.tensor(clips)[:, None]
    return {"input_features": noise(*mask.shape, values) * mask[:, :, None], "input_features_mask": mask}


def gemma4_batches(side: int, patch: int, lengths: dict[str, int], values: int) -> Batches:
    speech = {"a": [COLUMN, *[AUDIO] * 4, GRID], "A": [COLUMN, *[AUDIO] * 3, GRID]}
    return typed(
        batches(
            {"i": around(4), "I": around(2), "v": FRAME * 2, **speech},
            lambda sentences: {**seen(sentences, side, patch), **heard(sentences, lengths, values)},
            {**WITH_VIDEOS, **SPEECH},
        )
    )


@feeds("Gemma4ForConditionalGeneration")
def patches_and_spectrograms(model: Any) -> Batches:
    return gemma4_batches(2, 48, {"a": 16, "A": 9}, 8)


@feeds("Gemma4UnifiedForConditionalGeneration")
def pixels_and_waves(model: Any) -> Batches:
    return gemma4_batches(1, 192, {"a": 4, "A": 3}, 16)


@feeds("DiffusionGemmaForBlockDiffusion")
def padded_patches_and_types(model: Any) -> Batches:
    layouts = {"one image each": ["wiwww", "wiwww"], "prompts of different lengths": ["wiwwwwww", "Iw", "wwwiww"]}
    return typed(batches({"i": around(4), "I": around(2)}, lambda sentences: seen(sentences, 2, 48), layouts))
