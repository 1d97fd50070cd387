"""Models that read images as crops of equal size, or sound beside images: tiny configurations and real inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor

from tiny_models.grids_of_patches import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    END,
    IMAGE,
    IMAGES,
    INDEXED,
    LATENT,
    LINEAR,
    MUSE,
    ROUTED,
    SIGLIP,
    SMALL,
    START,
    TIME,
    VIDEO,
    VIDEO_END,
    VIDEO_START,
    VIDEOS,
    VISION,
    WIDE,
    Batches,
    Inputs,
    Layout,
    Sentences,
    batches,
    sizes,
    tagged,
    turned,
)
from tiny_models.language_models import TEXT
from tiny_models.registry import SPECIAL, VOCABULARY, configures, feeds, noise, words

Token = tuple[int, int]  # and its modality
SOUNDS: list[tuple[str, Sentences]] = [
    ("a clip each", [[3, (24,), 2], [3, (24,), 2]]),
    ("clips of different lengths", [[2, (24,), 3], [1, (18,), 4], [3, (9,), 1]]),
]
MIXED: list[tuple[str, Sentences]] = [("a clip beside an image", [[2, (24,), 1, WIDE, 2], [3, SMALL, 1, (18,), 2]])]


# ---------------------------------------------------------------------------------------------- sound
def heard(lengths: list[int], longest: int | None = None) -> Tensor:
    """Where clips of these lengths are no padding, int64 `[clips, longest]`."""
    return (torch.arange(longest or max(lengths)) < torch.tensor(lengths)[:, None]).long()


def with_sound(
    model: Any, layout: Layout, listen: Callable[[list[int]], Inputs], sentences: list[tuple[str, Sentences]]
) -> Batches:
    found = batches(model, layout, sentences)
    for (_, inputs), (_, rows) in zip(found, sentences, strict=True):
        if lengths := [length for (length,) in sizes(rows, 1)]:
            inputs |= listen(lengths)
    return found


def _features(lengths: list[int]) -> Inputs:
    mask = heard(lengths)
    return {"input_features": noise(len(lengths), 8, mask.shape[1]), "feature_attention_mask": mask}


def _omni(model: Any, tokens: Callable[[int], int]) -> Batches:
    layout = Layout(types=False, heard=tokens)
    found = with_sound(model, layout, _features, [*IMAGES, *VIDEOS, *SOUNDS, *MIXED])
    for _, inputs in found:
        if "video_grid_thw" in inputs:
            inputs["video_second_per_grid"] = torch.ones(len(inputs["video_grid_thw"]))
    return found


MODALITIES = dict(image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=AUDIO)
OMNI = dict(vision_start_token_id=START, vision_end_token_id=END, user_token_id=TIME, initializer_range=0.3)
OMNI |= dict(audio_start_token_id=AUDIO_START, audio_end_token_id=AUDIO_END)
MEL = dict(num_mel_bins=8, d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, output_dim=32)
MEL |= dict(max_source_positions=64, initializer_range=0.3)


@configures("Qwen2_5OmniThinkerForConditionalGeneration")
def qwen2_5_omni() -> Any:
    tokens = dict(image_token_index=IMAGE, video_token_index=VIDEO, audio_token_index=AUDIO)
    return transformers.Qwen2_5OmniThinkerConfig(
        text_config=turned(),
        vision_config=dict(VISION, window_size=16, fullatt_block_indexes=[1]),
        audio_config=dict(MEL, n_window=4),
        **OMNI,
        **tokens,
    )


feeds("Qwen2_5OmniThinkerForConditionalGeneration")(functools.partial(_omni, tokens=lambda length: (length + 1) // 4))


@configures("Qwen3OmniMoeThinkerForConditionalGeneration")
def qwen3_omni_moe() -> Any:
    return transformers.Qwen3OmniMoeThinkerConfig(
        text_config=turned(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0]),
        vision_config=dict(VISION, num_position_embeddings=16, deepstack_visual_indexes=[0]),
        audio_config=dict(MEL, downsample_hidden_size=8, n_window_infer=100),
        **MODALITIES,
        **OMNI,
    )


feeds("Qwen3OmniMoeThinkerForConditionalGeneration")(functools.partial(_omni, tokens=lambda length: -(-length // 8)))


@configures("Dots3NoteForConditionalGeneration")
def dots3_note() -> Any:
    """A layer that looks at chosen tokens only, and one with a window; vision has a layer with experts, too."""
    text: dict[str, Any] = {**TEXT, **LATENT, **ROUTED, **INDEXED, "qk_rope_head_dim": 8, "head_dim": 16}
    text |= dict(layer_types=["indexed_attention", "sliding_attention"], sliding_window=6)
    text |= dict(shared_experts_intermediate_size=24, swa_num_attention_heads=4, swa_num_key_value_heads=4)
    text |= dict(swa_q_lora_rank=16, swa_kv_lora_rank=16, swa_head_dim=16, swa_qk_nope_head_dim=8, swa_v_head_dim=8)
    vision = dict(SIGLIP, moe_intermediate_size=24, pyramid_num_routed=[-1, 4], adapter_in_dim=32, adapter_out_dim=32)
    audio = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3
    )
    audio |= dict(feature_size=8, hop_length=1, downsample_hidden_size=8, adapter_input_size=32, adapter_out_dim=32)
    return transformers.Dots3NoteConfig(text_config=text, vision_config=vision, audio_config=audio, **MODALITIES)


def _chunks(lengths: list[int]) -> Inputs:
    longest = -(-max(lengths) // 8) * 8
    return {"input_features": noise(len(lengths), 8, longest), "chunk_sample_lengths": torch.tensor(lengths)}


@feeds("Dots3NoteForConditionalGeneration")
def grids_and_chunks(model: Any) -> Batches:
    layout = Layout((3 * 4 * 4,), types=False, heard=lambda length: -(-length // 8))
    return with_sound(model, layout, _chunks, [*IMAGES, *VIDEOS, *SOUNDS, *MIXED])


@configures("MuseSparkForConditionalGeneration")
def muse_spark() -> Any:
    experts = dict(num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, moe_hidden_size=16)
    text = dict(TEXT, **experts, head_dim=8, sliding_window=6, output_multiplier=1.0)
    text |= dict(mlp_layer_types=["dense", "sparse"])
    vision = dict(SIGLIP, pos_emb_height=4, pos_emb_width=4, layer_types=["window_attention", "full_attention"])
    audio = dict(patch_sizes=[4, 2], hidden_sizes=[16, 32], depths=[1, 1], num_hidden_layers=2, out_hidden_size=32)
    return transformers.MuseSparkConfig(
        text_config=text,
        vision_config=vision,
        audio_config=dict(audio, initializer_range=0.3),
        out_hidden_size=128,
        projector_hidden_size=48,
        **MODALITIES,
    )


def _waves(lengths: list[int]) -> Inputs:
    mask = heard(lengths, longest=-(-max(lengths) // 8) * 8)
    return {"input_values": noise(*mask.shape) * mask, "input_values_mask": mask.int()}


@feeds("MuseSparkForConditionalGeneration")
def grids_and_waves(model: Any) -> Batches:
    layout = Layout(around=MUSE.around, types=False, heard=lambda length: -(-length // 8))
    return with_sound(model, layout, _waves, [*IMAGES, *VIDEOS, *SOUNDS, *MIXED])


# ---------------------------------------------------------------------------------------------- Inkling
HYBRID = dict(TEXT, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, head_dim=8, d_rel=4)
HYBRID |= dict(sliding_window_size=6, rel_extent=16, log_scaling_n_floor=16, layer_types=["hybrid_sliding", "hybrid"])
HYBRID |= dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
HYBRID_VISION = dict(SIGLIP, posemb_grid_size=4, projection_hidden_dim=48, text_hidden_size=32)


@configures("InklingForConditionalGeneration")
def inkling() -> Any:
    return transformers.InklingConfig(
        text_config=dict(HYBRID, mlp_layer_types=["dense", "sparse"], logits_mup_width_multiplier=1.0),
        vision_config=dict(SIGLIP, num_hidden_layers=4),
        audio_config=dict(n_mel_bins=4, mel_vocab_size=8, initializer_range=0.3),
        image_token_id=IMAGE,
        audio_token_id=AUDIO,
        image_bos_token_id=START,
        audio_bos_token_id=AUDIO_START,
    )


def _bins(lengths: list[int]) -> Inputs:
    mask = heard(lengths).bool()
    bins = noise(*mask.shape, 4).mul(2).add(4).clamp(0, 7).int()
    return {"audio_input_ids": bins, "audio_input_ids_mask": mask}


@feeds("InklingForConditionalGeneration")
def patches_and_bins(model: Any) -> Batches:
    """Every patch is a token, shown twice as if in two frames; sound is quantized."""
    found = with_sound(model, Layout((2, 4, 4, 3), merge=1, types=False), _bins, [*IMAGES, *SOUNDS, *MIXED])
    for _, inputs in found:
        inputs.pop("image_grid_thw", None)
    return found


@configures("Inkling2ForConditionalGeneration")
def inkling2() -> Any:
    text = dict(HYBRID, unpadded_vocab_size=VOCABULARY, n_layers_per_attn_res_block=1)
    return transformers.Inkling2Config(text_config=text, vision_config=dict(HYBRID_VISION), image_token_id=IMAGE)


@configures("Inkling2LoopForConditionalGeneration")
def inkling2_loop() -> Any:
    """The two layers in the middle run twice."""
    text: dict[str, Any] = dict(HYBRID, unpadded_vocab_size=VOCABULARY, n_layers_per_attn_res_block=1)
    text |= dict(num_hidden_layers=4, layer_types=["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid"])
    text |= dict(loop_layer_index_start=1, loop_layer_index_end=3, loop_num_passes=2, loop_gate_rank=8)
    return transformers.Inkling2LoopConfig(text_config=text, vision_config=dict(HYBRID_VISION), image_token_id=IMAGE)


feeds("Inkling2ForConditionalGeneration", "Inkling2LoopForConditionalGeneration")(
    functools.partial(batches, layout=Layout((8, 8, 3), merge=1, types=False), sentences=IMAGES)
)


# ---------------------------------------------------------------------------------------------- MiniCPM
SLICE_START, SLICE_END, NEWLINE, NUMBER_START, NUMBER_END = AUDIO, VIDEO_START, VIDEO_END, AUDIO_START, AUDIO_END
OVERVIEW, SLICE = (4, 8), (8, 4)  # rows and columns of patches
# So many words, an image's slices as rows and columns, or a video's frames.
SLICED: list[tuple[str, Sentences]] = [
    ("an image each", [[3, (0, 0), 2], [3, (0, 0), 2]]),
    ("prompts of different lengths", [[5, (0, 0), 3], [1, (0, 0), 2], [2, (0, 0), 6]]),
    ("slices, and two images beside one", [[2, (1, 2), 1, (0, 0), 3], [4, (2, 1), 2]]),
    ("a sentence without an image", [[2, (0, 0), 3], [6]]),
    ("videos of different lengths", [[2, (2,), 3], [1, (3,), 2]]),
]


def _minicpm(config: Any) -> Any:
    markers = dict(image_start_id=START, image_end_id=END, slice_start_id=SLICE_START, slice_end_id=SLICE_END)
    text = turned(head_dim=16, **LINEAR, layer_types=["linear_attention", "full_attention"])
    return config(
        text_config=dict(text, model_type="qwen3_5_text"),
        vision_config=dict(SIGLIP, image_size=32),
        insert_layer_id=0,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        newline_id=NEWLINE,
        **markers,
    )


@configures("MiniCPMV4_6ForConditionalGeneration")
def minicpm_v4_6() -> Any:
    return _minicpm(transformers.MiniCPMV4_6Config)


@configures("MiniCPMV4_7ForConditionalGeneration")
def minicpm_v4_7() -> Any:
    return _minicpm(transformers.MiniCPMV4_7Config)


@configures("MiniCPMOcrForConditionalGeneration")
def minicpm_ocr() -> Any:
    return _minicpm(transformers.MiniCPMOcrConfig)


def _sliced(piece: Any, text: Iterator[int], size: int, numbered: bool) -> list[Token]:
    """Tokens of words, of an overview and its slices, or of a video, `numbered` or not; so many are a crop."""
    if isinstance(piece, int):
        return [(next(text), 0) for _ in range(piece)]
    number = [(NUMBER_START, 0), (TIME, 0), (NUMBER_END, 0)]
    if len(piece) == 1:
        return [*number * numbered, *[(START, 0), *[(VIDEO, 2)] * size, (END, 0)] * piece[0]]
    tokens = [(IMAGE, 1)] * size
    row = [(SLICE_START, 0), *tokens, (SLICE_END, 0)] * piece[1]
    rows = [*row, (NEWLINE, 0)] * piece[0]
    return [*number, (START, 0), *tokens, (END, 0), *rows[:-1]]


@feeds(*(f"MiniCPM{name}ForConditionalGeneration" for name in ("V4_6", "V4_7", "Ocr")))
def slices(model: Any) -> Batches:
    size, typed = 8 if model.config.downsample_mode == "4x" else 2, model.config.model_type == "minicpmv4_7"
    found = []
    for special, sentences in SLICED:
        text = iter(words(1, 99)[0].tolist())
        write = functools.partial(_sliced, text=text, size=size, numbered=not typed)
        rows = [[token for piece in sentence for token in write(piece)] for sentence in sentences]
        inputs = tagged(rows, types=typed)
        images = [crop for down, across in sizes(sentences, 2) for crop in [OVERVIEW] + [SLICE] * (down * across)]
        frames = [OVERVIEW for (count,) in sizes(sentences, 1) for _ in range(count)]
        for suffix, crops in (("", images), ("_videos", frames)):
            if crops:
                inputs[f"pixel_values{suffix}"] = noise(1, 3, 4, 4 * 32 * len(crops))
                inputs[f"target_sizes{suffix}"] = torch.tensor(crops, dtype=torch.int32)
        found.append((special, inputs))
    return found


# ---------------------------------------------------------------------------------------------- crops of equal size
# So many words, or what a sentence holds beside them: crops of an image or frames of a video.
CROPPED: list[tuple[str, Sentences]] = [
    ("an image each", [[3, (0,), 2], [3, (0,), 2]]),
    ("prompts of different lengths", [[5, (0,), 3], [1, (0,), 2], [2, (0,), 6]]),
    ("two images beside one", [[2, (0,), 1, (0,), 3], [4, (0,), 2]]),
    ("a sentence without an image", [[2, (0,), 3], [6]]),
]


def _in_crops(sentences: Sentences, write: Callable[[int], list[Token]], types: bool) -> Inputs:
    text = iter(words(1, 99)[0].tolist())
    rows: list[list[Token]] = []
    for sentence in sentences:
        rows.append([(SPECIAL["bos_token_id"], 0)])
        for piece in sentence:
            rows[-1] += [(next(text), 0) for _ in range(piece)] if isinstance(piece, int) else write(piece[0])
    return tagged(rows, types)


@configures("Molmo2ForConditionalGeneration")
def molmo2() -> Any:
    """Features of both layers of vision are pooled in twos by two."""
    vision = dict(SIGLIP, num_key_value_heads=4, head_dim=8, image_size=[16, 16])
    adapter = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8, intermediate_size=48)
    return transformers.Molmo2Config(
        text_config=dict(TEXT, head_dim=8, additional_vocab_size=8),
        vision_config=vision,
        adapter_config=dict(adapter, vision_feature_layer=[1, 0], text_hidden_size=32, initializer_range=0.3),
        initializer_range=0.3,
        image_patch_id=IMAGE,
        image_start_token_id=START,
        image_end_token_id=END,
        low_res_image_start_token_id=LOW_START,
        frame_start_token_id=VIDEO_START,
        frame_end_token_id=VIDEO_END,
    )


LOW_START, COLUMN = AUDIO_START, AUDIO_END  # tokens of Molmo 2 only


def _pooled(count: int) -> list[Token]:
    """An image as an overview and a crop, of two rows by two columns each; a video's frames without columns."""
    if count == 0:
        rows = [IMAGE, IMAGE, COLUMN] * 2
        return [(token, 1) for token in (LOW_START, *rows, END, START, *rows, END)]
    return [(TIME, 0), *((token, 1) for token in (VIDEO_START, *[IMAGE] * 4, VIDEO_END))] * count


@feeds("Molmo2ForConditionalGeneration")
def crops_and_frames(model: Any) -> Batches:
    """Four patches of a crop or frame, by their numbers, are pooled into a token."""
    square = torch.arange(16).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    found = []
    for special, sentences in [*CROPPED, ("videos of different lengths", [[2, (2,), 3], [1, (3,), 2]])]:
        inputs = _in_crops(sentences, _pooled, types=True)
        counts = [count for (count,) in sizes(sentences, 1)]
        crops = sum(counts) or 2 * len(counts)
        pooling = torch.cat([square + 16 * crop for crop in range(crops)])
        if sum(counts):
            grids = torch.tensor([[count, 2, 2] for count in counts])
            inputs |= dict(pixel_values_videos=noise(crops, 16, 48), video_token_pooling=pooling, video_grids=grids)
        else:
            inputs |= dict(pixel_values=noise(crops, 16, 48), image_token_pooling=pooling)
            inputs |= dict(image_grids=torch.full((len(counts), 4), 2), image_num_crops=torch.full((len(counts),), 2))
        found.append((special, inputs))
    return found


@configures("Step3p7ForConditionalGeneration")
def step3p7() -> Any:
    text = dict(TEXT, **ROUTED, head_dim=8, share_expert_dim=24, sliding_window=6, num_sliding_attention_heads=2)
    text |= dict(layer_types=["sliding_attention", "full_attention"], mlp_layer_types=["dense", "sparse"])
    vision = dict(SIGLIP, mlp_ratio=1.5, image_size=32)
    return transformers.Step3p7Config(text_config=text, vision_config=vision, image_token_id=IMAGE)


def _local(count: int) -> list[Token]:
    """Crops of an image, then its overview."""
    crop = [(VIDEO_START, 0), (IMAGE, 0), (VIDEO_END, 0)]
    return [*crop * count, (START, 0), *[(IMAGE, 0)] * 4, (END, 0)]


@feeds("Step3p7ForConditionalGeneration")
def overviews_and_crops(model: Any) -> Batches:
    found = []
    for special, sentences in [*CROPPED, ("crops of some images", [[2, (2,), 1, (0,), 3], [1, (3,), 2]])]:
        inputs = _in_crops(sentences, _local, types=False)
        counts = [count for (count,) in sizes(sentences, 1)]
        inputs |= dict(pixel_values=noise(len(counts), 3, 32, 32), num_local_patches=torch.tensor(counts))
        if sum(counts):
            inputs["pixel_values_local"] = noise(sum(counts), 3, 16, 16)
        found.append((special, inputs))
    return found
