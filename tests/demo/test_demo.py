"""fastgen-demo: the task's right answers, the shipped model, the command from end to end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen.cli import demo
from fastgen.demo import comparison, job, page, task
from fastgen.memory.peak import PeakMemory

MIB = 2**20


# The task.


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (0, "zero"),
        (7, "seven"),
        (13, "thirteen"),
        (20, "twenty"),
        (21, "twenty one"),
        (99, "ninety nine"),
        (100, "one hundred"),
        (110, "one hundred ten"),
        (4213, "four thousand two hundred thirteen"),
        (60005, "sixty thousand five"),
        (100000, "one hundred thousand"),
        (999999, "nine hundred ninety nine thousand nine hundred ninety nine"),
    ],
)
def test_numbers_are_written_out(n: int, words: str) -> None:
    assert task.cardinal(n) == words


@pytest.mark.parametrize("n", [-1, 1_000_000])
def test_numbers_out_of_range_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=re.escape(str(n))):
        task.cardinal(n)


def test_no_two_numbers_read_alike() -> None:
    numbers = [*range(10_000), *range(10_000, 1_000_000, 997)]
    assert len({task.cardinal(n) for n in numbers}) == len(numbers)


@pytest.mark.parametrize(
    ("day", "month", "year", "words"),
    [
        (3, 3, 2021, "the third of March twenty twenty one"),
        (1, 1, 1900, "the first of January nineteen hundred"),
        (12, 12, 1905, "the twelfth of December nineteen oh five"),
        (20, 6, 2000, "the twentieth of June two thousand"),
        (22, 8, 2009, "the twenty second of August two thousand nine"),
        (30, 9, 2010, "the thirtieth of September twenty ten"),
        (31, 10, 1999, "the thirty first of October nineteen ninety nine"),
    ],
)
def test_dates_are_written_out(day: int, month: int, year: int, words: str) -> None:
    assert task.date_words(day, month, year) == words


@pytest.mark.parametrize("day", [0, 32])
def test_days_out_of_range_are_refused(day: int) -> None:
    with pytest.raises(ValueError, match=str(day)):
        task.ordinal(day)


@pytest.mark.parametrize(
    ("hour", "minute", "words"),
    [
        (14, 5, "fourteen oh five"),
        (9, 30, "nine thirty"),
        (0, 0, "zero hundred"),
        (23, 59, "twenty three fifty nine"),
    ],
)
def test_times_are_written_out(hour: int, minute: int, words: str) -> None:
    assert task.time_words(hour, minute) == words


@pytest.mark.parametrize(
    ("symbol", "whole", "hundredths", "words"),
    [
        ("$", 17, 5, "seventeen dollars and five cents"),
        ("$", 1, 1, "one dollar and one cent"),
        ("£", 1, 1, "one pound and one penny"),
        ("£", 2, 20, "two pounds and twenty pence"),
        ("€", 0, 0, "zero euros"),
        ("€", 9000, 0, "nine thousand euros"),
    ],
)
def test_money_is_written_out(symbol: str, whole: int, hundredths: int, words: str) -> None:
    assert task.money_words(symbol, whole, hundredths) == words


def _read_item(text: str) -> str:
    """A second, independent parse of a written item: what the generator wrote must read as it says."""
    lead, rest = text.split(" ", 1)
    if match := re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)", rest):
        year, month, day = map(int, match.groups())
        return f"{lead} {task.date_words(day, month, year)}"
    if match := re.fullmatch(r"(\d{1,2}) ([A-Z][a-z]+) (\d{4})", rest):
        month = task.MONTHS.index(match[2]) + 1
        return f"{lead} {task.date_words(int(match[1]), month, int(match[3]))}"
    if match := re.fullmatch(r"(\d\d):(\d\d)", rest):
        return f"{lead} {task.time_words(int(match[1]), int(match[2]))}"
    if match := re.fullmatch(r"([$€£])(\d+)\.(\d\d)", rest):
        return f"{lead} {task.money_words(match[1], int(match[2]), int(match[3]))}"
    return f"{lead} {task.cardinal(int(rest))}"


def test_sentences_carry_their_right_answers() -> None:
    pairs = list(itertools.islice(task.sentences(1, held_out=True), 500))
    for source, answer in pairs:
        assert ", ".join(map(_read_item, source.split(", "))) == answer
    assert {source.count(", ") + 1 for source, _ in pairs} == set(range(1, task.MAX_ITEMS + 1))
    lengths = [len(answer.split()) for _, answer in pairs]
    assert min(lengths) <= 5 and max(lengths) >= 50


def test_sentences_repeat_with_the_seed() -> None:
    first, again, other = (list(itertools.islice(task.sentences(s, held_out=True), 50)) for s in (3, 3, 4))
    assert first == again
    assert first != other


def test_training_never_sees_a_held_out_sentence() -> None:
    train = {s for s, _ in itertools.islice(task.sentences(1, held_out=False, max_items=2), 4000)}
    test = {s for s, _ in itertools.islice(task.sentences(1, held_out=True, max_items=2), 1000)}
    assert train and test and not train & test


# The shipped model.


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(job.SHIPPED_MODEL, local_files_only=True)


def test_the_model_is_small_and_described() -> None:
    files = [path for path in job.SHIPPED_MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 8_000_000
    names = {path.name for path in files}
    assert {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    } <= names
    assert "train_demo_model.py" in (job.SHIPPED_MODEL / "README.md").read_text(encoding="utf-8")


def test_the_tokenizer_splits_digits_and_gives_answers_back(tokenizer: Any) -> None:
    ids = tokenizer("bus 4213, owes €17.05").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == [*"bus 4 2 1 3 , owes € 1 7 . 0 5".split(), "</s>"]
    for source, answer in itertools.islice(task.sentences(2, held_out=True), 200):
        assert tokenizer.decode(tokenizer(answer).input_ids, skip_special_tokens=True) == answer
        assert tokenizer.unk_token_id not in tokenizer(source).input_ids


def test_the_tokenizer_knows_exactly_the_tasks_words(tokenizer: Any) -> None:
    saved = json.loads((job.SHIPPED_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    words = [word for word in saved["model"]["vocab"] if not re.fullmatch(r"</?\w+>", word)]
    assert words == task.vocabulary()


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = demo.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_shipped_model_is_accurate() -> None:
    """A small sample, of other sentences than the demo's; the README's figure comes from a larger one."""
    job = demo.job_of(demo.parse([]))
    pairs = list(itertools.islice(task.sentences(11, held_out=True), 100))
    texts = []
    for batch in dataclasses.replace(job, sources=[source for source, _ in pairs], batch_size=50).batches():
        tokens = job.new_tokens(batch, job.generate(batch))
        texts += job.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert page.accuracy(texts, [answer for _, answer in pairs]) >= 0.97


# The command.


def test_the_demo_runs_offline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise AssertionError(f"tried to reach {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    status, out, err = _run(capsys, "--limit", "6", "--batch-size", "3", "--samples", "2")
    assert status == 0
    assert "6 inputs, 5 beams, batches of 3" in out
    assert out.count("->") == 2
    assert re.search(r"time \* +[\d.]+ s +[\d.]+ s +[\d.]+x (faster|slower)", out)
    assert re.search(r"exact match +[\d.]+% +[\d.]+%", out)
    assert re.search(r"identical outputs +6 of 6", out)
    assert "12/12" in err  # the progress bar counts both sides


def test_each_side_runs_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock batches run with fastgen off, the others with it on, and the order alternates."""
    sides: list[str] = []
    generate = comparison.Job.generate

    def watched(self: comparison.Job, *args: Any, **options: Any) -> Any:
        sides.append("fastgen" if fastgen.status().enabled else "stock")
        return generate(self, *args, **options)

    monkeypatch.setattr(comparison.Job, "generate", watched)
    job = demo.job_of(demo.parse(["--limit", "4", "--beams", "2", "--batch-size", "2"]))
    result = comparison.compare(job, progress=False)
    warm_up, timed, memory = sides[:2], sides[2:6], sides[6:]
    assert warm_up == memory == ["stock", "fastgen"]
    assert timed == ["stock", "fastgen", "fastgen", "stock"]
    assert result.identical == 4
    assert sum(result.tiers.values()) in (0, 2)  # one beam search a batch, if anything is patched
    assert fastgen.status().enabled


def test_users_own_inputs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("at 14:05\n\n  \nowes £2.20, bus 7\nroom 12\n", encoding="utf-8")
    status, out, _ = _run(capsys, "--input", str(texts), "--limit", "2", "--beams", "3", "--quiet")
    assert status == 0
    assert "2 inputs, 3 beams" in out
    assert "at fourteen oh five" in out and "owes two pounds and twenty pence, bus seven" in out
    assert "exact match" not in out  # nobody knows the right answers


def test_users_own_causal_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, tokenizer: Any) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=32, **ids)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    texts = tmp_path / "texts.txt"
    texts.write_text("at 14:05\nbus 7\n" + "bus 7, " * 30, encoding="utf-8")
    arguments = ["--model", str(tmp_path / "model"), "--input", str(texts), "--beams", "2", "--quiet"]
    status, out, _ = _run(capsys, *arguments)
    assert status == 0
    assert "GPT2LMHeadModel" in out
    assert "at most 16 new tokens" in out  # 128 are asked for; prompt and text share 32 positions
    assert re.search(r"identical outputs +3 of 3", out)


def test_a_difference_is_shown_and_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    new_tokens = comparison.Job.new_tokens
    calls = itertools.count()

    def spoiled(self: comparison.Job, *args: Any) -> list[list[int]]:
        rows = new_tokens(self, *args)
        if next(calls) == 1:  # of the only batch, stock comes first
            rows[1] = rows[1][:-2]
        return rows

    monkeypatch.setattr(comparison.Job, "new_tokens", spoiled)
    status, out, _ = _run(capsys, "--limit", "3", "--beams", "2", "--quiet")
    assert status == 1
    assert re.search(r"identical outputs +2 of 3", out)
    assert "1 of 3 outputs differ. The first, input 2:" in out


def test_no_speed_up_is_claimed_where_nothing_was_accelerated(capsys: pytest.CaptureFixture[str]) -> None:
    fastgen.disable()
    status, out, _ = _run(capsys, "--limit", "2", "--beams", "2", "--quiet")
    assert status == 0
    assert "Nothing was accelerated: transformers is disabled." in out
    assert "both sides ran stock code" in out
    assert not fastgen.status().enabled


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ({("fast", None): 5}, "5 x fast: fastgen's own loop"),
        ({("stock", "output_attentions"): 2}, "2 x stock: transformers alone (output_attentions)"),
    ],
)
def test_what_ran_is_told(tiers: dict[tuple[str, str | None], int], expected: str) -> None:
    job = demo.job_of(demo.parse(["--limit", "1"]))
    result = comparison.Result(job, {}, Counter(tiers))
    assert expected in page.what_ran(result)


def test_a_search_that_was_never_reached_is_no_fault_of_the_host() -> None:
    job = demo.job_of(demo.parse(["--limit", "1"]))
    assert "never reached a search that fastgen knows" in page.what_ran(comparison.Result(job, {}, Counter()))


def test_a_strict_fallback_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fall_back(job: comparison.Job, *, progress: bool) -> comparison.Result:
        raise fastgen.FallbackError("the cache is quantised")

    monkeypatch.setattr(demo, "compare", fall_back)
    status, _, err = _run(capsys, "--limit", "1")
    assert status == 2
    assert err == ("fastgen-demo: FASTGEN_STRICT is set, and fastgen cannot accelerate this: the cache is quantised.\n")


# Bad input.


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.txt"
    path.write_text("bus 7\n", encoding="utf-8")
    return str(path)


def _refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    status, out, err = _run(capsys, *argv)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("fastgen-demo: ") and err.endswith(".\n")
    return err


def test_a_missing_input_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = _refusal(capsys, "--input", str(tmp_path / "none.txt"))
    assert "none.txt" in message and "No such file" in message


def test_an_empty_input_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n\n")
    assert "holds no text" in _refusal(capsys, "--input", str(tmp_path / "empty.txt"))


def test_an_input_file_that_is_not_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00\x81")
    assert "not UTF-8 text" in _refusal(capsys, "--input", str(tmp_path / "image"))


def test_without_transformers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers is needed: pip install -c constraints.txt -e '.[transformers]'" in _refusal(capsys)


def test_a_folder_without_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, texts: str) -> None:
    (tmp_path / "model").mkdir()
    message = _refusal(capsys, "--model", str(tmp_path / "model"), "--input", texts)
    assert "Cannot load the model" in message and str(tmp_path / "model") in message


def test_a_broken_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, texts: str) -> None:
    for path in job.SHIPPED_MODEL.iterdir():
        (tmp_path / path.name).write_bytes(
            path.read_bytes()[:1000] if path.suffix == ".safetensors" else path.read_bytes()
        )
    assert "Cannot load the model" in _refusal(capsys, "--model", str(tmp_path), "--input", texts)


def test_a_model_without_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--input FILE" in _refusal(capsys, "--model", "anything")


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_numbers_must_be_positive(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert f"'{value}' is not a whole number above 0" in _refusal(capsys, f"--beams={value}")


def test_settings_are_put_back(capsys: pytest.CaptureFixture[str], texts: str) -> None:
    import torch
    from transformers.utils import logging

    def settings() -> tuple[object, ...]:
        return (
            torch.get_num_threads(),
            torch.is_inference_mode_enabled(),
            logging.get_verbosity(),
            logging.is_progress_bar_enabled(),
        )

    before = settings()
    assert _run(capsys, "--input", texts, "--threads", "2", "--max-new-tokens", "4", "--quiet")[0] == 0
    assert _run(capsys, "--input", texts, "--model", "/nowhere/at/all", "--threads", "2")[0] == 2
    assert settings() == before


# Memory.


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is measured through Linux's /proc")
def test_peak_memory_is_what_the_work_held() -> None:
    import torch

    device = torch.device("cpu")
    # Beyond 32 MiB malloc asks the system for each block; smaller ones may lie in memory that is there already.
    with PeakMemory(device) as big:
        block = torch.ones(128 * MIB // 4)
        del block
    with PeakMemory(device) as small:
        block = torch.ones(48 * MIB // 4)
        del block
    if big.bytes is None or small.bytes is None:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert 120 * MIB < big.bytes < 150 * MIB
    assert 44 * MIB < small.bytes < 64 * MIB  # not what came before it
