"""Every generative class of transformers that can be built tiny: accelerated or a reasoned fallback, never different.

    python tests/optimizer/transformers/test_sweep.py docs/data/models.json

examines all classes and writes what came of each; `python docs/tools/generated.py` then writes it into the docs.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository is importable under pytest
    sys.path[:0] = map(str, (Path(__file__).resolve().parents[3], Path(__file__).resolve().parents[2] / "kit"))

import harness
import pytest
import torch
import transformers
import zoo
from transformers.models.auto import modeling_auto

import fastgen
from fastgen import report

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
SECONDS = 10  # for one class, at most; nearly all need less than one
PARAMETERS = 20_000_000  # more means that shrinking missed a size

# ---------------------------------------------------------------------------------------------- tiny configurations
_SIZES: dict[int, str] = {
    32: """hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim hidden_dim model_dim
        decoder_hidden_size encoder_hidden_size cross_attention_hidden_size projection_dim mm_hidden_size
        vision_hidden_size out_hidden_size qformer_hidden_size output_dim perceiver_dim audio_hidden_size
        lru_width hidden_size_per_layer_input output_hidden_size mm_embed_dim""",
    48: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size d_inner
        moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        dense_intermediate_size intermediate_size_mlp feed_forward_hidden_size mlp_dim""",
    2: """num_key_value_heads num_kv_heads
        num_key_value_groups num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts
        moe_num_active_experts attn_layer_period
        num_selected_experts encoder_num_key_value_heads decoder_num_key_value_heads moe_top_k""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads num_experts
        decoder_num_attention_heads num_local_experts n_routed_experts moe_num_experts num_codebooks
        speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads patch_size
        linear_num_key_heads linear_num_value_heads mamba_n_heads mamba_num_heads""",
    1: """n_group topk_group n_shared_experts moe_num_shared_experts num_shared_experts num_mtp_modules
        first_k_dense_replace moe_layer_start_index num_nextn_predict_layers attn_layer_offset
        mamba_n_groups n_groups""",
    8: """head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_size kv_channels
        num_mel_bins input_feat_per_channel num_mels linear_key_head_dim linear_value_head_dim
        mamba_chunk_size chunk_size""",
    16: """mamba_d_head mamba_head_dim ssm_state_size q_lora_rank
        kv_lora_rank image_size conv_channels mamba_d_state expert_dim""",
    64: """mamba_d_ssm max_position_embeddings n_positions n_ctx
        max_source_positions max_target_positions max_sequence_length
        seq_length max_seq_len""",
    zoo.VOCAB: "vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size vocab_size_per_layer_input",
}
SMALL: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}
LAYERS = """num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers
    num_decoder_layers encoder_num_layers decoder_num_layers depth vision_layers t2u_encoder_layers
    t2u_decoder_layers speech_encoder_layers adaptor_layers""".split()
SMALL |= dict(
    initializer_range=0.3, init_std=0.3, pad_token_id=zoo.PAD, bos_token_id=zoo.START, eos_token_id=zoo.UNUSED
)
SMALL |= dict(decoder_start_token_id=zoo.START)
WINDOWS = dict(sliding_window=6, attention_window=4)  # only where the default has one


class NotTiny(Exception):
    """The class cannot be tried; the message says why."""


def tiny_config(default: Any, layers: int) -> Any:
    """A configuration of the same class with every size we know of made small, sub-configurations too."""
    known = default.to_dict()
    options = {name: value for name, value in SMALL.items() if known.get(name) is not None}
    options |= {name: layers for name in LAYERS if known.get(name) is not None}
    options |= {name: SMALL[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if known.get("pad_token_id") == 0:  # some take this for granted
        options["pad_token_id"] = 0
    options |= {name: window for name, window in WINDOWS.items() if isinstance(known.get(name), int)}
    options |= {name: None for name in ("forced_bos_token_id", "forced_eos_token_id") if name in known}
    if known.get("num_key_value_heads") == known.get("num_attention_heads") and "num_key_value_heads" in options:
        options["num_key_value_heads"] = options["num_attention_heads"]
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:  # adds up to half the rotated part of a head
        rotated = int(SMALL["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
        options["rope_parameters"] = {**rope, "mrope_section": [rotated - rotated // 2, rotated // 2, 0]}
    for name in getattr(default, "sub_configs", {}):
        part = getattr(default, name, None)
        if part is not None and hasattr(part, "to_dict"):
            options[name] = tiny_config(part, layers)
    return type(default)(**options)


def build(name: str, layers: int) -> Any:
    """A tiny random float32 model of class `name`, or NotTiny."""
    cls = getattr(transformers, name)
    if not hasattr(cls, "generate"):
        raise NotTiny("has no generate")
    try:
        config = tiny_config(cls.config_class(), layers)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in cls(config).parameters())
        if size > PARAMETERS:
            raise NotTiny(f"still has {size / 1e6:.0f}M parameters")
        torch.manual_seed(0)
        return cls(config).float().eval().requires_grad_(False)
    except (NotTiny, TimeoutError):
        raise
    except Exception as error:  # anything may go wrong in a configuration that nobody has thought of
        raise NotTiny(_short(error)) from error


# ---------------------------------------------------------------------------------------------- one class
@dataclass(frozen=True)
class Outcome:
    name: str
    state: str  # "accelerated", "fallback", "not tried" or "different"
    detail: str = ""
    seconds: float = 0.0


SEARCHES: tuple[dict[str, Any], ...] = (
    dict(num_beams=3, max_new_tokens=9, return_dict_in_generate=True, output_scores=True),
    dict(num_beams=4, max_new_tokens=7, early_stopping=True, no_repeat_ngram_size=2, num_return_sequences=2),
)


def inputs_of(model: Any) -> list[dict[str, Any]]:
    """Inputs to try, ragged ones first: the first that stock accepts are used, after plain ones."""
    name, generator = model.main_input_name, torch.Generator().manual_seed(1)
    if name == "input_features":
        shapes = [(2, 8, 24), (2, 24, 8), (2, 80, 128), (2, 128, 80), (2, 24, 160)]
        return [{name: torch.randn(shape, generator=generator)} for shape in shapes]
    if name == "input_values":
        return [{name: torch.randn(2, 2000, generator=generator)}]
    if name == "pixel_values" and not hasattr(model.config, "text_config"):
        return [{name: torch.randn(2, 3, 16, 16, generator=generator)}]
    plain = zoo.text(model, seed=1, batch=2, length=8, ragged=False)
    return [zoo.text(model, seed=2, batch=3, length=8), plain, {"input_ids": plain["input_ids"]}]


def examine(name: str) -> Outcome:
    start = time.perf_counter()
    try:
        with time_limit(SECONDS):
            try:
                return _examine(name, layers=2)
            except NotTiny:  # hybrids alternate kinds of layers, and four hold one of each
                return _examine(name, layers=4)
    except (NotTiny, TimeoutError) as error:
        return Outcome(name, "not tried", str(error), time.perf_counter() - start)


def _examine(name: str, layers: int) -> Outcome:
    start = time.perf_counter()
    model = build(name, layers)
    model.generation_config.eos_token_id = zoo.UNUSED
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = zoo.PAD
    inputs = _first_accepted(model)
    tiers: list[report.Call] = []
    # A model is proven once, with its first request: let that be the plain one, and the ragged one follow.
    ragged = [_full(inputs), inputs] if "attention_mask" in inputs else [inputs]
    alone = {name: value[:1] for name, value in ragged[0].items()}
    for tensors in [*ragged, alone]:
        for search in SEARCHES:
            stock = _stock(model, tensors, search)
            try:
                output, calls = harness.run_fastgen(model, tensors, _generate, strict=False, **search)
                harness.assert_same(stock, output, tolerance=1e-3)  # some of these weights are wild
            except TimeoutError:
                raise
            except Exception as error:  # a crash is as bad as a difference
                return Outcome(name, "different", _short(error), time.perf_counter() - start)
            tiers += calls
    seconds = time.perf_counter() - start
    if not tiers:
        return Outcome(name, "not tried", "its generate runs no beam search", seconds)
    reasons = {call.reason or "" for call in tiers if call.tier == "stock"}
    if "" in reasons:
        return Outcome(name, "different", "fell back without a reason", seconds)
    if reasons:
        return Outcome(name, "fallback", "; ".join(sorted(reasons)), seconds)
    return Outcome(name, "accelerated", "" if all(c.tier == "fast" for c in tiers) else "compat tier", seconds)


def _generate(model: Any, arguments: dict[str, Any]) -> Any:
    return model.generate(**arguments)


def _full(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}


def _stock(model: Any, inputs: dict[str, Any], search: dict[str, Any]) -> Any:
    try:
        return harness.run_stock(model, inputs, _generate, **search)
    except TimeoutError:
        raise
    except Exception as error:  # stock's own beam search does not work on this class
        raise NotTiny(f"stock: {_short(error)}") from error


def _first_accepted(model: Any) -> dict[str, Any]:
    errors = []
    for inputs in inputs_of(model):
        try:
            _stock(model, inputs, SEARCHES[0])
            return inputs
        except NotTiny as error:
            errors.append(error)
    raise errors[-1]


def _short(error: BaseException) -> str:
    """The message in a line; the last says most where a configuration's validator wraps another error."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1] if "Validation" in type(error).__name__ else lines[0]
    return f"{type(error).__name__}: {line.strip()[:140]}"


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"takes more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


# ---------------------------------------------------------------------------------------------- all classes
def _classes() -> dict[str, str]:
    """Class name -> kind, each class once."""
    found: dict[str, str] = {}
    for kind, mapping in MAPPINGS.items():
        for names in getattr(modeling_auto, mapping, {}).values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, kind)
    return found


CLASSES = _classes()


@pytest.mark.parametrize("name", CLASSES)
def test_class(name: str) -> None:
    outcome = examine(name)
    if outcome.state == "not tried":
        pytest.skip(outcome.detail)
    assert outcome.state in ("accelerated", "fallback"), f"{name}: {outcome.detail}"


def test_known_outcomes() -> None:
    """The sweep itself can tell the two apart."""
    assert examine("LlamaForCausalLM").state == "accelerated"
    assert examine("BartForConditionalGeneration").state == "accelerated"
    outcome = examine("MambaForCausalLM")
    assert outcome.state == "fallback" or outcome.detail.startswith("stock:"), outcome


# ---------------------------------------------------------------------------------------------- the docs' data
def found(outcomes: list[Outcome]) -> dict[str, Any]:
    """What the docs' table is made of."""
    classes = {
        outcome.name: {"kind": CLASSES[outcome.name], "outcome": outcome.state, "why": outcome.detail}
        for outcome in sorted(outcomes, key=lambda outcome: outcome.name.lower())
    }
    return {"transformers": transformers.__version__, "classes": classes}


def main(path: str) -> None:
    global SECONDS
    SECONDS = 120  # a busy machine is no reason to leave a class out
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    fastgen.enable()
    outcomes = []
    for name in CLASSES:
        outcomes.append(examine(name))
        print(f"{outcomes[-1].seconds:5.1f} s  {name}: {outcomes[-1].state}", file=sys.stderr, flush=True)
    Path(path).write_text(json.dumps(found(outcomes), indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
