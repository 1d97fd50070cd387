"""The suite of captioning and of reading: images in, text out."""

from __future__ import annotations

from fastgen.bench.captioners import CAPTIONERS
from fastgen.bench.sections import SHOWN, Section, random_text, task_of

_SIDES = ("transformers", "fastgen")


def captions(quick: bool) -> list[Section]:
    """Captions and texts of images: Florence-2, BLIP, BLIP-2, Donut and TrOCR."""
    sizes = dict(batch=2, new=8, beams=3, layers=1) if quick else dict(batch=8, new=32, beams=3)
    tasks = [
        task_of(f"captions-{name}", f"{one.label}, images of {one.pixels}", name, _SIDES, **sizes)
        for name, one in CAPTIONERS.items()
    ]
    return [Section("Images to text", random_text(quick), tasks, list(SHOWN))]
