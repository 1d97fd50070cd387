"""Models that read several media beside a text: images, videos and audio clips in its midst, or by cross-attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor

from tiny_models.captioning import (
    DECODER,
    IMAGE,
    PATCH,
    UNDROPPED,
    VISION,
    Batches,
    pixels,
    prompts,
    right_padded,
    text,
    texts,
)
from tiny_models.registry import FIRST_PLACEHOLDER, VOCABULARY, configures, feeds, noise

AUDIO, VIDEO, BEGINS, ENDS, BETWEEN, LINE_ENDS, WRAPPED = range(FIRST_PLACEHOLDER + 1, FIRST_PLACEHOLDER + 8)

GROUPED = dict(DECODER, num_key_value_heads=2)
ROTATED = {"rope_type": "default", "rope_theta": 10000.0}


def until(lengths: Iterable[int]) -> Tensor:
    """Which steps of clips of these lengths are there, bool `[clips, longest]`."""
    ends = torch.tensor(list(lengths))
    return torch.arange(int(ends.max())) < ends[:, None]


def awake(model: Any, *names: str, scale: float = 1.0) -> None:
    """Random numbers for what is zero until it is trained: else the answer would not depend on what is shown."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(names):
                tensor.copy_(scale * noise(*tensor.shape))


# ---------------------------------------------------------------------------------------------- images read across
@configures("MllamaForConditionalGeneration")
def mllama() -> Any:
    vision = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_global_layers=1,
        attention_heads=4,
        image_size=8,
        patch_size=PATCH,
        intermediate_layers_indices=[0],
        vision_output_dim=2 * 32,
        initializer_range=0.3,
    )
    return transformers.MllamaConfig(
        text_config=dict(GROUPED, num_hidden_layers=3, cross_attention_layers=[1]),
        vision_config=vision,
        image_token_index=VOCABULARY,  # only ever read
    )


@feeds("MllamaForConditionalGeneration")
def tiled_images(model: Any) -> Batches:
    """Images in up to four tiles, which the words behind an image read by cross-attention."""
    awake(model, "gate")
    most, tiles_of = 4, {1: 1, 2: 2, 6: 4}  # kind of grid -> tiles

    def batch(*rows: tuple[int, list[int]]) -> dict[str, Tensor]:
        tensors = prompts(*((length, [[VOCABULARY]] * len(kinds)) for length, kinds in rows))
        count, length = tensors["input_ids"].shape
        images = max(len(kinds) for _, kinds in rows)
        shown = torch.zeros(count, images, most, 3, 8, 8)
        ids, tiles = torch.zeros(count, images, dtype=torch.long), torch.zeros(count, images, most, dtype=torch.long)
        tiles[:, :, 0] = 1
        reads = torch.zeros(count, length, images, most, dtype=torch.long)
        for row, (_, kinds) in enumerate(rows):
            places = (tensors["input_ids"][row] == VOCABULARY).nonzero().flatten().tolist()
            for image, kind in enumerate(kinds):
                used = tiles_of[kind]
                shown[row, image, :used] = noise(used, 3, 8, 8, seed=10 * row + image)
                ids[row, image], tiles[row, image, :used] = kind, 1
                reads[row, places[image] :, image, :used] = 1  # images in a row are read to the end
        names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask")
        return {**tensors, **dict(zip(names, (shown, ids, tiles, reads), strict=True))}

    return [
        ("one image each", batch((4, [1]), (4, [2]))),
        ("padded prompts", batch((5, [2]), (2, [6]), (3, [1]))),
        ("two images and one", batch((2, [1, 6]), (5, [2]))),
        ("a text without an image", batch((6, []), (4, [2]))),
    ]


@configures("EvollaForProteinText2Text")
def evolla() -> Any:
    protein = dict(DECODER, vocab_size=30, **UNDROPPED)
    resampler = dict(resampler_depth=1, resampler_dim_head=8, resampler_heads=2, resampler_num_latents=4)
    return transformers.EvollaConfig(
        protein_encoder_config=protein,
        aligner_num_add_layers=1,
        aligner_attention_probs_dropout_prob=0.0,
        **resampler,
        **dict(GROUPED, initializer_range=0.4),
    )


@feeds("EvollaForProteinText2Text")
def proteins(model: Any) -> Batches:
    """With `use_cache=True`, which is not its configuration's default."""
    awake(model, "gate_attention", "gate_ffw")

    def batch(lengths: list[int], residues: list[int]) -> dict[str, Any]:
        rows = right_padded([[0, *(token % 25 + 5 for token in own), 2] for own in texts(residues)])
        protein = {f"protein_{name}": tensor for name, tensor in rows.items()}
        return {**prompts(*((length, []) for length in lengths)), **protein, "use_cache": True}

    return [
        ("one protein each", batch([4, 4], [6, 6])),
        ("proteins of different lengths", batch([4, 4, 4], [6, 3, 8])),
        ("padded prompts", batch([5, 2, 3], [6, 6, 6])),
    ]


# ---------------------------------------------------------------------------------------------- several media
@configures("Llama4ForConditionalGeneration")
def llama_4() -> Any:
    experts = dict(num_local_experts=4, num_experts_per_tok=1, moe_layers=[1], intermediate_size_mlp=48)
    layers = dict(no_rope_layers=[1, 0], attention_chunk_size=8, head_dim=8, rope_parameters=ROTATED)
    shuffled = 4 * VISION["hidden_size"]  # four patches become one
    vision = dict(VISION, intermediate_size=shuffled, projector_input_dim=32, projector_output_dim=32)
    return transformers.Llama4Config(
        text_config=dict(GROUPED, **experts, **layers),
        vision_config=dict(vision, vision_output_dim=32, rope_parameters=ROTATED),
        image_token_index=IMAGE,
        boi_token_index=BEGINS,
        eoi_token_index=ENDS,
    )


@feeds("Llama4ForConditionalGeneration")
def split_images(model: Any) -> Batches:
    """Each image as a whole and, if it is large, in tiles before that."""

    def tokens(rows: int, columns: int) -> list[int]:
        tiles = [([IMAGE] * 4 + [BETWEEN]) * columns for _ in range(rows)]
        return [BEGINS, *[token for row in tiles for token in [*row[:-1], LINE_ENDS]], WRAPPED, *[IMAGE] * 4, ENDS]

    def batch(*texts: tuple[int, list[tuple[int, int]]]) -> dict[str, Tensor]:
        images = sum(rows * columns + 1 for _, grids in texts for rows, columns in grids)
        tensors = prompts(*((length, [tokens(*grid) for grid in grids]) for length, grids in texts))
        return {**tensors, "pixel_values": pixels(images)}

    small, wide = (0, 0), (1, 2)
    return [
        ("one image each", batch((4, [small]), (4, [small]))),
        ("padded prompts", batch((5, [small]), (2, [wide]), (3, [small]))),
        ("two images and one", batch((2, [small, small]), (5, [wide]))),
        ("a text without an image", batch((6, []), (4, [small]))),
    ]


@configures("Apertus1p5ForConditionalGeneration")
def apertus() -> Any:
    vision = dict(
        codebook_size=16,
        embed_dim=8,
        latent_channels=8,
        base_channels=32,
        channel_multiplier=[1, 1],
        num_res_blocks=1,
        attn_resolutions=[8],
        resolution=16,
    )
    audio = dict(
        model_type="wavtokenizer_encoder",
        num_filters=4,
        upsampling_ratios=[2, 2],
        num_lstm_layers=1,
        hidden_size=16,
        codebook_dim=16,
        codebook_size=8,
    )
    text_config = dict(GROUPED, vocab_size=VOCABULARY + 16 + 8, output_vocab_size=VOCABULARY, rope_parameters=ROTATED)
    return transformers.Apertus1p5Config(
        text_config=text_config,
        vision_config=vision,
        audio_config=audio,
        image_token_id=IMAGE,
        audio_token_id=AUDIO,
        image_token_offset=VOCABULARY,
        audio_token_offset=VOCABULARY + 16,
    )


@feeds("Apertus1p5ForConditionalGeneration")
def images_and_clips(model: Any) -> Batches:
    """Two pixels by two and four samples are a token each."""
    awake(model, "codebook.embed", scale=0.3)

    def image(rows: int, columns: int) -> list[int]:
        lines = [token for _ in range(rows) for token in [*[IMAGE] * columns, LINE_ENDS]]
        return [BEGINS, *text(3), WRAPPED, *lines[:-1], ENDS]

    def clip(tokens: int) -> list[int]:
        return [BETWEEN, *[AUDIO] * tokens, ENDS]

    def batch(*rows: tuple[int, list[tuple[int, int]], list[int]]) -> dict[str, Tensor]:
        grids = [grid for _, shapes, _ in rows for grid in shapes]
        clips = [samples for _, _, lengths in rows for samples in lengths]
        tensors = prompts(
            *(
                (length, [image(*grid) for grid in shapes] + [clip(-(-samples // 4)) for samples in lengths])
                for length, shapes, lengths in rows
            )
        )
        if grids:
            sizes = 2 * torch.tensor(grids)
            height, width = sizes.amax(dim=0).tolist()
            tensors |= {"pixel_values": noise(len(grids), 3, height, width), "image_sizes": sizes}
        if clips:
            tensors |= {"input_values": 5 * noise(len(clips), 1, max(clips)), "padding_mask": until(clips).long()}
        return tensors

    return [
        ("one image each", batch((4, [(4, 4)], []), (4, [(4, 4)], []))),
        ("one clip each", batch((4, [], [24]), (4, [], [24]))),
        ("padded prompts", batch((5, [(4, 4)], []), (2, [(2, 3)], []), (3, [(4, 2)], []))),
        ("two images and one", batch((2, [(2, 3), (4, 4)], []), (5, [(4, 4)], []))),
        ("clips of different lengths", batch((4, [], [24]), (4, [], [17]), (4, [], [30]))),
        ("a text with nothing, one with both", batch((6, [], []), (4, [(2, 2)], [20]))),
    ]


@configures("NemotronH_Omni_Reasoning_V3")
def nemotron_omni() -> Any:
    hybrid = dict(
        DECODER,
        model_type="nemotron_h",
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        num_key_value_heads=2,
        head_dim=8,
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=1,
        chunk_size=8,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    )
    del hybrid["num_hidden_layers"]
    vision = dict(VISION, model_type="radio", mlp_ratio=1.5, max_img_size=32, num_cls_tokens=2, num_registers=1)
    audio = dict(
        DECODER,
        model_type="parakeet_encoder",
        conv_kernel_size=3,
        subsampling_conv_channels=8,
        num_mel_bins=8,
        projection_hidden_size=32,
        projection_bias=False,
        **dict.fromkeys("dropout layerdrop activation_dropout attention_dropout".split(), 0.0),
    )
    return transformers.NemotronH_Omni_Reasoning_V3_Config(
        text_config=hybrid,
        vision_config=dict(vision, video_temporal_patch_size=2),
        audio_config=audio,
        vision_hidden_size=32,
        projector_hidden_size=32,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        dtype="float32",
    )


@feeds("NemotronH_Omni_Reasoning_V3")
def images_videos_and_clips(model: Any) -> Batches:
    """Two by two patches are a token; so are eight steps of a clip. Tokens of images stand for videos too."""

    def image(rows: int, columns: int) -> list[int]:
        return [BEGINS, *[IMAGE] * (rows * columns // 4), ENDS]

    def images(*texts: tuple[int, list[tuple[int, int]]]) -> dict[str, Tensor]:
        grids = torch.tensor([grid for _, shapes in texts for grid in shapes])
        patches = noise(int(grids.prod(1).sum()), 3 * PATCH * PATCH)
        tensors = prompts(*((length, [image(*grid) for grid in shapes]) for length, shapes in texts))
        return {**tensors, "pixel_values": patches, "image_grid_hw": grids}

    def clips(*texts: tuple[int, int]) -> dict[str, Tensor]:
        steps = [step for _, step in texts]
        tensors = prompts(*((length, [[BEGINS, *[AUDIO] * -(-step // 8), ENDS]]) for length, step in texts))
        mask = torch.nn.functional.pad(until(step - 1 for step in steps), (0, 1))  # the last step is half a step
        return {**tensors, "input_features": noise(len(steps), max(steps), 8), "input_features_mask": mask}

    frames = [[*text(2, seed), *image(4, 4)] for seed in (1, 2, 3)]  # two frames in each of three pieces
    return [
        ("one image each", images((4, [(4, 4)]), (4, [(4, 4)]))),
        ("padded prompts", images((5, [(4, 4)]), (2, [(2, 6)]), (3, [(4, 2)]))),
        ("two images and one", images((2, [(4, 4), (2, 4)]), (5, [(4, 4)]))),
        ("a text without an image", images((6, []), (4, [(4, 4)]))),
        ("a video", {**prompts((4, frames)), "pixel_values_videos": noise(1, 3, 2 * 3, 16, 16)}),
        ("one clip each", clips((4, 24), (4, 24))),
        ("clips of different lengths", clips((4, 24), (4, 10))),
    ]


@configures("Phi4MultimodalForCausalLM")
def phi_4_multimodal() -> Any:
    vision = dict(VISION, crop_size=VISION["image_size"], image_token_id=IMAGE)
    audio = dict(
        hidden_size=32,
        intermediate_size=48,
        num_blocks=2,
        num_attention_heads=4,
        ext_pw_out_channel=32,
        depthwise_separable_out_channel=32,
        input_size=8,
        nemo_conv_channels=8,
        bias_max_distance=16,
        initializer_range=0.3,
        audio_token_id=AUDIO,
    )
    return transformers.Phi4MultimodalConfig(vision_config=vision, audio_config=audio, **GROUPED)


@feeds("Phi4MultimodalForCausalLM")
def cropped_images_and_clips(model: Any) -> Batches:
    """An image is its crops in a row, with a token at the end of each line, then a separator and the whole."""
    with torch.no_grad():  # none that is trained writes these, and the host would then look for one more image or clip
        model.lm_head.weight[[IMAGE, AUDIO]] = 0

    def image(crops: int) -> list[int]:
        return [IMAGE] * (2 * (2 * crops + 1) + 1 + 2 * (2 + 1))

    def batch(*texts: tuple[int, list[int], list[int]]) -> dict[str, Tensor]:
        crops = [count for _, images, _ in texts for count in images]
        steps = [step for _, _, clips in texts for step in clips]
        tensors = prompts(
            *(
                (length, [image(count) for count in images] + [[AUDIO] * -(-step // 8) for step in clips])
                for length, images, clips in texts
            )
        )
        if crops:
            views = max(crops) + 1
            shown = noise(len(crops), views, 3, 16, 16) * until(count + 1 for count in crops)[:, :, None, None, None]
            sizes = torch.tensor([[16, 16 * count] for count in crops])
            mask = torch.ones(len(crops), views, 4, 4)
            tensors |= {"image_pixel_values": shown, "image_sizes": sizes, "image_attention_mask": mask}
        if steps:
            counts = torch.tensor([-(-step // 8) for step in steps])
            tensors |= {"audio_input_features": noise(len(steps), max(steps), 8), "audio_embed_sizes": counts}
        if len(steps) > 1:
            tensors["audio_attention_mask"] = until(steps)
        return tensors

    return [
        ("one image each", batch((4, [1], []), (4, [1], []))),
        ("one clip each", batch((4, [], [24]), (4, [], [24]))),
        ("padded prompts", batch((5, [1], []), (2, [2], []), (3, [1], []))),
        ("two images and one", batch((2, [1, 1], []), (5, [2], []))),
        ("clips of different lengths", batch((4, [], [24]), (4, [], [11]))),
        ("a text with nothing, one with both", batch((6, [], []), (4, [1], [16]))),
    ]
