"""benchmarks/gpu.py and bench_gpu.py, rehearsed on a CPU: what waits for a GPU must not fail there by a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_stages_are_resumed(tmp_path: Path) -> None:
    listed = _run("gpu.py", "--list").stdout.split("\n")
    names = [line.split()[0] for line in listed if line]
    assert names[0] == "build" and "nvcc" in _run("gpu.py", "--needs").stdout
    unknown = _run("gpu.py", "biuld")
    assert unknown.returncode == 2 and "no stage 'biuld'" in unknown.stderr
    well = {"command": {"code": 0, "seconds": 1.0, "end": []}}
    results = tmp_path / "rehearsal.json"
    results.write_text(json.dumps(dict.fromkeys(names[:-1], well)))
    ran = _run("gpu.py", "--rehearse", "--output", tmp_path)
    assert ran.returncode == 0, ran.stdout
    assert [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("==")] == [f"{names[-1]}:"]
    assert list(json.loads(results.read_text())) == names


def test_a_command_that_fails_is_said(tmp_path: Path) -> None:
    """Nothing that a stage finds may be lost: neither its exit code nor its last lines."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import gpu
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    commands = {"good": "{python} -c 'print(7)'", "bad": "{python} -c 'raise SystemExit(3)'", "slow": "sleep 60"}
    found = gpu.run(gpu.Stage("some", "what", commands, {}), False, tmp_path, 0.02)
    assert {name: one["code"] for name, one in found.items()} == {"good": 0, "bad": 3, "slow": 124}
    assert found["good"]["end"] == ["7"]
