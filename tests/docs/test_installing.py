"""What pages and messages say about installing fastgen: where packages come from, that name is another project's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastgen import installing

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
_FOLDERS = ("fastgen", "docs", "benchmarks", "tests", ".github", ".ci", "csrc")
_OTHERS = re.compile(r"(?<![\w./-])fastgen(\[[\w,-]+\])?(?=['\"\s`,;.)]|$)")
_EXTRAS = re.compile(r"\[([\w,-]+)\]")


def texts() -> list[Path]:
    """Every file that speaks to a reader, but for this one and the results of benchmarks."""
    found = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    found += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "setup.py", "pyproject.toml", "constraints.txt")]
    kinds = {".py", ".md", ".yml", ".toml", ".txt", ".sh", ""}
    return [path for path in found if path.suffix in kinds and "data" not in path.parts and path != Path(__file__)]


def commands(text: str) -> list[str]:
    """What follows `pip install` on a line, up to the end of the command."""
    return [found.split("&&")[0] for found in re.findall(r"pip install +([^`\n]*)", text)]


def test_no_page_and_no_message_installs_the_other_project() -> None:
    wrong = []
    for path in texts():
        for command in commands(path.read_text("utf-8", "replace")):
            words = command.split(" in a clone")[0]
            if _OTHERS.search(words.split("(")[0]):
                wrong.append(f"{path.relative_to(ROOT)}: pip install {command}")
    assert wrong == []


def test_the_search_sees_what_it_is_for() -> None:
    """Each of these has been on a page or in a message."""
    for text in (
        "pip install 'fastgen[ray]'",
        "pip install fastgen.",
        "`pip install fastgen[bench]`",
        "pip install fastgen",
    ):
        (command,) = commands(text)
        assert _OTHERS.search(command), text
    for text in ("pip install fastgen-torch", "pip install -e '.[ray]' in a clone of fastgen", "pip install ./fastgen"):
        (command,) = commands(text)
        assert not _OTHERS.search(command.split(" in a clone")[0]), text


def test_every_extra_that_is_named_exists() -> None:
    known = set(PROJECT["optional-dependencies"])
    for path in texts():
        for command in commands(path.read_text("utf-8", "replace")):
            for extras in re.findall(r"(?:\.|fastgen-torch)\[([\w,-]+)\]", command):
                assert set(extras.split(",")) <= known | {"nothing"}, f"{path}: {command}"


def test_the_distribution_has_the_name_that_messages_know() -> None:
    assert PROJECT["name"] == installing.DISTRIBUTION
    references = [one for group in PROJECT["optional-dependencies"].values() for one in group if "fastgen" in one]
    assert references and all(one.startswith(f"{installing.DISTRIBUTION}[") for one in references)
    for extra in ("transformers", "fairseq", "whisper", "ray", "metrics", "bench"):
        assert extra in PROJECT["optional-dependencies"]
        assert f"pip install -c constraints.txt -e '.[{extra}]'" in installing.command(extra)


def _distribution(folder: Path, name: str, version: str, scripts: str) -> None:
    made = folder / f"{name}-{version}.dist-info"
    made.mkdir(parents=True)
    (made / "entry_points.txt").write_text(f"[console_scripts]\n{scripts}\n")


def test_a_command_says_that_the_other_project_has_overwritten_the_package(tmp_path: Path) -> None:
    """Its `__init__.py` in the place of ours, and our other files beside it, as pip leaves them."""
    shutil.copytree(
        ROOT / "fastgen", tmp_path / "fastgen", ignore=shutil.ignore_patterns("*.safetensors", "__pycache__")
    )
    (tmp_path / "fastgen/__init__.py").write_text('__version__ = "0.3.5"\n')
    _distribution(tmp_path, "fastgen", "0.3.5", "fastgen = fastgen.main:app")
    for module in ("check", "demo", "generate_transformers"):
        run = subprocess.run(
            [sys.executable, "-c", f"import fastgen.cli.{module}"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 1 and run.stderr == f"{installing.another([str(tmp_path)])}\n"


def test_the_other_project_is_noticed(tmp_path: Path) -> None:
    _distribution(tmp_path / "both", "fastgen", "0.3.5", "fastgen = fastgen.main:app")
    _distribution(tmp_path / "ours", "fastgen", "0.1.0", "fastgen-check = fastgen.cli.check:main")
    _distribution(tmp_path / "new", "fastgen_torch", "0.1.0", "fastgen-check = fastgen.cli.check:main")
    assert installing.another([str(tmp_path / "ours"), str(tmp_path / "new"), "/nowhere", ""]) is None
    ignored: list[Any] = [tmp_path / "both", os.fsencode(tmp_path / "both"), None, 3]  # by Python
    assert installing.another(ignored) is None
    said = installing.another([str(tmp_path / "ours"), str(tmp_path / "both")])
    assert (
        said is not None and "(version 0.3.5)" in said and "pip uninstall fastgen, then install fastgen-torch" in said
    )
    code = (
        "import warnings\nwith warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always')\n"
    )
    code += "    import fastgen\nprint(*[warning.message for warning in caught], sep='\\n')"
    path = os.pathsep.join([str(ROOT), str(tmp_path / "both")])
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert run.stdout == f"{said}\n"
