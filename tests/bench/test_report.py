"""The report: a page that needs nothing beside it, says what was measured, and hides nothing that went wrong."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import bench_kit as kit
import pytest
from bench_kit import EVERYTHING, showing
from page_kit import Element, figure, parsed, row, section, tables

from fastgen.bench import report
from fastgen.bench.document import Document, Section
from fastgen.bench.report import facts

MODELS = "Beam search of many models"
HOSTILE = "\"'><script>alert(1)</script><img src=http://x.org/a.png>&amp;"


def check_alone(page: str) -> None:
    """It is one page that asks for nothing."""
    elements = parsed(page).all()
    assert not [each for each in elements if each.name in ("script", "link", "img", "iframe", "object", "use", "image")]
    for each in elements:
        names = set(each.attributes)
        assert not [name for name in names if name in ("src", "srcset", "xlink:href", "style") or name.startswith("on")]
        assert each.attributes.get("href", "#").startswith("#")
    assert len([each for each in elements if each.name == "style"]) == 1
    style = page[page.index("<style>") : page.index("</style>")]
    assert not re.search(r"@import|@font-face|url\(|http|//", style)


def test_the_page_is_well_formed_and_alone(document: Document, page: Element) -> None:
    text = report.render(document)
    check_alone(text)
    assert text.startswith("<!DOCTYPE html>")
    ids = [each.attributes["id"] for each in page.all() if "id" in each.attributes]
    assert len(set(ids)) == len(ids)
    assert {each.attributes["href"][1:] for each in page.all("a")} == set(ids)


def test_all_that_was_measured_is_there(document: Document, page: Element) -> None:
    text = page.text
    for task in document["tasks"]:
        assert task["name"] in text and task["what"] in text
        for result in task["sides"].values():
            assert result.get("refused", "") in text
    for side in document["sides"].values():
        for words in [side["label"], *side["settings"], *side["versions"].values()]:
            assert words in text
    for words in [*document["statements"], *document["versions"].values(), document["command"], "2026-11-24 10:15 UTC"]:
        assert words in text
    for each in document["sections"]:
        assert each["title"] in text


def test_tables_have_the_figures(document: Document, page: Element) -> None:
    found = tables(section(page, MODELS))
    ratios, seconds, outputs = (found[name] for name in ("Times as fast as the reference", "Seconds", _outputs(found)))
    timed = 0
    for name in document["sections"][0]["tasks"]:
        (task,) = [each for each in document["tasks"] if each["name"] == name]
        for side, result in task["sides"].items():
            label = facts.label(document, side) + (" (lossy)" if side.endswith("int8") else "")
            if "seconds" not in result:
                continue
            timed += 1
            measured = [each["seconds"][side] for each in task["rounds"]]
            cell = row(seconds, name)[label]
            for value in (result["seconds"], min(measured), max(measured), result["first_seconds"]):
                assert facts.number(value) in cell
            if side != "stock":
                ratio = result["ratio"]
                expected = f"{ratio['median']:.2f}x {ratio['min']:.2f} to {ratio['max']:.2f}"
                assert row(ratios, name)[label] == expected
                (column,) = [head for head in outputs[0] if re.fullmatch(rf"{re.escape(label)} (must|may).*", head)]
                same = 37 if side.endswith("int8") else 40
                assert row(outputs, name)[column].startswith(f"{same} of 40 same")
    assert timed == 52  # 12 tasks of five sides, but for three refusals and a task that was not timed


def _outputs(found: dict[str, list[list[str]]]) -> str:
    return next(name for name in found if name.startswith("Outputs"))


def test_every_round_is_there_and_busy_ones_are_marked(document: Document, page: Element) -> None:
    method = page.all("section")[-1]
    rounds = tables(method)["Seconds"]
    assert len(rounds) - 1 == sum(len(task.get("rounds", [])) for task in document["tasks"])
    name, label = kit.SHAPES[5][0], "fastgen"
    value = facts.seconds(document["tasks"][5]["rounds"][1]["seconds"]["fastgen"])
    assert row(rounds, name, "2")[label] == f"{value} (0.84!)"
    assert [each.text for each in method.all(kind="busy")] == ["(0.84!)"]
    unknown = row(rounds, kit.SHAPES[7][0], "1")["transformers 5.23.0"]
    assert unknown.endswith("(?)")


def test_strings_are_escaped_wherever_they_come_from() -> None:
    document = hostile(kit.sample())
    text = report.render(document)
    check_alone(text)
    shown = parsed(text).text
    assert '<b>&"' + HOSTILE in shown
    # Machine, versions, settings, statements, text, sides, reasons, metrics, lines, options: all show it.
    assert shown.count(HOSTILE) > 200


def hostile(value: Any, key: str = "") -> Any:
    """A document whose every string, but for words that have a meaning, ends in `HOSTILE`."""
    names = ("sides", "metrics", "tiers", "versions", "seconds", "other_processes")
    if isinstance(value, dict):
        return {
            (name + HOSTILE if key in names else name): hostile(each, "" if key == "sides" else name)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [hostile(each, key) for each in value]
    return value + HOSTILE if isinstance(value, str) and key not in ("show", "axis") else value


def test_a_time_of_other_outputs_is_never_shown() -> None:
    """Not even if it stands in the document."""
    task = kit.task("a", 10, ("stock", "fastgen"), axis="beams", line="all")
    task["sides"]["fastgen"]["verified"]["different"] = [0]
    task["sides"]["fastgen"].update(seconds=7777.0, first_seconds=7777.0)
    task["sides"]["fastgen"]["ratio"] = {"median": 6666.0, "min": 6666.0, "max": 6666.0}
    document = showing(["ratios", "seconds", "lines", "outputs"], task)
    assert not re.search("7,?777|6,?666", report.render(document) + report.table(document))


def test_summary_says_the_range_of_ratios_and_equality(page: Element, document: Document) -> None:
    said = page.all("div", "summary")[0].text
    medians = [
        task["sides"]["fastgen"]["ratio"]["median"] for task in document["tasks"] if "ratio" in task["sides"]["fastgen"]
    ]
    assert f"fastgen: {min(medians):.2f} to {max(medians):.2f} times as fast as transformers 5.23.0" in said
    assert "In 1 of 405 timings other processes kept more than 0.1 cores busy (up to 0.84)" in said
    quiet = showing(["ratios"], kit.task("a", 10, ("stock", "fastgen")))
    text = parsed(report.render(quiet)).all("div", "summary")[0]
    assert "All outputs that must be equal are equal, token for token: 40 outputs (fastgen)." in text.text
    assert "The machine was quiet: in none of 10 timings" in text.text
    assert "near" not in text.text
    assert not text.all("li", "bad")
    quiet["settings"]["quick"] = True
    assert parsed(report.render(quiet)).all("div", "summary")[0].all("li", "bad")


def test_near_ties_are_said_and_no_failure() -> None:
    task = kit.task("a", 10, ("stock", "fastgen"))
    task["sides"]["fastgen"]["verified"]["near_ties"] = [7]
    document = showing(["ratios", "outputs"], task)
    page = report.render(document)
    said = parsed(page).all("div", "summary")[0].text
    assert "39 outputs (fastgen). Besides, 1 differ at near-ties of the host's" in said
    assert "39 of 40 same" in page and "output 7 at a near-tie" in page
    assert "39 same, 1 at a near-tie" in report.table(document)


def test_metrics_that_must_be_equal_and_are_not_are_red() -> None:
    task = kit.task("a", 1, ("stock", "fastgen"))
    task["sides"]["fastgen"]["metrics"] = {"BLEU": 31.0}
    page = parsed(report.render(showing(["metrics"], task)))
    assert "not those of" in section(page, "One").all("span", "bad")[0].text


def test_what_is_empty_does_not_break_it() -> None:
    nothing: Section = {"title": "Nothing", "text": "", "tasks": [], "show": EVERYTHING}
    absent: Section = {"title": "Left out", "text": "", "tasks": ["never run"], "show": EVERYTHING}
    document = kit.document([], [nothing, absent])
    page = parsed(report.render(document))
    assert "Not in this run: never run." in section(page, "Left out").text
    assert "No task was run." in page.text and "No task was run." in report.table(document)
    bare = kit.document([{"name": "bare"}], [{**nothing, "tasks": ["bare"]}])
    bare["machine"], bare["date"] = {}, "some day"
    page = parsed(report.render(bare))
    for name in EVERYTHING:
        assert f"No {name} in this run." in page.text
    assert "some day" in page.text
    assert "bare" in report.table(bare)


def test_tasks_in_no_section_are_shown() -> None:
    document = showing(["ratios"], kit.task("a", 1))
    document["tasks"].append(kit.task("forgotten", 2))
    page = parsed(report.render(document))
    assert figure(section(page, "Other tasks"), "forgotten").all("rect")
    assert "forgotten" in report.table(document)


def test_an_unknown_way_of_showing_is_said() -> None:
    document = showing(["ratios", "holograms"], kit.task("a", 1))
    page = parsed(report.render(document))
    assert "This version doesn't know how to show “holograms”." in [each.text for each in page.all("p", "bad")]


@pytest.mark.parametrize("alone", ["stock", "fastgen"])
def test_one_side_alone(alone: str) -> None:
    task = kit.task("a", 10, ("stock", "fastgen"), axis="beams", line="all")
    task["sides"] = {alone: task["sides"][alone]}
    document = showing(EVERYTHING, task, sides=(alone,))
    check_alone(report.render(document))
    page = parsed(report.render(document))
    assert f"Sides: {kit.SIDES[alone][0]}." in page.text
    seconds = facts.seconds(task["sides"][alone]["seconds"])
    assert seconds in tables(section(page, "One"))["Seconds"][1][1]
    assert seconds in report.table(document)


def test_rendering_leaves_the_document_as_it_was(document: Document, tmp_path: Path) -> None:
    before = copy.deepcopy(document)
    report.write(document, tmp_path / "new" / "report.html")
    assert (tmp_path / "new" / "report.html").read_text("utf-8") == report.render(document)
    report.table(document)
    assert document == before
