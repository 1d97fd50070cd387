"""Tiny random models of many families, drawn by number, and inputs for them."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers

VOCABS = (37, 61, 130)
_SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 3}
_POSITIONS = 64
FIRST_WORD = 5  # ids below are special


def drawn_model(draw: random.Random) -> dict[str, Any]:
    """A model as plain data: its class, its configuration, and the seed of its weights."""
    name = draw.choice(list(_FAMILIES))
    heads, width = draw.choice([1, 2, 4]), draw.choice([4, 8, 12, 16])
    sizes = {
        "heads": heads,
        "key_heads": draw.choice([count for count in (1, 2, 4) if heads % count == 0]),
        "head_dim": width,
        "hidden": heads * width,
        "inner": draw.choice([24, 40, 64]),
        "layers": draw.choice([1, 1, 2]),
        "vocab": draw.choice(VOCABS),
        "tied": draw.random() < 0.5,
        "bias": draw.random() < 0.5,
        "std": draw.choice([0.2, 0.4]),
    }
    kind, config = _FAMILIES[name](sizes)
    return {"family": name, "class": kind, "config": {**_SPECIAL, **config}, "seed": draw.randrange(10**6)}


def _decoder(kind: str, **more: Any) -> Any:
    def described(sizes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        config = {
            "vocab_size": sizes["vocab"],
            "hidden_size": sizes["hidden"],
            "intermediate_size": sizes["inner"],
            "num_hidden_layers": sizes["layers"],
            "num_attention_heads": sizes["heads"],
            "max_position_embeddings": _POSITIONS,
            "initializer_range": sizes["std"],
            "tie_word_embeddings": sizes["tied"],
        }
        if more.get("grouped"):
            config |= {"num_key_value_heads": sizes["key_heads"], "head_dim": sizes["head_dim"]}
        if more.get("biased"):
            config["attention_bias"] = sizes["bias"]
        return kind, config | {name: value for name, value in more.items() if name not in ("grouped", "biased")}

    return described


def _gpt2(sizes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    names = {"n_embd": "hidden", "n_layer": "layers", "n_head": "heads", "n_inner": "inner", "vocab_size": "vocab"}
    config = {name: sizes[size] for name, size in names.items()}
    more = {"n_positions": _POSITIONS, "initializer_range": sizes["std"], "tie_word_embeddings": sizes["tied"]}
    return "GPT2", config | more


def _opt(sizes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    kind, config = _decoder("OPT")(sizes)
    config.pop("intermediate_size")
    more = {"ffn_dim": sizes["inner"], "word_embed_proj_dim": sizes["hidden"], "init_std": sizes["std"]}
    return kind, config | more | {"enable_bias": sizes["bias"]}


def _encoder_decoder(kind: str) -> Any:
    def described(sizes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        each = {"layers": "layers", "attention_heads": "heads", "ffn_dim": "inner"}
        config = {f"{end}_{name}": sizes[size] for end in ("encoder", "decoder") for name, size in each.items()}
        more = {"max_position_embeddings": _POSITIONS, "init_std": sizes["std"], "forced_eos_token_id": None}
        more |= {"decoder_start_token_id": 2, "tie_word_embeddings": sizes["tied"]}
        return kind, {**config, **more, "d_model": sizes["hidden"], "vocab_size": sizes["vocab"]}

    return described


def _t5(sizes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    names = {"d_model": "hidden", "d_kv": "head_dim", "d_ff": "inner", "num_layers": "layers", "num_heads": "heads"}
    config = {name: sizes[size] for name, size in names.items()}
    more = {"decoder_start_token_id": 1, "initializer_factor": 1.5, "tie_word_embeddings": sizes["tied"]}
    more |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    return "T5", {**config, **more, "vocab_size": sizes["vocab"]}


_FAMILIES: dict[str, Any] = {
    "llama": _decoder("Llama", grouped=True, biased=True),
    "mistral": _decoder("Mistral", grouped=True, sliding_window=4),
    "qwen3": _decoder("Qwen3", grouped=True, biased=True),
    "gemma": _decoder("Gemma", grouped=True, biased=True),
    "phi3": _decoder("Phi3", grouped=True),
    "gpt_neox": _decoder("GPTNeoX", biased=True),
    "gpt2": _gpt2,
    "opt": _opt,
    "bart": _encoder_decoder("Bart"),
    "mbart": _encoder_decoder("MBart"),
    "marian": _encoder_decoder("Marian"),
    "m2m_100": _encoder_decoder("M2M100"),
    "pegasus": _encoder_decoder("Pegasus"),
    "t5": _t5,
}
_HEADS = {"Marian": "MarianMTModel", "GPT2": "GPT2LMHeadModel"}


def built(model: dict[str, Any]) -> Any:
    """The model that `drawn_model` describes, in evaluation mode."""
    kind = model["class"]
    config = getattr(transformers, f"{kind}Config")(**model["config"])
    ending = "ForConditionalGeneration" if config.is_encoder_decoder else "ForCausalLM"
    torch.manual_seed(model["seed"])
    made = getattr(transformers, _HEADS.get(kind, f"{kind}{ending}"))(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:  # norms and biases start at one and zero
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.requires_grad_(False)


def inputs_of(model: Any, shape: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Ids and mask; `lengths` of the rows, padded on one side to the longest."""
    draw = torch.Generator().manual_seed(shape["seed"])
    batch, longest = len(shape["lengths"]), max(shape["lengths"])
    ids = torch.randint(FIRST_WORD, model.config.vocab_size, (batch, longest), generator=draw)
    mask = torch.ones_like(ids)
    for row, length in enumerate(shape["lengths"]):
        unused = slice(0, longest - length) if shape["padding"] == "left" else slice(length, longest)
        mask[row, unused] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}
