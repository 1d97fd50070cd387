"""The texts of the trained models' tasks: sources, tokens that a model reads, and references to judge outputs by."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgen import phases
from fastgen.bench.runners import Refused

__phase__ = phases.TEXT

Folders = dict[str, str]  # of trained models and data, by the name of the option that names them

_DEMO_SEED = 7  # the demo model was trained on other sentences

# President Kennedy's inaugural address, 1961: what is said in audio/jfk.npy.
SPEECH = "And so, my fellow Americans: ask not what your country can do for you, ask what you can do for your country."


@dataclass(frozen=True)
class Texts:
    """Sources and references are parallel."""

    sources: list[str]
    references: list[str]
    tokens: Callable[[str], list[int]]  # of a source, as the model reads it
    text: Callable[[list[int]], str]  # of generated tokens, special ones left out

    @property
    def ids(self) -> list[list[int]]:
        return [self.tokens(source) for source in self.sources]


def of(task: dict[str, Any], folders: Folders) -> Texts:
    """The texts of a task (as `Task.as_dict` gives it); KeyError if its model has none."""
    clips = task["batch"] if task["model"] == "whisper" else 0  # a batch of the same clip, and no more
    return TEXTS[task["model"]](folders, task["limit"] or clips)


def tokenizer_of(folders: Folders, name: str) -> Any:
    """The tokenizer in the folder of --NAME; Refused if it can't be that model's."""
    import transformers

    from fastgen.pipeline.transformers.tokenizing import why_unfit

    # Without the second transformers asks whether it may run code of the folder.
    config = transformers.AutoConfig.from_pretrained(folders[name], trust_remote_code=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[name], trust_remote_code=False)
    if why := why_unfit(tokenizer, config):
        raise Refused(f"--{name} {folders[name]} {why}")
    return tokenizer


def _figures(folders: Folders, limit: int) -> Texts:
    """Held-out sentences for the model that fastgen ships, the shortest first."""
    import transformers

    from fastgen.demo import job, task

    pairs = list(itertools.islice(task.sentences(_DEMO_SEED, held_out=True), limit))
    pairs.sort(key=lambda pair: len(pair[0]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.SHIPPED_MODEL)
    return Texts(
        [source for source, _ in pairs],
        [answer for _, answer in pairs],
        lambda source: list(tokenizer(source).input_ids),
        lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
    )


def _translation(folders: Folders, limit: int) -> Texts:
    """The English to German test set, the shortest sentences first."""
    import sentencepiece

    data, folder = (Path(folders["shared"], kind, "ddtp-en-de") for kind in ("data", "models"))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "spm.model"))
    names = json.loads((folder / "vocab.json").read_text("utf-8"))
    known = {name: index for index, name in enumerate(names)}
    unknown, end = known["<unk>"], known["</s>"]
    english, german = ((data / f"test.{side}").read_text("utf-8").splitlines() for side in ("en", "de"))

    def tokens(source: str) -> list[int]:
        return [known.get(piece, unknown) for piece in pieces.encode(source, out_type=str)] + [end]

    def text(row: list[int]) -> str:
        return str(pieces.decode([names[token] for token in row if token > unknown]))

    order = sorted(range(len(english)), key=lambda index: len(tokens(english[index])))
    if limit:  # all lengths, not the shortest alone
        order = order[:: -(-len(order) // limit)]
    return Texts([english[i] for i in order], [german[i] for i in order], tokens, text)


def _pronunciation(folders: Folders, limit: int) -> Texts:
    """Words and their phonemes, one token a character."""
    folder, table = (Path(folders["shared"], name) for name in ("models/g2p-bart-us", "data/words_phonemes.tsv"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    letters = {letter: index for index, letter in enumerate(config["grapheme_chars"]) if index > 3}
    sounds = config["phoneme_chars"]
    pairs = [line.split("\t")[:2] for line in table.read_text("utf-8").splitlines()][: limit or None]
    return Texts(
        [word for word, _ in pairs],
        [spoken for _, spoken in pairs],
        lambda word: [1, *(letters.get(letter, 3) for letter in word), 2],
        lambda tokens: "".join(sounds[token] for token in tokens if token > 3),
    )


def _speech(folders: Folders, limit: int) -> Texts:
    """What is said in the clip, so often."""
    tokenizer = tokenizer_of(folders, "whisper")
    return Texts(
        ["audio/jfk.npy"] * limit,
        [SPEECH] * limit,
        lambda source: [],
        lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
    )


def documents(folders: Folders) -> list[str]:
    return Path(folders["shared"], "data/docs.txt").read_text("utf-8").splitlines()


TEXTS: dict[str, Callable[[Folders, int], Texts]] = {
    "demo": _figures,
    "ddtp": _translation,
    "g2p": _pronunciation,
    "whisper": _speech,
}
