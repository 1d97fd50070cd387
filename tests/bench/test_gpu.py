"""benchmarks/gpu.py and bench_gpu.py, rehearsed on a CPU: what waits for a GPU must not fail there by a mistake."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).resolve().parents[2]


def _run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_timings(tmp_path: Path) -> None:
    """Stock, fastgen and fastgen without graphs have the same outputs, and all that is said is written."""
    case = "transformer-base-1"
    ran = _run("bench_gpu.py", "--rehearse", "--rounds", 1, "--dtype", "float32", "--case", case, "--output", tmp_path)
    assert ran.returncode == 0, ran.stderr
    (file,) = tmp_path.glob("gpu-*.json")
    (record,) = json.loads(file.read_text())["records"]
    assert record["case"] == case and set(record["equal"].values()) == {record["rows"]}
    assert record["median"].keys() == {"stock", "fastgen", "fastgen without graphs"}
    assert record["paths"]["stock"] == [] and record["paths"]["fastgen"] == ["fast"]
    assert f"{case} " in ran.stdout


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


def test_what_is_said_of_the_stages() -> None:
    listed = _run("gpu.py", "--list").stdout.split("\n")
    assert listed[0].split()[0] == "build" and "nvcc" in _run("gpu.py", "--needs").stdout
    unknown = _run("gpu.py", "biuld")
    assert unknown.returncode == 2 and "no stage 'biuld'" in unknown.stderr


def test_stages_are_resumed(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that has ended well is not run again; one that has failed is, and one that is asked for."""
    commands = {"one": "{python} -c pass", "two": "{python} -c pass", "three": "test -f {output}/there"}
    stages = [gpu.Stage(name, "what", {"bad": "false"}, {"command": command}) for name, command in commands.items()]
    monkeypatch.setattr(gpu, "STAGES", stages)
    results = tmp_path / "rehearsal.json"
    results.write_text(json.dumps({"one": {"command": {"code": 0, "seconds": 1.0, "end": []}}}))

    def run(*stages: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--rehearse", "--output", str(tmp_path), *stages])
        code = gpu.main()
        return code, [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("==")]

    assert run() == (1, ["two:", "three:"])
    assert list(json.loads(results.read_text())) == ["one", "two", "three"]
    (tmp_path / "three" / "there").touch()
    assert run() == (0, ["three:"])
    assert run() == (0, [])
    assert run("one") == (0, ["one:"])


def test_every_stage_is_rehearsed(gpu: Any) -> None:
    """By the same programs, or by those that take their place where there is no device; no command has no end."""
    for stage in gpu.STAGES:
        assert stage.rehearsal, f"{stage.name} has no rehearsal"
        programs, rehearsed = (
            {word for command in each.values() for word in command.split() if word.endswith(".py")}
            for each in (stage.commands, stage.rehearsal)
        )
        measuring = {program for program in programs if program.startswith("benchmarks/")}
        assert measuring <= rehearsed, f"{stage.name} rehearses {rehearsed}, not {measuring}"
        assert all((ROOT / program).is_file() for program in programs | rehearsed)
        devices = " ".join(stage.rehearsal.values())
        assert "--device cuda" not in devices and ("bench_gpu.py" not in devices or "--rehearse" in devices)


def test_a_command_that_fails_is_said(gpu: Any, tmp_path: Path) -> None:
    """Nothing that a stage finds may be lost: neither its exit code nor its last lines."""
    commands = {"good": "{python} -c 'print(7)'", "bad": "{python} -c 'raise SystemExit(3)'", "slow": "sleep 60"}
    found = gpu.run(gpu.Stage("some", "what", commands, {}), False, tmp_path, 0.02)
    assert {name: one["code"] for name, one in found.items()} == {"good": 0, "bad": 3, "slow": 124}
    assert found["good"]["end"] == ["7"]
