"""fastgen-generate-transformers with a decoder-only model: each prompt as if it were alone, whatever it is beside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer
from transformers_kit import MODEL, run

import fastgen

FLAGS = ["--num-beams", "3", "--workers", "0", "--quiet", "--batch-size", "32"]
POSITIONS = 256
ENDS = [2, *range(20, 50)]  # so many that outputs end early


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 with the demo's tokenizer, whose padding token is none of its end tokens."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.model_max_length = 10 * POSITIONS  # so that the model alone has a limit
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, bos_token_id=0, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def alone(folder: Path, texts: list[str], **options: Any) -> list[str]:
    """What stock makes of each prompt alone."""
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options |= dict(num_beams=3, pad_token_id=tokenizer.pad_token_id)
    found = []
    for text in texts:
        prompt = tokenizer(text, return_tensors="pt").input_ids
        with fastgen.disabled():
            tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        found.append(tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True))
    return found


def lengths(folder: Path, texts: list[str]) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [len(tokens) for tokens in tokenizer(texts).input_ids]


@pytest.mark.parametrize("refill", ["off", "on"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 9},  # and the longest prompt: see below
        {"min_length": 9, "max_new_tokens": 50},
        {"encoder_repetition_penalty": 6.0, "max_new_tokens": 12},
        {"no_repeat_ngram_size": 1, "max_new_tokens": 40},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_padding_beside_a_prompt_does_not_count(
    folder: Path, source: Path, texts: list[str], tmp_path: Path, options: dict[str, Any], refill: str
) -> None:
    assert len(set(lengths(folder, texts))) > 5
    longest = max(lengths(folder, texts))
    options = options | {name: longest + options[name] for name in ("max_length", "min_length") if name in options}
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert run(folder, source, tmp_path / "out.txt", *FLAGS, *flags, "--refill", refill) == 0
    assert (tmp_path / "out.txt").read_text("utf-8").splitlines() == alone(folder, texts, **options)


def test_a_prompt_that_leaves_no_room_is_refused_alone(
    folder: Path, source: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = lengths(folder, texts)
    most = sorted(tokens)[len(tokens) // 2]
    flags = [*FLAGS, "--max-length", most]
    assert run(folder, source, tmp_path / "out.jsonl", *flags) == 1
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert ["error" in one for one in found] == [count >= most for count in tokens]
    expected = alone(folder, [text for text, count in zip(texts, tokens, strict=True) if count < most], max_length=most)
    assert [one["outputs"][0]["text"] for one in found if "outputs" in one] == expected
    capsys.readouterr()
    assert run(folder, source, tmp_path / "out.txt", *flags) == 1
    first = next(number for number, count in enumerate(tokens, 1) if count >= most)
    assert f"in.txt, line {first}: {tokens[first - 1]} tokens, and the model has room for {most - 1}" in (
        capsys.readouterr().err
    )
    assert run(folder, source, tmp_path / "cut.txt", *flags, "--truncate") == 0
    assert run(folder, source, tmp_path / "none.txt", *FLAGS, "--max-length", 1) == 1
    assert "--max-length 1 leaves no room for an input" in capsys.readouterr().err


@pytest.mark.parametrize("count", [POSITIONS - 1, POSITIONS])
def test_a_prompt_of_all_positions(folder: Path, tmp_path: Path, count: int) -> None:
    """Where nobody says how much is to follow, the host generates up to the last position."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "1" * next(n for n in range(300) if len(tokenizer("1" * n).input_ids) == count)
    (tmp_path / "in.txt").write_text(f"room 12\n{text}\n", "utf-8")
    assert run(folder, tmp_path / "in.txt", tmp_path / "out.jsonl", *FLAGS) == (count == POSITIONS)
    first, last = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines())
    assert first["outputs"][0]["text"] == alone(folder, ["room 12"])[0]
    assert ("error" in last) is (count == POSITIONS)


@pytest.mark.parametrize("of_the_model", [-1, None])
def test_padding_tokens_that_the_model_does_not_know(
    folder: Path, source: Path, texts: list[str], tmp_path: Path, of_the_model: int | None
) -> None:
    """-1 in the model's configuration, and a tokenizer with a token more than the model has."""
    shutil.copytree(folder, tmp_path / "model")
    config = tmp_path / "model" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"pad_token_id": of_the_model}), "utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<one more>"})
    assert tokenizer.pad_token_id == size
    tokenizer.save_pretrained(tmp_path / "model")
    assert run(tmp_path / "model", source, tmp_path / "out.txt", *FLAGS, "--max-new-tokens", "12") == 0
    assert (tmp_path / "out.txt").read_text("utf-8").splitlines() == alone(folder, texts, max_new_tokens=12)
