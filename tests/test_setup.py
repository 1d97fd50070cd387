"""What setup.py puts into distributions: the operators' sources, and libraries where they can be compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fastgen

pytest.importorskip("setuptools", minversion="77", reason="needs setuptools")
pytest.importorskip("torch", reason="needs torch")

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.*"))
BUILT = 'for last; do :; done; echo built > "$last"'  # -o is the last option


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy to build in, as setuptools leaves its own files beside the sources."""
    if not (ROOT / "setup.py").is_file():
        pytest.skip("needs a checkout")
    unneeded = shutil.ignore_patterns(
        ".*_cache", ".git", ".venv", "__pycache__", "build", "dist", "*.egg-info", "_native"
    )
    shutil.copytree(ROOT, tmp_path / "project", ignore=unneeded)
    return tmp_path / "project"


def build(project: Path, kind: str, isolated: bool = False, **environment: str) -> tuple[list[str], str]:
    """The files in a "sdist" or "wheel", and what building it printed. `isolated`: without torch, as pip does it."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("FASTGEN", "TORCH", "CXX"))}
    python = [sys.executable]
    if isolated:
        import setuptools

        only = project.parent / "only"  # site-packages with nothing else
        only.mkdir()
        installed = Path(setuptools.__file__).parents[1]
        for name in ("setuptools", "_distutils_hack", *(path.name for path in installed.glob("setuptools-*-info"))):
            (only / name).symlink_to(installed / name)
        python += ["-S"]
        settings["PYTHONPATH"] = str(only)
    out = project.parent / "out"
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run = subprocess.run(
        [*python, "-c", code], cwd=project, env=settings | environment, text=True, capture_output=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (file,) = out.iterdir()
    if kind == "sdist":
        with tarfile.open(file) as archive:
            names = [name.partition("/")[2] for name in archive.getnames()]
    else:
        names = zipfile.ZipFile(file).namelist()
    return names, run.stdout + run.stderr


def script(folder: Path, name: str, version: str, body: str) -> str:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'#!/bin/sh\ncase "$*" in *--version*) echo "{version}"; exit;; esac\n{body}\n')
    file.chmod(0o755)
    return str(file)


def in_package(names: list[str], folder: str) -> list[str]:
    return sorted(name for name in names if name.startswith(f"fastgen/{folder}/"))


def test_the_source_distribution(project: Path) -> None:
    names, _ = build(project, "sdist", isolated=True)
    assert set(names) >= {
        *SOURCES,
        "setup.py",
        "fastgen/ops/builder.py",
        ".ci/run",
        ".ci/sanitize",
        "tests/test_setup.py",
    }
    assert not in_package(names, "_native")


def test_a_wheel_without_torch(project: Path, tmp_path: Path) -> None:
    """pip builds in isolation, unless told otherwise."""
    names, output = build(project, "wheel", isolated=True, CXX=script(tmp_path, "cxx", "1.0", BUILT))
    assert in_package(names, "_csrc") == sorted(f"fastgen/_{source}" for source in SOURCES)
    assert not in_package(names, "_native")
    assert "fastgen:" not in output


def test_a_wheel_with_torch(project: Path, tmp_path: Path) -> None:
    names, _ = build(project, "wheel", CXX=script(tmp_path, "cxx", "1.0", BUILT))
    assert_native(names)
    assert len(in_package(names, "_csrc")) == len(SOURCES)
    (wheel,) = (tmp_path / "out").iterdir()
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == ("py3", "none") and platform != "any", "for every Python, and one platform"


def assert_native(names: list[str]) -> None:
    libraries = in_package(names, "_native")
    assert [Path(name).stem.partition("-")[0] for name in libraries] == ["cpu", "runtime"]
    assert all(name.endswith(".so") for name in libraries)


BROKEN_TORCH = 'raise RuntimeError("the driver on your system is too old")'
CUDA = 'import torch\ntorch.version.cuda = "13.0"'  # imported at Python's start


@pytest.mark.parametrize(
    ("body", "environment", "message"),
    [
        ("echo wrong on purpose; exit 1", {}, "compiling the cpu operators with cxx failed"),
        (BUILT, {"CXX": "c++ '"}, "the quotes in CXX are not closed"),
        (BUILT, {"CXX": "no-such-compiler"}, "there is no C++ compiler no-such-compiler"),
        (BUILT, {"PYTHONPATH": "torch.py", "TORCH": BROKEN_TORCH}, "the driver on your system is too old"),
        (
            BUILT,
            {"PYTHONPATH": "sitecustomize.py", "TORCH": "import torch\ntorch._C._GLIBCXX_USE_CXX11_ABI = 'x'"},
            "invalid literal",
        ),
    ],
)
def test_what_fails_is_left_out(
    project: Path, tmp_path: Path, body: str, environment: dict[str, str], message: str
) -> None:
    settings = {"CXX": script(tmp_path, "cxx", "1.0", body)} | environment
    if code := settings.pop("TORCH", ""):
        module = tmp_path / "modules" / settings["PYTHONPATH"]
        module.parent.mkdir()
        module.write_text(code)
        settings["PYTHONPATH"] = str(module.parent)
    names, output = build(project, "wheel", **settings)
    assert message in output
    assert len(in_package(names, "_csrc")) == len(SOURCES)
    assert not in_package(names, "_native")


def test_a_library_that_fails_leaves_the_other(project: Path, tmp_path: Path) -> None:
    script(tmp_path, "cuda/bin/nvcc", "Cuda compilation tools, release 13.0, V13.0.1", "echo wrong on purpose; exit 1")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/sitecustomize.py").write_text(CUDA)
    names, output = build(
        project,
        "wheel",
        CXX=script(tmp_path, "cxx", "1.0", BUILT),
        CUDA_HOME=str(tmp_path / "cuda"),
        TORCH_CUDA_ARCH_LIST="9.0",
        PYTHONPATH=str(tmp_path / "modules"),
    )
    assert "compiling the cuda operators with cxx failed" in output and "wrong on purpose" in output
    assert_native(names)


def test_an_editable_install_is_on_the_path(project: Path) -> None:
    """A finder would come after the path: beside a clone called "fastgen" that folder would be imported."""
    names, _ = build(project, "editable", FASTGEN_NATIVE="0")
    assert [name for name in names if name.startswith("__editable__")] == [
        f"__editable__.fastgen_torch-{fastgen.__version__}.pth"
    ]
