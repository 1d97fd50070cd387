"""Numbers in words, the table for a terminal, and the scales of pictures."""

from __future__ import annotations

import itertools
import re

import bench_kit as kit
import pytest

from fastgen.bench import report
from fastgen.bench.report import drawing, facts, summary


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (123.4, "123 s"),
        (1234.5, "1,234 s"),
        (28.21, "28.2 s"),
        (4.416, "4.42 s"),
        (0.2099, "0.210 s"),
        (0.01234, "0.0123 s"),
        (0.0, "0.000 s"),
        (None, "–"),
    ],
)
def test_seconds(value: float | None, words: str) -> None:
    assert facts.seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.0, "100%"),
        (0.99999, "99.999%"),
        (0.9996, "99.960%"),
        (0.99, "99%"),
        (0.9731, "97.3%"),
        (0.0, "0%"),
        (0.0001, "0.010%"),
        (0.5, "50%"),
        (0.1, "10%"),
        (0.05, "5%"),
    ],
)
def test_parts_are_never_rounded_to_all_or_nothing(value: float, words: str) -> None:
    assert facts.part(value) == words


@pytest.mark.parametrize("largest", [0.003, 0.7, 1.0, 6.5, 7.3, 13.9, 94.4, 1234.0])
def test_ticks_reach_the_largest_and_not_far_beyond(largest: float) -> None:
    marks = drawing.ticks(largest)
    assert marks[0] == 0
    steps = {round(after - before, 9) for before, after in itertools.pairwise(marks)}
    assert len(steps) == 1
    assert largest <= marks[-1] < largest + max(steps)
    assert 3 <= len(marks) <= 8


def test_ticks_of_nothing() -> None:
    assert drawing.ticks(0) == [0, 1]


def test_text_is_cut_to_its_width() -> None:
    assert drawing.cut("short", 200) == "short"
    for text in ("a long name " * 20, "長い名前" * 20):
        short = drawing.cut(text, 200)
        assert short.endswith("…") and drawing.width_of(short) <= 200
        assert drawing.width_of(short) > 150
    assert drawing.width_of("長い") > drawing.width_of("ab")


def test_hatching_stays_in_its_box() -> None:
    picture = drawing.Drawing(100, 50, "hatched")
    picture.hatch(10, 20, 33, 14)
    places = [tuple(map(float, each)) for each in re.findall(r"[ML]([\d.]+) ([\d.]+)", "".join(picture.parts))]
    assert len(places) >= 10
    assert all(10 <= x <= 43 and 20 <= y <= 34 for x, y in places)
    assert {x for x, _ in places} >= {10.0, 43.0}  # it reaches both sides


def test_the_table_for_a_terminal() -> None:
    document = kit.sample()
    lines = report.table(document).splitlines()
    assert lines[0] == "Beam search of many models" and lines[3].strip("-") == ""
    first = lines.index(kit.SHAPES[0][0])
    fastgen = next(line for line in lines[first:] if line.startswith("  fastgen "))
    result = document["tasks"][0]["sides"]["fastgen"]
    assert fastgen.split("  ")[-1] == facts.ratio(result)
    assert "40 same" in fastgen and facts.seconds(result["seconds"]) in fastgen
    end = lines.index("Growth with beams and source")
    ends = {line.index(" s ") for line in lines[first:end] if re.search(r"\d s  ", line)}
    assert len(ends) == 1  # numbers stand to the right, below each other
    assert any(line.endswith("3 of 40 differ") for line in lines)
    assert any(line.endswith("refused: it has no diverse beam search") for line in lines)
    assert any("97.3% of tokens same" in line for line in lines)
    assert len(fastgen) < 90  # long names and reasons pass their columns, and don't widen them
    assert lines.count(kit.SHAPES[0][0]) == 1  # though three sections have it
    assert lines[-1] == summary.sentences(document)[-1].text
    assert not any(line != line.rstrip() for line in lines)


def test_busy_processes_are_counted() -> None:
    task = kit.task("a", 1, ("stock", "fastgen"), rounds=3)
    task["rounds"][0]["other_processes"] = {"stock": 0.1, "fastgen": 0.1001}
    task["rounds"][2]["other_processes"] = {"stock": None}
    section = {"title": "", "text": "", "tasks": ["a"], "show": []}
    document = kit.document([task], [section])  # type: ignore[list-item]
    assert facts.busy(document) == (6, 1, 2, 0.1001)
    for each in task["rounds"]:
        each["other_processes"] = {}
    assert "doesn't tell" in summary.sentences(document)[-1].text


def test_ratios_are_said_for_each_reference() -> None:
    one, two = kit.task("one", 10, ("stock", "fastgen")), kit.task("two", 10, ("stock", "fastgen", "ctranslate2"))
    two["reference"] = "ctranslate2"
    document = kit.document([one, two], [])
    said = [each.text for each in summary.sentences(document)]
    ours = [each for each in said if each.startswith("fastgen: ")]
    assert len(ours) == 2
    assert "transformers 5.23.0 in “one”" in ours[0] and "CTranslate2 4.8.5 in “two”" in ours[1]
