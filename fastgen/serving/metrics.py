"""Writes counters, gauges and histograms in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import fastgen
from fastgen.serving.counts import Counts
from fastgen.serving.histograms import Histogram

_GAUGES = ("running", "queued")
_NAMES = {"requests": "accepted"}  # `requests` is the count by status
_HELP = {
    "requests": "Requests that entered the queue",
    "finished": "Requests that were answered",
    "failed": "Requests that failed, those beyond their deadline among them",
    "refused": "Requests refused since the queue was full",
    "expired": "Requests that took longer than they may",
    "cancelled": "Requests whose client went away",
    "freed_rows": "Rows that left a batch before their end",
    "inputs": "Inputs of all requests",
    "tokens": "Tokens generated",
    "steps": "Steps of the batches",
    "rows": "Rows decoded, summed over the steps",
    "running": "Rows that decode now",
    "queued": "Inputs that wait now",
}


def written(model: str, counts: Counts, statuses: Mapping[int, int], histograms: Iterable[Histogram] = ()) -> str:
    """All metrics, labelled with the model's name and fastgen's version; requests also by HTTP status."""
    labels = f'model="{escaped(shown(model))}",version="{escaped(fastgen.__version__)}"'
    lines = [
        "# HELP fastgen_requests_total Requests to /v1, by the status of the answer",
        "# TYPE fastgen_requests_total counter",
    ]
    for status, number in sorted(statuses.items()):
        lines.append(f'fastgen_requests_total{{{labels},status="{status}"}} {number}')
    for name, value in asdict(counts).items():
        kind = "gauge" if name in _GAUGES else "counter"
        full = f"fastgen_{_NAMES.get(name, name)}" + ("" if kind == "gauge" else "_total")
        lines += [f"# HELP {full} {_HELP[name]}", f"# TYPE {full} {kind}", f"{full}{{{labels}}} {value}"]
    for histogram in histograms:
        lines += histogram.lines(labels)
    return "\n".join(lines) + "\n"


def shown(model: str) -> str:
    """A model's name as given; for a folder only the last part, as paths reveal details of the machine."""
    return Path(model).resolve().name if Path(model).exists() else model


def escaped(value: str) -> str:
    """Escape a label's value by the rules of Prometheus."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
