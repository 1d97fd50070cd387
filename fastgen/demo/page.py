"""What the demo says of a comparison: on the terminal, and in the parts that its report shows too."""

from __future__ import annotations

import importlib
import textwrap
from dataclasses import dataclass

import fastgen
from fastgen.demo.comparison import SIDES, Result, Side, Work
from fastgen.memory.peak import PeakMemory
from fastgen.pipeline.errors import counted


def facts(job: Work) -> dict[str, str]:
    """What is decoded, where, and with which versions."""
    import torch

    size = sum(parameter.numel() for parameter in job.model.parameters()) / 1e6
    host = importlib.import_module(job.host)
    return {
        "model": f"{job.name}: {type(job.model).__name__}, {size:.1f}M parameters, float32",
        "job": job.shape(),
        "machine": f"{job.model.device.type}, {counted(torch.get_num_threads(), 'CPU thread')}",
        "versions": f"torch {torch.__version__}, {job.host} {host.__version__}, fastgen {fastgen.__version__}",
    }


def header(job: Work) -> str:
    return "\n".join(f"{name:8} {text}" for name, text in facts(job).items())


def shown(result: Result, count: int) -> list[int]:
    """Which outputs are shown: `count` at most, evenly spread."""
    total = len(result.job.sources)
    return list(range(0, total, max(1, -(-total // count))))


def mark(result: Result, index: int) -> str:
    """Whether an output of fastgen's side is the known answer; nothing if none is known."""
    answers = result.job.answers
    if answers is None:
        return ""
    return "right" if result.sides["fastgen"].texts[index] == answers[index] else "wrong"


def samples(result: Result, count: int) -> str:
    """A few inputs and what fastgen's side made of them."""
    job, texts = result.job, result.sides["fastgen"].texts
    lines = ["", "Some outputs:"]
    for i in shown(result, count):
        ending = f" [{found}]" if (found := mark(result, i)) else ""
        lines += textwrap.wrap(job.sources[i], 100, initial_indent="  ", subsequent_indent="    ", max_lines=3)
        lines += textwrap.wrap(
            f"{texts[i]}{ending}", 100, initial_indent="    -> ", subsequent_indent="       ", max_lines=6
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Row:
    """Of the table: stock beside fastgen, and the ratio in words."""

    what: str
    stock: str
    fastgen: str
    ratio: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        return self.what, self.stock, self.fastgen, self.ratio


def rows(result: Result) -> tuple[list[Row], list[str]]:
    """Stock beside fastgen, with the ratios; and the notes below the table."""
    stock, ours = (result.sides[name] for name in SIDES)
    job = result.job
    found = [Row("time *", _seconds(stock), _seconds(ours), times(result.speed_up, "faster"))]
    what, amount = job.amount()
    found.append(Row(f"{what} per second", f"{amount / stock.seconds:.1f}", f"{amount / ours.seconds:.1f}"))
    notes = [f"* Of {job.call}, over all {job.inputs}, which the two sides took in turn."]
    meaning = PeakMemory.meaning(job.model.device, job.call, job.memory_part)
    if stock.peak_bytes and ours.peak_bytes:
        ratio = times(stock.peak_bytes / ours.peak_bytes, "less")
        found.append(Row("peak memory **", _mebibytes(stock.peak_bytes), _mebibytes(ours.peak_bytes), ratio))
        meaning = f"** {meaning}"
    notes.append(meaning)
    if job.answers is not None:
        right = [f"{accuracy(side.texts, job.answers):.1%}" for side in (stock, ours)]
        found.append(Row("exact match", right[0], right[1], "with the known answers"))
    found.append(Row("identical outputs", "", f"{result.identical} of {len(job.sources)}"))
    return found, notes


def table(result: Result) -> str:
    """The rows, for the terminal."""
    found, notes = rows(result)
    cells = [("", *SIDES, ""), *(row.cells for row in found)]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    lines = [""]
    for row in cells:
        padded = (row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3])
        lines.append("  " + "   ".join(padded).rstrip())
    lines.insert(2, "  " + "-" * (sum(widths[:3]) + 6))
    for note in notes:
        lines += textwrap.wrap(note, 100, initial_indent="  ", subsequent_indent="     ")
    return "\n".join(lines)


def _seconds(side: Side) -> str:
    return f"{side.seconds:.2f} s"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def times(ratio: float, word: str) -> str:
    opposite = {"faster": "slower", "less": "more"}
    return f"{ratio:.2f}x {word}" if ratio >= 1 else f"{1 / ratio:.2f}x {opposite[word]}"


def accuracy(texts: list[str], answers: list[str]) -> float:
    return sum(text == answer for text, answer in zip(texts, answers, strict=True)) / len(answers)


def tiers(result: Result) -> list[str]:
    """Which of the searches on fastgen's side were accelerated, and why others were not; empty if there were none."""
    name = result.job.host
    what = {
        "fast": "fast: fastgen's own loop",
        "compat": f"compat: the loop of {name} over fastgen's cache",
        "stock": f"stock: {name} alone",
    }
    return [
        f"{count} x {what[tier]}" + (f" ({reason})" if reason else "")
        for (tier, reason), count in result.tiers.most_common()
    ]


def why_nothing_ran(result: Result) -> str:
    """Why no search of the host's was reached on fastgen's side, in a sentence."""
    name = result.job.host
    host = next((each for each in fastgen.status().hosts if each.name == name), None)
    if host is not None and host.state in ("disabled", "left alone", "not imported"):
        why = f" ({host.detail})" if host.detail else ""
        return f"Nothing was accelerated: {name} is {host.state}{why}."
    return f"Nothing was accelerated: {result.job.call} of this model never reached a search that fastgen knows."


def what_ran(result: Result) -> str:
    """`tiers`, for the terminal."""
    if not result.tiers:
        return f"\n{why_nothing_ran(result)}"
    head = f"Searches on fastgen's side ({sum(result.tiers.values())}):"
    return "\n".join(["", head, *(f"  {line}" for line in tiers(result))])


def conclusion(result: Result) -> str:
    """Whether the outputs are identical, and how much faster fastgen was, in a sentence."""
    total = len(result.job.sources)
    if not result.all_identical:
        return f"{total - result.identical} of {total} outputs differ."
    same = f"All {total} outputs are identical" if total > 1 else "The output is identical"
    if all(tier == "stock" for tier, _ in result.tiers):
        return f"{same}; both sides ran stock code."
    return f"{same}; fastgen was {times(result.speed_up, 'faster')}."


def first_difference(result: Result) -> int:
    """The first source whose outputs differ."""
    stock, ours = (result.sides[name] for name in SIDES)
    return next(i for i in range(len(result.job.sources)) if stock.tokens[i] != ours.tokens[i])


def verdict(result: Result) -> str:
    """The conclusion, for the terminal, with the first output that differs."""
    if result.all_identical:
        return f"\n{conclusion(result)}"
    stock, ours = (result.sides[name] for name in SIDES)
    first = first_difference(result)
    return (
        f"\n{conclusion(result)} The first, input {first + 1}:\n"
        f"  input    {result.job.sources[first]}\n"
        f"  stock    {stock.texts[first]}\n"
        f"  fastgen  {ours.texts[first]}"
    )
