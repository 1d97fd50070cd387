"""Loads the model, finds length limits, and makes the generation config."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.utils import logging as hub_logging
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
)

import fastgen.models.unilm
import fastgen.models.vae  # noqa: F401  # both register with transformers' Auto classes
from fastgen.pipeline.errors import InputError, first_line, why_unloadable
from fastgen.pipeline.transformers.generation_fields import flag_of, token_ids

_PATIENCE_SECONDS = 5.0
# The errors that transformers raises for names, folders and files that it can't use.
_UNLOADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    ImportError,
    AttributeError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
)


def find_device(name: str | None) -> torch.device:
    """The device to generate on; by default a CUDA device, if there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"Cannot use the device {name!r}: {first_line(error)}.") from error
    return device


def check_path(name: str, what: str) -> None:
    """Raise InputError if `name` can only be a path and does not exist: transformers would call it a bad name.

    Args:
        what: the name of the argument, for the message.
    """
    is_path = name.startswith((".", "~")) or os.path.isabs(name) or name.count("/") > 1 or "\\" in name
    # os.path's functions answer for any name; those of pathlib raise for one that is too long.
    if not os.path.exists(name) and (is_path or ("/" in name and os.path.isdir(name.split("/")[0]))):
        raise InputError(f"{what} {name}: the path does not exist; give a folder, or the name of a model on the hub.")


def load_config(name: str) -> Any:
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)  # without this it would ask
    except _UNLOADABLE as error:
        raise InputError(f"Cannot load the model {name!r}: {first_line(error)}.") from error


def load_model(name: str, config: Any, dtype: str, device: torch.device) -> Any:
    """Load the model, seq2seq or causal as the config says, ready to generate."""
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return _loaded(kind, name, dtype, device)


def load_speech_model(name: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """Load a model of speech, ready to generate, and what makes spectrograms for it."""
    model = _loaded(AutoModelForSpeechSeq2Seq, name, dtype, device)
    try:
        return model, AutoFeatureExtractor.from_pretrained(name, trust_remote_code=False)
    except _UNLOADABLE as error:
        raise InputError(f"Cannot load the feature extractor of {name!r}: {first_line(error)}.") from error


def _loaded(kind: Any, name: str, dtype: str, device: torch.device) -> Any:
    from safetensors import SafetensorError

    try:
        model = kind.from_pretrained(
            name, dtype=dtype if dtype == "auto" else getattr(torch, dtype), trust_remote_code=False
        )
        return model.to(device).eval()
    except (*_UNLOADABLE, SafetensorError) as error:
        raise InputError(f"Cannot load the model {name!r}: {why_unloadable(error)}.") from error


def source_limit(config: Any, tokenizer: Any, new_tokens: int, total: int | None = None) -> int | None:
    """How many input tokens the model and the tokenizer have room for; None if no limit is known.

    Args:
        new_tokens: how many the user wants behind an input, where that is known.
        total: see `most_tokens`.
    """
    limits = [] if tokenizer.model_max_length > 10**9 else [int(tokenizer.model_max_length)]
    parts = config, getattr(config, "encoder", None)  # the latter of two models in one, such as bert2bert
    found = (getattr(part, "max_position_embeddings", None) for part in parts)
    if positions := next(filter(None, found), None):
        limits.append(positions if config.is_encoder_decoder else positions - new_tokens)
    if total is not None:
        limits.append(total - 1)
    limit = min(limits, default=None)
    if limit is not None and limit < 1:
        if total is not None and total < 2:
            raise InputError(f"--max-length {total} leaves no room for an input, whose tokens it counts.")
        raise InputError(
            f"--max-new-tokens {new_tokens} leaves no room for an input: the model has {positions} positions."
        )
    return limit


def most_tokens(config: Any, generation: GenerationConfig) -> int | None:
    """The most tokens of an input with what follows it: the host refuses an input that leaves none to follow.

    None if it does not count inputs: those of an encoder-decoder, or with `max_new_tokens`.
    """
    if config.is_encoder_decoder or generation.max_new_tokens is not None:
        return None
    if generation.max_length in (None, GenerationConfig().max_length):  # 20 tokens follow, or as many as have positions
        return getattr(config, "max_position_embeddings", None)
    return int(generation.max_length)


@contextlib.contextmanager
def asking_the_hub(names: Iterable[str], warn: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, the hub's client does not log retries; if it takes long, one sentence says what is awaited.

    Args:
        names: the names that are loaded; local folders are not mentioned.
    """
    asked = [name for name in names if not os.path.isdir(name)]
    if not asked or constants.HF_HUB_OFFLINE:
        yield
        return
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    text = f"still looking for {asked[0]}: the model hub is slow, or out of reach (HF_HUB_OFFLINE=1 does without it)."
    said = threading.Timer(_PATIENCE_SECONDS, warn, [text])
    said.daemon = True
    said.start()
    try:
        yield
    finally:
        said.cancel()
        hub_logging.set_verbosity(verbosity)


def checked(name: str, config: Any, flags: dict[str, Any]) -> GenerationConfig:
    """The generation config before the weights are loaded; InputError for flags that contradict each other."""
    try:
        own = GenerationConfig.from_pretrained(name)
    except OSError:  # an older model, whose config has the fields
        own = GenerationConfig.from_model_config(config)
    except (ValueError, TypeError) as error:
        raise InputError(f"Cannot load the model {name!r}: {first_line(error)} (generation_config.json).") from error
    merged = _merged(own, flags)
    for least, most in (("min_length", "max_length"), ("min_new_tokens", "max_new_tokens")):
        if least in flags and most in flags and (flags[least] or 0) > (flags[most] or 0):
            raise InputError(f"{flag_of(least)} {flags[least]} is more than {flag_of(most)} {flags[most]}.")
    return merged


def _merged(own: GenerationConfig, flags: dict[str, Any]) -> GenerationConfig:
    """The model's generation config, with the user's flags over it."""
    try:
        return GenerationConfig.from_dict({**own.to_dict(), **flags})
    except (ValueError, TypeError) as error:
        raise InputError(f"transformers refuses these flags: {first_line(error)}.") from error


def generation_config(
    model: Any,
    tokenizer: Any,
    flags: dict[str, Any],
    language: int | None,
    shown: Callable[[str], str] = flag_of,
) -> GenerationConfig:
    """The model's generation config, with the user's flags over it; `shown`: returns a field's name for the user."""
    merged = _merged(model.generation_config, flags)
    if language is not None and "forced_bos_token_id" not in flags:
        merged.forced_bos_token_id = language
    if merged.pad_token_id is None or not _is_fed(merged.pad_token_id, model):
        merged.pad_token_id = _pad_token(tokenizer, model)
    if "max_new_tokens" in flags and "max_length" not in flags:
        merged.max_length = None  # with both given, transformers warns at every batch
    _check_tokens(model, flags, shown)
    _check_length(model, merged, shown)
    return merged


def _check_tokens(model: Any, flags: dict[str, Any], shown: Callable[[str], str]) -> None:
    """Refuse unknown tokens that the model would be fed. An end token may be any number: -1 means none."""
    size = model.get_input_embeddings().num_embeddings
    for name, value in flags.items():
        if not name.endswith("_token_id") or name == "eos_token_id" or value is None:
            continue
        if wrong := [i for i in token_ids(value) if not 0 <= i < size]:
            raise InputError(f"{shown(name)} {wrong[0]}: the model's tokens are 0 to {size - 1}.")


def decoder_room(model: Any) -> int | None:
    """How many tokens an encoder-decoder can generate; None if positions are computed, without a limit."""
    if not model.config.is_encoder_decoder or not hasattr(model, "get_decoder"):
        return None  # for causal models see source_limit
    table = getattr(model.get_decoder(), "embed_positions", None)
    if not isinstance(table, torch.nn.Embedding) or hasattr(table, "make_weight"):  # FSMT's table grows
        return None
    # The first token is the decoder's start token; the last token is never fed.
    return table.num_embeddings - int(getattr(table, "offset", 0))


def _check_length(model: Any, config: GenerationConfig, shown: Callable[[str], str]) -> None:
    room = decoder_room(model)
    if room is None:
        return
    if config.max_new_tokens is not None and config.max_new_tokens > room:
        raise InputError(
            f"{shown('max_new_tokens')} {config.max_new_tokens}: the model's decoder has {room} positions."
        )
    if config.max_new_tokens is None and config.max_length is not None and config.max_length - 1 > room:
        raise InputError(f"{shown('max_length')} {config.max_length}: the model's decoder has {room} positions.")


def _pad_token(tokenizer: Any, model: Any) -> int:
    """A token to pad with. If there is no padding token, any token will do: the mask hides it."""
    for candidate in (tokenizer.pad_token_id, model.config.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None and _is_fed(candidate, model):
            return int(candidate)
    return 0


def _is_fed(token: int, model: Any) -> bool:
    """Whether the model has an embedding for it: the padding token of an old configuration may be -1, and that of a
    tokenizer may be one more than the model knows."""
    return bool(0 <= token < model.get_input_embeddings().num_embeddings)
