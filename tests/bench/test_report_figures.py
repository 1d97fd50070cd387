"""The report's figures: in proportion, in order, in one colour for a side, and none of what went wrong."""

from __future__ import annotations

import itertools
import re

import bench_kit as kit
import pytest
from bench_kit import EVERYTHING, showing
from page_kit import Element, figure, parsed, row, section, tables

from fastgen.bench import report
from fastgen.bench.document import Document
from fastgen.bench.report import charts, facts
from fastgen.phases import PHASES

MODELS = "Beam search of many models"


def test_pictures_have_names_and_nothing_undefined_in_them(page: Element) -> None:
    style = page.all("style")[0].children[0]
    pictures = page.all("svg")
    assert len(pictures) > 20
    for picture in pictures:
        assert picture.attributes["aria-label"]
        for shape in picture.all():
            for kind in shape.kinds:
                assert re.search(rf"\.{kind}\b", str(style)), kind
            assert not re.search("nan|inf|None", " ".join(shape.attributes.values()))


def test_bars_whiskers_and_the_line_at_one_are_in_proportion() -> None:
    task = kit.task("a", 10, ("stock", "fastgen", "ctranslate2"))
    task["sides"]["fastgen"]["ratio"] = {"median": 4.0, "min": 3.0, "max": 5.0}
    task["sides"]["ctranslate2"]["ratio"] = {"median": 0.5, "min": 0.25, "max": 0.75}
    document = showing(["ratios"], task)
    picture = parsed(report.render(document)).all("figure")[0].all("svg")[0]
    ours, theirs = picture.all("rect")
    assert ours.number("width") == pytest.approx(8 * theirs.number("width"), abs=0.05)
    unit, left = ours.number("width") / 4, ours.number("x")
    one = picture.all("path", "one")[0].points()
    assert [x for x, _ in one] == pytest.approx([left + unit] * 2, abs=0.05)
    ends = [each.points() for each in picture.all("path", "ink")]
    assert [x for x, _ in ends[0]] == pytest.approx([left + 3 * unit, left + 5 * unit], abs=0.05)
    assert "4.00x (3.00 to 5.00)" in picture.text and "0.50x (0.25 to 0.75)" in picture.text


def test_a_side_has_one_colour_and_lossy_ones_are_hatched(document: Document, page: Element) -> None:
    look = charts.Look(document)
    assert len(set(look.number.values())) == len(kit.SIDES)
    for picture in page.all("svg"):
        label = picture.attributes["aria-label"]
        for side, (name, _) in kit.SIDES.items():
            if label == name and picture.all("rect"):
                assert picture.all("rect")[0].kinds == [look.fill(side)]
                assert bool(picture.all("path", "hatch")) == side.endswith("int8")
    body = figure(section(page, MODELS), kit.SHAPES[0][0]).all("svg")[0]
    fills = [each.kinds[0] for each in body.all("rect")]
    assert fills == [look.fill(side) for side in kit.SIDES if side != "stock"]
    assert body.all("path", "hatch")
    assert "97.3% of tokens same" in body.text


def test_more_sides_than_colours_still_have_marks() -> None:
    sides = {f"side{number}": kit.side("stock") for number in range(11)}
    document = kit.document([], [])
    document["sides"] = sides
    assert set(charts.Look(document).number.values()) == set(range(8))


def test_a_refusal_is_text_and_no_bar(document: Document, page: Element) -> None:
    one = figure(section(page, MODELS), kit.SHAPES[2][0])
    assert "CTranslate2 4.8.5 refused: it has no diverse beam search" in one.text
    fills = {kind for shape in one.all("rect") for kind in shape.kinds}
    look = charts.Look(document)
    assert fills == {look.fill("fastgen"), look.fill("fastgen-off")}
    assert row(tables(section(page, MODELS))["Seconds"], kit.SHAPES[2][0])["CTranslate2 4.8.5"] == "refused"
    said = [each.text for each in page.all("div", "summary")[0].all("li")]
    assert "CTranslate2 4.8.5 refused 2 tasks; the reasons stand below the figures." in said


def test_outputs_that_differ_are_red_and_have_no_bar(page: Element) -> None:
    one = figure(section(page, MODELS), kit.SHAPES[10][0])
    assert not one.all("rect")
    assert [each.text for each in one.all("text", "bad")] == ["✗ outputs differ: 3 of 40 differ"]
    said = [each.text for each in page.all("div", "summary")[0].all("li", "bad")]
    assert any("NOT" in each and kit.SHAPES[10][0] in each and "fastgen, packing off" in each for each in said)
    found = tables(section(page, MODELS))
    assert row(found["Seconds"], kit.SHAPES[10][0])["fastgen, packing off"] == "✗ outputs differ"


def test_growth_is_drawn_in_order_and_in_proportion(page: Element, document: Document) -> None:
    grown = section(page, "Growth with beams and source")
    pictures = [each for each in grown.all("svg") if "swatch" not in each.kinds]
    assert len(pictures) == 3
    for picture in pictures:
        width, height = picture.box()
        curves = [each.points() for each in picture.all("path", "curve") if len(each.points()) == 5]
        assert len(curves) == 3
        for points in curves:
            assert [x for x, _ in points] == sorted({x for x, _ in points})
            assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
        for band in picture.all("path", "band"):
            assert all(0 <= x <= width and 0 <= y <= height for x, y in band.points())
    # The last picture's first curve: stock at 1022 tokens. Time is the distance from the axis.
    bottom = pictures[2].all("path", "axis")[0].points()[0][1]
    seconds = [task["sides"]["stock"]["seconds"] for task in document["tasks"] if "source 1022" in task["name"]]
    (first, *rest) = [bottom - y for _, y in curves[0]]
    assert [each / first for each in rest] == pytest.approx([each / seconds[0] for each in seconds[1:]], rel=0.01)
    x = [x for x, _ in curves[0]]
    assert (x[4] - x[3]) / (x[1] - x[0]) == pytest.approx(8, rel=0.01)  # 8 to 16 beams, 1 to 2


def test_a_grid_is_also_a_table_of_ratios(page: Element, document: Document) -> None:
    found = tables(section(page, "Growth with beams and source"))
    for task in kit.grid():
        line, beams = task["line"], str(task["shape"]["beams"])
        median = f"{task['sides']['fastgen']['ratio']['median']:.2f}x"
        assert row(found["fastgen"], line)[beams] == median
        assert row(found["Seconds by beams"], line, beams)["fastgen"].endswith(median)


def test_growth_says_what_it_does_not_draw() -> None:
    tasks = kit.grid()[:5]
    kit.refused(tasks[1], "ctranslate2", "too many beams")
    tasks[3]["sides"]["fastgen"]["verified"]["different"] = [2]
    document = showing(["lines"], *tasks)
    page = parsed(report.render(document))
    (one,) = [each for each in page.all("figure") if each.all("path", "curve")]
    assert "CTranslate2 4.8.5 at beams 2: refused (too many beams)" in one.text
    assert "fastgen at beams 8: outputs differ (1 of 40 differ)" in one.text
    lengths = sorted(len(each.points()) for each in one.all("path", "curve"))
    assert [each for each in lengths if each > 2] == [4, 4, 5]  # those of two points are whiskers


def test_phases_of_a_bar_sum_up_on_one_scale(page: Element, document: Document) -> None:
    shown = section(page, "Where the time goes")
    units = []
    for task in document["tasks"][:3]:
        bars: dict[str, list[Element]] = {}
        for shape in figure(shown, task["name"]).all("rect"):
            bars.setdefault(shape.attributes["y"], []).append(shape)
        sides = [side for side, result in task["sides"].items() if "phases" in result]
        assert len(bars) == len(sides) == 3
        for side, shapes in zip(sides, bars.values(), strict=True):
            phases = task["sides"][side]["phases"]
            assert [each.kinds for each in shapes] == [[f"phase{number}"] for number in range(len(PHASES))]
            for before, after in itertools.pairwise(shapes):
                assert before.number("x") + before.number("width") == pytest.approx(after.number("x"), abs=0.02)
            length = sum(each.number("width") for each in shapes)
            units.append(length / sum(phases[name] for name in PHASES))
            cells = row(tables(shown)["Seconds by phase"], task["name"], facts.label(document, side))
            assert cells["3 attention"].split()[0] == facts.number(phases["attention"])
            assert cells["3 attention"].split()[1] == f"{phases['attention'] / phases['total']:.0%}"
            assert cells["all"] == facts.number(phases["total"])
    assert units == pytest.approx([units[0]] * 9, rel=0.005)
    legend = [each.text for each in shown.all("ul", "legend")[0].all("li")]
    assert legend == [f"{number} {name}" for number, name in enumerate(PHASES, 1)]


def test_phases_far_apart_have_scales_of_their_own() -> None:
    document = showing(["phases"], kit.task("long", 100), kit.task("short", 0.5))
    page = parsed(report.render(document))
    assert "Each task has a scale of its own." in page.text
    for task in ("long", "short"):
        width = sum(each.number("width") for each in figure(page, task).all("rect")[: len(PHASES)])
        assert width > 300


def test_memory_and_metrics(page: Element, document: Document) -> None:
    task = document["tasks"][0]
    memory = section(page, "Memory")
    shapes = figure(memory, task["name"]).all("rect")
    counts = [task["sides"][side][kind] for kind in charts.KINDS_OF_MEMORY for side in kit.SIDES]  # type: ignore[literal-required]
    widths = [each.number("width") for each in shapes]
    assert [each / widths[0] for each in widths] == pytest.approx([each / counts[0] for each in counts], rel=0.01)
    rows = row(tables(memory)["Memory"], task["name"], "fastgen")
    assert rows["bytes"] == f"{task['sides']['fastgen']['resident_bytes']:,}"
    quality = tables(section(page, "Quality"))["Quality of the outputs"]
    name = document["tasks"][8]["name"]
    assert row(quality, name, "fastgen")["metrics"] == "identical to transformers 5.23.0"
    assert row(quality, name, "fastgen")["BLEU"] == "31.25"
    assert row(quality, name, "CTranslate2 4.8.5, int8 (lossy)")["metrics"] == "not those of transformers 5.23.0"


def test_long_names_are_cut_in_pictures_and_whole_in_the_page() -> None:
    long = "x" * 300
    task = kit.task(long, 10)
    document = showing(EVERYTHING, task)
    label = "a side with a very long name indeed " * 5
    document["sides"]["fastgen"]["label"] = label.strip()
    page = parsed(report.render(document))
    (shown, *_) = [each for each in figure(page, long).all("text") if each.text.startswith("a side")]
    assert shown.text.endswith("…") and len(shown.text) < 60
    assert shown.all("title")[0].children == [label.strip()]
    assert label.strip() in page.text and long in page.text
