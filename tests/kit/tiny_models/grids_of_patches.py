"""Models that read images as grids of flat patches, as Qwen2-VL does: tiny configurations and real inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from zoo import FIRST_WORD

from tiny_models.language_models import TEXT
from tiny_models.registry import FIRST_PLACEHOLDER, VOCABULARY, configures, feeds, noise, padded, words

IMAGE, VIDEO, AUDIO, START, END, VIDEO_START, VIDEO_END, AUDIO_START, AUDIO_END = range(FIRST_PLACEHOLDER, VOCABULARY)
TIME, COMMA = FIRST_WORD, FIRST_WORD + 1  # words around the frames of a video

# So many words, or what stands between words by its size: a clip of sound `(frames,)`, an image `(1, rows, columns)` or
# a video `(frames, rows, columns)`, in patches.
Piece = int | tuple[int, ...]
Sentences = list[list[Piece]]
Inputs = dict[str, Tensor]
Batches = list[tuple[str, Inputs]]

WIDE, TALL, SMALL, FILM, LONG_FILM = (1, 4, 6), (1, 6, 4), (1, 4, 4), (2, 4, 4), (4, 4, 4)
IMAGES: list[tuple[str, Sentences]] = [
    ("an image each", [[3, WIDE, 4], [3, WIDE, 4]]),
    ("prompts of different lengths", [[5, WIDE, 6], [1, SMALL, 2], [3, TALL, 1]]),
    ("two images beside one", [[2, SMALL, 1, WIDE, 3], [4, TALL, 2]]),
    ("a sentence without an image", [[2, WIDE, 3], [6]]),
]
VIDEOS: list[tuple[str, Sentences]] = [
    ("videos of different lengths", [[2, FILM, 3], [1, LONG_FILM, 4]]),
    ("a video beside an image", [[3, FILM, 1], [1, WIDE, 2]]),
]


# ---------------------------------------------------------------------------------------------- inputs
@dataclass(frozen=True)
class Layout:
    """How a processor writes images, videos and clips into prompts, and their patches into tensors."""

    pixels: tuple[int, ...] = (2 * 3 * 4 * 4,)  # shape of a patch
    merge: int = 2  # rows and columns of patches in a token
    newlines: int = 0  # tokens that end a row
    ends: int = 0  # tokens of an image beside its rows
    frames: int = 1  # frames of the grid in a token
    # before a video, before each of its frames, after each and after the video
    around: tuple[tuple[int, ...], ...] = ((START,), (), (), (END,))
    types: bool = True  # whether `mm_token_type_ids` tell the modalities apart
    heard: Callable[[int], int] = int  # tokens of a clip, by its frames


STAMPED = ((), (TIME, START), (END,), ())  # each frame of a video after its time


def _written(piece: Piece, layout: Layout, text: Iterator[int]) -> list[tuple[int, int]]:
    """Tokens, each with its modality: 0 for words, 1 for images, 2 for videos, 3 for sound."""
    if isinstance(piece, int):
        return [(next(text), 0) for _ in range(piece)]
    if len(piece) == 1:
        return [(AUDIO_START, 0), *[(AUDIO, 3)] * layout.heard(piece[0]), (AUDIO_END, 0)]
    frames, rows, columns = piece
    count = rows // layout.merge * (columns // layout.merge + layout.newlines) + layout.ends
    if frames == 1:
        return [(START, 0), *[(IMAGE, 1)] * count, (END, 0)]
    opening, before, after, closing = ([(token, 0) for token in tokens] for tokens in layout.around)
    frame = [*before, *[(VIDEO, 2)] * count, *after]
    return [*opening, *frame * (frames // layout.frames), *closing]


def sizes(sentences: Sentences, dimensions: int) -> list[tuple[int, ...]]:
    """Sizes of all images and videos (of three dimensions) or of all clips (of one)."""
    pieces = [piece for sentence in sentences for piece in sentence]
    return [piece for piece in pieces if isinstance(piece, tuple) and len(piece) == dimensions]


def tagged(rows: list[list[tuple[int, int]]], types: bool) -> Inputs:
    """Prompts of tokens with their modalities, which are an input of their own if `types`."""
    inputs = padded([[token for token, _ in row] for row in rows])
    if types:
        longest = max(map(len, rows))
        found = [[0] * (longest - len(row)) + [modality for _, modality in row] for row in rows]
        inputs["mm_token_type_ids"] = torch.tensor(found)
    return inputs


def batch(sentences: Sentences, layout: Layout) -> Inputs:
    """All inputs but those for sound."""
    text = iter(words(1, 99)[0].tolist())
    rows = [[token for piece in sentence for token in _written(piece, layout, text)] for sentence in sentences]
    inputs = tagged(rows, layout.types)
    grids = sizes(sentences, 3)
    images, videos = [grid for grid in grids if grid[0] == 1], [grid for grid in grids if grid[0] > 1]
    for name, pixels, found in (("image", "pixel_values", images), ("video", "pixel_values_videos", videos)):
        if found:
            inputs[f"{name}_grid_thw"] = torch.tensor(found)
            inputs[pixels] = noise(int(inputs[f"{name}_grid_thw"].prod(-1).sum()), *layout.pixels)
    return inputs


def batches(model: Any, layout: Layout, sentences: list[tuple[str, Sentences]]) -> Batches:
    return [(special, batch(rows, layout)) for special, rows in sentences]


def _fed(layout: Layout, *sentences: tuple[str, Sentences]) -> Callable[[Any], Batches]:
    """A source of these batches, or of all."""
    return functools.partial(batches, layout=layout, sentences=[*(sentences or (*IMAGES, *VIDEOS))])


# ---------------------------------------------------------------------------------------------- configurations
VISION = dict(depth=2, num_heads=4, hidden_size=32, intermediate_size=48, patch_size=4, initializer_range=0.3)
VISION |= dict(out_hidden_size=32)
SIGLIP = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, patch_size=4)
SIGLIP |= dict(initializer_range=0.3)
TOKENS = dict(image_token_id=IMAGE, video_token_id=VIDEO)
TOKENS |= dict(vision_start_token_id=START, vision_end_token_id=END, image_start_token_id=START, image_end_token_id=END)
TOKENS |= dict(video_start_token_id=VIDEO_START, video_end_token_id=VIDEO_END)
ROUTED = dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=24)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
LINEAR = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4)
INDEXED = dict(index_topk=8, index_head_dim=8, index_n_heads=2)


def turned(*sections: int, **options: Any) -> dict[str, Any]:
    """A text's options, with so many pairs of a head turned by the place in time, in rows and in columns."""
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=list(sections or (2, 1, 1)))
    if options.get("head_dim") == 16:
        rope["partial_rotary_factor"] = 0.5
    return {**TEXT, "rope_parameters": rope, **options}


# ---------------------------------------------------------------------------------------------- Qwen
@configures("Qwen2VLForConditionalGeneration")
def qwen2_vl() -> Any:
    vision = dict(VISION, embed_dim=32, mlp_ratio=2)
    return transformers.Qwen2VLConfig(text_config=turned(), vision_config=vision, **TOKENS)


feeds("Qwen2VLForConditionalGeneration")(_fed(Layout()))


@configures("Qwen2_5_VLForConditionalGeneration")
def qwen2_5_vl() -> Any:
    vision = dict(VISION, window_size=16, fullatt_block_indexes=[1])
    return transformers.Qwen2_5_VLConfig(text_config=turned(), vision_config=vision, **TOKENS)


@feeds("Qwen2_5_VLForConditionalGeneration")
def timed_videos(model: Any) -> Batches:
    """Videos with the seconds from one frame of their grid to the next."""
    found = batches(model, Layout(), [*IMAGES, *VIDEOS])
    for _, inputs in found:
        if "video_grid_thw" in inputs:
            inputs["second_per_grid_ts"] = torch.full((len(inputs["video_grid_thw"]),), 0.5)
    return found


def _deep(config: Any, **options: Any) -> Any:
    """Features of the first layer of vision are added to the hidden states of the text's layers, too."""
    vision = dict(VISION, num_position_embeddings=16, deepstack_visual_indexes=[0])
    return config(text_config=turned(head_dim=8, **options), vision_config=vision, **TOKENS)


@configures("Qwen3VLForConditionalGeneration")
def qwen3_vl() -> Any:
    return _deep(transformers.Qwen3VLConfig)


@configures("Cosmos3OmniForConditionalGeneration")
def cosmos3_omni() -> Any:
    return _deep(transformers.Cosmos3OmniConfig)


@configures("Qwen3VLMoeForConditionalGeneration")
def qwen3_vl_moe() -> Any:
    return _deep(transformers.Qwen3VLMoeConfig, **EXPERTS, mlp_only_layers=[0])


@configures("Qwen3_5ForConditionalGeneration")
def qwen3_5() -> Any:
    text = turned(head_dim=16, **LINEAR, layer_types=["linear_attention", "full_attention"])
    vision = dict(VISION, num_position_embeddings=16)
    return transformers.Qwen3_5Config(text_config=text, vision_config=vision, **TOKENS)


@configures("Qwen3_5MoeForConditionalGeneration")
def qwen3_5_moe() -> Any:
    text = turned(head_dim=16, **LINEAR, **EXPERTS, layer_types=["linear_attention", "full_attention"])
    vision = dict(VISION, num_position_embeddings=16)
    return transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision, **TOKENS)


@configures("Qwen4ExpForConditionalGeneration")
def qwen4_exp() -> Any:
    """Tokens and their n-grams are embedded again in the first layer, and the second looks at chosen blocks only."""
    chosen = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2)
    again = dict(ple_layer_ids=[1], ple_embed_dim=32, heads_per_ngram=2, ngram_vocab_size_base=50, split_ngram_parts=1)
    kinds = ["linear_attention", "indexed_attention"]
    text = turned(head_dim=16, **LINEAR, **EXPERTS, **chosen, **again, hc_count=2, hc_lowrank=8, layer_types=kinds)
    vision = dict(VISION, num_position_embeddings=16)
    return transformers.Qwen4ExpConfig(text_config=text, vision_config=vision, **TOKENS)


@configures("Cosmos3EdgeForConditionalGeneration")
def cosmos3_edge() -> Any:
    vision = dict(SIGLIP, num_patches=16)
    return transformers.Cosmos3EdgeConfig(
        text_config=turned(head_dim=8), vision_config=vision, projector_hidden_size=48, **TOKENS
    )


for name in ("Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "Qwen4Exp", "Cosmos3Omni"):
    feeds(f"{name}ForConditionalGeneration")(_fed(Layout(around=STAMPED)))
feeds("Cosmos3EdgeForConditionalGeneration")(_fed(Layout((3 * 4 * 4,), around=STAMPED)))


# ---------------------------------------------------------------------------------------------- GLM
def _glm(config: Any, **options: Any) -> Any:
    """Half of a wide head is turned."""
    text = turned(num_attention_heads=2, num_key_value_heads=1, **options)
    text["rope_parameters"]["partial_rotary_factor"] = 0.5
    return config(text_config=text, vision_config=dict(VISION, image_size=16), **TOKENS)


@configures("Glm4vForConditionalGeneration")
def glm4v() -> Any:
    return _glm(transformers.Glm4vConfig)


@configures("Glm46VForConditionalGeneration")
def glm46v() -> Any:
    return _glm(transformers.Glm46VConfig)


@configures("GlmOcrForConditionalGeneration")
def glm_ocr() -> Any:
    return _glm(transformers.GlmOcrConfig)


@configures("Glm4vMoeForConditionalGeneration")
def glm4v_moe() -> Any:
    return _glm(transformers.Glm4vMoeConfig, **ROUTED, first_k_dense_replace=1)


@configures("Glm5NextForConditionalGeneration")
def glm5_next() -> Any:
    """A layer of linear attention, and one that looks at chosen groups of tokens only."""
    text: dict[str, Any] = {
        **TEXT,
        **LATENT,
        **ROUTED,
        **INDEXED,
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
        "hc_mult": 2,
    }
    text |= dict(layer_types=["linear_attention", "indexed_attention"], mlp_layer_types=["dense", "sparse"])
    text |= dict(linear_head_dim=8, linear_num_heads=4)
    vision = dict(VISION, image_size=16, projection_intermediate_size=48)
    return transformers.Glm5NextConfig(text_config=text, vision_config=vision, **TOKENS)


# The host's beam search mixes up the images of a sentence between its beams, and finds no token of a video.
for name in ("Glm4v", "Glm46V", "GlmOcr", "Glm4vMoe", "Glm5Next"):
    feeds(f"{name}ForConditionalGeneration")(_fed(Layout(), *IMAGES[:2], IMAGES[3]))


# ---------------------------------------------------------------------------------------------- others
@configures("Ernie4_5_VLMoeForConditionalGeneration")
def ernie4_5_vl_moe() -> Any:
    experts = dict(moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_intermediate_size=[24, 24])
    text = turned(1, 1, 2, **experts)
    return transformers.Ernie4_5_VLMoeConfig(text_config=text, vision_config=dict(VISION), **TOKENS)


@feeds("Ernie4_5_VLMoeForConditionalGeneration")
def modalities_for_experts(model: Any) -> Batches:
    """Experts of their own read images and videos with the tokens around them."""
    layout = Layout((3 * 4 * 4,), frames=2, around=((VIDEO_START,), (), (), (VIDEO_END,)))
    found = batches(model, layout, [*IMAGES, *VIDEOS])
    for _, inputs in found:
        images = torch.isin(inputs["input_ids"], torch.tensor([IMAGE, START, END]))
        videos = torch.isin(inputs["input_ids"], torch.tensor([VIDEO, VIDEO_START, VIDEO_END]))
        inputs["moe_mm_token_type_ids"] = images.long() + 2 * videos.long()
    return found


@configures("PaddleOCRVLForConditionalGeneration")
def paddle_ocr_vl() -> Any:
    vision = dict(SIGLIP, image_size=16)
    return transformers.PaddleOCRVLConfig(text_config=turned(head_dim=8), vision_config=vision, **TOKENS)


feeds("PaddleOCRVLForConditionalGeneration")(_fed(Layout((3, 4, 4)), *IMAGES))


@configures("HunYuanVLForConditionalGeneration")
def hunyuan_vl() -> Any:
    """Heads are turned by the place in the text, too."""
    text = turned(1, 1, 1, 1, head_dim=8)
    vision = dict(SIGLIP, out_hidden_size=32, max_image_size=32)
    return transformers.HunYuanVLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, im_start_id=START, im_end_id=END
    )


feeds("HunYuanVLForConditionalGeneration")(_fed(Layout((3 * 4 * 4,), newlines=1, ends=2), *IMAGES))


@configures("HYV4VLForConditionalGeneration")
def hy_v4_vl() -> Any:
    """The second layer looks at the tokens that the first has chosen."""
    text = turned(**{**LATENT, **ROUTED, **INDEXED, "qk_rope_head_dim": 8, "hc_mult": 2})
    vision = dict(SIGLIP, out_hidden_size=32, max_image_size=32)
    text |= dict(indexer_types=["full", "shared"])
    return transformers.HYV4VLConfig(text_config=text, vision_config=vision, **TOKENS)


feeds("HYV4VLForConditionalGeneration")(_fed(Layout((3 * 4 * 4,), newlines=1)))


def _minimax_m3() -> dict[str, Any]:
    """The second layer looks at chosen blocks only."""
    rope = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
    sizes = dict(dense_intermediate_size=48, intermediate_size=24, shared_intermediate_size=24, head_dim=8)
    experts = dict(num_local_experts=4, num_experts_per_tok=2, mlp_layer_types=["dense", "sparse"])
    chosen = dict(index_n_heads=2, index_head_dim=8, index_block_size=4, index_topk_blocks=2)
    kinds = ["full_attention", "minimax_m3_sparse"]
    return {**TEXT, **sizes, **experts, **chosen, "rope_parameters": rope, "layer_types": kinds}


@configures("MiniMaxM3VLForCausalLM")
def minimax_m3_text() -> Any:
    return transformers.MiniMaxM3VLTextConfig(**_minimax_m3())


@configures("MiniMaxM3SparseForConditionalGeneration")
def minimax_m3_vl() -> Any:
    return transformers.MiniMaxM3VLConfig(
        text_config=_minimax_m3(),
        vision_config=dict(SIGLIP, image_size=16),
        projector_hidden_size=32,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
    )


TEXTS: list[tuple[str, Sentences]] = [("texts", [[9], [9]]), ("texts of different lengths", [[9], [5], [7]])]
feeds("MiniMaxM3VLForCausalLM")(_fed(Layout(types=False), *TEXTS))
feeds("MiniMaxM3SparseForConditionalGeneration")(_fed(Layout(types=False, around=STAMPED)))


@configures("MuseGlimmerForConditionalGeneration")
def muse_glimmer() -> Any:
    vision = dict(SIGLIP, pos_emb_height=4, pos_emb_width=4, layer_types=["window_attention", "full_attention"])
    return transformers.MuseGlimmerConfig(
        text_config=dict(TEXT, head_dim=8, sliding_window=6, output_multiplier=1.0),
        vision_config=vision,
        out_hidden_size=128,
        projector_hidden_size=48,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )


MUSE = Layout(around=((VIDEO_START,), (TIME,), (COMMA,), (VIDEO_END,)), types=False)
feeds("MuseGlimmerForConditionalGeneration")(_fed(MUSE))


@configures("VideoLlama3ForConditionalGeneration")
def video_llama3() -> Any:
    text = dict(TEXT, model_type="qwen2")
    return transformers.VideoLlama3Config(text_config=text, vision_config=dict(SIGLIP), **TOKENS)


@feeds("VideoLlama3ForConditionalGeneration")
def merged_patches(model: Any) -> Batches:
    """Every image and video with how many rows and columns of patches make a token."""
    found = batches(model, Layout((3 * 4 * 4,), around=((), (TIME,), (COMMA,), ()), types=False), [*IMAGES, *VIDEOS])
    for _, inputs in found:
        for name in ("image", "video"):
            if f"{name}_grid_thw" in inputs:
                inputs[f"{name}_merge_sizes"] = torch.full((len(inputs[f"{name}_grid_thw"]),), 2)
        if "video_grid_thw" in inputs:
            count = int(inputs["video_grid_thw"].prod(-1).sum()) // 4
            inputs["video_compression_mask"] = torch.ones(count, dtype=torch.bool)  # no frame repeats another
    return found
