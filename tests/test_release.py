"""What a release needs: one version everywhere, workflows that name what there is, metadata that an index can show."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import fastgen

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEMPLATES = [path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def test_the_version_is_the_same_everywhere() -> None:
    changes = re.findall(r"^## (\S+)$", (ROOT / "docs/changes.md").read_text("utf-8"), re.M)
    assert changes[0] == fastgen.__version__
    assert str(read(ROOT / "CITATION.cff")["version"]) == fastgen.__version__


def test_the_citation_has_what_the_format_asks_for() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= reference.keys()
        assert all({"family-names", "given-names"} <= author.keys() for author in reference["authors"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_name_what_there_is(path: Path) -> None:
    jobs = read(path)["jobs"]
    scripts = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.scripts]")[2].partition("[tool")[0]
    for job in jobs.values():
        needed = job.get("needs", [])
        assert {needed} if isinstance(needed, str) else set(needed) <= jobs.keys()
        for step in job.get("steps", ()):
            run = step.get("run", "")
            assert ("uses" in step) != ("run" in step)
            for script in re.findall(r"(?<![\w/.])\.ci/\w+", run):
                assert (ROOT / script).is_file(), script
            for command in re.findall(r"\bfastgen-[a-z-]+", run):
                assert f"{command} = " in scripts, command


def test_only_the_job_that_publishes_may_ask_for_a_token() -> None:
    jobs = read(ROOT / ".github/workflows/release.yml")["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert "tag" in jobs["publish"]["if"] and jobs["publish"]["needs"] == "install"
    assert jobs["install"]["needs"] == ["build", "wheels"]


def test_what_is_published_is_all_that_was_built() -> None:
    """Each job that builds names its distributions for itself: two of one name would be an error."""
    jobs = read(ROOT / ".github/workflows/release.yml")["jobs"]
    options = {name: [step.get("with", {}) for step in job["steps"]] for name, job in jobs.items()}
    platforms = [entry["platform"] for entry in jobs["wheels"]["strategy"]["matrix"]["include"]]
    (built,) = (each["name"] for each in options["build"] if "path" in each)
    (wheel,) = (each["name"] for each in options["wheels"] if "path" in each)
    names = [built, *(wheel.replace("${{ matrix.platform }}", platform) for platform in platforms)]
    assert len(set(names)) == 1 + len(platforms)
    for job in ("install", "publish"):
        (fetched,) = (each for each in options[job] if "pattern" in each)
        assert fetched["merge-multiple"] and fetched["path"] == "dist/"
        assert fnmatch.filter(names, fetched["pattern"]) == names


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_issue_templates_have_what_github_asks_for(path: Path) -> None:
    template = read(path)
    assert {"name", "description", "body"} <= template.keys()
    names = [part["id"] for part in template["body"]]
    assert len(set(names)) == len(names)
    assert all(part["attributes"]["label"] for part in template["body"])


def test_the_source_distribution_has_what_its_tests_read(tmp_path: Path) -> None:
    """And metadata that twine accepts, where twine is installed."""
    pytest.importorskip("setuptools", minversion="77", reason="needs setuptools")
    if not (ROOT / "setup.py").is_file():
        pytest.skip("needs a checkout")
    unneeded = shutil.ignore_patterns(".*_cache", ".git", ".venv", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "project", ignore=unneeded)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "project", capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (file,) = tmp_path.glob("*.tar.gz")
    assert file.name == f"fastgen_torch-{fastgen.__version__}.tar.gz"
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"CHANGELOG.md", "CITATION.cff", "SECURITY.md", "constraints.txt"}
    wanted |= {path.relative_to(ROOT).as_posix() for path in (*WORKFLOWS, *TEMPLATES)}
    for folder in (".ci", "csrc", "docs", "examples"):  # files that other kinds of tests and CI read
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        wanted |= {path.relative_to(ROOT).as_posix() for path in files}
    assert wanted <= names, sorted(wanted - names)
    if shutil.which("twine"):
        checked = subprocess.run(["twine", "check", "--strict", str(file)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_ci_leaves_out_each_setting_of_the_users() -> None:
    settings = (ROOT / ".ci/settings.sh").read_text("utf-8")
    unset = {name for line in re.findall(r"^unset (.*)$", settings, re.M) for name in line.split()}
    known = {f"FASTGEN_{field.name.upper()}" for field in dataclasses.fields(fastgen.Config)}
    assert known | {"FASTGEN_DISABLE", "FASTGEN_NATIVE", "FASTGEN_CACHE_DIR"} <= unset
