"""The outputs that `--allowed-outputs FILE` lists, one a line, as a trie."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from fastgen.decoding.trie import Trie
from fastgen.pipeline.batch_effects import DEFAULT_TOKENS
from fastgen.pipeline.errors import InputError, counted, first_line
from fastgen.pipeline.transformers.generation_fields import token_ids
from fastgen.pipeline.transformers.load import decoder_room


def load(path: str, tokenizer: Any, target_lang: str | None, model: Any, generation: Any) -> Trie:
    """Read the file as the model writes its outputs.

    Args:
        target_lang: the tokenizer's name of the language of the outputs, if any was given.
        generation: the GenerationConfig of the run.

    Raises:
        InputError: the file can't be read or holds no output, or one that the model can't write or would be cut; or the
            model has no end token, or the language of the outputs is unknown.
    """
    ends = token_ids(generation.eos_token_id)
    if not ends:
        raise InputError("--allowed-outputs needs a model whose outputs end with a token: give --eos-token-id.")
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
    is_encoder_decoder = model.config.is_encoder_decoder
    forced = token_ids(generation.forced_bos_token_id)
    if is_encoder_decoder:
        _choose_language(tokenizer, target_lang, forced)
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
    if is_encoder_decoder and forced and not set(forced) & set(trie.allowed([])):
        if _writes_language_first(tokenizer):
            given = "the language of the tokenizer" if target_lang is None else f"--target-lang {target_lang}"
            raise InputError(
                f"Each of --allowed-outputs begins with {given}, and the model is forced to begin with another token, "
                f"{forced[0]}: give --target-lang, and no --forced-bos-token-id."
            )
        trie = trie.after(2)  # the model is forced to write a token first that the tokenizer does not
    _check_length(path, trie, model, generation)
    return trie


def _choose_language(tokenizer: Any, target_lang: str | None, forced: list[int]) -> None:
    """Tell the tokenizer the language of the outputs; InputError if it would begin them with one that nobody chose.

    Without a target language mBART-50 and NLLB take the source's, and M2M100 none.
    """
    if not hasattr(tokenizer, "tgt_lang"):
        return
    if target_lang is not None:
        tokenizer.tgt_lang = target_lang
    elif _writes_language_first(tokenizer):
        if tokenizer.tgt_lang is None and set(forced) & set(tokenizer.prefix_tokens):
            tokenizer.tgt_lang = tokenizer.src_lang  # the model is forced to write the source's language, too
        if tokenizer.tgt_lang is None:
            raise InputError(
                "--allowed-outputs needs --target-lang: with this tokenizer each output begins with its language."
            )


def _writes_language_first(tokenizer: Any) -> bool:
    """Whether texts begin with their language, as those of mBART-50, NLLB and M2M100 do; mBART's end with it."""
    return hasattr(tokenizer, "tgt_lang") and bool(getattr(tokenizer, "prefix_tokens", None))


def _check_length(path: str, trie: Trie, model: Any, generation: Any) -> None:
    """Raise InputError if an output has more tokens than are generated: it would be cut, and be none of the list's."""
    needed = trie.longest + trie.prompt_length - 1  # a token that is forced first is generated, too
    if generation.max_new_tokens is not None:
        room = int(generation.max_new_tokens)
    elif generation.max_length in (None, GenerationConfig().max_length):
        room = DEFAULT_TOKENS
    else:
        room = int(generation.max_length) - 1  # a prompt has a token at least
    if needed <= room:
        return
    most = decoder_room(model)
    if most is not None and needed > most:
        remedy = f"leave out lines of more than {most}, for which the model's decoder has positions"
    else:
        remedy = f"give --max-new-tokens {needed}"
    has = counted(needed, "token")
    raise InputError(
        f"Cannot use --allowed-outputs {path}: an output has {has}, its end included, and at most {room} are "
        f"generated, which would cut it: {remedy}."
    )
