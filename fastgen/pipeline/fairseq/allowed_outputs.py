"""The outputs that `--allowed-outputs FILE` lists, one a line, as a trie for fairseq's constrained search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fairseq.search import PrefixConstrainedBeamSearch

from fastgen.decoding import trie_building
from fastgen.decoding.trie import Trie
from fastgen.pipeline.errors import InputError, first_line


def load(path: str, dictionary: Any, codecs: list[Any]) -> Trie:
    """Read the file.

    Args:
        dictionary: of the outputs.
        codecs: what `--tokenizer` and `--bpe` name, in this order, None for none. Without them a line is words of the
            dictionary with spaces between them.

    Raises:
        InputError: the file can't be read, holds no output, or one with a word that no search writes.
    """
    if dictionary is None:
        raise InputError("--allowed-outputs needs a task whose outputs are texts.")
    try:
        trie = Trie(_sequences(path, dictionary, codecs), eos_token_id=dictionary.eos())
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot use --allowed-outputs {path}: {first_line(error).rstrip('.')}.") from error
    trie.ends_once = True
    return trie


def _sequences(path: str, dictionary: Any, codecs: list[Any]) -> Iterator[list[int]]:
    end = dictionary.eos()
    unusable = {
        dictionary.unk(): "which the dictionary lacks",
        end: "which ends an output",
        dictionary.pad(): "which no search writes",
    }
    for number, line in trie_building.lines_of(path):
        text = line.strip()
        for codec in codecs:
            text = text if codec is None else codec.encode(text)
        words = text.split()
        tokens = [dictionary.index(word) for word in words]
        written = tokens[:-1] if tokens[-1:] == [end] else tokens
        if not unusable.keys().isdisjoint(written):
            word, token = next(pair for pair in zip(words, tokens, strict=True) if pair[1] in unusable)
            raise ValueError(f"line {number} has the word {word[:40]!r}, {unusable[token]}")
        yield tokens


def check(generator: Any, trie: Trie) -> None:
    """Raise InputError if the task has made a generator that does not ask the trie."""
    if trie_of(generator) is not trie:
        raise InputError("--allowed-outputs is for plain beam search, and not for this task or these flags.")


def trie_of(generator: Any) -> Trie | None:
    """The trie that a generator's search asks; None if it asks none."""
    search: Any = getattr(generator, "search", None)
    if type(search) is not PrefixConstrainedBeamSearch or not isinstance(search.prefix_allowed_tokens_fn, Trie):
        return None
    return search.prefix_allowed_tokens_fn
