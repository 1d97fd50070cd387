"""`--allowed-outputs FILE` of the commands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the command needs transformers")

import torch
import transformers_kit as kit
from transformers import AutoTokenizer, GenerationConfig, M2M100Tokenizer, MBart50Tokenizer, NllbTokenizer

import fastgen
from fastgen import Trie
from fastgen.pipeline.errors import InputError
from fastgen.pipeline.transformers import allowed_outputs, tokenizing

TEXTS = ["bus 7 at 14:05", "room 12", "costs $17.20"]
ALLOWED = ["Bus 7 um 14:05", "Zimmer 12", "kostet 17,20 $", "Zimmer 13", "Haus"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    source, output, allowed = tmp_path / "in.txt", tmp_path / "out.jsonl", tmp_path / "allowed.txt"
    source.write_text("".join(f"{text}\n" for text in TEXTS), "utf-8")
    allowed.write_text("".join(f"{text}\n" for text in ALLOWED), "utf-8")
    return source, output, allowed


@pytest.mark.parametrize("refill", ["on", "off"])
def test_outputs_are_among_them(files: tuple[Path, Path, Path], refill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output, allowed = files
    asked: list[bool] = []
    call = Trie.__call__

    def counted(self: Trie, sentence: int, tokens: torch.Tensor) -> list[int]:
        asked.append(True)
        return call(self, sentence, tokens)

    monkeypatch.setattr(Trie, "__call__", counted)
    flags = [*kit.FLAGS, "--allowed-outputs", allowed, "--refill", refill]
    assert kit.run(kit.MODEL, source, output, *flags) == 0
    records = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    best = [record["outputs"][0] for record in records]
    tokenizer = AutoTokenizer.from_pretrained(kit.MODEL)
    rows = tokenizer(text_target=ALLOWED).input_ids
    known = tokenizer.batch_decode(rows, skip_special_tokens=True)
    assert {one["text"] for one in best} <= set(known)
    assert not asked
    trie = Trie(rows, eos_token_id=tokenizer.eos_token_id)
    with fastgen.disabled():
        texts, scores = kit.stock(TEXTS, prefix_allowed_tokens_fn=trie)  # type: ignore[arg-type]
    assert [one["text"] for one in best] == texts
    assert [one["score"] for one in best] == pytest.approx(scores, abs=1e-4)


def test_refusals(files: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, output, allowed = files

    def refused(*more: object) -> str:
        assert kit.run(kit.MODEL, source, output, *kit.FLAGS, *more) == 1
        assert not output.exists()
        return capsys.readouterr().err

    assert "--allowed-outputs none.txt: there is no such file." in refused("--allowed-outputs", "none.txt")
    allowed.write_text("\n\n", "utf-8")
    assert f"Cannot use --allowed-outputs {allowed}: {allowed} holds no sequence." in refused(
        "--allowed-outputs", allowed
    )
    allowed.write_bytes(b"Haus\n\xff\xfe\n")
    assert f"Cannot use --allowed-outputs {allowed}: {allowed}, line 2 is not UTF-8." in refused(
        "--allowed-outputs", allowed
    )
    allowed.write_text("Haus\n\nZimmer</s>12\n", "utf-8")
    assert f"{allowed}, line 3: the tokenizer writes the end token, 2, before the text is over." in refused(
        "--allowed-outputs", allowed
    )
    assert "it is not for --ray" in refused("--allowed-outputs", allowed, "--ray")


def test_another_list_is_another_run(files: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, output, allowed = files
    flags = [*kit.FLAGS, "--allowed-outputs", allowed]
    assert kit.run(kit.MODEL, source, output, *flags) == 0
    allowed.write_text("Zimmer 12\n", "utf-8")
    assert kit.run(kit.MODEL, source, output, *flags, "--resume") == 1
    assert "allowed.txt" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--forced-eos-token-id", 2]], ids=["", "forced end"])
def test_an_output_that_would_be_cut_is_refused(
    files: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str], more: list[object]
) -> None:
    """With the number of tokens that the message names, each output is one of them."""
    source, output, allowed = files
    flags = [*kit.FLAGS, "--allowed-outputs", allowed, *more, "--max-new-tokens"]
    assert kit.run(kit.MODEL, source, output, *flags, 3) == 1
    (said,) = capsys.readouterr().err.splitlines()
    named = re.search(
        r": an output has (\d+) tokens, its end included, and at most 3 are generated, which would cut it: "
        r"give --max-new-tokens (\d+)\.$",
        said,
    )
    assert named is not None and named[1] == named[2] and not output.exists(), said
    assert kit.run(kit.MODEL, source, output, *flags, int(named[1]) - 1) == 1
    assert kit.run(kit.MODEL, source, output, *flags, named[1]) == 0
    tokenizer = AutoTokenizer.from_pretrained(kit.MODEL)
    rows = tokenizer(text_target=ALLOWED).input_ids
    assert max(map(len, rows)) == int(named[1])
    records = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    known = tokenizer.batch_decode(rows, skip_special_tokens=True)
    assert {each["text"] for record in records for each in record["outputs"]} <= set(known)


def test_an_output_that_the_model_has_no_positions_for(
    files: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, output, allowed = files
    allowed.write_text("Haus\n" + "Zimmer 12 " * 100 + "\n", "utf-8")
    assert kit.run(kit.MODEL, source, output, *kit.FLAGS, "--allowed-outputs", allowed) == 1
    assert re.search(r"leave out lines of more than \d+, for which the model's decoder has p", capsys.readouterr().err)


# ---------------------------------------------------------------------------------------------- limits, languages
class Model:
    """What is asked of a model."""

    def __init__(self, is_encoder_decoder: bool = True) -> None:
        self.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(num_embeddings=10**6)


def loaded(path: Path, tokenizer: Any, language: str | None = None, model: Any = None, **options: Any) -> Trie:
    generation = GenerationConfig(eos_token_id=2, **options)
    return allowed_outputs.load(str(path), tokenizer, language, model or Model(), generation)


@pytest.mark.parametrize("is_encoder_decoder", [True, False])
@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({}, 20),  # the host's own
        (dict(max_new_tokens=9), 9),
        (dict(max_new_tokens=9, max_length=30), 9),
        (dict(max_length=30), 29),
        (dict(max_length=20), 19 if GenerationConfig().max_length is None else 20),
        (dict(max_length=30, forced_bos_token_id=9), 28),
    ],
)
def test_how_many_tokens_there_are(
    tmp_path: Path, options: dict[str, Any], room: int, is_encoder_decoder: bool
) -> None:
    if not is_encoder_decoder and "forced_bos_token_id" in options:
        return  # of encoder-decoders alone
    tokenizer, path = AutoTokenizer.from_pretrained(kit.MODEL), tmp_path / "one"

    def lines_of(count: int) -> Trie:
        """One output, of so many tokens."""
        ids = [20] * (count - 1)
        path.write_text(tokenizer.decode(ids), "utf-8")
        model = Model(is_encoder_decoder)
        trie = loaded(path, tokenizer, model=model, **options)
        assert trie.longest == count
        return trie

    assert lines_of(room).prompt_length == (2 if "forced_bos_token_id" in options else 1)
    with pytest.raises(InputError, match=f"give --max-new-tokens {room + 1 + ('forced_bos_token_id' in options)}"):
        lines_of(room + 1)


def mbart50(_: Path) -> Any:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁Haus", -1.0), ("▁Zimmer", -1.0)]
    return MBart50Tokenizer(vocab=pieces, src_lang="en_XX")


def nllb(_: Path, **options: Any) -> Any:
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = {token: number for number, token in enumerate([*special, "▁", *"HZaeimrsu"])}
    return NllbTokenizer(vocab=vocabulary, merges=[], src_lang="eng_Latn", **options)


def m2m_100(folder: Path) -> Any:
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = ["Haus", "Zimmer", "Haus Zimmer"]
    name, words = str(folder / "pieces"), str(folder / "vocab.json")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=name, vocab_size=30, hard_vocab_limit=False, minloglevel=2
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=f"{name}.model")
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokens = [*special, *(token for token in map(pieces.id_to_piece, range(len(pieces))) if token not in special)]
    Path(words).write_text(json.dumps({token: number for number, token in enumerate(tokens)}), "utf-8")
    return M2M100Tokenizer(words, f"{name}.model", src_lang="en")


LANGUAGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "mBART-50": (mbart50, ["en_XX", "de_DE", "fr_XX"]),
    "NLLB": (nllb, ["eng_Latn", "deu_Latn", "fra_Latn"]),
    "M2M100": (m2m_100, ["en", "de", "fr"]),
}


@pytest.mark.parametrize("name", sorted(LANGUAGES))
def test_outputs_begin_with_the_language_that_was_chosen(tmp_path: Path, name: str) -> None:
    """Without one, these tokenizers would begin them with the source's, or with none at all."""
    make, (source, target, other) = LANGUAGES[name]
    path = tmp_path / "allowed"
    path.write_text("Haus\nZimmer\n", "utf-8")
    tokens = {language: tokenizing.target_language(make(tmp_path), language)[0] for language in (source, target, other)}
    for forced in (None, tokens[target]):
        with pytest.raises(InputError, match=r"^--allowed-outputs needs --target-lang: with this tokenizer"):
            loaded(path, make(tmp_path), forced_bos_token_id=forced)
    for forced in (None, tokens[target]):
        trie = loaded(path, make(tmp_path), target, forced_bos_token_id=forced)
        assert (trie.allowed([]), trie.prompt_length, len(trie)) == ([tokens[target]], 1, 2)
    trie = loaded(path, make(tmp_path), forced_bos_token_id=tokens[source])  # the source's is the outputs', too
    assert (trie.allowed([]), trie.prompt_length, len(trie)) == ([tokens[source]], 1, 2)
    with pytest.raises(InputError, match=f"forced to begin with another token, {tokens[other]}: give --target-lang"):
        loaded(path, make(tmp_path), target, forced_bos_token_id=tokens[other])
    tokenizer = make(tmp_path)
    tokenizer.tgt_lang = target  # saved with the tokenizer
    assert loaded(path, tokenizer).allowed([]) == [tokens[target]]
    with pytest.raises(InputError, match="begins with the language of the tokenizer"):
        loaded(path, tokenizer, forced_bos_token_id=tokens[other])


def test_a_language_behind_the_end(tmp_path: Path) -> None:
    """There it decides nothing: none is needed."""
    path = tmp_path / "allowed"
    path.write_text("Haus\nZimmer\n", "utf-8")
    tokenizer = nllb(tmp_path, legacy_behaviour=True)
    first = set(loaded(path, tokenizer).allowed([]))
    assert first and not first & set(map(tokenizer.convert_tokens_to_ids, LANGUAGES["NLLB"][1]))
    assert loaded(path, tokenizer, forced_bos_token_id=90).prompt_length == 2
