"""Models that read an image as a fixed number of placeholder tokens for each of its tiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers

from tiny_models.registry import FIRST_PLACEHOLDER, SPECIAL, VOCABULARY, configures, feeds, noise, padded, words

Batches = list[tuple[str, dict[str, Any]]]

# Placeholders, then tokens around images and inside them.
IMAGE, VIDEO, AUDIO, OPEN, CLOSE, MARK, ROW, COLUMN, GRID = range(FIRST_PLACEHOLDER, VOCABULARY)
CODES = [VIDEO, AUDIO, COLUMN, GRID]  # in models that turn images into tokens of the vocabulary, and read no videos

TEXT = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    initializer_range=0.3,
    **SPECIAL,
)
WINDOWS = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6)
VISION = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=16,
    patch_size=4,
    initializer_range=0.3,
)
CLIP = dict(VISION, model_type="clip_vision_model", projection_dim=32)
SIGLIP = dict(VISION, model_type="siglip_vision_model", vision_use_head=False)

# Sentences, a letter for each part: w a word, i an image, I an image of another size, v a video.
LAYOUTS = {
    "one image each": ["wiwww", "wiwww"],
    "prompts of different lengths": ["wiwwwwww", "Iw", "wwwiww"],
    "two images in a sentence and one in the other": ["wiwIww", "wwiwww"],
    "a sentence without an image": ["wwww", "wIwww"],
}
VIDEOS = {"a video each": ["wvwww", "wvwww"], "an image beside a video": ["wiwww", "wwvww"]}


# ---------------------------------------------------------------------------------------------- prompts with images
def batches(
    parts: dict[str, list[int]],
    inputs: Callable[[list[str]], dict[str, Any]],
    layouts: dict[str, list[str]] = LAYOUTS,
) -> Batches:
    """Prompts in these layouts, the letters being the tokens in `parts`, with what `inputs` adds to each batch."""
    found = []
    for name, sentences in layouts.items():
        text = itertools.cycle(words(1, 40)[0].tolist())
        rows = [
            [token for part in sentence for token in (parts[part] if part in parts else [next(text)])]
            for sentence in sentences
        ]
        found.append((name, {**padded(rows), **inputs(sentences)}))
    return found


def shown(sentences: Iterable[str], letters: Iterable[str] = "iI") -> list[str]:
    """The images of a batch, in order."""
    return [part for sentence in sentences for part in sentence if part in letters]


def typed(found: Batches, name: str = "mm_token_type_ids") -> Batches:
    """With the kind of each token: 1 for images, 2 for videos, 3 for speech."""
    for _, batch in found:
        ids = batch["input_ids"]
        batch[name] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long() + 3 * (ids == AUDIO).long()
    return found


def count_tiles(parts: dict[str, list[int]], each: int, sentences: Iterable[str]) -> int:
    return sum(parts[part].count(IMAGE) for part in shown(sentences, parts)) // each


def tiled(parts: dict[str, list[int]], each: int, size: int = 16, layouts: dict[str, list[str]] = LAYOUTS) -> Batches:
    """All tiles of a batch one after the other, with `each` placeholders for a tile."""
    return batches(
        parts, lambda sentences: {"pixel_values": noise(count_tiles(parts, each, sentences), 3, size, size)}, layouts
    )


def around(count: int) -> list[int]:
    """An image of this many placeholders between two tokens."""
    return [OPEN, *[IMAGE] * count, CLOSE]


# ---------------------------------------------------------------------------------------------- as LLaVA
@configures("LlavaForConditionalGeneration")
def llava() -> Any:
    text = dict(TEXT, model_type="llama")
    return transformers.LlavaConfig(text_config=text, vision_config=CLIP, image_token_index=IMAGE)


@configures("VipLlavaForConditionalGeneration")
def vip_llava() -> Any:
    text = dict(TEXT, model_type="llama")
    return transformers.VipLlavaConfig(
        text_config=text, vision_config=CLIP, image_token_index=IMAGE, vision_feature_layer=[-2, -1]
    )


@configures("DeepseekVLForConditionalGeneration")
def deepseek_vl() -> Any:
    text = dict(TEXT, model_type="llama")
    return transformers.DeepseekVLConfig(text_config=text, vision_config=SIGLIP, image_token_id=IMAGE)


@feeds(
    "LlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
)
def a_token_for_each_patch(model: Any) -> Batches:
    return tiled({"i": [IMAGE] * 16, "I": [IMAGE] * 16}, each=16)


@configures("DeepseekVLHybridForConditionalGeneration")
def deepseek_vl_hybrid() -> Any:
    fine = dict(
        VISION, model_type="sam_vision_model", image_size=32, output_channels=16, window_size=4, global_attn_indexes=[1]
    )
    return transformers.DeepseekVLHybridConfig(
        text_config=dict(TEXT, model_type="llama"),
        vision_config=SIGLIP,
        high_res_vision_config=dict(fine, mlp_dim=48),
        image_token_id=IMAGE,
    )


@feeds("DeepseekVLHybridForConditionalGeneration")
def images_in_two_resolutions(model: Any) -> Batches:
    def pixels(sentences: list[str]) -> dict[str, Any]:
        count = len(shown(sentences))
        return {"pixel_values": noise(count, 3, 16, 16), "high_res_pixel_values": noise(count, 3, 32, 32, seed=2)}

    return batches({"i": [IMAGE] * 16, "I": [IMAGE] * 16}, pixels)


@configures("VideoLlavaForConditionalGeneration")
def video_llava() -> Any:
    return transformers.VideoLlavaConfig(
        text_config=dict(TEXT, model_type="llama"),
        vision_config=CLIP,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
    )


@feeds("VideoLlavaForConditionalGeneration")
def images_and_videos(model: Any) -> Batches:
    def pixels(sentences: list[str]) -> dict[str, Any]:
        images, videos = len(shown(sentences)), len(shown(sentences, "v"))
        return {
            **({"pixel_values": noise(images, 3, 16, 16)} if images else {}),
            **({"pixel_values_videos": noise(videos, 2, 3, 16, 16)} if videos else {}),
        }

    # Only a video's frames keep the token of their class.
    parts = {"i": [IMAGE] * 16, "I": [IMAGE] * 16, "v": [VIDEO] * 34}
    found = batches(parts, pixels, {**LAYOUTS, **VIDEOS, "images under their older name": ["wiwIww", "wwiwww"]})
    older = found[-1][1]
    older["pixel_values_images"] = older.pop("pixel_values")
    return found


# ---------------------------------------------------------------------------------------------- one tile or several
@configures("AyaVisionForConditionalGeneration")
def aya_vision() -> Any:
    text = dict(TEXT, model_type="cohere2", logit_scale=1.0, **WINDOWS)
    return transformers.AyaVisionConfig(text_config=text, vision_config=SIGLIP, image_token_index=IMAGE)


@feeds("AyaVisionForConditionalGeneration")
def marked_tiles(model: Any) -> Batches:
    tile = [IMAGE] * 4
    whole = [MARK, *tile, CLOSE]
    return tiled({"i": [OPEN, *whole], "I": [OPEN, COLUMN, *tile, COLUMN, *tile, *whole]}, each=4)


@configures("Cohere2VisionForConditionalGeneration")
def cohere2_vision() -> Any:
    return transformers.Cohere2VisionConfig(
        text_config=dict(TEXT, model_type="cohere2", logit_scale=1.0, **WINDOWS),
        vision_config=SIGLIP,
        image_token_id=IMAGE,
        alignment_intermediate_size=64,
    )


@feeds("Cohere2VisionForConditionalGeneration")
def tiles_and_line_breaks(model: Any) -> Batches:
    tile = [*[IMAGE] * 4, ROW]
    return tiled({"i": [OPEN, *tile, CLOSE], "I": [OPEN, *tile * 3, CLOSE]}, each=4)


@configures("InternVLForConditionalGeneration")
def intern_vl() -> Any:
    return transformers.InternVLConfig(
        text_config=dict(TEXT, model_type="qwen2"), vision_config=VISION, image_token_id=IMAGE
    )


@configures("QianfanOCRForConditionalGeneration")
def qianfan_ocr() -> Any:
    return transformers.QianfanOCRConfig(
        text_config=dict(TEXT, model_type="qwen3"), vision_config=VISION, image_token_id=IMAGE
    )


@feeds("QianfanOCRForConditionalGeneration")
def tiles_in_a_row(model: Any) -> Batches:
    return tiled({"i": around(4), "I": around(12)}, each=4)


@feeds("InternVLForConditionalGeneration")
def tiles_in_a_row_and_frames(model: Any) -> Batches:
    return tiled({"i": around(4), "I": around(12), "v": [MARK, *around(4)] * 2}, each=4, layouts={**LAYOUTS, **VIDEOS})


@configures("GotOcr2ForConditionalGeneration")
def got_ocr2() -> Any:
    vision = dict(VISION, image_size=32, output_channels=16, window_size=4, global_attn_indexes=[1], mlp_dim=48)
    return transformers.GotOcr2Config(
        text_config=dict(TEXT, model_type="qwen2"), vision_config=vision, image_token_index=IMAGE
    )


@feeds("GotOcr2ForConditionalGeneration")
def one_page_or_several(model: Any) -> Batches:
    layouts = {
        "one image each": ["wiwww", "wiwww"],
        "prompts of different lengths": ["wiwwwwww", "iw", "wwwiww"],
        "two pages in a sentence and one in the other": ["wIwww", "wwiw"],
    }
    return tiled({"i": around(4), "I": around(8)}, each=4, size=32, layouts=layouts)


@configures("Ovis2ForConditionalGeneration")
def ovis2() -> Any:
    return transformers.Ovis2Config(
        text_config=dict(TEXT, model_type="qwen2"),
        vision_config=dict(VISION, vocab_size=16, hidden_stride=2),
        image_token_id=IMAGE,
        visual_indicator_token_ids=[OPEN, GRID, COLUMN, ROW, CLOSE],
        vocab_size=VOCABULARY,
        hidden_size=32,
    )


@feeds("Ovis2ForConditionalGeneration")
def tiles_in_a_grid(model: Any) -> Batches:
    tile = [IMAGE] * 4
    return tiled({"i": [OPEN, *tile, GRID, CLOSE], "I": [OPEN, *tile, GRID, *tile, COLUMN, *tile, CLOSE]}, each=4)


# ---------------------------------------------------------------------------------------------- images of one size
@configures("AriaForConditionalGeneration")
def aria() -> Any:
    return transformers.AriaConfig(
        text_config=dict(TEXT, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
        vision_config=dict(VISION, model_type="idefics3_vision"),
        projector_patch_to_query_dict={4: 2, 16: 4},
        image_token_index=IMAGE,
        initializer_range=0.3,
    )


@feeds("AriaForConditionalGeneration")
def images_with_margins(model: Any) -> Batches:
    def pixels(sentences: list[str], size: int = 16) -> dict[str, Any]:
        images = shown(sentences)
        mask = torch.ones(len(images), size, size, dtype=torch.bool)
        mask[[image == "I" for image in images], size // 2 :] = False
        return {"pixel_values": noise(len(images), 3, size, size) * mask[:, None], "pixel_mask": mask}

    small = {"small images": ["wiwww", "wIw"]}
    return [
        *batches({"i": [IMAGE] * 4, "I": [IMAGE] * 4}, pixels),
        *batches({"i": [IMAGE] * 2, "I": [IMAGE] * 2}, lambda sentences: pixels(sentences, 8), small),
    ]


@configures("ChameleonForConditionalGeneration")
def chameleon() -> Any:
    codes = {f"IMGIMG{letter}Z": token for letter, token in zip("ABCD", CODES, strict=True)}
    vision = dict(
        num_embeddings=4, embed_dim=8, latent_channels=8, resolution=8, base_channels=32, channel_multiplier=[1, 1, 1]
    )
    return transformers.ChameleonConfig(
        **TEXT, vq_config=dict(vision, num_res_blocks=1), vocabulary_map={"<image>": IMAGE, **codes}
    )


@feeds("ChameleonForConditionalGeneration")
def images_as_codes(model: Any) -> Batches:
    return tiled({"i": around(4), "I": around(4)}, each=4, size=8)


@configures("JanusForConditionalGeneration")
def janus() -> Any:
    codes = dict(num_embeddings=8, embed_dim=8, latent_channels=8, base_channels=32, channel_multiplier=[1, 1])
    return transformers.JanusConfig(
        text_config=dict(TEXT, model_type="llama"),
        vision_config=dict(VISION, projection_dim=32, num_image_tokens=16),
        vq_config=dict(codes, num_res_blocks=1, projection_dim=32, image_token_embed_dim=32),
        image_token_id=IMAGE,
    )


@feeds("JanusForConditionalGeneration")
def images_between_tokens(model: Any) -> Batches:
    return tiled({"i": around(16), "I": around(16)}, each=16)


@configures("Gemma3ForConditionalGeneration")
def gemma3() -> Any:
    return transformers.Gemma3Config(
        text_config={**TEXT, **WINDOWS, "query_pre_attn_scalar": 8, "initializer_range": 0.05},
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=OPEN,
        eoi_token_index=CLOSE,
        initializer_range=0.3,
    )


@feeds("Gemma3ForConditionalGeneration")
def images_of_another_token_type(model: Any) -> Batches:
    return typed(tiled({"i": around(4), "I": around(4)}, each=4), "token_type_ids")


@configures("PaliGemmaForConditionalGeneration")
def pali_gemma() -> Any:
    return transformers.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma", "initializer_range": 0.5},
        vision_config=SIGLIP,
        image_token_index=IMAGE,
        vocab_size=VOCABULARY,
        projection_dim=32,
        hidden_size=32,
    )


@feeds("PaliGemmaForConditionalGeneration")
def images_first(model: Any) -> Batches:
    layouts = {
        "one image each": ["ibwww", "ibwww"],
        "prompts of different lengths": ["ibwwwwww", "ibw", "ibwww"],
        "two images in a sentence and one in the other": ["iibwww", "ibwww"],
    }
    found = tiled({"i": [IMAGE] * 16, "b": [SPECIAL["bos_token_id"]]}, each=16, layouts=layouts)
    for _, batch in found:
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        batch["labels"] = torch.full_like(batch["input_ids"], -100)
    return found


@configures("FuyuForCausalLM")
def fuyu() -> Any:
    return transformers.FuyuConfig(
        text_config=dict(TEXT, model_type="persimmon"), image_size=8, patch_size=4, image_token_id=IMAGE
    )


@feeds("FuyuForCausalLM")
def patches_in_rows(model: Any) -> Batches:
    layouts = {
        "one image each": ["ibwww", "ibwww"],
        "prompts of different lengths": ["ibwwwwww", "Ibw", "ibwww"],
        "a sentence without an image": ["wwww", "Ibwww"],
    }
    row = [IMAGE, IMAGE, ROW]
    parts = {"i": row * 2, "I": row, "b": [SPECIAL["bos_token_id"]]}
    return batches(parts, lambda sentences: {"image_patches": noise(count_tiles(parts, 1, sentences), 48)}, layouts)
