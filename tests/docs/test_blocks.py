"""Every block of code in the README and in the docs runs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import io
import itertools
import json
import os
import re
import shlex
import shutil
import unittest.mock
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
import settings
import torch
from packaging.requirements import Requirement
from pages import BLOCKS, DOCS, LANGUAGES, PAGES, ROOT, Block

import fastgen
from fastgen import config, installing, report
from fastgen.cli import bench, check, demo, generate, generate_transformers, serve, transcribe
from fastgen.demo.job import SHIPPED_MODEL
from fastgen.pipeline import InputError

# Blocks that stand on a page and need the same run together, in their order, in one namespace.
RUNS = list(dict.fromkeys((block.page, block.needs) for block in BLOCKS if block.language == "python"))
SHELL = [block for block in BLOCKS if block.language == "bash"]


# ---------------------------------------------------------------------------------------------- all are seen
@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_overlooked(page: str) -> None:
    text, blocks = pages.text_of(page), pages.blocks_of(page)
    fences = re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE)
    assert len(fences) == 2 * len(blocks), "a fence that is not closed, or made of something else than backticks"
    outside = text
    for block in blocks:
        assert block.language in LANGUAGES, block
        assert block.code.strip(), f"{block} is empty"
        is_run = (block.page, block.needs) in RUNS if block.language == "python" else block in SHELL
        assert is_run or block.language == "text", f"no test runs {block}"
        outside = outside.replace(block.code.strip("\n"), "")
    for tag in ("<pre", "<code"):
        assert tag not in outside, f"{page} has code that is no fenced block"


def test_pages_have_blocks() -> None:
    """The count that the tests above rest on."""
    count = {language: sum(block.language == language for block in BLOCKS) for language in LANGUAGES}
    assert count["python"] >= 25 and count["bash"] >= 12, count
    assert all(name in [(block.page, block.needs) for block in BLOCKS] for name in settings.NAMES), "names for nobody"


# ---------------------------------------------------------------------------------------------- Python
@pytest.fixture
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(gradients)


def _skip_without(needs: str | None) -> None:
    if needs == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if needs == "hub":
        pytest.skip("needs a model of the hub: its arguments have been parsed, and it is not run")
    if needs == "server":
        pytest.skip("needs a server that runs: tests/serving asks one")
    if needs in ("fairseq", "whisper", "ray") and importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}, which is not installed")


@pytest.mark.parametrize("page, needs", RUNS, ids=[f"{page}-{needs}" if needs else page for page, needs in RUNS])
def test_python(page: str, needs: str | None, undisturbed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _skip_without(needs)
    # What stands above a block that needs a host has imported fastgen.
    names: dict[str, Any] = {"__name__": "__main__"} | ({"fastgen": fastgen} if needs else {})
    if (make := settings.NAMES.get((page, needs))) is not None:
        names |= make(monkeypatch) if inspect.signature(make).parameters else make()
    blocks = [b for b in BLOCKS if (b.page, b.language, b.needs) == (page, "python", needs)]
    assert blocks
    for block in blocks:
        # Errors name the page and its line.
        code = compile("\n" * (block.line - 1) + block.code, str(ROOT / page), "exec")
        exec(code, names)
    assert config.current() == config.from_environment() or page in _SETS, f"{page} leaves other settings"
    assert fastgen.status().enabled, f"{page} leaves fastgen disabled"


_SETS = ("README.md",)  # whose blocks show a setting and leave it at that


# ---------------------------------------------------------------------------------------------- commands
STAND_INS = {
    "NAME_OR_PATH": str(SHIPPED_MODEL),
    "facebook/bart-large-cnn": str(SHIPPED_MODEL),
    "google-t5/t5-small": str(SHIPPED_MODEL),
    "FILE": "in.txt",
}
_done: set[tuple[str, ...]] = set()  # runs that need not be repeated


def commands(block: Block) -> list[list[str]]:
    """The words of each."""
    found = []
    for line in block.code.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word == "&&":
                found.append(words)
                words = []
            else:
                words.append(word)
    return [words for words in found if words]


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell(block: Block, undisturbed: None, tmp_path: Path) -> None:
    if block.needs not in ("hub", None):
        _skip_without(block.needs)
    for name in ("in.txt", "articles.txt", "summaries.ref"):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in settings.LINES), "utf-8")
    for name, *words in commands(block):
        check = CHECKS.get(Path(name).name)  # perhaps of another environment
        assert check is not None, f"{block}: no test knows the command {name}"
        file = "in.txt"  # what standard input has
        if "<" in words:
            *words, _, file = words
        with open(tmp_path / file, encoding="utf-8") as lines, unittest.mock.patch("sys.stdin", lines):
            check(words, block)
    if block.needs == "hub":
        _skip_without("hub")


def _pip(words: list[str], block: Block) -> None:
    action, *rest = words
    assert action in ("install", "uninstall"), words
    waiting = iter(rest)
    for word in waiting:
        if word == "-c":
            assert (ROOT / next(waiting)).is_file()
        elif word in ("-e", "--no-build-isolation"):
            continue
        elif word.startswith("."):
            _known_extras(re.findall(r"[\w-]+", word))
        else:
            requirement = Requirement(word)
            assert action == "uninstall" or requirement.name != "fastgen", "another project's"
            if requirement.name == installing.DISTRIBUTION:
                _known_extras(list(requirement.extras))


def _known_extras(extras: list[str]) -> None:
    known = re.findall(r"^([\w-]+) = \[", _section("project.optional-dependencies"), re.MULTILINE)
    assert set(extras) <= set(known), f"{extras} are not all among {known}"


def _section(name: str) -> str:
    """Of pyproject.toml: Python 3.10 cannot read TOML."""
    return (ROOT / "pyproject.toml").read_text("utf-8").partition(f"[{name}]\n")[2].partition("\n[")[0]


def _pytest(words: list[str], block: Block) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-k")
    parser.add_argument("--features", type=Path)
    parser.add_argument("paths", nargs="*", type=Path)
    parsed = parser.parse_args(words)
    for path in [*parsed.paths, *filter(None, [parsed.features])]:
        assert (ROOT / path).exists(), path


def _python(words: list[str], block: Block) -> None:
    if words[:2] == ["-m", "venv"]:
        assert len(words) == 3, words
        return
    script, *rest = words
    assert (ROOT / script).is_file(), script
    source = (ROOT / script).read_text("utf-8")
    for word in rest:
        assert f'"{word}"' in source if word.startswith("-") else (ROOT / word).exists(), word


def _optimum(words: list[str], block: Block) -> None:
    """Only where the model goes is known here: the tool is for older versions of transformers."""
    assert words[:2] == ["export", "openvino"], words
    weights = {"fp32": "float32", "int8": "int8"}[words[words.index("--weight-format") + 1]]
    model = words[words.index("--model") + 1].lower()
    assert words[-1] == f"exported/{model}-{weights}", words


def _mkdocs(words: list[str], block: Block) -> None:
    assert words[0] in ("serve", "build") and set(words[1:]) <= {"--strict"}


def _bench(words: list[str], block: Block) -> None:
    """Planned, not measured: tests/bench has that. A report is written beside a copy of its result."""
    if "--report" in words:
        assert words[0] == "--report"
        _run_once(lambda: bench.main(["--report", shutil.copy(ROOT / words[1], "result.json")]), "bench", *words)
        return
    words = [word.replace("before/*.json", "before.json") for word in words]
    shutil.copy(ROOT / "benchmarks/baselines/counts.json", "before.json")
    words = [str(ROOT / word) if word.startswith("benchmarks/") else word for word in words]
    if "soak" in words:  # one case: it plans nothing
        bench.parser().parse_args(words)
        _run_once(lambda: bench.main([*words, "--count", "1"]), "bench", *words)
        return
    _run_once(lambda: bench.main([*words, "--list"]), "bench", *words)


def _demo(words: list[str], block: Block) -> None:
    arguments = [STAND_INS.get(word, word) for word in words]
    parsed = demo.parse(arguments)  # exits where a flag is unknown
    if parsed.speech:  # tests/demo runs it
        return
    if parsed.limit is None or parsed.limit > 4:
        arguments += ["--limit", "4"]
    with unittest.mock.patch("webbrowser.open"):  # of a report
        _run_once(lambda: demo.main([*arguments, "--quiet"]), "demo", *arguments)


def _generate_transformers(words: list[str], block: Block) -> None:
    arguments = [STAND_INS.get(word, word) for word in words]
    generate_transformers.parser().parse_args(arguments)
    if block.needs is None:
        more = ["--workers", "0", "--quiet", "--device", "cpu"]
        _run_once(lambda: generate_transformers.main([*arguments, *more]), "transformers", *arguments)


def _generate(words: list[str], block: Block) -> None:
    if "--user-dir" in words:
        _write_prophetnet(words)
    else:
        import fairseq_kit

        data = fairseq_kit.write_data(Path("data-bin"), 5)
        fairseq_kit.write_checkpoint(Path("checkpoint.pt"), data)
    generate.parse(list(words))
    _run_once(lambda: generate.main([*words, "--cpu", "--workers", "0", "--max-len-b", "12"]), "fairseq", *words)


def _serve(words: list[str], block: Block) -> None:
    """Parsed: tests/serving starts it."""
    serve.parser().parse_args(words)


def _transcribe(words: list[str], block: Block) -> None:
    """Parsed: tests/pipeline/transcription runs it."""
    transcribe.settings_of(transcribe.parser().parse_args(words))


def _ray(words: list[str], block: Block) -> None:
    assert words[0] == "start" and set(words[1::2]) <= {"--head", "--port", "--address", "6379"}, words


def _curl(words: list[str], block: Block) -> None:
    from fastgen.serving import openai_schema, options, speech_schema
    from fastgen.serving.limits import Limits

    bodies = {"generate": options.question, "completions": openai_schema.completion}
    bodies["chat/completions"] = openai_schema.chat
    path = words[0].partition("/v1/")[2]
    for header in (word for flag, word in itertools.pairwise(words) if flag == "-H"):
        assert header.split(": ")[0] in ("Authorization", "Content-Type"), header
    if path.startswith("audio/"):
        form = dict(word.split("=", 1) for flag, word in itertools.pairwise(words) if flag == "-F")
        assert form.pop("file").startswith("@")
        speech_schema.fields(Limits())(**form)
        return
    bodies[path](Limits())(**json.loads(words[words.index("-d") + 1]))


def _write_prophetnet(words: list[str]) -> None:
    import prophetnet_kit

    place = words.index("--user-dir") + 1
    words[place] = str(ROOT / words[place])
    assert words[place] == prophetnet_kit.USER_DIR
    prophetnet_kit.write_job(Path("data-bin"))
    Path("data-bin/checkpoint.pt").rename("checkpoint.pt")


def _run_once(command: Any, *key: str) -> None:
    if key in _done:
        return
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = command()
    assert code == 0, errors.getvalue()
    _done.add(key)


CHECKS = {
    "curl": _curl,
    "fastgen-bench": _bench,
    "fastgen-check": lambda words, block: _run_once(lambda: check.main(words), "check"),
    "fastgen-demo": _demo,
    "fastgen-generate": _generate,
    "fastgen-generate-transformers": _generate_transformers,
    "fastgen-serve": _serve,
    "fastgen-transcribe": _transcribe,
    "mkdocs": _mkdocs,
    "optimum-cli": _optimum,
    "pip": _pip,
    "pytest": _pytest,
    "python": _python,
    "ray": _ray,
}


def test_what_pip_is_told_is_checked() -> None:
    """Negative controls."""
    block = SHELL[0]
    for words in ("-e .[nothing]", "fastgen-torch[nothing]", "fastgen", "-c none.txt ."):
        with pytest.raises(AssertionError):
            _pip(["install", *words.split()], block)
    with pytest.raises(AssertionError):
        _python(["benchmarks/bench_slim.py", "--no-such-flag"], block)
    with pytest.raises(InputError):
        _demo(["--no-such-flag"], block)


def test_readme_begins_with_the_command_that_tests() -> None:
    """Two lines, each of which does all the set-up."""
    first = next(block for block in SHELL if block.page == "README.md")
    assert [words[-1][0] for words in (commands(first)[::2], commands(first)[1::2])] == ["pip", "pytest"]
    assert len(first.code.splitlines()) == 2 and first.code.splitlines()[1].endswith(" && pytest")


# ---------------------------------------------------------------------------------------------- output
def test_status_is_shown_as_it_is() -> None:
    """The pages' example, made again."""
    plan = (
        "predicted: kv 80.0 MiB and 0.18 s; e+kv 60.4 MiB and 0.24 s; x+kv 51.8 MiB and 0.19 s; x+e 32.1 MiB and 0.26 s"
    )
    names = "ban_repeated_ngrams_ ban_source_ngrams_ topk_log_softmax beam_attention skinny_linear".split()
    call = ("transformers", "BartForConditionalGeneration")
    why = "output_attentions asks for tensors of the host's own layout"
    left = f"1 of 3 calls were left to transformers, the last because {why}"
    status = report.Status(
        "0.3.0",
        True,
        (
            report.HostStatus("transformers", "5.24.0", "partly accelerated", left),
            report.HostStatus("fairseq", None, "not imported"),
            report.HostStatus("whisper", None, "not imported"),
        ),
        {"fast": 2, "stock": 1},
        (
            report.Call(*call, "stock", why, 64, 5, None, 7.912),
            report.Call(*call, "fast", None, 64, 5, 25, 4.227, 80 * 2**20, "kv", plan),
        ),
        operators=dict.fromkeys(names, "native (cpu)"),
    )
    shown = [block for block in BLOCKS if block.language == "text" and "calls so far" in block.code]
    assert {block.page for block in shown} == {"README.md", "docs/troubleshooting.md"}
    for block in shown:
        whole = block.page != "README.md"
        lines = str(status).splitlines()
        assert block.code.splitlines() == (
            lines if whole else [line for line in lines if line in block.code.splitlines()]
        )


def test_the_tiny_model_that_is_shown_is_one_of_the_sweeps() -> None:
    (shown,) = (block.code for block in BLOCKS if block.language == "text" and "@configures(" in block.code)
    assert shown.strip() in (ROOT / "tests" / "kit" / "tiny_models" / "documents.py").read_text("utf-8")


def test_nothing_else_is_text() -> None:
    # tests/serving/test_app.py has what the service logs and counts, tests/test_container.py what is put around it.
    looked_at = (
        "calls so far",
        "POST /v1/generate",
        "fastgen_requests_total",
        "@configures(",
        "proxy_pass",
        "docker run",
    )
    others = [b for b in BLOCKS if b.language == "text" and not any(part in b.code for part in looked_at)]
    assert not others, "text that no test looks at"


def test_all_pages_are_read() -> None:
    assert len(PAGES) == len(list(DOCS.rglob("*.md"))) + 1
    assert not os.environ.get("FASTGEN_DISABLE")
