"""Who gains how much, beside what else one would install: the README's table and picture, from the newest results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from table_markup import table

Result = Callable[[str], dict[str, Any]]  # the newest of a scenario's results, by its name
_PEERS = {"ctranslate2": "CTranslate2", "llamacpp": "llama.cpp", "openvino": "OpenVINO"}
# Who, the suite and the task, and which sides people would otherwise install.
_TASKS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("translation, many sentences", "peers", "ddtp", ("ctranslate2",)),
    ("translation, one sentence", "peers", "transformer-base-1", ("ctranslate2",)),
    ("summaries", "peers", "bart-base", ("ctranslate2",)),
    ("text in images", "captions", "captions-trocr-base", ()),
    ("captions", "captions", "captions-blip-base", ()),
    ("captions, a large image tower", "captions", "captions-florence2-base", ()),
    ("retrieval, many beams over a trie", "wide-zen4", "t5-small-beams-400", ()),
    ("chat, one prompt, greedy", "peers", "greedy-smollm-64", ("ctranslate2", "llamacpp", "openvino")),
)


@dataclass(frozen=True)
class Gain:
    who: str
    what: str
    stock: str  # the host
    seconds: float  # of the stock host
    peers: dict[str, float]  # how many times as fast as the stock host, by name
    fastgen: float


def gains(result: Result) -> list[Gain]:
    machines = {suite: result(suite)["machine"]["cpu"] for suite in ("speech", *(suite for _, suite, _, _ in _TASKS))}
    assert len(set(machines.values())) == 1, f"the README says that all rows are of one machine: {machines}"
    rows = [_of_suite(result(suite), who, name, peers) for who, suite, name, peers in _TASKS]
    rows.insert(-1, _of_speech(result("speech")))
    return rows


def _of_suite(document: dict[str, Any], who: str, name: str, peers: Iterable[str]) -> Gain:
    (task,) = (task for task in document["tasks"] if task["name"] == name)
    sides = task["sides"]
    verified = sides["fastgen"]["verified"]
    assert not verified["different"] and not verified.get("near_ties"), f"{name}: outputs differ from stock's"
    others = {_PEERS[peer]: sides[peer]["ratio"]["median"] for peer in peers}
    stock = task["reference"]
    return Gain(who, task["what"], stock, sides[stock]["seconds"], others, sides["fastgen"]["ratio"]["median"])


def _of_speech(document: dict[str, Any]) -> Gain:
    """One long recording; whisper itself takes part in the first rounds alone."""
    (task,) = (task for task in document["tasks"] if task["task"] == "long")
    ours = task["sides"]["fastgen"]
    assert ours["same"] == ours["of"], "fastgen's transcript differs from whisper's"
    rounds = [one for one in task["rounds"] if "whisper" in one]

    def ratio(side: str) -> float:
        return statistics.median(one["whisper"]["seconds"] / one[side]["seconds"] for one in rounds)

    seconds = statistics.median(one["whisper"]["seconds"] for one in rounds)
    what = f"Whisper-base, {task['sound']:.0f} s of speech, 5 beams"
    return Gain("speech", what, "whisper", seconds, {"faster-whisper": ratio("faster-whisper")}, ratio("fastgen"))


def shown(result: Result) -> str:
    from fastgen.bench.report import facts

    rows = []
    for gain in gains(result):
        others = ", ".join(f"{name} {facts.times(ratio)}" for name, ratio in gain.peers.items())
        stock = f"{facts.seconds(gain.seconds)} ({gain.stock})"
        rows.append((gain.who, gain.what, stock, others or "–", f"**{facts.times(gain.fastgen)}**"))
    return table(("who", "task, float32", "stock", "what else one would install", "fastgen"), rows)


def of_other_hosts(result: Result) -> str:
    """A sentence on fairseq and whisper: the least and the largest medians."""
    tasks = [task for task in result("peers")["tasks"] if {"fairseq", "fastgen-fairseq"} <= task["sides"].keys()]
    rounds = [[one["seconds"] for one in task["rounds"]] for task in tasks]
    fairseq = [statistics.median(one["fairseq"] / one["fastgen-fairseq"] for one in each) for each in rounds]
    whisper, peer = [], []
    for task in result("speech")["tasks"]:
        for against, found in (("whisper", whisper), ("faster-whisper", peer)):
            shared = [one for one in task["rounds"] if against in one]
            found.append(statistics.median(one[against]["seconds"] / one["fastgen"]["seconds"] for one in shared))
    (a, b), (c, d), (e, f) = ((f"{min(some):.1f}", f"{max(some):.1f}") for some in (fairseq, whisper, peer))
    return (
        f"fairseq is {a} to {b} times as fast with fastgen there, and whisper's `transcribe` {c} to {d} times, one "
        f"recording after the other, which is {e} to {f} times as fast as faster-whisper: see "
        "[whisper](whisper.md#speed)."
    )
