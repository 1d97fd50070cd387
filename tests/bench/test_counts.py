"""Counts: the same for every run, process and number of threads, and of the generation as it runs without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import bench_models
import torch
from asking import running

import fastgen
from fastgen import ops
from fastgen.bench.counts import Counts, counted, settings

IN_A_PROCESS = """
import json, sys
import torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
import fastgen, bench_models
from fastgen.bench.counts import counted
found = {}
for kind in ("bart", "gpt2"):
    model = bench_models.load(kind, width=64)
    found[kind] = counted(lambda: bench_models.generate(model)).as_dict()
    with fastgen.disabled():
        found[kind + " stock"] = counted(lambda: bench_models.generate(model)).as_dict()
print(json.dumps(found))
"""


def _in_a_process(threads: int) -> dict[str, dict[str, int]]:
    root = Path(__file__).parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(root.parent)}
    command = [sys.executable, "-c", IN_A_PROCESS, str(root / "kit"), str(threads)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


@pytest.mark.slow
def test_every_process_and_number_of_threads_counts_the_same() -> None:
    first = _in_a_process(1)
    assert _in_a_process(1) == first and _in_a_process(2) == first


@pytest.mark.parametrize("side", ["stock", "fast", "compat"])
@pytest.mark.parametrize("kind", ["bart", "gpt2"])
def test_what_is_counted_runs_as_ever(kind: str, side: str) -> None:
    model = bench_models.load(kind)
    outputs: list[torch.Tensor] = []
    with running(side):
        each = [counted(lambda: outputs.append(bench_models.generate(model))).as_dict() for _ in range(2)]
        assert each[0] == each[1]
        counts = counted(lambda: bench_models.generate(model))
        with fastgen.configured(**settings()):
            outputs.append(bench_models.generate(model))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert counts.as_dict()["operators"] > counts.as_dict()["allocations"] > 0
    if side != "stock":
        calls = fastgen.status().calls
        assert len({(call.tier, call.cache, call.steps, call.cache_bytes) for call in calls}) == 1
        assert calls[-1].tier == side


def test_native_operators_are_counted() -> None:
    if not ops.is_native(torch.device("cpu")):
        pytest.skip("needs the native operators")
    model, new = bench_models.load("bart"), 8
    counts = counted(lambda: bench_models.generate(model, new=new))
    layers, attentions = 2, 2
    assert counts.by_operator["fastgen.beam_attention.default"] == layers * attentions * (new - 1)
    assert counts.by_operator["fastgen.beam_candidates.default"] == new


def test_each_kind_of_allocation() -> None:
    def count(action: object) -> tuple[int, int, int]:
        with Counts() as counts:
            assert callable(action)
            action()
        return tuple(counts.as_dict().values())  # type: ignore[return-value]

    x, weight, out = torch.ones(4, 8), torch.ones(16, 8), torch.empty(4, 8)
    assert count(lambda: torch.zeros(10)) == (1, 1, 40)
    assert count(lambda: x + x) == (1, 1, 128)
    assert count(lambda: x.view(8, 4)) == (1, 0, 0)
    assert count(lambda: x.add_(1)) == (1, 0, 0)
    assert count(lambda: torch.add(x, x, out=out)) == (1, 0, 0)
    assert count(lambda: x.split(2)) == (1, 0, 0)
    assert count(lambda: x.topk(2)) == (1, 2, 4 * 2 * (4 + 8))
    assert count(lambda: torch.tensor(1.0))[1:] == (1, 4)
    assert count(lambda: torch.empty(0).resize_(5))[1:] == (1, 20)
    linear = count(lambda: torch.nn.functional.linear(x, weight))
    assert linear[1:] == (1, 4 * 16 * 4)
    with torch.inference_mode():
        assert count(lambda: torch.nn.functional.linear(x, weight))[1:] == (1, 4 * 16 * 4)


def test_settings_are_put_back() -> None:
    before = fastgen.config.current()
    with pytest.raises(KeyError), Counts():
        assert all(getattr(fastgen.config.current(), name) == value for name, value in settings().items())
        raise KeyError
    assert fastgen.config.current() == before
    with Counts() as counts:
        pass
    assert counts.as_dict() == {"operators": 0, "allocations": 0, "allocated_bytes": 0}
