"""fastgen-check: a line on each host, and an exit code, from what tiny models do."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import transformers

import fastgen
from fastgen import installing, report
from fastgen.cli import check
from fastgen.decoding.beam_search import BeamSearch
from fastgen.optimizer.transformers import TESTED, support


def _line(output: str, host: str = "transformers") -> str:
    return next(line for line in output.splitlines() if line.startswith(host))


def test_installed_hosts_are_accelerated(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"fastgen {fastgen.__version__}, Python ") and "operators: " in output
    assert "accelerated, identical; 6 searches: 2 fast, 4 compat" in _line(output)
    assert len(output.splitlines()) == 4  # no faults


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "fastgen", "--help"], capture_output=True, text=True, check=True)
    assert "fastgen-check" in done.stdout


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--faster"]) == 2
    assert capsys.readouterr().err == "fastgen-check: Unrecognized arguments: --faster; --help lists the flags.\n"


def test_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["transformers"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["fastgen", "transformers"]
    assert check.main(["transformers", "marian"]) == 2
    told = "fastgen-check: There is no host 'marian': there are transformers, fairseq, whisper.\n"
    assert capsys.readouterr().err == told


def test_a_host_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == "whisper" else importlib.util.find_spec(name))
    assert check.main(["whisper"]) == 2
    how = installing.command("whisper")
    assert capsys.readouterr().err == f"fastgen-check: whisper is not installed: {how}.\n"


def test_no_history(capsys: pytest.CaptureFixture[str]) -> None:
    with fastgen.configured(history=0):
        assert check.main([]) == 0, capsys.readouterr()


def test_disabled(capsys: pytest.CaptureFixture[str]) -> None:
    with fastgen.disabled():
        assert check.main([]) == check.DIFFERENT
    output = capsys.readouterr().out
    assert "NOT accelerated; 6 searches: 6 stock" in _line(output)
    assert "  beam search of a decoder: fastgen is disabled (FASTGEN_DISABLE)" in output


def test_calls_left_to_the_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a host whose caches have a name that we do not know."""
    monkeypatch.setattr(support, "CACHE", "keys_and_values")
    monkeypatch.setattr(report, "_warned", set())
    told = r"fastgen leaves transformers \S+ to itself in calls like this one: its cache is called"
    with pytest.warns(RuntimeWarning, match=told) as caught:
        assert check.main([]) == check.DIFFERENT
    assert len([one for one in caught if "leaves transformers" in str(one.message)]) == 1
    output = capsys.readouterr().out
    assert "NOT accelerated; 6 searches: 6 stock" in _line(output)
    assert output.count("and not keys_and_values") == 6


_NEWER_HOST = """
import warnings

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, transformers
    mixin = transformers.GenerationMixin
    CHANGE
    import fastgen
    from fastgen.cli import check
    code = check.main(["transformers"])
told = [str(one.message) for one in caught if "fastgen" in str(one.message)]
print(code, len(told), told[0])
print(fastgen.status())
"""


_PARAMETER = "stock = mixin._sample; mixin._sample = lambda self, ids, *more, **named: stock(self, ids, *more, **named)"
_PROCESSOR = "del transformers.generation.logits_process.SuppressTokensLogitsProcessor"


@pytest.mark.parametrize("change", [_PARAMETER, _PROCESSOR], ids=["parameter", "processor"])
def test_a_host_that_has_changed(change: str) -> None:
    """A parameter has another name, or a class is missing: one warning, exit code 1, and all is the host's own."""
    script = _NEWER_HOST.replace("CHANGE", change)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "NOT accelerated; 6 searches: 6 stock" in _line(done.stdout)
    assert done.stdout.count("the call did not reach fastgen") == 6
    told = next(line for line in done.stdout.splitlines() if line.startswith("1 1 "))
    assert f"fastgen leaves transformers {transformers.__version__} alone: " in told
    assert f"The newest version tested is {TESTED}: " in told
    assert "transformers " + transformers.__version__ + ": left alone" in done.stdout


def test_other_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = BeamSearch.result

    def worst_first(self: Any) -> Any:
        found = result(self)
        return dataclasses.replace(found, tokens=found.tokens.flip(1))

    monkeypatch.setattr(BeamSearch, "result", worst_first)
    assert check.main([]) == check.DIFFERENT
    output = capsys.readouterr().out
    assert "NOT all well; 6 searches: 2 fast, 4 compat" in _line(output)
    for model in ("an encoder-decoder", "a decoder"):
        assert f"  beam search of {model}: other tokens than the host's" in output


def test_a_model_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Any:
        raise OSError("no such library")

    monkeypatch.setitem(check._SEARCHES, "transformers", broken)
    assert check.main([]) == check.DIFFERENT
    output = capsys.readouterr().out
    assert "NOT accelerated" in _line(output)
    assert "  import: a model cannot be made (OSError: no such library)" in output
