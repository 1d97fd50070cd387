"""Models that read images, in their true shapes with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FREE_FROM = 200  # ids from here on mean nothing special to any of the models


@dataclass(frozen=True)
class Captioner:
    """A model that reads images.

    `build`: makes the model, with so many layers in each part if that is not 0; `size`: height and width of an image;
    `prompt`: makes the tokens that a prompt consists of, int64 `[N]`, for a model; None: it takes none.
    """

    label: str
    build: Callable[[int], Any]
    size: tuple[int, int]
    prompt: Callable[[Any], Any] | None = None

    @property
    def pixels(self) -> str:
        return " x ".join(map(str, self.size))


def _layers(number: int, *names: str) -> dict[str, int]:
    """Options that make so many layers; none for a model's own number."""
    return dict.fromkeys(names, number) if number else {}


def _florence2(layers: int) -> Any:
    """Florence-2-base: a DaViT, and a decoder and an encoder as wide as BART-base's."""
    import transformers

    text = dict(
        vocab_size=51289,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        max_position_embeddings=1024,
        forced_eos_token_id=None,
        model_type="bart",
    )
    vision: dict[str, Any] = {"projection_dim": 768}
    if layers:
        vision["depths"] = (layers,) * 4
    config = transformers.Florence2Config(
        text_config=text | _layers(layers, "encoder_layers", "decoder_layers"),
        vision_config=vision,
        image_token_id=51288,
    )
    return transformers.Florence2ForConditionalGeneration(config)


def _blip(layers: int) -> Any:
    import transformers

    part = _layers(layers, "num_hidden_layers")
    vision = dict(image_size=384, patch_size=16) | part
    text = dict(vocab_size=30524, bos_token_id=30522, sep_token_id=102, pad_token_id=0) | part
    return transformers.BlipForConditionalGeneration(transformers.BlipConfig(text_config=text, vision_config=vision))


def _blip2(layers: int) -> Any:
    """BLIP-2's parts around OPT-125M: the released language models are too large for most machines."""
    import transformers

    part = _layers(layers, "num_hidden_layers")
    vision = dict(hidden_size=768, intermediate_size=3072, num_attention_heads=12, num_hidden_layers=12) | part
    text = dict(model_type="opt", hidden_size=768, ffn_dim=3072, num_attention_heads=12, num_hidden_layers=12) | part
    config = transformers.Blip2Config(
        vision_config=vision | {"image_size": 224, "patch_size": 14},
        qformer_config=dict(encoder_hidden_size=768) | part,
        text_config=text | {"word_embed_proj_dim": 768, "vocab_size": 50304},
        image_token_index=50265,
    )
    return transformers.Blip2ForConditionalGeneration(config)


def _encoder_decoder(encoder: Any, decoder: Any) -> Any:
    import transformers

    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 1, 2
    return transformers.VisionEncoderDecoderModel(config)


def _trocr(layers: int) -> Any:
    """TrOCR-base: a ViT, and a decoder of 12 layers."""
    import transformers

    encoder = transformers.ViTConfig(image_size=384, qkv_bias=False, **_layers(layers, "num_hidden_layers"))
    decoder = transformers.TrOCRConfig(cross_attention_hidden_size=768, **_layers(layers, "decoder_layers"))
    return _encoder_decoder(encoder, decoder)


def _donut(layers: int) -> Any:
    """Donut-base: a Swin transformer, and four layers of mBART's decoder."""
    import transformers

    depths = [layers] * 4 if layers else [2, 2, 14, 2]
    encoder = transformers.DonutSwinConfig(
        image_size=[1280, 960], embed_dim=128, depths=depths, num_heads=[4, 8, 16, 32], window_size=10
    )
    decoder = transformers.MBartConfig(
        vocab_size=57525,
        decoder_layers=layers or 4,
        is_decoder=True,
        add_cross_attention=True,
        add_final_layer_norm=True,
        scale_embedding=True,
        max_position_embeddings=1536,
        forced_eos_token_id=None,
    )
    return _encoder_decoder(encoder, decoder)


def _with_images(tokens: int) -> Callable[[Any], Any]:
    """A prompt of so many placeholders for an image, and eight words."""

    def prompt(model: Any) -> Any:
        import torch

        number = getattr(model.config, "image_token_id", None) or model.config.image_token_index
        return torch.tensor([number] * tokens + list(range(_FREE_FROM, _FREE_FROM + 8)))

    return prompt


def _words(model: Any) -> Any:
    import torch

    return torch.arange(_FREE_FROM, _FREE_FROM + 4)


CAPTIONERS = {
    "florence2-base": Captioner("Florence-2-base", _florence2, (768, 768), _with_images(577)),
    "blip-base": Captioner("BLIP-base", _blip, (384, 384), _words),
    "blip2-opt-125m": Captioner("BLIP-2 with OPT-125M", _blip2, (224, 224), _with_images(32)),
    "donut-base": Captioner("Donut-base", _donut, (1280, 960)),
    "trocr-base": Captioner("TrOCR-base", _trocr, (384, 384)),
}


def job_parts(task: dict[str, Any]) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """The model, the options of `generate` and the one batch of a task."""
    import torch

    one, batch, new = CAPTIONERS[task["model"]], task["batch"], task["new"]
    model = one.build(task["layers"])
    inputs = {"pixel_values": torch.randn(batch, 3, *one.size)}
    if one.prompt is not None:
        ids = one.prompt(model).repeat(batch, 1)
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"num_beams": task["beams"], "min_new_tokens": new, "max_new_tokens": new, "do_sample": False}
    return model, options, [inputs]
