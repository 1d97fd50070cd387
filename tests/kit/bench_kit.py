"""A document of `fastgen-bench` as a long run writes it: five sides, tasks of all kinds, and what can go wrong."""

from __future__ import annotations

import random
import statistics
from typing import Any

from fastgen.bench.document import FORMAT, Document, Result, Round, Section, Side, Task
from fastgen.phases import PHASES

SIDES: dict[str, tuple[str, float]] = {  # by name: label, and about how many times as fast as stock
    "stock": ("transformers 5.23.0", 1.0),
    "ctranslate2": ("CTranslate2 4.8.5", 3.6),
    "ctranslate2-int8": ("CTranslate2 4.8.5, int8", 6.5),
    "fastgen": ("fastgen", 6.0),
    "fastgen-off": ("fastgen, packing off", 4.1),
}
MIB = 2**20
EVERYTHING = ["ratios", "lines", "phases", "memory", "seconds", "metrics", "outputs"]  # what a section can show
SHAPES = [
    ("BART-base shape, 8 x 1022 -> 32, 5 beams", 28.2),
    ("BART-base shape, 8 x 512 -> 64, 4 beams", 22.9),
    ("BART-base shape, 8 x 512 -> 64, diverse: 4 groups of 2 beams", 38.9),
    ("ProphetNet-large's layers, 512 wide, 8 x 512 -> 64, 5 beams", 38.4),
    ("UniLM-base shape, 8 x 512 -> 64, 5 beams", 94.3),
    ("GPT-2 shape, 4 prompts of 128 -> 512, 4 beams", 70.5),
    ("transformer-base shape, 32 x 25 -> 30, 4 beams", 3.82),
    ("transformer-base shape, 1 x 25 -> 30, 4 beams", 0.67),
    ("trained translation model (BART, 3+3 layers, 192 wide), 1,000 sentences, batches of 64, 5 beams", 19.1),
    ("Whisper-base, trained, 4 x 11 s of speech, 5 beams", 10.9),
    ("SmolLM2-135M, trained, prompts of 512, 512, 512 and 300 -> 48, 4 beams", 19.7),
    ("t5", 4.1),
]
_PARTS = (0.2, 0.05, 0.3, 0.2, 0.15, 0.07, 0.02, 0.01)  # of stock's seconds, by phase


def result(side: str, task: Task, chance: random.Random, outputs: int = 40) -> Result:
    """What a side makes of a task whose rounds are known."""
    rounds = task["rounds"]
    seconds = statistics.median(each["seconds"][side] for each in rounds)
    ratios = [each["seconds"]["stock"] / each["seconds"][side] for each in rounds]
    found: Result = {
        "seconds": seconds,
        "first_seconds": seconds * 1.4,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "cache_bytes": int((333 if side.startswith("fastgen") else 1482) * MIB * chance.uniform(0.3, 1)),
        "peak_bytes": int(2100 * MIB * chance.uniform(0.8, 1)),
        "resident_bytes": int(3000 * MIB * chance.uniform(0.8, 1)),
        "metrics": {"BLEU": 31.25 if side != "ctranslate2-int8" else 31.02, "chrF": 58.125},
    }
    if not side.startswith("ctranslate2"):
        weights = [part * (chance.uniform(0.2, 0.6) if side != "stock" else 1) for part in _PARTS]
        phases = {name: seconds * weight / sum(weights) for name, weight in zip(PHASES, weights, strict=True)}
        found["phases"] = {**phases, "total": seconds}
    if side.startswith("fastgen"):
        found["tiers"] = {"fast": 5}
    if side != "stock":
        must = side.startswith("fastgen")
        different = [3, 7, 20] if side == "ctranslate2-int8" else []
        same = 0.9731 if different else 1.0
        found["verified"] = {
            "against": "stock",
            "outputs": outputs,
            "different": different,
            "same_tokens": same,
            "must": must,
        }
    return found


def task(name: str, seconds: float, sides: tuple[str, ...] = tuple(SIDES), rounds: int = 5, **more: Any) -> Task:
    """A task on which stock takes about `seconds`."""
    chance = random.Random(name)

    def around(side: str) -> float:
        return seconds / SIDES[side][1] * chance.uniform(0.93, 1.07)

    measured: list[Round] = [
        {
            "seconds": {side: around(side) for side in sides},
            "other_processes": {side: round(chance.uniform(0, 0.06), 3) for side in sides},
        }
        for _ in range(rounds)
    ]
    made: Task = {
        "name": name,
        "what": "random tokens, all decode the same length; keys and values in float32",
        "weights": "random",
        "options": {"num_beams": 4, "max_new_tokens": 64, "length_penalty": 1.0},
        "shape": {"batch": 8, "beams": 4, "source": 512, "new": 64},
        "reference": "stock",
        "rounds": measured,
    }
    made["sides"] = {side: result(side, made, chance) for side in sides}
    made.update(more)  # type: ignore[typeddict-item]
    return made


def grid() -> list[Task]:
    """Seconds by beams, for three lengths of the source."""
    tasks = []
    for source in (128, 512, 1022):
        for beams in (1, 2, 4, 8, 16):
            name = f"BART-base, source {source}, {beams} beams"
            seconds = 0.4 + source / 600 * beams**1.1
            one = task(name, seconds, ("stock", "ctranslate2", "fastgen"), 3)
            one.update(axis="beams", line=f"source of {source} tokens", shape={"batch": 4, "beams": beams})
            for number, each in enumerate(one["rounds"]):  # what fastgen gains grows with the beams
                each["seconds"]["fastgen"] = (0.3 + source / 600 * beams**0.35) * (1 + number / 40)
            one["sides"]["fastgen"] = result("fastgen", one, random.Random(name))
            tasks.append(one)
    return tasks


def refused(one: Task, side: str, reason: str) -> Task:
    """`one` after a side has refused it."""
    one["sides"][side] = {"refused": reason}
    for each in one["rounds"]:
        each["seconds"].pop(side)
    return one


def different(one: Task, side: str, outputs: tuple[int, ...]) -> Task:
    """`one` after outputs of a side that must be equal weren't: nothing is timed."""
    verified = {**one["sides"][side]["verified"], "different": list(outputs), "same_tokens": 0.91}
    one["sides"] = {name: _untimed(each) for name, each in one["sides"].items()}
    one["sides"][side] = {"verified": verified}  # type: ignore[typeddict-item]
    del one["rounds"]
    return one


def _untimed(found: Result) -> Result:
    return {"verified": found["verified"]} if "verified" in found else {}


def side(name: str) -> Side:
    return {
        "label": SIDES[name][0],
        "settings": ["float32, 2 threads", "4 beams, no n-gram blocking", f"{name}'s own defaults otherwise"],
        "lossy": name.endswith("int8"),
        "versions": {"torch": "2.13.0+cpu"} if "ctranslate2" not in name else {"ctranslate2": "4.8.5"},
    }


def document(tasks: list[Task], sections: list[Section], sides: tuple[str, ...] = tuple(SIDES)) -> Document:
    return {
        "fastgen_bench": FORMAT,
        "suite": "paper",
        "command": "fastgen-bench paper --rounds 5 --threads 2",
        "date": "2026-11-24T10:15:00+00:00",
        "machine": {
            "cpu": "AMD EPYC (Zen 5)",
            "cores": 2,
            "threads": 2,
            "memory_bytes": 8 * 2**30,
            "system": "Linux 6.1",
            "device": "cpu",
        },
        "versions": {"python": "3.12.4", "torch": "2.13.0+cpu", "transformers": "5.23.0", "fastgen": "0.1.0"},
        "settings": {"rounds": 5, "threads": 2, "device": "cpu", "dtype": "float32", "quick": False},
        "statements": [
            "Each side runs in a process of its own, with the same inputs, options and threads.",
            "Outputs are compared before anything is timed; the side that goes first changes with each round.",
        ],
        "sides": {name: side(name) for name in sides},
        "sections": sections,
        "tasks": tasks,
    }


def showing(show: list[str], *tasks: Task, sides: tuple[str, ...] = tuple(SIDES)) -> Document:
    """A document of one section, "One"."""
    one: Section = {"title": "One", "text": "", "tasks": [task["name"] for task in tasks], "show": show}
    return document(list(tasks), [one], sides)


def sample() -> Document:
    """All kinds of sections; a refused side, outputs that differ, busy processes, and names that need escaping."""
    tasks = [task(name, seconds) for name, seconds in SHAPES]
    refused(tasks[2], "ctranslate2", "it has no diverse beam search")
    refused(tasks[2], "ctranslate2-int8", "it has no diverse beam search")
    refused(tasks[4], "ctranslate2", "there is no converter for <UniLM> & its masks, which see the source both ways")
    different(tasks[10], "fastgen-off", (1, 3, 5))
    tasks[5]["rounds"][1]["other_processes"]["fastgen"] = 0.84
    tasks[7]["rounds"][0]["other_processes"]["stock"] = None
    names = [each["name"] for each in tasks]
    grown = grid()
    odd = task('<b>&"', 2.0, ("stock", "fastgen"))
    sections: list[Section] = [
        {
            "title": "Beam search of many models",
            "text": "Random weights of well-known shapes, and three trained models.\n\nAll decode in float32.",
            "tasks": names,
            "show": ["ratios", "seconds", "outputs"],
        },
        {
            "title": "Growth with beams and source",
            "text": "How time grows.",
            "tasks": [each["name"] for each in grown],
            "show": ["lines"],
        },
        {
            "title": "Where the time goes",
            "text": "One call of each, timed by phase.",
            "tasks": names[:3],
            "show": ["phases"],
        },
        {"title": "Memory", "text": "Keys and values, and the peak.", "tasks": names[:3], "show": ["memory"]},
        {"title": "Quality", "text": "Trained weights.", "tasks": names[8:10], "show": ["metrics"]},
        {"title": 'Names like <b>&"', "text": "<i>Not</i> markup & so on.", "tasks": ['<b>&"'], "show": ["ratios"]},
    ]
    return document([*tasks, *grown, odd], sections)
