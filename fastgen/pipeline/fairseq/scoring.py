"""Passes references and hypotheses to fairseq's scorer."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.data import Dictionary

from fastgen.pipeline.fairseq.lines import Scored


class Scoring:
    """Feeds stock's scorer sentence by sentence, in order: the scorer has a state, and the dictionary grows."""

    def __init__(self, scorer: Any, dictionary: Any, *, by_words: bool) -> None:
        """`by_words`: as in Format; words that the dictionary doesn't know are added to it."""
        self._scorer, self._dictionary, self._by_words = scorer, dictionary, by_words
        self._by_text = hasattr(scorer, "add_string")
        self._stock = type(dictionary).encode_line is Dictionary.encode_line

    def add(self, scored: Scored) -> None:
        """Add the best hypothesis and the reference of a sentence."""
        if self._by_text:
            self._scorer.add_string(scored.target, scored.hypothesis)
        elif not self._by_words:
            self._scorer.add(_ids(scored.target_tokens), _ids(scored.hypothesis_tokens))
        else:
            # All hypotheses in stock's order: BLEU's hash of n-grams has collisions, so even the number of a new word
            # can change the score.
            self._learn(scored.texts[0])
            target = self._encode(scored.target)
            self._scorer.add(target, self._encode(scored.hypothesis))
            for text in scored.texts[1:]:
                self._learn(text)

    def result(self) -> str:
        return str(self._scorer.result_string())

    def _learn(self, line: str) -> None:
        if self._stock:
            for word in line.split():
                if word not in self._dictionary.indices:
                    self._dictionary.add_symbol(word)
        else:
            self._encode(line)

    def _encode(self, line: str) -> torch.Tensor:
        """Encode a line as fairseq's `encode_line` does, but fill the tensor at once."""
        dictionary = self._dictionary
        if not self._stock:
            return dictionary.encode_line(line, add_if_not_exist=True)
        return _ids([*map(dictionary.add_symbol, line.split()), dictionary.eos_index])


def _ids(tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32, device="cpu")
