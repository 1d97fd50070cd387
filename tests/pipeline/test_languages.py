"""--source-lang and --target-lang: languages of a tokenizer, which pieces of words may be called like."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import MBart50Tokenizer, NllbTokenizer

from fastgen.pipeline import InputError
from fastgen.pipeline.transformers.tokenizing import TokenizerSpec, load_tokenizer, target_language

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
PIECES = ["▁", "de", "en", "▁Haus"]


def nllb() -> Any:
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *PIECES])}
    return NllbTokenizer(vocab=vocabulary, merges=[], src_lang="eng_Latn")


def mbart50() -> Any:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, -1.0) for piece in PIECES)]
    return MBart50Tokenizer(vocab=pieces, src_lang="en_XX")


@pytest.mark.parametrize(("make", "known"), [(nllb, "deu_Latn"), (mbart50, "de_DE")], ids=["NLLB", "mBART-50"])
@pytest.mark.parametrize("unknown", ["de", "Haus", "deutsch"])
def test_a_piece_of_a_word_is_no_language(tmp_path: Path, make: Any, known: str, unknown: str) -> None:
    """The outputs of all lines would begin with that piece, the inputs with it or with the unknown word."""
    tokenizer = make()
    assert "de" in tokenizer.get_vocab()
    assert target_language(tokenizer, known) == (tokenizer.convert_tokens_to_ids(known), "")
    with pytest.raises(InputError, match=f"doesn't know the language '{unknown}'"):
        target_language(tokenizer, unknown)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(TokenizerSpec(str(tmp_path), source_lang=known))
    assert tokenizer.convert_tokens_to_ids(known) in loaded("Haus").input_ids
    with pytest.raises(InputError, match=f"doesn't know the language '{unknown}'"):
        load_tokenizer(TokenizerSpec(str(tmp_path), source_lang=unknown))


def test_a_language_that_is_written_before_the_input() -> None:
    """As Marian's models with several targets need it, whatever pieces their words have."""
    tokenizer = SimpleNamespace(
        all_special_tokens=["</s>"], get_added_vocab=dict, get_vocab=lambda: {"fr": 5, ">>fr<<": 9}
    )
    assert target_language(tokenizer, "fr") == (None, ">>fr<< ")
    with pytest.raises(InputError, match="doesn't know the language 'de'"):
        target_language(tokenizer, "de")


def test_a_language_between_underscores() -> None:
    """As PLBart's are, which has words such as `java`, too."""
    tokenizer = SimpleNamespace(
        all_special_tokens=["__java__"],
        get_added_vocab=dict,
        get_vocab=lambda: {"java": 5},
        convert_tokens_to_ids={"__java__": 9, "java": 5}.__getitem__,
    )
    assert target_language(tokenizer, "java") == (9, "")
