"""Models in which the size of an image decides how many placeholder tokens it has, and models of videos among them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tiny_models.image_tokens import (
    CLIP,
    CLOSE,
    CODES,
    IMAGE,
    LAYOUTS,
    MARK,
    OPEN,
    ROW,
    SIGLIP,
    TEXT,
    VIDEO,
    VIDEOS,
    VISION,
    WINDOWS,
    Batches,
    around,
    batches,
    shown,
    typed,
)
from tiny_models.registry import VOCABULARY, configures, feeds, noise

FRAME = [MARK, OPEN, *[VIDEO] * 4, CLOSE]  # of a video, after its time
WITH_VIDEOS = {**LAYOUTS, **VIDEOS}


# ---------------------------------------------------------------------------------------------- images with margins
SIZES = {"i": (16, 16), "I": (8, 16)}


def padded_images(sentences: list[str]) -> dict[str, Tensor]:
    """Images with margins below and on the right where others are larger, and their sizes."""
    sizes = torch.tensor([SIZES[part] for part in shown(sentences)])
    height, width = sizes.amax(0).tolist()
    pixels = noise(len(sizes), 3, height, width)
    for image, (rows, columns) in zip(pixels, sizes.tolist(), strict=True):
        image[:, rows:] = 0
        image[:, :, columns:] = 0
    return {"pixel_values": pixels, "image_sizes": sizes}


@configures("Emu3ForConditionalGeneration")
def emu3() -> Any:
    codes = {f"<|visual token {code:06d}|>": token for code, token in enumerate(CODES)}
    vision = dict(
        codebook_size=4,
        embed_dim=1,
        base_channels=32,
        channel_multiplier=[1, 1, 1, 1],
        num_res_blocks=1,
        hidden_size=32,
    )
    return transformers.Emu3Config(
        text_config=dict(TEXT, attention_dropout=0.0),
        vq_config=vision,
        vocabulary_map={"<image>": IMAGE, "<|extra_200|>": ROW, **codes},
    )


@feeds("Emu3ForConditionalGeneration")
def images_as_rows_of_codes(model: Any) -> Batches:
    # Three tokens to a row: one for each 8 x 8 pixels, one for the row's end.
    return batches({"i": [OPEN, MARK, *[IMAGE] * 6, MARK, CLOSE], "I": [OPEN, MARK, *around(3)]}, padded_images)


@configures("LightOnOcrForConditionalGeneration")
def light_on_ocr() -> Any:
    return transformers.LightOnOcrConfig(
        text_config=dict(TEXT, model_type="qwen3"),
        vision_config=dict(VISION, model_type="pixtral"),
        image_token_id=IMAGE,
    )


@feeds("LightOnOcrForConditionalGeneration")
def images_of_two_sizes(model: Any) -> Batches:
    return batches({"i": [IMAGE] * 4, "I": [IMAGE] * 2}, padded_images)


@configures("Mistral3ForConditionalGeneration")
def mistral3() -> Any:
    return transformers.Mistral3Config(
        text_config=dict(TEXT, model_type="mistral", sliding_window=None),
        vision_config=dict(VISION, model_type="pixtral"),
        image_token_index=IMAGE,
    )


@configures("MistralLarge4ForConditionalGeneration")
def mistral_large4() -> Any:
    heads = dict(kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4)
    experts = dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=16)
    indices = dict(index_topk=8, index_head_dim=16, index_n_heads=2, no_rope_layers=[1, 0])
    return transformers.MistralLarge4Config(
        text_config={**TEXT, **heads, **experts, **indices, "model_type": "mistral_large4_text"},
        vision_config=dict(VISION, model_type="pixtral"),
        image_token_index=IMAGE,
    )


@feeds("Mistral3ForConditionalGeneration", "MistralLarge4ForConditionalGeneration")
def images_in_rows(model: Any) -> Batches:
    row = [IMAGE, IMAGE]
    return batches({"i": [*row, ROW, *row, CLOSE], "I": [*row, CLOSE]}, padded_images)


@configures("Lfm2VlForConditionalGeneration")
def lfm2_vl() -> Any:
    text = dict(TEXT, model_type="lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    return transformers.Lfm2VlConfig(
        text_config=text,
        vision_config=dict(VISION, model_type="siglip2_vision_model", num_patches=16, vision_use_head=False),
        image_token_id=IMAGE,
        projector_hidden_size=48,
    )


@feeds("Lfm2VlForConditionalGeneration")
def padded_patches(model: Any) -> Batches:
    def pixels(sentences: list[str]) -> dict[str, Any]:
        shapes = torch.tensor([SIZES[part] for part in shown(sentences)]) // 4
        there = torch.arange(16) < shapes.prod(1)[:, None]
        return {
            "pixel_values": noise(len(shapes), 16, 48) * there[:, :, None],
            "pixel_attention_mask": there.long(),
            "spatial_shapes": shapes,
        }

    return batches({"i": around(4), "I": around(2)}, pixels)


# ---------------------------------------------------------------------------------------------- tiles and the whole
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
# Sizes, and the grids of their tiles; m is one of several images in a sentence, which some do not cut into tiles.
TILES = {"i": ((8, 32), (1, 2)), "I": ((32, 32), (2, 2)), "m": ((16, 16), (0, 0))}


def features(part: str, side: int) -> int:
    """How many tokens has an image whose tiles are `side` tokens wide: the whole, the grid of tiles, its line ends."""
    (height, width), (rows, columns) = TILES[part][0], (side * tiles for tiles in TILES[part][1])
    if width / height > columns / rows:  # margins of an image that is wider or higher than the grid go
        rows -= (rows - int(height * columns / width)) // 2 * 2
    else:
        columns -= (columns - int(width * rows / height)) // 2 * 2
    return side * side + rows * columns + rows


def tiles_and_sizes(sentences: list[str]) -> dict[str, Tensor]:
    images = [TILES[part] for part in shown(sentences, TILES)]
    if not images:
        return {}
    counts = torch.tensor([1 + rows * columns for _, (rows, columns) in images])
    there = torch.arange(int(counts.max())) < counts[:, None]
    return {
        "pixel_values": noise(*there.shape, 3, 16, 16) * there[:, :, None, None, None],
        "image_sizes": torch.tensor([size for size, _ in images]),
    }


def frames(sentences: list[str]) -> dict[str, Tensor]:
    videos = len(shown(sentences, "v"))
    return {"pixel_values_videos": noise(videos, 2, 3, 16, 16)} if videos else {}


@configures("LlavaNextForConditionalGeneration")
def llava_next() -> Any:
    return transformers.LlavaNextConfig(
        text_config=dict(TEXT, model_type="llama"),
        vision_config=CLIP,
        image_token_index=IMAGE,
        image_grid_pinpoints=PINPOINTS,
    )


@configures("Granite4VisionForConditionalGeneration")
def granite4_vision() -> Any:
    resampler = dict(
        model_type="blip_2_qformer",
        vocab_size=VOCABULARY,
        num_hidden_layers=1,
        intermediate_size=48,
        cross_attention_frequency=1,
        initializer_range=0.3,
    )
    return transformers.Granite4VisionConfig(
        text_config=dict(TEXT, attention_multiplier=0.35),
        vision_config=dict(CLIP, hidden_size=64),  # a head of the resampler holds 64 numbers
        qformer_config=resampler,
        image_token_index=IMAGE,
        image_grid_pinpoints=PINPOINTS,
        downsample_rate="1/2",
        deepstack_layer_map=[[-2, 0]],
        spatial_target_layers=[1],
        projector_dropout=0.0,
    )


@feeds("LlavaNextForConditionalGeneration", "Granite4VisionForConditionalGeneration")
def images_in_tiles(model: Any) -> Batches:
    side = 2 if model.config.model_type == "granite4_vision" else 4
    return batches({part: [IMAGE] * features(part, side) for part in "iI"}, tiles_and_sizes)


@configures("LlavaNextVideoForConditionalGeneration")
def llava_next_video() -> Any:
    return transformers.LlavaNextVideoConfig(
        text_config=dict(TEXT, model_type="llama"),
        vision_config=CLIP,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=PINPOINTS,
    )


@feeds("LlavaNextVideoForConditionalGeneration")
def images_in_tiles_and_frames(model: Any) -> Batches:
    parts = {"i": [IMAGE] * features("i", 4), "I": [IMAGE] * features("I", 4), "v": [VIDEO] * 8}
    return batches(parts, lambda sentences: {**tiles_and_sizes(sentences), **frames(sentences)}, WITH_VIDEOS)


@configures("LlavaOnevisionForConditionalGeneration")
def llava_onevision() -> Any:
    return transformers.LlavaOnevisionConfig(
        text_config=dict(TEXT, model_type="qwen2"),
        vision_config=SIGLIP,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=PINPOINTS,
    )


@feeds("LlavaOnevisionForConditionalGeneration")
def tiles_of_single_images(model: Any) -> Batches:
    def pixels(sentences: list[str]) -> dict[str, Any]:
        counts = [len(shown([sentence], TILES)) for sentence in sentences]
        images = {"batch_num_images": torch.tensor([count for count in counts if count])} if any(counts) else {}
        return {**tiles_and_sizes(sentences), **images, **frames(sentences)}

    parts = {"i": [IMAGE] * features("i", 4), "I": [IMAGE] * features("I", 4), "m": [IMAGE] * 17, "v": [VIDEO] * 9}
    layouts = {**WITH_VIDEOS, "two images in a sentence and one in the other": ["wmwmww", "wwiwww"]}
    return batches(parts, pixels, layouts)


# ---------------------------------------------------------------------------------------------- grids of patches
Grids = dict[str, list[tuple[int, int, int]]]
GRIDS: Grids = {"i": [(1, 4, 4)], "I": [(1, 2, 4)], "v": [(2, 4, 4)]}  # frames, rows and columns of patches
PATCHES = dict(
    depth=2,
    hidden_size=32,
    num_heads=4,
    intermediate_size=48,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=32,
    initializer_range=0.3,
)
IN_WINDOWS = dict(PATCHES, window_size=16, fullatt_block_indexes=[1])
MEDIA = dict(image_token_id=IMAGE, video_token_id=VIDEO)


def patches_in_grids(sentences: list[str], grids: Grids = GRIDS, patch: tuple[int, ...] = (96,)) -> dict[str, Tensor]:
    found = {}
    for letters, pixels, name in (
        ("iI", "pixel_values", "image_grid_thw"),
        ("v", "pixel_values_videos", "video_grid_thw"),
    ):
        sizes = torch.tensor([grid for part in shown(sentences, letters) for grid in grids[part]])
        if len(sizes):
            found |= {pixels: noise(int(sizes.prod(1).sum()), *patch), name: sizes}
    return found


@configures("Exaone4_5_ForConditionalGeneration")
def exaone4_5() -> Any:
    return transformers.Exaone4_5_Config(
        text_config=dict(TEXT, model_type="exaone4", **WINDOWS),
        vision_config=dict(IN_WINDOWS, num_key_value_heads=2),
        **MEDIA,
    )


@configures("HyperCLOVAXVisionV2ForConditionalGeneration")
def hyper_clova_x() -> Any:
    return transformers.HyperCLOVAXVisionV2Config(
        text_config=dict(TEXT, model_type="hyperclovax"),
        vision_config=dict(IN_WINDOWS, model_type="qwen2_5_vl_vision"),
        **MEDIA,
    )


@feeds("Exaone4_5_ForConditionalGeneration", "HyperCLOVAXVisionV2ForConditionalGeneration")
def whole_videos(model: Any) -> Batches:
    video = [OPEN, *[VIDEO] * 8, CLOSE]
    return batches({"i": around(4), "I": around(2), "v": video}, patches_in_grids, WITH_VIDEOS)


@configures("CohereCompassForConditionalGeneration")
def cohere_compass() -> Any:
    rope = {kind: dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]) for kind in WINDOWS["layer_types"]}
    return transformers.CohereCompassConfig(
        text_config=dict(TEXT, rope_parameters=rope, **WINDOWS),
        vision_config=dict(PATCHES, num_position_embeddings=16, deepstack_visual_indexes=[0]),
        vision_start_token_id=OPEN,
        vision_end_token_id=CLOSE,
        **MEDIA,
    )


@configures("Lfm3VlForConditionalGeneration")
def lfm3_vl() -> Any:
    kinds = ["conv", "sliding_attention", "full_attention"]
    return transformers.Lfm3VlConfig(
        text_config=dict(TEXT, model_type="lfm3", num_hidden_layers=3, layer_types=kinds, sliding_window=6),
        vision_config=dict(
            VISION,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"],
        ),
        projector_hidden_size=48,
        vision_start_token_id=OPEN,
        vision_end_token_id=CLOSE,
        **MEDIA,
    )


@feeds("CohereCompassForConditionalGeneration")
def frames_with_times_and_types(model: Any) -> Batches:
    return typed(frames_with_times(model))


@feeds("Lfm3VlForConditionalGeneration")
def frames_with_times(model: Any) -> Batches:
    return batches({"i": around(4), "I": around(2), "v": FRAME * 2}, patches_in_grids, WITH_VIDEOS)


@configures("Kimi_K25ForConditionalGeneration")
def kimi_k25() -> Any:
    heads = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1)
    text = {**TEXT, **heads, **experts, "model_type": "deepseek_v3", "num_key_value_heads": 4}
    return transformers.Kimi_K25Config(
        text_config=dict(text, first_k_dense_replace=1),
        vision_config=dict(VISION, pos_emb_height=4, pos_emb_width=4, pos_emb_time=2),
        projection_hidden_size=32,
        vision_start_token_id=OPEN,
        vision_end_token_id=CLOSE,
        **MEDIA,
    )


@feeds("Kimi_K25ForConditionalGeneration")
def chunks_of_videos(model: Any) -> Batches:
    grids = {**GRIDS, "v": [(2, 4, 4), (1, 4, 4)]}  # the frames of a chunk are pooled
    parts = {"i": [OPEN, MARK, *around(4)], "I": [OPEN, MARK, *around(2)], "v": FRAME * 2}
    return batches(parts, lambda sentences: patches_in_grids(sentences, grids, (3, 4, 4)), WITH_VIDEOS)
