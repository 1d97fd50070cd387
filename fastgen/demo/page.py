"""What the demo shows of a comparison."""

from __future__ import annotations

import textwrap

import fastgen
from fastgen.demo.comparison import SIDES, Job, Result, Side
from fastgen.memory.peak import PeakMemory


def header(job: Job) -> str:
    import torch
    import transformers

    shape = f"{job.beams} beams, batches of {job.batch_size}, at most {job.max_new_tokens} new tokens"
    size = sum(parameter.numel() for parameter in job.model.parameters()) / 1e6
    return "\n".join(
        (
            f"model    {job.name}: {type(job.model).__name__}, {size:.1f}M parameters, float32",
            f"job      {len(job.sources)} inputs, {shape}",
            f"machine  {job.model.device.type}, {torch.get_num_threads()} CPU threads",
            f"versions torch {torch.__version__}, transformers {transformers.__version__}, "
            f"fastgen {fastgen.__version__}",
        )
    )


def samples(result: Result, count: int) -> str:
    """A few inputs and what fastgen's side made of them."""
    job, texts = result.job, result.sides["fastgen"].texts
    lines = ["", "Some outputs:"]
    for i in range(0, len(texts), max(1, -(-len(texts) // count))):
        mark = "" if job.answers is None else " [right]" if texts[i] == job.answers[i] else " [wrong]"
        lines += textwrap.wrap(job.sources[i], 100, initial_indent="  ", subsequent_indent="    ", max_lines=3)
        lines += textwrap.wrap(
            f"{texts[i]}{mark}", 100, initial_indent="    -> ", subsequent_indent="       ", max_lines=6
        )
    return "\n".join(lines)


def table(result: Result) -> str:
    """Stock beside fastgen, with the ratios."""
    stock, ours = (result.sides[name] for name in SIDES)
    total, answers = len(result.job.sources), result.job.answers
    rows: list[tuple[str, str, str, str]] = [("", "stock", "fastgen", "")]
    rows.append(("time *", _seconds(stock), _seconds(ours), _times(result.speed_up, "faster")))
    rows.append(("inputs per second", f"{total / stock.seconds:.1f}", f"{total / ours.seconds:.1f}", ""))
    notes = ["* Of generate(), over all batches, which the two sides took in turn."]
    if stock.peak_bytes and ours.peak_bytes:
        ratio = _times(stock.peak_bytes / ours.peak_bytes, "less")
        rows.append(("peak memory **", _mebibytes(stock.peak_bytes), _mebibytes(ours.peak_bytes), ratio))
        notes.append(f"** {PeakMemory.meaning(result.job.model.device)}")
    else:
        notes.append(PeakMemory.meaning(result.job.model.device))
    if answers is not None:
        right = [f"{accuracy(side.texts, answers):.1%}" for side in (stock, ours)]
        rows.append(("exact match", right[0], right[1], "with the known answers"))
    rows.append(("identical outputs", "", f"{result.identical} of {total}", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [""]
    for row in rows:
        cells = (row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3])
        lines.append("  " + "   ".join(cells).rstrip())
    lines.insert(2, "  " + "-" * (sum(widths[:3]) + 6))
    for note in notes:
        lines += textwrap.wrap(note, 100, initial_indent="  ", subsequent_indent="     ")
    return "\n".join(lines)


def _seconds(side: Side) -> str:
    return f"{side.seconds:.2f} s"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _times(ratio: float, word: str) -> str:
    opposite = {"faster": "slower", "less": "more"}
    return f"{ratio:.2f}x {word}" if ratio >= 1 else f"{1 / ratio:.2f}x {opposite[word]}"


def accuracy(texts: list[str], answers: list[str]) -> float:
    return sum(text == answer for text, answer in zip(texts, answers, strict=True)) / len(answers)


def what_ran(result: Result) -> str:
    """Which of fastgen's beam searches were accelerated, and why others were not."""
    if result.tiers:
        lines = ["", f"Beam searches on fastgen's side ({sum(result.tiers.values())}):"]
        what = {
            "fast": "fast: fastgen's own loop",
            "compat": "compat: transformers' loop over fastgen's cache",
            "stock": "stock: transformers alone",
        }
        for (tier, reason), count in result.tiers.most_common():
            lines.append(f"  {count} x {what[tier]}" + (f" ({reason})" if reason else ""))
        return "\n".join(lines)
    host = next((h for h in fastgen.status().hosts if h.name == "transformers"), None)
    if host is not None and host.state in ("disabled", "left alone", "not imported"):
        why = f" ({host.detail})" if host.detail else ""
        return f"\nNothing was accelerated: transformers is {host.state}{why}."
    if result.job.beams == 1:
        return "\nNothing was accelerated: with --beams 1 there is no beam search."
    return "\nNothing was accelerated: this model's generate() never reached its beam search."


def verdict(result: Result) -> str:
    total, same = len(result.job.sources), result.identical
    if same == total:
        if all(tier == "stock" for tier, _ in result.tiers):
            return f"\nAll {total} outputs are identical; both sides ran stock code."
        return f"\nAll {total} outputs are identical; fastgen was {_times(result.speed_up, 'faster')}."
    stock, ours = (result.sides[name] for name in SIDES)
    first = next(i for i in range(total) if stock.tokens[i] != ours.tokens[i])
    return (
        f"\n{total - same} of {total} outputs differ. The first, input {first + 1}:\n"
        f"  input    {result.job.sources[first]}\n"
        f"  stock    {stock.texts[first]}\n"
        f"  fastgen  {ours.texts[first]}"
    )
