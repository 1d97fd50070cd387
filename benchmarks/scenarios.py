"""Scenarios: chosen by options, measured one after another, each with a JSON of its own."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring


@dataclass(frozen=True)
class Scenario:
    what: str
    build: Callable[[argparse.Namespace], Any]  # the host's job
    needs: str | None = None  # the option that names its folder
    at_least: float | None = None  # the ratio aimed at, end to end
    decode_at_least: float | None = None  # without encoder or prefill

    def missing(self, args: argparse.Namespace) -> str:
        """The options that it needs and that were not given."""
        needed = ["shared", *({self.needs} - {"shared"})] if self.needs else []
        return " and ".join(f"--{option} DIR" for option in needed if getattr(args, option) is None)


def parse(
    description: str,
    scenarios: Mapping[str, Scenario],
    folders: dict[str, str],
    argv: list[str] | None = None,
) -> argparse.Namespace:
    """`folders`: options that scenarios need, and their help."""
    listed = "\n".join(f"  {name:20} {scenario.what}" for name, scenario in scenarios.items())
    parser = measuring.options(description, rounds=5, epilog=f"scenarios:\n{listed}")
    parser.add_argument("--scenario", nargs="+", choices=scenarios, metavar="NAME", help="default: all that can run")
    for option, text in folders.items():
        parser.add_argument(f"--{option}", type=Path, metavar="DIR", help=text)
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads must be 1 or more")
    args.scenario = args.scenario or [name for name in scenarios if not scenarios[name].missing(args)]
    for name in args.scenario:
        if needed := scenarios[name].missing(args):
            parser.error(f"{name} needs {needed}")
    return args


def run(
    args: argparse.Namespace,
    scenarios: Mapping[str, Scenario],
    measure: Callable[[str, argparse.Namespace], dict[str, Any]],
    show: Callable[[list[dict[str, Any]]], str],
) -> int:
    """Exit status: 1 if one was not timed, because its outputs differ."""
    measuring.begin(args)
    results = []
    for name in args.scenario:
        print(f"{name}: {scenarios[name].what}", file=sys.stderr, flush=True)
        results.append(measure(name, args))
        measuring.write(args.output, name, results[-1])
        gc.collect()
    print(f"{measuring.cpu_model()}, {args.threads} threads, float32, medians of {args.rounds} rounds (min to max)")
    print(", ".join(f"{name} {version}" for name, version in results[0]["versions"].items()))
    print(show(results))
    others = [one["other_processes"].values() for result in results for one in result["rounds"]]
    measuring.say_if_disturbed(max((cores or 0.0 for one in others for cores in one), default=0.0), " in a round")
    return 1 if any(result["end_to_end"] is None for result in results) else 0
