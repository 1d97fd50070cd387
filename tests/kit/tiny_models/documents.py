"""Models that read documents: pages of any shape, in tiles, with the places of their words, or with no text at all."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tiny_models.captioning import (
    BART,
    DECODER,
    IMAGE,
    IMAGE_BEGINS,
    IMAGE_ENDS,
    KOSMOS,
    PATCH,
    QUERIES,
    T5,
    VISION,
    Batches,
    pixels,
    prompts,
    right_padded,
    text,
    texts,
)
from tiny_models.registry import PAD, START, UNUSED, configures, feeds, noise, words

# The image encoder of SAM: attention in windows in one layer, over the whole image in the other.
WINDOWED_VISION = dict(
    hidden_size=32,
    output_channels=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=32,
    patch_size=PATCH,
    window_size=3,
    global_attn_indexes=[1],
    mlp_dim=48,
    initializer_range=0.3,
)


# ---------------------------------------------------------------------------------------------- pages of any shape
def flattened(grids: list[tuple[int, int]], most: int = 18) -> Tensor:
    """Images as a list of patches, `[images, most, 2 + numbers]`: row, column, pixels; zeros after the last patch."""
    patches = torch.zeros(len(grids), most, 2 + 3 * PATCH * PATCH)
    for image, (rows, columns) in enumerate(grids):
        places = torch.cartesian_prod(torch.arange(1, rows + 1), torch.arange(1, columns + 1))
        patches[image, : rows * columns] = torch.cat(
            [places.float(), noise(rows * columns, 3 * PATCH * PATCH, seed=image)], dim=1
        )
    return patches


@configures("Kosmos2_5ForConditionalGeneration")
def kosmos_2_5() -> Any:
    vision = dict(VISION, patch_embed_hidden_size=3 * PATCH * PATCH, head_dim=8, max_num_patches=32)
    return transformers.Kosmos2_5Config(
        text_config=KOSMOS, vision_config=vision, latent_query_num=QUERIES, tie_word_embeddings=False
    )


@feeds("Kosmos2_5ForConditionalGeneration")
def marked_pages(model: Any) -> Batches:
    head = [START, IMAGE_BEGINS, *[START] * QUERIES, IMAGE_ENDS]

    def batch(lengths: list[int], grids: list[tuple[int, int]]) -> dict[str, Tensor]:
        tensors = right_padded([head + own for own in texts(lengths)])
        mask = torch.zeros_like(tensors["input_ids"])
        mask[:, 1 : len(head)] = torch.tensor([-1] + [1] * QUERIES + [-1])
        return {**tensors, "image_embeds_position_mask": mask, "flattened_patches": flattened(grids)}

    return [
        ("one page each", batch([4, 4], [(4, 4), (4, 4)])),
        ("pages of different shapes", batch([4, 4, 4], [(3, 6), (4, 4), (5, 3)])),
        ("prompts padded on the right", batch([5, 2, 3], [(4, 4), (3, 6), (5, 3)])),
    ]


@configures("Pix2StructForConditionalGeneration")
def pix_2_struct() -> Any:
    text_config = dict(T5, hidden_size=32, decoder_start_token_id=PAD)
    vision = dict(VISION, patch_embed_hidden_size=3 * PATCH * PATCH, d_ff=48, d_kv=8, seq_len=32)
    vision |= dict(initializer_factor=1.5)
    return transformers.Pix2StructConfig(
        text_config=text_config, vision_config=vision, initializer_range=0.3, initializer_factor=1.5
    )


@feeds("Pix2StructForConditionalGeneration")
def screens(model: Any) -> Batches:
    """With `use_cache=True`, which is not the default of its text configuration."""

    def batch(grids: list[tuple[int, int]], **more: Tensor) -> dict[str, Any]:
        patches = flattened(grids)
        mask = (patches.sum(-1) != 0).float()
        return {"flattened_patches": patches, "attention_mask": mask, "use_cache": True, **more}

    beginning = dict(decoder_input_ids=words(2, 3), decoder_attention_mask=torch.ones(2, 3, dtype=torch.long))
    return [
        ("one page each", batch([(4, 4), (4, 4)])),
        ("pages of different shapes", batch([(3, 6), (4, 4), (5, 3)])),
        ("the beginning of the answer given", batch([(4, 4), (3, 6)], **beginning)),
    ]


@configures("PPFormulaNetForConditionalGeneration")
def formula_net() -> Any:
    convolutions = dict(post_conv_in_channels=16, post_conv_mid_channels=16, post_conv_out_channels=32)
    vision = dict(WINDOWED_VISION, decoder_hidden_size=32, **convolutions)
    return transformers.PPFormulaNetConfig(text_config=dict(BART, init_std=0.3), vision_config=vision)


@feeds("PPFormulaNetForConditionalGeneration")
def formulas(model: Any) -> Batches:
    return [(f"{images} images", {"pixel_values": pixels(images, size=32)}) for images in (2, 3)]


@configures("UdopForConditionalGeneration")
def udop() -> Any:
    return transformers.UdopConfig(
        **dict(T5, relative_attention_num_buckets=32),
        d_model=32,
        num_decoder_layers=2,
        max_2d_position_embeddings=32,
        image_size=16,
        patch_size=PATCH,
    )


@feeds("UdopForConditionalGeneration")
def pages_with_boxes(model: Any) -> Batches:
    """A task, then the words of the page with their boxes; special tokens have boxes in the corners."""
    nowhere, end = [0] * 4, [1000] * 4

    def batch(lengths: list[int], scale: float | None = None) -> dict[str, Tensor]:
        rows = [[*text(2), UNUSED, *own, UNUSED] for own in texts(lengths, seed=2)]
        tensors = right_padded(rows)
        boxes = torch.zeros(*tensors["input_ids"].shape, 4, dtype=torch.long)
        for row, length in enumerate(lengths):
            places = [[90 * word, 150 * row, 90 * word + 60, 150 * row + 40] for word in range(length)]
            boxes[row, : len(rows[row])] = torch.tensor([nowhere, nowhere, end, *places, end])
        return {**tensors, "bbox": boxes if scale is None else boxes * scale, "pixel_values": pixels(len(lengths))}

    return [
        ("one page each", batch([4, 4])),
        ("padded texts", batch([6, 2, 3])),
        ("boxes between 0 and 1", batch([5, 4], scale=0.001)),
    ]


OCR_TEXT = dict(
    DECODER,
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=16,
    mlp_layer_types=["dense", "sparse"],
)
TILED_VISION = dict(WINDOWED_VISION, patch_size=2, downsample_channels=[16, 32])  # 8 x 8 pixels to a token


@configures("DeepseekOcr2ForConditionalGeneration")
def deepseek_ocr_2() -> Any:
    encoder = dict(DECODER, num_key_value_heads=4)
    return transformers.DeepseekOcr2Config(
        text_config=OCR_TEXT,
        vision_config=dict(sam_config=TILED_VISION, encoder_config=encoder),
        image_token_id=IMAGE,
    )


@configures("UnlimitedOcrForConditionalGeneration")
def unlimited_ocr() -> Any:
    return transformers.UnlimitedOcrConfig(
        text_config=dict(OCR_TEXT, sliding_window=4),
        vision_config=dict(sam_config=TILED_VISION, encoder_config=VISION),
        image_token_id=IMAGE,
    )


@feeds("DeepseekOcr2ForConditionalGeneration", "UnlimitedOcrForConditionalGeneration")
def tiled_pages(model: Any) -> Batches:
    """Each page as a whole of 32 x 32 pixels and, if it is large, in tiles of 24 x 24."""
    newlines = model.config.model_type == "unlimited_ocr"

    def tokens(columns: int, rows: int) -> list[int]:
        if not newlines:  # 144 learned queries read the page, and each of its tiles
            return [IMAGE] * (144 * (1 + columns * rows) + 1)
        return [IMAGE] * (4 * (4 + 1) + 3 * rows * (3 * columns + 1) + 1)

    def batch(*pages: tuple[int, list[tuple[int, int]]]) -> dict[str, Any]:
        grids = [grid for _, row in pages for grid in row]
        tiles = [columns * rows for columns, rows in grids]
        page = prompts(*((length, [tokens(*grid) for grid in row]) for length, row in pages))
        page["pixel_values"] = pixels(len(grids), size=32)
        if any(tiles):
            page["pixel_values_local"] = pixels(sum(tiles), size=24)
        if newlines:  # as lists, not tensors
            return {**page, "num_local_patches": tiles, "patches_grid": [[c or 1, r or 1] for c, r in grids]}
        return {**page, "num_local_patches": torch.tensor(tiles)}

    small, wide, high = (0, 0), (2, 1), (1, 2)
    return [
        ("one small page each", batch((4, [small]), (4, [small]))),
        ("pages in tiles", batch((4, [wide]), (4, [wide]))),
        ("padded prompts", batch((5, [small]), (2, [wide]), (3, [high]))),
        ("two pages and one", batch((2, [small, high]), (5, [wide]))),
        ("a text without a page", batch((6, []), (4, [wide]))),
    ]
