"""What the workers of fastgen-generate-transformers do: text to tokens, and tokens to text."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastgen.pipeline.errors import InputError, counted, first_line


class TokenizerSpec(NamedTuple):
    """How to load the tokenizer; sent to each worker."""

    name: str
    task_prefix: str = ""
    source_lang: str | None = None
    target_lang: str | None = None
    truncate_to: int | None = None


@dataclass(frozen=True)
class Encode:
    texts: list[str]


@dataclass(frozen=True)
class Decode:
    rows: list[list[int]]


def load_tokenizer(spec: TokenizerSpec) -> Any:
    """The tokenizer with its languages set; InputError if it can't be loaded or doesn't know them."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        why = first_line(error).rstrip(": ")
        if isinstance(error, TypeError):  # transformers 4 opens a file of no name
            raise InputError(f"{spec.name} has no tokenizer ({why}): --tokenizer names another.") from error
        raise InputError(f"Cannot load the tokenizer {spec.name!r}: {why}; --tokenizer names another.") from error
    if spec.source_lang is not None:
        if not hasattr(tokenizer, "src_lang"):
            raise InputError(f"The tokenizer of {spec.name!r} has no languages: --source-lang is not for this model.")
        try:
            tokenizer.src_lang = spec.source_lang
        except (KeyError, ValueError) as error:
            raise InputError(f"The tokenizer doesn't know the language {spec.source_lang!r} ({error}).") from None
    return tokenizer


def check_fits(tokenizer: Any, config: Any, name: str) -> None:
    """InputError if the tokenizer, which is called `name`, can't be the model's."""
    if why := why_unfit(tokenizer, config):
        raise InputError(f"{name} {why}: --tokenizer names the tokenizer that the model was trained with.")


def why_unfit(tokenizer: Any, config: Any) -> str | None:
    """Why a tokenizer can't be the model's, by their numbers of tokens; None if it may be."""
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # transformers makes up an empty one
        return "has no tokenizer"
    parts = (getattr(config, "encoder", None), config.get_text_config(), config)
    sizes = [size for part in parts for kind in ("vocab_size", "src_vocab_size") if (size := getattr(part, kind, None))]
    # A model often has some more, since their number is rounded up; and tokens that are added to a tokenizer may be
    # used by nobody.
    if sizes and not (sizes[0] / 2 <= len(tokenizer) and tokenizer.vocab_size <= sizes[0]):
        return f"has a tokenizer of {counted(len(tokenizer), 'token')}, and the model has {sizes[0]}"
    return None


def target_language(tokenizer: Any, language: str) -> tuple[int | None, str]:
    """The token to force first, or else a prefix for the input, that choose the language of the output."""
    if hasattr(tokenizer, "get_lang_id"):  # m2m_100
        try:
            return int(tokenizer.get_lang_id(language)), ""
        except KeyError:
            raise InputError(f"The tokenizer doesn't know the language {language!r}.") from None
    vocabulary = tokenizer.get_vocab()
    if language in vocabulary:  # mbart, nllb
        return vocabulary[language], ""
    if f">>{language}<<" in vocabulary:  # marian, several targets
        return None, f">>{language}<< "
    raise InputError(f"The tokenizer doesn't know the language {language!r}.")


def build(spec: TokenizerSpec) -> Callable[[Encode | Decode], Any]:
    """The handler of a worker."""
    # Each worker is one stage of a pipeline that has its processes already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return handler(load_tokenizer(spec), spec)


def handler(tokenizer: Any, spec: TokenizerSpec) -> Callable[[Encode | Decode], Any]:
    """What encodes and decodes as `spec` says, with the tokenizer that it names."""
    prefix = spec.task_prefix
    if spec.target_lang is not None:
        prefix = target_language(tokenizer, spec.target_lang)[1] + prefix
    cut: dict[str, Any] = {} if spec.truncate_to is None else {"truncation": True, "max_length": spec.truncate_to}

    def handle(task: Encode | Decode) -> Any:
        if isinstance(task, Decode):
            return tokenizer.batch_decode(task.rows, skip_special_tokens=True)
        return tokenizer([prefix + text for text in task.texts], verbose=False, **cut)["input_ids"]

    return handle
