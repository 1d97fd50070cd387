"""A table that shows how exact the slim caches of a model are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fastgen.cache.slim.accuracy import Verdict

KINDS = ("x", "k", "v")  # of the caches in the table


@dataclass(frozen=True)
class Layer:
    """One attention module of the decoder."""

    module: nn.Module
    name: str
    is_cross_attn: bool  # attends to the encoder output
    verdicts: dict[str, Verdict]  # by kind of cache


@dataclass(frozen=True)
class Inspection:
    """How exact each layer's attention would be with each kind of slim cache; print it."""

    model: str
    layers: tuple[Layer, ...]

    def __str__(self) -> str:
        header = ("attention", "kv", "x or e", "k", "condition", "v", "condition")
        rows = [header, *map(_cells, self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join((cell.rjust if place else cell.ljust)(widths[place]) for place, cell in enumerate(row))
            for row in rows
        ]
        reasons = [
            f"{layer.name}, {kind}: {verdict.reason}"
            for layer in self.layers
            for kind, verdict in layer.verdicts.items()
            if verdict.error is None
        ]
        return "\n".join([f"{self.model}: error of attention, relative to its largest number", *lines, *reasons])


def _cells(layer: Layer) -> tuple[str, ...]:
    x, k, v = (layer.verdicts[kind] for kind in KINDS)
    plain = next((one.plain_error for one in (x, k, v) if one.plain_error is not None), None)
    conditions = ["-" if one.condition is None else f"{one.condition:.1e}" for one in (k, v)]
    first = "-" if plain is None else f"{plain:.1e}"
    return layer.name, first, str(x), str(k), conditions[0], str(v), conditions[1]
