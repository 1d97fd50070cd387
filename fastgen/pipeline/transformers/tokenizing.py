"""Turns text into tokens and tokens into text, in the workers of fastgen-generate-transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastgen.pipeline.errors import InputError, counted, first_line


class TokenizerSpec(NamedTuple):
    """How to load and use the tokenizer; sent to each worker."""

    name: str
    task_prefix: str = ""
    source_lang: str | None = None
    target_lang: str | None = None
    truncate_to: int | None = None


@dataclass(frozen=True)
class Encode:
    texts: list[str]


@dataclass(frozen=True)
class EncodeChat:
    """A conversation for a tokenizer with a chat template; the result has one input."""

    messages: list[dict[str, Any]]  # with `role` and `content`


@dataclass(frozen=True)
class Decode:
    rows: list[list[int]]
    special: bool = False  # write special tokens, too


def load_tokenizer(spec: TokenizerSpec) -> Any:
    """Load the tokenizer and set the source language; InputError if it can't be loaded or doesn't know it."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        why = first_line(error).rstrip(": ")
        if isinstance(error, TypeError):  # transformers 4 opens a file without a name
            raise InputError(f"{spec.name} has no tokenizer ({why}): --tokenizer names another.") from error
        raise InputError(f"Cannot load the tokenizer {spec.name!r}: {why}; --tokenizer names another.") from error
    if spec.source_lang is not None:
        if not hasattr(tokenizer, "src_lang"):
            raise InputError(f"The tokenizer of {spec.name!r} has no languages: --source-lang is not for this model.")
        if not _takes_any_language(tokenizer) and _language_token(tokenizer, spec.source_lang) is None:
            raise _unknown_language(spec.source_lang)
        try:
            tokenizer.src_lang = spec.source_lang
        except (KeyError, ValueError):
            raise _unknown_language(spec.source_lang) from None
    return tokenizer


def check_fits(tokenizer: Any, config: Any, name: str) -> None:
    """Raise InputError if the tokenizer, named `name`, can't be the model's."""
    if why := why_unfit(tokenizer, config):
        raise InputError(f"{name} {why}: --tokenizer names the tokenizer that the model was trained with.")


def why_unfit(tokenizer: Any, config: Any) -> str | None:
    """Why a tokenizer can't be the model's, judged by the numbers of tokens; None if it may be."""
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # transformers makes up an empty one
        return "has no tokenizer"
    parts = (getattr(config, "encoder", None), config.get_text_config(), config)
    sizes = [size for part in parts for kind in ("vocab_size", "src_vocab_size") if (size := getattr(part, kind, None))]
    # A model often has some more tokens, as their number is rounded up, and tokens added to a tokenizer may be unused.
    if sizes and not (sizes[0] / 2 <= len(tokenizer) and tokenizer.vocab_size <= sizes[0]):
        return f"has a tokenizer of {counted(len(tokenizer), 'token')}, and the model has {sizes[0]}"
    return None


def target_language(tokenizer: Any, language: str) -> tuple[int | None, str]:
    """How to choose the output's language: the token to force first, or else a prefix for the input."""
    if hasattr(tokenizer, "get_lang_id"):  # m2m_100
        try:
            return int(tokenizer.get_lang_id(language)), ""
        except KeyError:
            raise _unknown_language(language) from None
    if (token := _language_token(tokenizer, language)) is not None:  # mbart, nllb, plbart
        return int(tokenizer.convert_tokens_to_ids(token)), ""
    if f">>{language}<<" in tokenizer.get_vocab():  # marian, several targets
        return None, f">>{language}<< "
    raise _unknown_language(language)


def _language_token(tokenizer: Any, language: str) -> str | None:
    """The special token of a language, None if it has none: a piece of a word may be called alike, such as "de"."""
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return next((token for token in (language, f"__{language}__") if token in special), None)


def _takes_any_language(tokenizer: Any) -> bool:
    """Whether the language of inputs has no special token (FSMT), or the tokenizer raises an error itself (M2M100)."""
    return hasattr(tokenizer, "moses_detokenize") or hasattr(tokenizer, "get_lang_id")


def _unknown_language(language: str) -> InputError:
    return InputError(f"The tokenizer doesn't know the language {language!r}.")


def build(spec: TokenizerSpec) -> Callable[[Encode | EncodeChat | Decode], Any]:
    """Make the handler of a worker."""
    # The pipeline has several workers already: no further threads in each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return handler(load_tokenizer(spec), spec)


def handler(tokenizer: Any, spec: TokenizerSpec) -> Callable[[Encode | EncodeChat | Decode], Any]:
    """A function that encodes and decodes with `tokenizer`, as `spec` says."""
    prefix = spec.task_prefix
    if spec.target_lang is not None:
        prefix = target_language(tokenizer, spec.target_lang)[1] + prefix
    cut: dict[str, Any] = {} if spec.truncate_to is None else {"truncation": True, "max_length": spec.truncate_to}

    def handle(task: Encode | EncodeChat | Decode) -> Any:
        if isinstance(task, Decode):
            return tokenizer.batch_decode(task.rows, skip_special_tokens=not task.special)
        if isinstance(task, EncodeChat):
            text = tokenizer.apply_chat_template(task.messages, tokenize=False, add_generation_prompt=True)
            return [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]  # the template wrote them
        return tokenizer([prefix + text for text in task.texts], verbose=False, **cut)["input_ids"]

    return handle
