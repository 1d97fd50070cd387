"""fairseq is patched whenever it is imported, shown in the status, and left exactly as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PRELUDE = """
import sys, warnings
warnings.filterwarnings("error", message="fastgen")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    {imports}

class Same:
    # Equal only for the very same object, which it keeps alive: a freed one's id could be used again.
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value is other.value

def raw():
    found = {{}}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] != "fairseq" and not name.startswith("torch.nn"):
            continue
        found[name] = {{k: Same(v) for k, v in vars(module).items()}}
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                found[name, key] = {{k: Same(v) for k, v in vars(value).items() if k not in ("__dict__", "_abc_impl")}}
    return found

def host():
    return next(host for host in fastgen.status().hosts if host.name == "fairseq")
"""
CHECK = """
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from fairseq import checkpoint_utils
assert host().state == "ready" and not host().detail, fastgen.status()
assert host().version == fairseq.__version__
patched = raw()
fastgen.disable()
assert host().state == "disabled"
stock = raw()
changed = {name for name in stock if stock[name] != patched[name]}
assert changed == {
    ("fairseq.sequence_generator", "SequenceGenerator"),
    ("fairseq.sequence_generator", "EnsembleModel"),
    "fairseq.checkpoint_utils",
}, changed
fastgen.enable()
assert raw().keys() == patched.keys() and host().state == "ready"
with fastgen.disabled():
    assert raw() == stock
fastgen.disable()
assert raw() == stock
"""


def run_python(imports: str, code: str, **environment: str) -> str:
    indented = textwrap.indent(imports, "    ").strip()
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE.format(imports=indented) + code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_fairseq_after_fastgen() -> None:
    run_python("import fastgen\nimport fairseq", CHECK)


def test_fairseq_before_fastgen_comes_back_bit_for_bit() -> None:
    run_python(
        "import fairseq\nimport fairseq.sequence_generator",
        "before = raw()\nimport fastgen\n"
        + CHECK
        + "after = raw()\nassert {name: after[name] for name in before} == before\n",
    )


def test_not_imported_and_switched_off() -> None:
    run_python("import fastgen", 'assert host().state == "not imported" and "fairseq" not in sys.modules\n')
    code = """
from fairseq.sequence_generator import SequenceGenerator
assert SequenceGenerator._generate.__globals__["__name__"] == "fairseq.sequence_generator"
assert host().state == "disabled" and "fastgen.optimizer.fairseq" not in sys.modules
"""
    run_python("import fastgen\nimport fairseq", code, FASTGEN_DISABLE="1")


def test_neither_adapter_imports_the_other() -> None:
    code = """
import fairseq.sequence_generator
from fastgen.optimizer.fairseq import dispatch
assert not [name for name in sys.modules if name.startswith("fastgen.optimizer.transformers")]
"""
    run_python("import fastgen\nimport fairseq", code)


def test_a_host_with_other_seams_is_left_alone() -> None:
    code = """
from fairseq.sequence_generator import SequenceGenerator
stock = SequenceGenerator._generate
SequenceGenerator._generate = lambda self, sample, something_new: None
before = raw()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fastgen
assert [str(w.message) for w in caught if "leaves fairseq" in str(w.message)], caught
assert host().state == "left alone" and "something_new" in host().detail
assert "something_new" in str(fastgen.status())
"""
    run_python("import fairseq\nimport fairseq.sequence_generator", code)
