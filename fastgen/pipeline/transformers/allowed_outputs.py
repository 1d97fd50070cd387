"""The outputs that `--allowed-outputs FILE` lists, one a line, as a trie."""

from __future__ import annotations

from typing import Any

from fastgen.decoding.trie import Trie
from fastgen.pipeline.errors import InputError, first_line
from fastgen.pipeline.transformers.generation_fields import token_ids


def load(path: str, tokenizer: Any, target_lang: str | None, model: Any, generation: Any) -> Trie:
    """Read the file as the model writes its outputs.

    Args:
        target_lang: the tokenizer's name of the language of the outputs, if any was given.
        generation: the GenerationConfig of the run.

    Raises:
        InputError: the file can't be read or holds no output, or the model has no end token, or lacks a token.
    """
    ends = token_ids(generation.eos_token_id)
    if not ends:
        raise InputError("--allowed-outputs needs a model whose outputs end with a token: give --eos-token-id.")
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
    is_encoder_decoder = model.config.is_encoder_decoder
    if target_lang is not None and hasattr(tokenizer, "tgt_lang"):
        tokenizer.tgt_lang = target_lang
    try:
        trie = Trie.from_file(path, tokenizer=tokenizer, eos_token_id=end, special_tokens=is_encoder_decoder)
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot use --allowed-outputs {path}: {first_line(error).rstrip('.')}.") from error
    size = model.get_input_embeddings().num_embeddings
    if trie.largest_token >= size:
        raise InputError(
            f"Cannot use --allowed-outputs {path}: the tokenizer makes the token {trie.largest_token} of it, and the "
            f"model's are 0 to {size - 1}."
        )
    first = token_ids(generation.forced_bos_token_id)
    if is_encoder_decoder and first and not set(first) & set(trie.allowed([])):
        return trie.after(2)  # the model is forced to write a token first that the tokenizer does not
    return trie
