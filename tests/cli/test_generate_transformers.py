"""fastgen-generate-transformers: the same texts as stock generate(), formats, failures, resume, memory, metrics."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kill_kit
import pytest
import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers_kit import FLAGS, MODEL, run, stock

import fastgen
from fastgen.cli import demo, generate_transformers
from fastgen.cli import flags as flags_of_generation
from fastgen.pipeline import batching, resume
from fastgen.pipeline.resume import journal_path
from fastgen.pipeline.transformers import batches, generation, load, prepare, records, tokenizing
from fastgen.pipeline.transformers.writer import Writer


def test_text_is_stocks_in_the_order_of_the_input(source: Path, texts: list[str], tmp_path: Path) -> None:
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS) == 0
    assert (tmp_path / "out.txt").read_text("utf-8").splitlines() == stock(texts)[0]
    calls = fastgen.status().calls
    assert len(calls) == 5 and all(call.tier == "fast" for call in calls)


def test_workers_change_nothing(source: Path, tmp_path: Path) -> None:
    assert run(MODEL, source, tmp_path / "alone.txt", *FLAGS) == 0
    assert run(MODEL, source, tmp_path / "pool.txt", *FLAGS, "--workers", 2) == 0
    assert (tmp_path / "pool.txt").read_bytes() == (tmp_path / "alone.txt").read_bytes()


def test_jsonl_has_all_hypotheses_and_scores(texts: list[str], tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": f"n{i}", "src": text}) + "\n" for i, text in enumerate(texts)))
    assert run(MODEL, source, out, *FLAGS, "--text-field", "src", "--num-return-sequences", 2) == 0
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [line["id"] for line in lines] == [f"n{i}" for i in range(len(texts))]
    assert [line["line"] for line in lines] == list(range(1, len(texts) + 1))
    wanted, scores = stock(texts, num_return_sequences=2)
    assert [output["text"] for line in lines for output in line["outputs"]] == wanted
    assert [output["score"] for line in lines for output in line["outputs"]] == pytest.approx(scores, abs=1e-4)


def test_several_hypotheses_in_text_are_lines_that_follow(source: Path, texts: list[str], tmp_path: Path) -> None:
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS, "--num-return-sequences", 2) == 0
    assert (tmp_path / "out.txt").read_text("utf-8").splitlines() == stock(texts, num_return_sequences=2)[0]


def test_the_score_without_beams_is_the_sum_of_log_probabilities(tmp_path: Path, texts: list[str]) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("".join(f"{text}\n" for text in texts[:3]), "utf-8")
    assert run(MODEL, source, out, "--max-new-tokens", 24, "--workers", 0, "--quiet") == 0
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(MODEL).eval(), AutoTokenizer.from_pretrained(MODEL)
    for text, line in zip(texts, out.read_text("utf-8").splitlines(), strict=False):
        inputs = tokenizer(text, return_tensors="pt").input_ids
        tokens = model.generate(input_ids=inputs, max_new_tokens=24)
        with torch.inference_mode():
            logits = model(input_ids=inputs, decoder_input_ids=tokens[:, :-1]).logits.log_softmax(-1)
        score = logits.gather(-1, tokens[:, 1:, None]).sum().item()
        assert json.loads(line)["outputs"][0]["score"] == pytest.approx(score, abs=1e-3)


def test_task_prefix_is_put_before_each_input(source: Path, texts: list[str], tmp_path: Path) -> None:
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS, "--task-prefix", texts[0][:4] + " ") == 0
    wanted, _ = stock([texts[0][:4] + " " + text for text in texts])
    assert (tmp_path / "out.txt").read_text("utf-8").splitlines() == wanted


def test_every_field_of_the_generation_config_is_a_flag() -> None:
    known = {option for action in generate_transformers.parser()._actions for option in action.option_strings}
    ours = {"return_dict_in_generate", "output_scores", "transformers_version"}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - ours
    assert len(fields) > 50
    assert {"--" + name.replace("_", "-") for name in fields} <= known


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--num-beams", "4"], {"num_beams": 4}),
        (["--length-penalty", "0.6"], {"length_penalty": 0.6}),
        (["--length-penalty", "-1"], {"length_penalty": -1.0}),
        (["--do-sample"], {"do_sample": True}),
        (["--do-sample", "false"], {"do_sample": False}),
        (["--early-stopping", "never"], {"early_stopping": "never"}),
        (["--early-stopping", "true"], {"early_stopping": True}),
        (["--bad-words-ids", "[[5, 6], [7]]"], {"bad_words_ids": [[5, 6], [7]]}),
        (["--eos-token-id", "[2, 3]"], {"eos_token_id": [2, 3]}),
        (["--cache-implementation", "static"], {"cache_implementation": "static"}),
        ([], {}),
    ],
)
def test_flags_have_the_types_of_the_fields(flags: list[str], wanted: dict[str, Any]) -> None:
    given = flags_of_generation.given(generate_transformers.parser().parse_args(["m", "i", "o", *flags]))
    assert given == wanted
    assert [type(value) for value in given.values()] == [type(value) for value in wanted.values()]


# Bad input.


@pytest.fixture
def bad_lines(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "bad.txt"
    lines = [text.encode() for text in texts[:6]]
    lines[1], lines[3], lines[4] = b"12 \xff 3", b"", b"7 " * 600
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("policy", ["default", "blank", "skip"])
def test_bad_lines_become_error_records(
    bad_lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    out = tmp_path / "out.jsonl"
    flags = [] if policy == "default" else ["--on-error", policy]
    assert run(MODEL, bad_lines, out, *FLAGS, *flags) == 1
    lines = {(line := json.loads(text))["line"]: line for text in out.read_text("utf-8").splitlines()}
    messages = capsys.readouterr().err
    assert f"{bad_lines}, line 2: not UTF-8 (byte 0xff at position 4)." in messages
    assert f"{bad_lines}, line 5: 601 tokens" in messages and "2 of 6 records failed" in messages
    if policy == "skip":
        assert [*lines] == [1, 3, 6] and all("outputs" in line for line in lines.values())
        return
    assert {number: "error" in line for number, line in lines.items()} == {
        1: False, 2: True, 3: False, 4: False, 5: True, 6: False,
    }  # fmt: skip
    assert lines[4]["outputs"] == [{"text": ""}]  # a blank line is no error
    assert all(lines[number]["error"] in messages for number in (2, 5))


def test_with_text_output_the_first_bad_line_is_named_before_the_model_is_loaded(
    bad_lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "load_model", lambda *_: pytest.fail("the model was loaded"))
    lines = bad_lines.read_bytes().split(b"\n")
    for found in (
        b"line 2: not UTF-8 (byte 0xff at position 4); --on-error blank or skip goes on.",
        b"line 5: 601 tokens, and the model has room for 160",
    ):
        assert run(MODEL, bad_lines, tmp_path / "out.txt", *FLAGS) == 1
        assert f"{bad_lines}, {found.decode()}" in capsys.readouterr().err
        assert not (tmp_path / "out.txt").exists()
        bad_lines.write_bytes(b"\n".join([lines[0], lines[2], *lines[2:]]))
    bad_lines.write_bytes(lines[0] + b"\n\n")
    assert run(MODEL, bad_lines, tmp_path / "out.txt", *FLAGS, "--on-error", "stop") == 1
    assert f"{bad_lines}, line 2: the line is blank; --on-error blank or skip goes on." in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["blank", "skip"])
def test_text_output_with_bad_lines(bad_lines: Path, texts: list[str], tmp_path: Path, policy: str) -> None:
    out = tmp_path / "out.txt"
    assert run(MODEL, bad_lines, out, *FLAGS, "--on-error", policy) == 1
    found = {index: stock(texts[:6])[0][index] for index in (0, 2, 5)}
    wanted = [found.get(index, "") for index in range(6)] if policy == "blank" else [*found.values()]
    assert out.read_text("utf-8").splitlines() == wanted


def test_blank_lines_are_ordinary(texts: list[str], tmp_path: Path) -> None:
    """By default the output has a blank line there, so that the lines of both files go together."""
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text(f"\n{texts[0]}\n  \n{texts[1]}\n\n", "utf-8")
    assert run(MODEL, source, out, *FLAGS, "--num-return-sequences", "2") == 0
    found = stock(texts[:2], num_return_sequences=2)[0]
    assert out.read_text("utf-8").split("\n") == ["", "", *found[:2], "", "", *found[2:], "", "", ""]


def test_a_line_that_ended_a_run_is_mended_and_the_run_goes_on(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that only generating shows, here: for want of memory."""
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    lines = [*texts[:9], "7 " * 60, *texts[10:14]]
    source.write_text("\n".join(lines), "utf-8")
    generate = generation.Generator._generate

    def too_long(self: Any, found: Any) -> Any:
        if any(len(record.tokens) > 60 for record in found):
            raise MemoryError
        return generate(self, found)

    monkeypatch.setattr(generation.Generator, "_generate", too_long)
    assert run(MODEL, source, out, *FLAGS) == 1
    assert "line 10: out of memory, even alone in its batch; --on-error" in capsys.readouterr().err
    lines[9] = texts[9]
    source.write_text("\n".join(lines) + "\n", "utf-8")
    assert run(MODEL, source, out, *FLAGS, "--resume") == 0
    assert out.read_text("utf-8").splitlines() == stock(texts[:14])[0]


def _interrupted_after(batches: int, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, Any]:
    """A run that Ctrl-C ends; the last note of its journal, with all that is held."""
    write, calls = Writer.write, iter(range(100))

    def interrupted(self: Any, *rest: Any) -> None:
        if next(calls) == batches:
            raise KeyboardInterrupt
        write(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", interrupted)
        assert run(*arguments) == 130
    notes = [json.loads(line) for line in journal_path(Path(str(arguments[2]))).read_bytes().splitlines()[1:]]
    held = [index for note in notes for index, *_ in note["held"] if index >= notes[-1]["next"]]
    return {**notes[-1], "held": held}


@pytest.mark.parametrize("change", ["a written line", "a held line", "shorter", "a missing line", "more lines"])
def test_lines_that_are_done_must_be_the_same_and_others_may_be_mended(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    out, lines = tmp_path / "out.txt", source.read_text("utf-8").splitlines()
    lines.sort(key=len, reverse=True)  # so that the first ones are written
    lines.insert(4, "5")
    lines.insert(len(lines) - 2, lines[0])
    source.write_text("\n".join(lines), "utf-8")
    found = _interrupted_after(2, monkeypatch, MODEL, source, out, *FLAGS)
    written, held = found["next"], found["held"]
    assert written > 2 and held and max(held) > written
    missing = next(index for index in range(written, len(lines)) if index not in held)
    before = out.read_bytes(), journal_path(out).read_bytes()
    if change == "shorter":
        del lines[max(held) :]
    elif change == "more lines":
        lines += ["", "7"]
    else:
        index = {"a written line": 1, "a held line": held[0], "a missing line": missing}[change]
        lines[index] = "12 13"
    source.write_text("\n".join(lines), "utf-8")
    goes_on = change in ("a missing line", "more lines")
    assert run(MODEL, source, out, *FLAGS, "--resume") == (0 if goes_on else 1)
    if goes_on:
        assert out.read_text("utf-8").split("\n")[:-1] == [stock([line])[0][0] if line else "" for line in lines]
    else:
        said = f"Cannot resume {out}: lines of {source} that it has done have changed; --overwrite starts again."
        assert said in capsys.readouterr().err
        assert (out.read_bytes(), journal_path(out).read_bytes()) == before


def test_blank_lines_at_the_beginning_are_lines_that_are_done(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no bytes that could have changed."""
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text(f"\n{texts[0]}\n{texts[1]}\n", "utf-8")
    assert _interrupted_after(1, monkeypatch, MODEL, source, out, *FLAGS)["next"] == 1
    for other in (f"{texts[0]}\n{texts[1]}\n", f"12\n{texts[0]}\n{texts[1]}\n"):
        source.write_text(other, "utf-8")
        assert run(MODEL, source, out, *FLAGS, "--resume") == 1
    source.write_text(f"\r\n{texts[0]}\r\n{texts[1]}", "utf-8")  # the same lines
    assert run(MODEL, source, out, *FLAGS, "--resume") == 0
    assert out.read_text("utf-8").splitlines() == ["", *stock(texts[:2])[0]]


@pytest.mark.parametrize("more", ["\n", "\n" * 2000, "7\n"])
def test_a_complete_run_whose_input_has_grown_is_not_complete(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS) == 0
    source.write_text(source.read_text("utf-8") + more, "utf-8")
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS, "--resume") == 1
    assert "it is complete, and" in capsys.readouterr().err


def test_what_is_left_out_stays_so_when_a_run_goes_on(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("\n".join(["", *texts[:8], "", *texts[8:12]]), "utf-8")
    _interrupted_after(2, monkeypatch, MODEL, source, out, *FLAGS, "--on-error", "skip")
    for other in ([], ["--on-error", "blank"]):
        assert run(MODEL, source, out, *FLAGS, "--resume", *other) == 1
        assert "it was begun with another on_error" in capsys.readouterr().err
    assert run(MODEL, source, out, *FLAGS, "--resume", "--on-error", "skip") == 0
    assert out.read_text("utf-8").splitlines() == stock(texts[:12])[0]


def test_what_only_the_journal_holds_is_not_thrown_away(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest inputs are done first, so a short first line keeps the output empty for long."""
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("\n".join(["5", *sorted(texts, key=len)[4:14]]), "utf-8")
    assert _interrupted_after(1, monkeypatch, MODEL, source, out, *FLAGS)["held"] and out.read_bytes() == b""
    assert run(MODEL, source, out, *FLAGS) == 1
    assert "--resume goes on with it, --overwrite replaces it." in capsys.readouterr().err


def test_an_output_that_appears_while_the_model_is_loaded_is_kept(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, load_model = tmp_path / "out.txt", prepare.load_model

    def load_and_write(*arguments: Any) -> Any:
        out.write_text("precious")
        return load_model(*arguments)

    monkeypatch.setattr(prepare, "load_model", load_and_write)
    for flag in ([], ["--resume"]):
        assert run(MODEL, source, out, *FLAGS, *flag) == 1
        assert out.read_text() == "precious"


def test_a_bad_generation_config_is_a_sentence(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    for bad in ('{"max_new_tokens": -1}', "[1]"):
        (model / "generation_config.json").write_text(bad)
        assert run(model, source, tmp_path / "out.txt", *FLAGS) == 1
        assert f"Cannot load the model '{model}'" in capsys.readouterr().err


def test_code_of_a_model_is_never_run(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on standard input, where somebody or something may say yes."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "configuration_evil.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass EvilConfig: ...\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\ny\n"))
    assert run(model, source, tmp_path / "out.txt", *FLAGS) == 1
    assert demo.main(["--model", str(model), "--input", str(source)]) == 2
    assert not (tmp_path / "run").exists()


def test_truncate_cuts_long_lines(bad_lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run(MODEL, bad_lines, out, *FLAGS, "--truncate") == 1
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert ["error" in line for line in lines] == [False, True, False, False, False, False]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ('{"txt": "12"}', "'text'"),
        ('{"text": 12}', "'text'"),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"text": "1", "id": "\\udfff"}', "surrogate"),
        ("[" * 100_000, "cannot be read"),
        ('{"text": "1", "id": NaN}', "NaN"),
        ('{"text": "1", "id": [1e999]}', "infinite"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "12"}\n' + line + "\n")
    good, bad = records.read(path, records.JSONL)
    assert good.error is None and good.text == "12"
    assert bad.error is not None and bad.error.startswith(f"{path}, line 2: ") and why in bad.error
    json.loads(records.render(bad, [], records.JSONL), parse_constant=pytest.fail)


def test_a_record_that_fails_keeps_its_id(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a7", "txt": "12"}\n{"id": 8, "text": "\\ud800"}\n{"id": 9, "text": " "}\n')
    found = [json.loads(records.render(record, [("", None)], records.JSONL)) for record in records.read(path, "jsonl")]
    assert [record["id"] for record in found] == ["a7", 8, 9]
    assert ["error" in record for record in found] == [True, True, False]


@pytest.mark.parametrize(("form", "line"), [(records.TEXT, "12 3"), (records.JSONL, '{"text": "12 3"}')])
def test_a_byte_order_mark_is_no_part_of_the_first_word(tmp_path: Path, form: str, line: str) -> None:
    path = tmp_path / "in"
    path.write_text(f"\ufeff{line}\n{line}\n", "utf-8")
    assert [(record.text, record.error) for record in records.read(path, form)] == [("12 3", None)] * 2


def test_stop_strings_are_stocks(
    source: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stock(texts)[0]
    stop, prefix = whole[0].split()[1], whole[0].split()[0]
    # transformers finds out how tokens are joined with "abcdef", which the demo's tokenizer has no tokens for.
    known = functools.partial(StopStringCriteria.clean_tokenizer_vocab, static_prefix=prefix)
    monkeypatch.setattr(StopStringCriteria, "clean_tokenizer_vocab", staticmethod(known))
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS, "--stop-strings", stop) == 0
    outputs = (tmp_path / "out.txt").read_text("utf-8").splitlines()
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(MODEL).eval(), AutoTokenizer.from_pretrained(MODEL)
    options = {"num_beams": 3, "max_new_tokens": 24, "stop_strings": stop, "tokenizer": tokenizer}
    with fastgen.disabled(), torch.inference_mode():
        wanted = [model.generate(tokenizer(text, return_tensors="pt").input_ids, **options)[0] for text in texts[:5]]
    assert outputs[:5] == tokenizer.batch_decode(wanted, skip_special_tokens=True)
    assert outputs != whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}", "{tmp}/none.txt", "{tmp}/out.txt"], "none.txt: No such file"),
        (["{model}", "{tmp}/empty.txt", "{tmp}/out.txt"], "empty.txt is empty"),
        (["{tmp}/no-model", "{tmp}/in.txt", "{tmp}/out.txt"], "no-model"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--number-of-beams", "3"], "--number-of-beams"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--batch-size", "0"], "'0' is neither"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--num-beams", "three"], "'three' is not a whole number"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--device", "abacus"], "Cannot use the device 'abacus'"),
        (["{model}", "{tmp}/in.txt", "{tmp}/no/out.txt"], "no/out.txt"),
        (["{model}", "{tmp}/in.txt", "{tmp}/in.txt"], "is the input"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--references", "{tmp}/two.txt"], "2 references for 23 inputs"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--references", "{tmp}/two.txt", "--metrics", "bley"], "'bley'"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--source-lang", "en"], "has no languages"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--target-lang", "xx"], "'xx'"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--num-return-sequences", "9", "--num-beams", "2"], "refuses"),
        (["{model}", "{tmp}/in.txt", "/dev/null"], "/dev/null is no regular file"),
        (["{model}", "{tmp}/in.txt", "/dev/nothing"], "/dev/nothing stands for an open file"),
        (["{model}", "{tmp}/pipe", "{tmp}/out.txt"], "pipe is no regular file"),
        (
            ["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--max-new-tokens", "9999"],
            "--max-new-tokens 9999: the model's",
        ),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--num-beams", "0"], "--num-beams must be at least 1"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--num-beams", "-1"], "--num-beams must be at least 1"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--eos-token-id", "foo"], "--eos-token-id takes the number"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--decoder-start-token-id", "99999"], "--decoder-start-token-id"),
        (["{model}", "{tmp}/in.txt", "{tmp}/out.txt", "--pad-token-id", "-1"], "--pad-token-id -1: the model's tokens"),
    ],
)
def test_bad_arguments_are_one_sentence(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if "--references" in arguments:
        pytest.importorskip("sacrebleu")
        pytest.importorskip("rouge_score")
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "two.txt").write_text("a\nb\n")
    before = source.read_bytes()
    filled = [argument.format(model=MODEL, tmp=tmp_path) for argument in arguments]
    assert run(*filled, "--workers", 0, "--quiet") == 1
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1
    assert source.read_bytes() == before


def test_a_full_disk_is_one_sentence(
    source: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third write to the output fails; then there is room again, and --resume ends the run."""
    out = tmp_path / "out.txt"
    monkeypatch.setattr(batches, "WINDOW", 5)

    real, written = resume._Counted.write, []

    def full(self: Any, data: Any) -> int:
        """Room for two writes."""
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(bytes(data))
        return real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(resume._Counted, "write", full)
        assert run(MODEL, source, out, *FLAGS) == 1
    error = capsys.readouterr().err.strip()
    assert f"Cannot write {out}: No space left on device" in error and len(error.splitlines()) == 1
    assert out.read_text("utf-8").splitlines() == stock(texts)[0][:10]
    assert run(MODEL, source, out, *FLAGS, "--resume") == 0
    assert out.read_text("utf-8").splitlines() == stock(texts)[0]


def test_ctrl_c_keeps_what_is_done_and_exits_130(
    source: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.txt"
    monkeypatch.setattr(batches, "WINDOW", 5)
    real, calls = generation.Generator._run, []

    def interrupted(self: Any, part: Any) -> Any:
        calls.append(part)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, part)

    with monkeypatch.context() as patch:
        patch.setattr(generation.Generator, "_run", interrupted)
        assert run(MODEL, source, out, *FLAGS) == 130
    assert out.read_text("utf-8").splitlines() == stock(texts)[0][:10]
    assert run(MODEL, source, out, *FLAGS, "--resume") == 0
    assert out.read_text("utf-8").splitlines() == stock(texts)[0]


# Memory.


@pytest.mark.parametrize("size", [["--batch-size", "auto"], ["--batch-size", "8"], ["--max-tokens", "auto"]])
def test_out_of_memory_in_the_third_batch_loses_and_repeats_nothing(
    source: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: list[str]
) -> None:
    monkeypatch.setattr(batches, "AUTO_SENTENCES", 2)
    monkeypatch.setattr(batches, "AUTO_TOKENS", 96)
    monkeypatch.setattr(batching, "_WORTH_KEEPING", 0.0)  # here the clock would decide about sizes
    real, sizes = generation.Generator._generate, []

    def short(self: Any, part: Sequence[records.Record]) -> Any:
        sizes.append(len(part))
        if len(sizes) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, part)

    monkeypatch.setattr(generation.Generator, "_generate", short)
    out = tmp_path / "out.txt"
    assert run(MODEL, source, out, *FLAGS[:-2], *size) == 0
    assert out.read_text("utf-8").splitlines() == stock(texts)[0]
    assert sizes[3] == sizes[2] // 2
    assert sum(sizes) - sizes[2] == len(texts)


def test_a_record_that_never_fits_is_an_error_record(
    source: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = generation.Generator._generate

    def short(self: Any, part: Sequence[records.Record]) -> Any:
        if any(record.index == 7 for record in part):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, part)

    monkeypatch.setattr(generation.Generator, "_generate", short)
    out = tmp_path / "out.jsonl"
    assert run(MODEL, source, out, *FLAGS) == 1
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [i for i, line in enumerate(lines) if "error" in line] == [7]
    wanted = stock(texts)[0]
    assert [line["outputs"][0]["text"] for i, line in enumerate(lines) if i != 7] == wanted[:7] + wanted[8:]


# Resume.


@pytest.mark.parametrize("flags", [[], ["--do-sample", "--seed", "3", "--num-beams", "1"]], ids=["beams", "sampling"])
def test_killed_at_ten_random_points_and_resumed_it_ends_as_if_never_killed(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{text}\n" for text in 2 * texts), "utf-8")
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    monkeypatch.setattr(batches, "WINDOW", 8)
    common = [*FLAGS[:-1], "1", *flags]
    assert run(MODEL, source, whole, *common) == 0
    real = generation.Generator._run
    with monkeypatch.context() as patch:
        patch.setattr(
            generation.Generator, "_run", lambda self, part: (time.sleep(kill_kit.PAUSE), real(self, part))[1]
        )
        kills = kill_kit.kill_at_random(
            lambda: run(MODEL, source, out, *common, "--resume"), journal_path(out), kills=10, seed=5
        )
    assert kills == 10
    assert run(MODEL, source, out, *common, "--resume") == 0
    assert out.read_bytes() == whole.read_bytes()


def test_resume_of_a_complete_run_does_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.txt"
    assert run(MODEL, source, out, *FLAGS) == 0
    before = out.read_bytes()
    assert run(MODEL, source, out, *FLAGS, "--resume") == 0
    assert out.read_bytes() == before
    assert "nothing to resume" in capsys.readouterr().err


def test_resume_with_other_flags_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.txt"
    with monkeypatch.context() as patch:
        patch.setattr(generation.Generator, "_run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(MODEL, source, out, *FLAGS) == 130
    assert run(MODEL, source, out, *FLAGS, "--resume", "--num-beams", 2) == 1
    assert "another generation.num_beams" in capsys.readouterr().err


def test_resume_of_a_complete_run_with_other_flags_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.txt"
    assert run(MODEL, source, out, *FLAGS) == 0
    before = out.read_bytes()
    assert run(MODEL, source, out, *FLAGS, "--resume", "--num-beams", 2) == 1
    assert "another generation.num_beams" in capsys.readouterr().err
    assert out.read_bytes() == before


@pytest.mark.parametrize(("weights", "word"), [("int8", "8 bits"), ("bf16", "bfloat16")])
def test_resume_with_rounded_weights_is_refused(
    weights: str, word: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"linear layers have weights in {word} (FASTGEN_WEIGHTS={weights}), so texts may differ from the host's"
    out = tmp_path / "out.txt"
    assert run(MODEL, source, out, *FLAGS) == 0
    before = out.read_bytes()
    assert said not in capsys.readouterr().err
    with fastgen.configured(weights=weights):
        assert run(MODEL, source, out, *FLAGS, "--resume") == 1
        assert "another FASTGEN_WEIGHTS" in capsys.readouterr().err
        assert out.read_bytes() == before
        assert run(MODEL, source, out, *FLAGS, "--overwrite") == 0
    assert said in capsys.readouterr().err


def test_a_file_that_only_looks_complete_is_not(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.txt").write_bytes(source.read_bytes())
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS, "--resume") == 1
    assert "Cannot resume: there is no " in capsys.readouterr().err
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()


def test_a_complete_run_with_failed_records_is_still_one(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_bytes(b"\xff\n" + source.read_bytes())
    for flags in ([], ["--resume"]):
        assert run(MODEL, source, tmp_path / "out.jsonl", *FLAGS, *flags) == 1
        assert "1 of 24 records failed" in capsys.readouterr().err


def test_resume_with_another_model_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tmp_path / "model", tmp_path / "out.txt"
    shutil.copytree(MODEL, model)
    with monkeypatch.context() as patch:
        patch.setattr(generation.Generator, "_run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(model, source, out, *FLAGS) == 130
    path = model / "model.safetensors"
    stat = path.stat()
    path.write_bytes(path.read_bytes())  # of the same length
    assert run(model, source, out, *FLAGS, "--resume") == 1
    assert f"another content of {path}; --overwrite starts again." in capsys.readouterr().err
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert run(model, source, out, *FLAGS, "--resume") == 0


def test_a_wrong_model_leaves_the_output_of_an_earlier_run(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    assert run(MODEL, source, out, *FLAGS) == 0
    before = out.read_bytes(), journal_path(out).read_bytes()
    (tmp_path / "wrong").mkdir()
    assert run(tmp_path / "wrong", source, out, *FLAGS) == 1
    assert (out.read_bytes(), journal_path(out).read_bytes()) == before


def test_a_second_run_into_the_same_output_is_refused(
    source: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.txt"
    real, codes = generation.Generator._run, []

    def infer(self: Any, part: Any) -> Any:
        if len(codes) < 2:
            codes.append(kill_kit.second_run(lambda: run(MODEL, source, out, *FLAGS, *["--resume"] * len(codes))))
        return real(self, part)

    monkeypatch.setattr(generation.Generator, "_run", infer)
    assert run(MODEL, source, out, *FLAGS) == 0
    assert codes == [1, 1]
    assert out.read_text("utf-8").splitlines() == stock(texts)[0]


# Metrics.


def test_metrics_are_those_of_the_packages(
    source: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    rouge = pytest.importorskip("rouge_score.rouge_scorer")
    outputs = stock(texts)[0]
    references = [" ".join([*output.split()[1:], "point"]) for output in outputs]
    (tmp_path / "refs.txt").write_text("".join(f"{line}\n" for line in references), "utf-8")
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS, "--references", tmp_path / "refs.txt") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(sacrebleu.corpus_bleu(outputs, [references]))
    assert lines[1] == str(sacrebleu.corpus_chrf(outputs, [references]))
    scorer = rouge.RougeScorer(["rougeL"], use_stemmer=True)
    mean = sum(scorer.score(r, o)["rougeL"].fmeasure for r, o in zip(references, outputs, strict=True)) / len(outputs)
    assert lines[4] == f"ROUGE-L = {100 * mean:.2f}"


# Decoder-only models, and padding on the left.


def test_a_causal_model_goes_on_from_its_prompts(tmp_path: Path, texts: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in texts), "utf-8")
    assert run(tmp_path / "gpt2", tmp_path / "in.txt", tmp_path / "out.jsonl", *FLAGS) == 0
    got = [json.loads(line)["outputs"][0] for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    for text, output in zip(texts, got, strict=True):
        prompt = tokenizer(text, return_tensors="pt").input_ids
        with fastgen.disabled():
            row = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), num_beams=3, max_new_tokens=24, pad_token_id=1
            )[0, prompt.shape[1] :]
        assert output["text"] == tokenizer.decode(row, skip_special_tokens=True)


# What misleads.


def test_flags_of_json_say_where_it_ends(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS, "--bad-words-ids", "[[5, 6") == 1
    said = "Argument --bad-words-ids: '[[5, 6' is not JSON: Expecting ',' delimiter at character 7; --help lists"
    assert said in capsys.readouterr().err
    for text, wanted in (("[END]", "[END]"), ('["a", "b"]', ["a", "b"]), ("5", "5"), ('"', '"')):
        args = generate_transformers.parser().parse_args(["m", "i", "o", "--stop-strings", text])
        assert flags_of_generation.given(args) == {"stop_strings": wanted}


def test_a_name_that_is_too_long_is_a_sentence(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("x" * 300, source, tmp_path / "out.txt", *FLAGS) == 1
    assert "Cannot load the model" in capsys.readouterr().err


@pytest.fixture
def without_tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    return folder


def test_a_model_without_a_tokenizer_is_refused(
    without_tokenizer: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes up an empty tokenizer, and every output would be empty."""
    out = tmp_path / "out.txt"
    assert run(without_tokenizer, source, out, *FLAGS) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"fastgen-generate-transformers: {without_tokenizer} has no tokenizer")
    assert "--tokenizer names" in said and said.count("\n") == 1 and not out.exists()
    assert run(without_tokenizer, source, out, *FLAGS, "--tokenizer", MODEL) == 0
    assert demo.main(["--model", str(without_tokenizer), "--input", str(source)]) == 2
    assert "tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "refused"), [(90, True), (117, False), (200, False), (300, True)])
def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, size: int, refused: bool) -> None:
    """The shipped one has 117 tokens; models round their number up, and few have twice as many."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert len(tokenizer) == 117
    config = transformers.BartConfig(vocab_size=size)
    why = tokenizing.why_unfit(tokenizer, config)
    assert why == (f"has a tokenizer of 117 tokens, and the model has {size}" if refused else None)


@pytest.mark.parametrize("name", ["./none", "~/none/at/all", "~nobody/x", "/none", "a/b/c", "tests/none"])
def test_a_mistyped_path_is_called_one(
    name: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    assert run(name, source, "out.txt", *FLAGS) == 1
    assert capsys.readouterr().err == (
        f"fastgen-generate-transformers: MODEL {name}: the path does not exist; give a folder, or the name of a model "
        "on the hub.\n"
    )


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 3",)


def test_a_checkpoint_that_names_code_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({"weight": Malicious()}, model / "pytorch_model.bin")
    assert run(model, source, tmp_path / "out.txt", *FLAGS) == 1
    assert demo.main(["--model", str(model), "--input", str(source)]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert (
            f"it names {os.system.__module__}.system, which could run any code here; ask for the weights alone" in line
        )
        assert "weights_only" not in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--temperature", "0.5", "--top-k", "3"],
            "--temperature, --top-k: without effect, since the search is without",
        ),
        (
            ["--num-beams", "1", "--length-penalty", "2.0"],
            "--length-penalty: without effect, since the search is without",
        ),
        (["--temperature", "0.5", "--do-sample"], ""),
        (["--length-penalty", "2.0"], ""),
    ],
)
def test_flags_without_effect_are_named(
    flags: list[str], said: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS, *flags) == 0
    heard = capsys.readouterr().err
    assert said in heard if said else "without effect" not in heard


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-return-sequences", "9"], "`num_return_sequences` (9)"),
        (["--min-new-tokens", "9", "--max-new-tokens", "5"], "--min-new-tokens 9 is more than --max-new-tokens 5."),
        (["--resume", "--overwrite"], "give one of them"),
        (["--references", "{source}", "--on-error", "skip"], "give one of them"),
    ],
)
def test_flags_that_contradict_each_other_are_found_before_the_model_is_loaded(
    flags: list[str],
    said: str,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare, "load_model", lambda *_: pytest.fail("the model was loaded"))
    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS, *[flag.format(source=source) for flag in flags]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("place", ["input", "output"])
def test_a_dash_is_no_file(place: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("-", "out.txt") if place == "input" else (source, "-")
    assert run(MODEL, *files, *FLAGS) == 1
    assert capsys.readouterr().err.endswith("- stands for a pipe: this command needs the names of files.\n")


def test_several_lines_for_an_input_are_announced(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, told in (("out.txt", True), ("out.jsonl", False)):
        assert run(MODEL, source, tmp_path / name, *FLAGS, "--num-return-sequences", "2") == 0
        assert ("each input has 2 lines in " in capsys.readouterr().err) is told


def test_the_hub_keeps_its_retries_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(load, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(load.constants, "HF_HUB_OFFLINE", False)
    with load.asking_the_hub([MODEL], said.append):
        time.sleep(0.2)
    assert said == []
    before = hub_logging.get_verbosity()
    with load.asking_the_hub([MODEL, "some/model"], said.append):
        assert hub_logging.get_verbosity() == hub_logging.ERROR
        time.sleep(0.2)
    (sentence,) = said
    assert sentence.startswith("still looking for some/model: the model hub is slow, or out of reach")
    assert hub_logging.get_verbosity() == before
