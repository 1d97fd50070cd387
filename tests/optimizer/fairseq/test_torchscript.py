"""Users compile generators with TorchScript: that works as on stock, with fastgen on and off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

import fastgen
from fastgen.optimizer.fairseq import seams


def scripted(name: str, **options: Any) -> Any:
    generator = SequenceGenerator([models.load(name)], models.dictionary(), beam_size=3, max_len_b=9, **options)
    return torch.jit.script(generator)


def inputs() -> dict[str, Any]:
    net_input = models.batch()["net_input"]
    return {"net_input": {name: net_input[name] for name in ("src_tokens", "src_lengths")}}


@pytest.mark.parametrize(("name", "options"), [("post-norm", {}), ("pre-norm", dict(no_repeat_ngram_size=2))])
def test_scripted_generators(name: str, options: dict[str, Any]) -> None:
    with fastgen.disabled():
        stock = scripted(name, **options)
        expected = stock(inputs())
    while_on = scripted(name, **options)
    judge.assert_same(expected, while_on(inputs()), exactly=True)
    fastgen.disable()
    judge.assert_same(expected, while_on(inputs()), exactly=True)
    judge.assert_same(expected, scripted(name, **options)(inputs()), exactly=True)
    fastgen.enable()
    judge.assert_same(expected, while_on(inputs()), exactly=True)
    judge.assert_same(expected, stock(inputs()), exactly=True)


def test_the_alias_is_a_function_of_its_own() -> None:
    stock = vars(SequenceGenerator)[seams.STOCK_GENERATE]
    assert stock.__name__ == seams.STOCK_GENERATE and stock is not seams.stock["_generate"]
    assert stock.__code__ is seams.stock["_generate"].__code__
    with fastgen.disabled():
        assert seams.STOCK_GENERATE not in vars(SequenceGenerator)


_IN_A_PROCESS = """
import logging, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
logging.disable(logging.INFO)
if "fastgen" in sys.argv:
    import fastgen
else:  # the helpers beside the tests import it
    import fastgen
    fastgen.disable()
sys.path.insert(0, sys.argv[1])
import fairseq_models as models
import torch
from fairseq.sequence_generator import SequenceGenerator

size = int(sys.argv[2])
given = {"net_input": {name: models.batch()["net_input"][name] for name in ("src_tokens", "src_lengths")}}
if "search" in sys.argv:
    models.generate("pre-norm", models.batch(), no_repeat_ngram_size=size)
generator = SequenceGenerator([models.load("pre-norm")], models.dictionary(), beam_size=3, max_len_b=9,
                              no_repeat_ngram_size=size)
tiers = [call.tier for call in fastgen.status().calls]
assert tiers == (["compat"] if {"fastgen", "search"} <= {*sys.argv} else []), tiers
scripted = torch.jit.script(generator)
found = scripted(given)
torch.save([[dict(each) for each in sentence] for sentence in found], sys.argv[3])
scripted.save(sys.argv[3] + ".module")
again = torch.jit.load(sys.argv[3] + ".module")(given)
assert all(torch.equal(a["tokens"], b["tokens"]) for x, y in zip(found, again) for a, b in zip(x, y))
if "fastgen" in sys.argv:
    models.generate("pre-norm", models.batch())
    assert fastgen.status().calls[-1].tier == "compat"
"""


def _in_a_process(folder: Path, size: int, *words: str) -> Any:
    """What a scripted generator returns in a process where nothing has been scripted before."""
    where = folder / "-".join(("found", str(size), *words))
    arguments = [sys.executable, "-c", _IN_A_PROCESS, str(Path(models.__file__).parent), str(size), str(where), *words]
    done = subprocess.run(arguments, capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(where)


def _environment() -> dict[str, str]:
    """Where the tests' own helpers are found."""
    paths = [str(Path(fastgen.__file__).parents[1]), *(path for path in sys.path if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("size", [0, 2])
def test_scripted_first_in_a_process(size: int, tmp_path: Path) -> None:
    """TorchScript keeps what it has compiled of a class: where stock's was first, ours would never be looked at."""
    expected = _in_a_process(tmp_path, size)
    judge.assert_same(expected, _in_a_process(tmp_path, size, "fastgen"), exactly=True)
    judge.assert_same(expected, _in_a_process(tmp_path, size, "fastgen", "search"), exactly=True)
