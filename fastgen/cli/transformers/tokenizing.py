"""What the workers of fastgen-generate-transformers do: text to tokens, and tokens to text."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastgen.pipeline.errors import InputError, first_line


class TokenizerSpec(NamedTuple):
    """How to load the tokenizer; sent to each worker."""

    name: str
    task_prefix: str
    source_lang: str | None
    target_lang: str | None
    truncate_to: int | None


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
        raise InputError(f"Cannot load the tokenizer {spec.name!r}: {first_line(error)}.") from error
    if spec.source_lang is not None:
        if not hasattr(tokenizer, "src_lang"):
            raise InputError(f"The tokenizer of {spec.name!r} has no languages: --source-lang is not for this model.")
        try:
            tokenizer.src_lang = spec.source_lang
        except (KeyError, ValueError) as error:
            raise InputError(f"The tokenizer doesn't know the language {spec.source_lang!r} ({error}).") from None
    return tokenizer


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
    tokenizer = load_tokenizer(spec)
    prefix = spec.task_prefix
    if spec.target_lang is not None:
        prefix = target_language(tokenizer, spec.target_lang)[1] + prefix
    cut: dict[str, Any] = {} if spec.truncate_to is None else {"truncation": True, "max_length": spec.truncate_to}

    def handle(task: Encode | Decode) -> Any:
        if isinstance(task, Decode):
            return tokenizer.batch_decode(task.rows, skip_special_tokens=True)
        return tokenizer([prefix + text for text in task.texts], verbose=False, **cut)["input_ids"]

    return handle
