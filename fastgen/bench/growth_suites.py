"""The suites of curves: how time grows with a size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastgen.bench.sections import Section, random_text, task_of


def _grid(
    section: str,
    text: str,
    label: str,
    kept: str,
    model: str,
    sides: tuple[str, ...],
    axis: str,
    points: list[dict[str, Any]],
    by: str,
) -> Section:
    """`points` differ in `axis`, along a curve, and in `by`, between curves; `kept` says what else a curve has."""
    unit = {"batch": "inputs", "beams": "beams", "source": "source tokens", "new": "new tokens"}
    tasks = []
    for point in points:
        line = f"{label}, {f'{point[by]} {unit[by]}' if by else kept}"
        name = "-".join(f"{key}-{point[key]}" for key in ([by, axis] if by else [axis]))
        tasks.append(task_of(name, label, model, sides, **point, axis=axis, line=line))
    return Section(section, text, tasks, ["lines", "ratios", "seconds", "outputs"])


def lightseq_fig5(quick: bool) -> list[Section]:
    """Beam search over batch and length, as figure 5 of the paper on LightSeq (Wang et al., NAACL 2021)."""
    return [_lightseq("Beam search by batch and length", quick, beams=4, options={})]


def lightseq_fig6(quick: bool) -> list[Section]:
    """Sampling over batch and length, as that paper's figure 6."""
    options = {"do_sample": True, "top_k": 32, "top_p": 0.75}
    return [_lightseq("Sampling by batch and length", quick, beams=1, options=options)]


def _lightseq(title: str, quick: bool, beams: int, options: dict[str, Any]) -> Section:
    few = {"layers": 2} if quick else {}
    lengths, batches = ((8, 16), (1, 8)) if quick else ((16, 32, 64), (1, 8, 32))
    points = [
        dict(batch=batch, source=length, new=length, beams=beams, options=options, **few)
        for batch in batches
        for length in lengths
    ]
    text = f"{random_text(quick)} transformer-base, as many new tokens as the source has." + (
        " All sides sample; fastgen draws stock's tokens, CTranslate2 has random numbers of its own." if options else ""
    )
    sides = ("transformers", "ctranslate2", "fastgen")
    return _grid(title, text, "transformer-base", "", "transformer-base", sides, "new", points, by="batch")


def scale(quick: bool) -> list[Section]:
    """How time grows with each size, the others kept."""
    few = {"layers": 2} if quick else {}
    base = dict(batch=2, source=64, new=12, beams=4) if quick else dict(batch=4, source=256, new=32, beams=4)
    steps: dict[str, tuple[int, ...]] = (
        dict(batch=(1, 4), beams=(2, 8), source=(32, 128), new=(8, 24))
        if quick
        else dict(batch=(1, 2, 4, 8, 16), beams=(1, 2, 4, 8), source=(64, 256, 512, 1000), new=(16, 32, 64, 128))
    )
    titles = {"batch": "the batch", "beams": "beams", "source": "the source's length", "new": "the generated length"}
    sides = ("transformers", "fastgen") if quick else ("transformers", "ctranslate2", "fastgen")
    return [
        _grid(
            f"Growth with {titles[axis]}",
            random_text(quick),
            "BART-base",
            ", ".join(f"{key} {value}" for key, value in base.items() if key != axis),
            "bart-base",
            sides,
            axis,
            [{**base, axis: value, **few} for value in values],
            by="",
        )
        for axis, values in steps.items()
    ]


def wide(quick: bool) -> list[Section]:
    """Many beams and few steps, with 100,000 sequences that may be generated: retrieval and recommendation."""
    return [_wide(quick, "T5-small", "t5-small", source=64), _wide(quick, "Qwen3-0.6B", "qwen3-0.6b", source=128)]


def _wide(quick: bool, label: str, model: str, source: int) -> Section:
    allowed, beams = (1000, (10, 40)) if quick else (100_000, (10, 50, 100, 400, 1000))
    sizes = dict(batch=1, source=source, new=8, allowed_outputs=allowed) | ({"layers": 2} if quick else {})
    text = (
        f"{random_text(quick)} {allowed:,} sequences of 8 tokens may be generated: `prefix_allowed_tokens_fn` is a "
        "`fastgen.Trie`, in stock too, or a Python function over nested dictionaries."
    )
    sides = ("transformers", "transformers-function", "fastgen", "fastgen-function")
    kept, points = f"source {source}, new 8", [{**sizes, "beams": each} for each in beams]
    section = _grid(f"Beams of {label}", text, label, kept, model, sides, "beams", points, by="")
    tasks = [replace(task, name=f"{model}-{task.name}") for task in section.tasks]
    return replace(section, tasks=tasks, show=[*section.show, "memory"])
