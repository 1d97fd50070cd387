"""fastgen-bench: hosts, CTranslate2 and fastgen on the same tasks, verified, then timed in turn, with a report."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fastgen import installing
from fastgen.bench import compare, provenance
from fastgen.bench.document import Document
from fastgen.bench.measure import Settings
from fastgen.bench.sections import Section, needed
from fastgen.bench.suites import SUITES
from fastgen.bench.tasks import Task
from fastgen.cli.exits import Parser, exit_code, positive_number
from fastgen.pipeline.errors import DIFFERENT, UNUSABLE, InputError

NAME = "fastgen-bench"
FOLDERS = {
    "shared": "holds data/ and models/: adds the trained translation model and others",
    "whisper": "Whisper-base as transformers saves it; with --shared",
    "smollm": "SmolLM2-135M as transformers saves it; with --shared",
    "openvino": "holds models exported for OpenVINO (smollm-float32, smollm-int8): adds its sides",
}
SOAK = "soak"
_ROUNDS, _QUICK_ROUNDS = 5, 3


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return exit_code(NAME, lambda: _main(list(sys.argv[1:] if argv is None else argv)), input_error=UNUSABLE)


def parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:16} {(suite.__doc__ or '').splitlines()[0]}" for name, suite in SUITES.items())
    listed += f"\n  {SOAK:16} Random models, options, modes and edits, until an output is not stock's; see --seed"
    result = Parser(
        prog=NAME,
        description="Measure stock transformers, stock fairseq, other engines and fastgen on the same tasks, in turn, "
        "after verifying that outputs agree. Writes a JSON and an HTML report for each suite.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"suites:\n{listed}\n\nExit code: 0 if every output that must be stock's is; 1 if one is not, if a "
        "side of fastgen could not do\nits task, or if --compare finds a regression; 2 if the input is unusable.",
        allow_abbrev=False,
    )
    result.add_argument("suites", nargs="*", metavar="SUITE", help="by name (default: peers); all: every one")
    result.add_argument("--suite", action="append", default=[], metavar="SUITE", help="the same, as an option")
    result.add_argument("--quick", action="store_true", help="smaller tasks and fewer rounds: minutes on two cores")
    result.add_argument("--list", action="store_true", help="show the tasks and their sides, measure nothing")
    result.add_argument("--task", nargs="+", default=[], metavar="NAME", help="only these tasks")
    result.add_argument("--side", nargs="+", default=[], metavar="NAME", help="only these sides, and the reference")
    result.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to generate (default: %(default)s)"
    )
    result.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="of weights and computation (default: %(default)s)",
    )
    result.add_argument(
        "--rounds", type=positive_number, metavar="N", help=f"default: {_ROUNDS}, with --quick {_QUICK_ROUNDS}"
    )
    result.add_argument(
        "--threads", type=positive_number, metavar="N", help="of each side (default: the cores it may use)"
    )
    result.add_argument(
        "--output",
        type=Path,
        default=Path("bench-results"),
        metavar="DIR",
        help="for the results (default: %(default)s)",
    )
    result.add_argument(
        "--counts", action="store_true", help="count operators and allocations instead of measuring time"
    )
    result.add_argument(
        "--compare", nargs="+", type=Path, default=[], metavar="JSON", help="earlier results: fail if one got worse"
    )
    result.add_argument("--png", action="store_true", help="the report as a picture too: needs Chromium or Chrome")
    result.add_argument("--report", type=Path, metavar="JSON", help="measure nothing: make the report of these results")
    for folder, what in FOLDERS.items():
        result.add_argument(f"--{folder}", type=Path, metavar="DIR", help=what)
    soak = result.add_argument_group("soak", "fastgen against stock transformers on random models, options and modes")
    soak.add_argument("--seed", type=int, default=0, metavar="N", help="of the cases (default: %(default)s)")
    soak.add_argument("--first", type=int, default=0, metavar="K", help="begin at this case (default: %(default)s)")
    soak.add_argument("--count", type=positive_number, metavar="N", help="so many cases; with neither: 100")
    soak.add_argument("--minutes", type=float, metavar="M", help="for so long")
    result.add_argument("--quiet", action="store_true", help="no progress line")
    return result


def _main(argv: list[str]) -> int:
    from fastgen.bench import report, run

    args = parser().parse_args(argv)
    if args.report:
        return _report(args.report, args.output)
    if SOAK in (asked := args.suites + args.suite):
        return _soak(args, asked)
    names = _suites(asked)
    baselines = [_baseline(file, names) for file in args.compare]
    settings = _settings(args)
    planned = {name: run.sections(name, args.quick, settings, args.task, args.side) for name in names}
    _check_names(args, names)
    if args.list:
        for name, sections in planned.items():
            print(_listed(name, sections))
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    status = 0
    for name, sections in planned.items():
        if not sections:
            print(f"{name}: none of its tasks was asked for.", file=sys.stderr)
            continue
        kind = f"{'-quick' if args.quick else ''}{'-counts' if args.counts else ''}"
        file = args.output / f"{name}{kind}-{datetime.date.today().isoformat()}.json"
        with _Line(sections, args.quiet) as line:
            found = run.run(name, sections, args.quick, settings, provenance.command([NAME, *argv]), file, line.say)
        page = file.with_suffix(".html")
        report.write(found, page)
        print(report.table(found))
        print(f"\n{file}\n{page}")
        if args.png:
            print(report.png(page, page.with_suffix(".png")) or page.with_suffix(".png"))
        for sentence in (wrong := run.is_wrong(found)):
            print(f"{NAME}: {sentence}.", file=sys.stderr)
        status = max(status, DIFFERENT if wrong else 0)
        if same := [baseline for baseline in baselines if baseline["suite"] == name]:
            findings = compare.compare(same, found)
            print(compare.table(findings), end="")
            if said := compare.sensitivity(same, found):
                print(said)
            status = max(status, compare.status(findings))
    return status


def _soak(args: argparse.Namespace, asked: list[str]) -> int:
    if asked != [SOAK]:
        raise InputError(f"{SOAK} runs alone: it measures nothing.")
    from fastgen.bench.soak import program

    count = args.count or (None if args.minutes else 100)
    same = program.run(args.seed, args.first, count, args.minutes, args.output, args.quiet, args.device, args.dtype)
    return 0 if same else DIFFERENT


def _report(source: Path, output: Path) -> int:
    from fastgen.bench import report

    found = compare.load(source)
    output.mkdir(parents=True, exist_ok=True)
    page = output / source.with_suffix(".html").name
    report.write(found, page)
    print(report.table(found))
    print(f"\n{page}")
    return 0


def _baseline(file: Path, suites: list[str]) -> Document:
    found = compare.load(file)
    if found["suite"] not in suites:
        raise InputError(f"--compare {file} is of the suite {found['suite']}, which is not measured now.")
    return found


def _suites(asked: list[str]) -> list[str]:
    if asked == ["all"]:
        return list(SUITES)
    for name in asked:
        if name not in SUITES:
            raise InputError(f"There is no suite {name!r}: the suites are {', '.join(SUITES)} and {SOAK}.")
    return list(dict.fromkeys(asked)) or ["peers"]


def _settings(args: argparse.Namespace) -> Settings:
    from fastgen.bench.machine import cores

    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise InputError("--device cuda: torch sees no CUDA device.")
    folders = {name: getattr(args, name) for name in FOLDERS if getattr(args, name) is not None}
    for name, folder in folders.items():
        if not folder.is_dir():
            raise InputError(f"--{name} {folder}: there is no such folder.")
    return Settings(
        rounds=args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS),
        threads=args.threads or cores(),
        device=args.device,
        dtype=args.dtype,
        folders={name: str(folder.resolve()) for name, folder in folders.items()},
        counts=args.counts,
    )


def _check_names(args: argparse.Namespace, suites: list[str]) -> None:
    """Before anything slow: names that no suite has, and tasks that lack their data."""
    tasks = [task for name in suites for section in SUITES[name](args.quick) for task in section.tasks]
    known = {"task": [task.name for task in tasks], "side": [side for task in tasks for side in task.sides]}
    for option, names in known.items():
        for name in getattr(args, option):
            if name not in names:
                choices = ", ".join(dict.fromkeys(names))
                raise InputError(f"--{option} {name}: no task of {', '.join(suites)} has it; they have {choices}.")
    sections = [section for name in suites for section in SUITES[name](args.quick) if "metrics" in section.show]
    if any(not args.task or task.name in args.task for section in sections for task in section.tasks):
        for module in ("sacrebleu", "sentencepiece"):
            if importlib.util.find_spec(module) is None:
                raise InputError(f"{module} is needed for the metrics: {installing.command('bench')}.")
    given = {name: "" for name in FOLDERS if getattr(args, name) is not None}
    for task in tasks:
        if task.name in args.task and (missing := needed(task, given)):
            raise InputError(f"--task {task.name} needs {missing}.")


def _listed(suite: str, sections: list[Section]) -> str:
    lines = [f"{suite}: {(SUITES[suite].__doc__ or '').splitlines()[0]}"]
    for section in sections:
        lines += ["", f"  {section.title}. {section.text}"]
        lines += [f"    {task.name:24} {task.what}\n{'':28} {', '.join(task.sides)}" for task in section.tasks]
    return "\n".join(lines) + "\n"


class _Line:
    """What is being done, in one line of standard error."""

    def __init__(self, sections: list[Section], quiet: bool) -> None:
        self._tasks = [task for section in sections for task in section.tasks]
        self._done, self._started = 0, time.monotonic()
        self._shown = not quiet and sys.stderr.isatty()

    def __enter__(self) -> _Line:
        return self

    def say(self, what: str, task: Task | None) -> None:
        if task is None:
            self._done += 1
        elif self._shown:
            minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
            line = f"{minutes}:{seconds:02} task {self._done + 1} of {len(self._tasks)}, {task.name}: {what}"
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
