"""Models that see through a network of timm: no such model can be built where timm or Pillow is missing."""

from __future__ import annotations

from typing import Any

import transformers

from tiny_models.gemma4 import SPEECH, heard
from tiny_models.image_tokens import IMAGE, LAYOUTS, TEXT, VIDEO, VIDEOS, Batches, batches, shown, tiled
from tiny_models.language_models import gemma3n as gemma3n_text
from tiny_models.registry import FIRST_PLACEHOLDER, VOCABULARY, configures, feeds, noise


# ---------------------------------------------------------------------------------------------- FastVLM
@configures("FastVlmForConditionalGeneration")
def fast_vlm() -> Any:
    """A stage of convolutions and one of attention, whose heads are 32 wide; a placeholder for each 8 x 8 pixels."""
    network = dict(
        layers=(1, 1),
        embed_dims=(8, 32),
        mlp_ratios=(2, 2),
        token_mixers=("repmixer", "attention"),
        downsamples=(False, True),
        se_downsamples=(False, False),
        pos_embs=(None, None),
        cls_ratio=1.0,
        layer_scale_init_value=1.0,
        inference_mode=True,
    )
    return transformers.FastVlmConfig(
        text_config=dict(TEXT, model_type="qwen2"),
        vision_config=dict(
            model_type="timm_wrapper",
            architecture="fastvit_mci3",
            hidden_size=32,
            initializer_range=0.3,
            model_args=network,
        ),
        image_token_index=IMAGE,
    )


@feeds("FastVlmForConditionalGeneration")
def images_cropped_square(model: Any) -> Batches:
    return tiled({"i": [IMAGE] * 4, "I": [IMAGE] * 4}, each=4)


# ---------------------------------------------------------------------------------------------- PerceptionLM
@configures("PerceptionLMForConditionalGeneration")
def perception_lm() -> Any:
    """4 x 4 patches and the token of their class, which is left out; each 2 x 2 patches become a placeholder."""
    network = dict(
        img_size=(16, 16),
        patch_size=4,
        embed_dim=32,
        depth=2,
        num_heads=4,
        mlp_ratio=2.0,
        global_pool="",
        use_post_transformer_norm=False,
        init_values=0.5,
        ref_feat_shape=(4, 4),
    )
    return transformers.PerceptionLMConfig(
        text_config=dict(TEXT, model_type="llama"),
        vision_config=dict(
            model_type="timm_wrapper",
            architecture="vit_pe_core_large_patch14_336",
            do_pooling=False,
            initializer_range=0.3,
            model_args=network,
        ),
        vision_use_cls_token=True,
        projector_pooling_ratio=2,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )


def tiles_and_frames(tiles: int, layouts: dict[str, list[str]]) -> Batches:
    """Images of as many tiles each, as no others fit into a tensor, and videos of two frames."""

    def pixels(sentences: list[str]) -> dict[str, Any]:
        images, videos = len(shown(sentences)), len(shown(sentences, "v"))
        return {
            **({"pixel_values": noise(images, tiles, 3, 16, 16)} if images else {}),
            **({"pixel_values_videos": noise(videos, 2, 3, 16, 16, seed=2)} if videos else {}),
        }

    image = [IMAGE] * 4 * tiles
    return batches({"i": image, "I": image, "v": [VIDEO] * 8}, pixels, layouts)


@feeds("PerceptionLMForConditionalGeneration")
def thumbnails_and_tiles(model: Any) -> Batches:
    wide = {"images of three tiles": ["wiwww", "wwiw"]}
    single = {"images of one tile": ["wiwww", "wwiw"]}
    return [
        *tiles_and_frames(2, {**LAYOUTS, **VIDEOS}),
        *tiles_and_frames(4, wide),  # a thumbnail beside them
        *tiles_and_frames(1, single),
    ]


# ---------------------------------------------------------------------------------------------- Gemma 3n
# The order of its vocabulary: words, tokens of images, then tokens of speech, the last of which fills clips up.
BEFORE_IMAGE, BEFORE_SPEECH, AFTER_IMAGE, SEEN, AFTER_SPEECH, HEARD = range(FIRST_PLACEHOLDER, FIRST_PLACEHOLDER + 6)
OF_IMAGES, OF_SPEECH = AFTER_IMAGE, AFTER_SPEECH  # the first token of each kind


@configures("Gemma3nForConditionalGeneration")
def gemma3n() -> Any:
    """All blocks of its network of convolutions, a few channels wide; clips have fewer features than placeholders."""
    text = gemma3n_text()
    text.vocab_size_per_layer_input = OF_IMAGES
    return transformers.Gemma3nConfig(
        text_config=text,
        vision_config=dict(
            vocab_size=OF_SPEECH - OF_IMAGES,
            vocab_offset=OF_IMAGES,
            initializer_range=0.3,
            model_args=dict(channel_multiplier=1 / 16, msfa_output_resolution=2, layer_scale_init_value=0.5),
        ),
        audio_config=dict(
            vocab_size=VOCABULARY - OF_SPEECH,
            vocab_offset=OF_SPEECH,
            input_feat_size=8,
            hidden_size=32,
            conf_attention_chunk_size=4,
            conf_attention_context_left=5,
            conf_num_attention_heads=4,
            conf_num_hidden_layers=2,
            conf_conv_kernel_size=3,
            conf_reduction_factor=2,
            sscp_conv_channel_size=(8, 4),
            initializer_range=0.3,
        ),
        audio_soft_tokens_per_image=4,
        vision_soft_tokens_per_image=4,
        boi_token_id=BEFORE_IMAGE,
        eoi_token_id=AFTER_IMAGE,
        image_token_id=SEEN,
        boa_token_id=BEFORE_SPEECH,
        eoa_token_id=AFTER_SPEECH,
        audio_token_id=HEARD,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )


@feeds("Gemma3nForConditionalGeneration")
def images_and_clips_of_as_many_tokens(model: Any) -> Batches:
    image, clip = [BEFORE_IMAGE, *[SEEN] * 4, AFTER_IMAGE], [BEFORE_SPEECH, *[HEARD] * 4, AFTER_SPEECH]

    def inputs(sentences: list[str]) -> dict[str, Any]:
        images = len(shown(sentences))
        return {
            **({"pixel_values": noise(images, 3, 32, 32).sigmoid()} if images else {}),
            **heard(sentences, {"a": 24, "A": 13}, 8),
        }

    found = batches({"i": image, "I": image, "a": clip, "A": clip}, inputs, {**LAYOUTS, **SPEECH})
    for _, batch in found:
        ids = batch["input_ids"]
        batch["token_type_ids"] = (ids == SEEN).long() + 3 * (ids == HEARD).long()
    return found
