"""How good outputs are, by the measures of each trained model's task."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from fastgen.bench import data
from fastgen.bench.data import Folders


def metrics(task: dict[str, Any], folders: Folders, tokens: list[list[int]]) -> dict[str, float]:
    """Of a side's outputs, `tokens` [inputs][new tokens]: by name, in percent."""
    texts = data.of(task, folders)
    outputs = [texts.text(row) for row in tokens]
    return MEASURES[task["model"]](outputs, texts.references)


def _translation(outputs: list[str], references: list[str]) -> dict[str, float]:
    import sacrebleu

    return {
        "BLEU": sacrebleu.corpus_bleu(outputs, [references]).score,
        "chrF": sacrebleu.corpus_chrf(outputs, [references]).score,
    }


def _exact(outputs: list[str], references: list[str]) -> dict[str, float]:
    right = sum(output == reference for output, reference in zip(outputs, references, strict=True))
    return {"exact match": 100 * right / len(references)}


def _phonemes(outputs: list[str], references: list[str]) -> dict[str, float]:
    return _exact(outputs, references) | {"phoneme error rate": error_rate(outputs, references)}


def _words(outputs: list[str], references: list[str]) -> dict[str, float]:
    def split(text: str) -> list[str]:
        return re.sub(r"[^\w' ]", " ", text.lower()).split()

    return {"word error rate": error_rate([*map(split, outputs)], [*map(split, references)])}


def error_rate(outputs: Sequence[Sequence[Any]], references: Sequence[Sequence[Any]]) -> float:
    """Edits / length of the references, in percent."""
    edits = sum(_edits(output, reference) for output, reference in zip(outputs, references, strict=True))
    return 100 * edits / sum(map(len, references))


def _edits(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Levenshtein's distance: insertions, deletions and substitutions."""
    above = list(range(len(other) + 1))
    for row, item in enumerate(one, 1):
        left = [row]
        for column, against in enumerate(other, 1):
            left.append(min(above[column] + 1, left[-1] + 1, above[column - 1] + (item != against)))
        above = left
    return above[-1]


MEASURES: dict[str, Callable[[list[str], list[str]], dict[str, float]]] = {
    "demo": _exact,
    "ddtp": _translation,
    "g2p": _phonemes,
    "whisper": _words,
}
