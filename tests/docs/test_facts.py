"""What the pages say follows from code and data: options, variables, reasons, tables, pictures."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import draw
import features
import generated
import pages
import pytest
import transformers
from pages import DOCS, PAGES, ROOT

import fastgen
from fastgen import config

OPTIONS = pages.text_of("docs/options.md")
TROUBLE = pages.text_of("docs/troubleshooting.md")
PARTS = [(page, part) for page in PAGES for part in generated.names(pages.text_of(page))]


# ---------------------------------------------------------------------------------------------- generated parts
@pytest.mark.parametrize("page, part", PARTS)
def test_generated_part_is_up_to_date(page: str, part: str) -> None:
    text = pages.text_of(page)
    of_a_version = part in ("command-generation-flags", "serve-fields")
    if of_a_version and f"With transformers {transformers.__version__}:" not in text:
        pytest.skip(f"the page shows the fields of another version than transformers {transformers.__version__}")
    assert generated.written(text, only=part) == text, "run python docs/tools/generated.py"


def test_every_part_is_shown() -> None:
    assert {part for _, part in PARTS} == set(generated.PARTS)
    begun = sum(pages.text_of(page).count("<!-- generated:") for page in PAGES)
    assert begun == len(PARTS), "a part without its end"


def test_stale_parts_are_noticed() -> None:
    page = "docs/results.md"
    text = pages.text_of(page)
    assert generated.written(text.replace("7.30x", "9.99x")) == text


def test_the_changelog_is_the_page_of_changes() -> None:
    text = generated.CHANGELOG.read_text("utf-8")
    assert text == generated.changelog(), "run python docs/tools/generated.py"
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 9 and all((ROOT / link).is_file() for link in links)


def test_models_are_those_of_the_sweep() -> None:
    data = json.loads(generated.MODELS.read_text("utf-8"))
    verdicts = [verdict for one in data["classes"].values() for verdict in (one["text"], one["own"]) if verdict]
    assert {one["outcome"] for one in verdicts} <= {"accelerated", "fallback", "not tried"}, (
        "a class differs from stock"
    )
    assert all(one["why"] for one in verdicts if one["outcome"] != "accelerated")
    assert {one["kind"] for one in data["classes"].values()} == set(generated._KINDS)
    if data["transformers"] != transformers.__version__:
        pytest.skip(f"the sweep was of transformers {data['transformers']}, here is {transformers.__version__}")
    sys.path.insert(0, str(ROOT / "tests" / "optimizer" / "transformers"))
    import test_sweep

    assert {name: one["kind"] for name, one in data["classes"].items()} == test_sweep.CLASSES


def test_versions_are_those_that_are_tested() -> None:
    data = json.loads(generated.VERSIONS.read_text("utf-8"))
    assert data.keys() == features.FEATURES.keys()
    for host, found in data.items():
        adapter = (ROOT / "fastgen" / "optimizer" / host / "__init__.py").read_text("utf-8")
        tested = re.search(r'^TESTED = "(.*?)"', adapter, re.MULTILINE)
        assert tested is not None and next(iter(found)) == tested[1], (
            f"{host}: the newest on the page is not the newest"
        )
        for version, one in found.items():
            counts = one["features"]
            assert counts.keys() == features.FEATURES[host].keys()
            assert all(each and "failed" not in each for each in counts.values()), f"{host} {version}"
    again = re.search(r"for version in (.*?); do", (ROOT / ".ci" / "run").read_text("utf-8"))
    assert again is not None and set(again[1].split()) < data["transformers"].keys()


def test_pictures_are_as_drawn() -> None:
    for path, svg in draw.drawn():
        assert path.read_text("utf-8") == svg, "run python docs/tools/draw.py"
        tree = ElementTree.fromstring(svg)
        assert tree.get("role") == "img"
        assert [part.tag.rpartition("}")[2] for part in tree[:2]] == ["title", "desc"]
        assert all(part.text for part in tree[:2])
        shown = path.relative_to(DOCS).as_posix()
        assert any(shown in pages.text_of(page) for page in ("docs/how-it-works.md", "docs/index.md"))


def test_pages_tell_the_same_of_kept_prefixes() -> None:
    medians = json.loads(max((ROOT / "benchmarks" / "results").glob("prefixes-*.json")).read_text("utf-8"))["median"]
    for page in ("docs/prefixes.md", "docs/recipes.md"):
        for seconds in medians.values():
            assert f" {1e3 * seconds:.0f} ms" in " ".join(pages.text_of(page).split()), page


# ---------------------------------------------------------------------------------------------- options
CHOICES = {
    "tier": config.TIERS,
    "packing": config.PACKING,
    "weights": config.WEIGHTS,
    "replay": config.REPLAY,
    "cache": config.CACHES,
    "foreign_code": config.FOREIGN_CODE,
}


def _section(name: str) -> str:
    return OPTIONS.partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("field", dataclasses.fields(config.Config), ids=lambda field: field.name)
def test_option_is_documented(field: dataclasses.Field[object]) -> None:
    default = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
    section, variable = _section(field.name), f"FASTGEN_{field.name.upper()}"
    assert section, f"there is no section ## `{field.name}`"
    assert f"| [`{field.name}`](#{field.name}) | `{default}` | `{variable}` |" in OPTIONS
    assert f"`{variable}" in section
    begin = section.strip().splitlines()[0]
    assert re.search(rf"`{re.escape(default)}` (\(default\)|by default)", begin), f"the default is {default}"
    for choice in CHOICES.get(field.name, ()):
        assert f'`"{choice}"`' in begin, f"{choice} is not among the values"


@pytest.mark.parametrize("field", dataclasses.fields(config.Config), ids=lambda field: field.name)
def test_help_names_each_option_and_its_values(field: dataclasses.Field[object]) -> None:
    shown = " ".join((fastgen.configure.__doc__ or "").split())
    found = re.search(rf"\b{field.name} \(([^)]*)\)", shown)
    assert found, f"help(fastgen.configure) says nothing of {field.name}"
    for choice in CHOICES.get(field.name, ()):
        assert f'"{choice}"' in found[1]


def test_native_choices_are_documented() -> None:
    for choice in filter(None, config.NATIVE):
        assert f"| `{choice}` |" in pages.text_of("docs/operators.md")


def _variables() -> set[str]:
    """Environment variables that the package reads."""
    found = {f"FASTGEN_{field.name.upper()}" for field in dataclasses.fields(config.Config)}
    for path in (ROOT / "fastgen").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"\bFASTGEN_[A-Z_]*[A-Z]\b", node.value))
    return found


def test_variables_are_documented() -> None:
    documented = set(re.findall(r"`(FASTGEN_[A-Z_]+)(?:=\w+)?`", OPTIONS))
    assert documented == _variables()


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_no_other_variable(page: str) -> None:
    assert set(re.findall(r"FASTGEN_[A-Z_]+", pages.text_of(page))) <= _variables()


def test_functions_are_documented() -> None:
    text = "\n".join(map(pages.text_of, PAGES))
    for name in fastgen.__all__:
        if inspect.isfunction(getattr(fastgen, name)) or name == "FallbackError":
            assert f"fastgen.{name}" in text, f"no page names fastgen.{name}"


# ---------------------------------------------------------------------------------------------- reasons
_OPTIMIZER = ROOT / "fastgen" / "optimizer"
REASONED = [
    "verification.py",
    "transformers/cache/hosts_caches.py",
    "transformers/cache/users_cache.py",
    "transformers/foreign_code.py",
    "transformers/equivalence.py",
    "transformers/model/facts.py",
    "transformers/support.py",
    "transformers/model/streams.py",
    "transformers/streaming.py",
    "fairseq/model/decoder.py",
    "fairseq/generate/beam_search.py",
    "fairseq/foreign_code.py",
    "fairseq/request.py",
    "whisper/inference.py",
]


def _texts(node: ast.expr | None) -> list[str]:
    """What an expression may give: its text, with … for what is filled in."""
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("OfThisVersion", "_told"):
        return _texts(node.args[-1])
    return []


def reasons(path: Path) -> list[str]:
    """What the functions return that say why not."""
    found: list[str] = []
    for function in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(function, ast.FunctionDef) and function.returns and ast.unparse(function.returns) == "str | None":
            for node in ast.walk(function):
                found += _texts(node.value) if isinstance(node, ast.Return) else []
    return found


@pytest.mark.parametrize("module", REASONED)
def test_reasons_are_explained(module: str) -> None:
    found = reasons(_OPTIMIZER / module)
    assert found
    missing = [reason for reason in found if f"`{reason}`" not in TROUBLE]
    assert not missing, "docs/troubleshooting.md says nothing of these reasons"


def test_reasons_against_prefixes_are_explained() -> None:
    """Each is a row of the page's table, and no other."""
    listed = re.findall(r"^\| `([^`]+)` \|", pages.text_of("docs/prefixes.md"), re.MULTILINE)
    assert set(listed) == set(reasons(_OPTIMIZER / "transformers" / "cache" / "prefixes.py"))


def test_explained_reasons_exist() -> None:
    """The page's tables name no reason that is gone."""
    known = {reason for module in REASONED for reason in reasons(_OPTIMIZER / module)}
    known |= {"tier='stock' is configured", "its steps cannot be captured (…)"}
    known |= {"a captured step differs from the model's own step (…)"}
    listed = re.findall(r"^\| `([^`]+)` \|", TROUBLE.partition("## Reasons in transformers")[2], re.MULTILINE)
    assert len(listed) > 60
    assert set(listed) <= known


def test_explained_reasons_for_plain_torch_exist() -> None:
    ops = ROOT / "fastgen" / "ops"
    files = (ops / "builder.py", ops / "library_cache.py", ops / "library.py", ROOT / "fastgen" / "files.py")
    code = "".join(path.read_text("utf-8") for path in files)
    section = pages.text_of("docs/operators.md").partition("### Why plain torch runs")[2]
    listed = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(listed) == 12
    for reason in listed:
        assert all(part.strip() in code for part in reason.split("…")), reason
