"""All that a CUDA device must answer, in stages of some minutes each; the most valuable first.

    python benchmarks/gpu.py                      # every stage that has not been run yet
    python benchmarks/gpu.py equivalence tables   # these, in this order, run before or not
    python benchmarks/gpu.py --list               # what each does
    python benchmarks/gpu.py --needs              # what must be installed: nothing is downloaded
    python benchmarks/gpu.py --rehearse           # on a CPU, everything tiny: do the programs themselves work?

The commands of a stage run side by side, unless they measure time. Each has a log in the folder of results. The file
gpu.json there says what became of each; a stage whose commands have all ended well is not run again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDS = """\
A build of torch for CUDA, the CUDA toolkit of the same version (nvcc), a C++ compiler, transformers, pytest,
pytest-xdist, hypothesis. For the tests and the cases on other hosts: fairseq (from Python 3.11 on: fairseq-fixed) with
hydra-core, omegaconf, antlr4-python3-runtime and bitarray, and openai-whisper with tiktoken and more-itertools.
compute-sanitizer, which the toolkit brings, for memory checks of the kernels."""
PYTEST = "{python} -m pytest -q -p no:cacheprovider"
CHECK = "from fastgen.cli.check import main; raise SystemExit(main([]))"
SOAK = "import sys; from fastgen.cli.bench import main; raise SystemExit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class Stage:
    """Commands, and what they show; `rehearsal` takes their place on a CPU."""

    name: str
    what: str
    commands: dict[str, str]
    rehearsal: dict[str, str]
    side_by_side: bool = True


def _soaks(device: str, amount: str, seeds: dict[str, tuple[int, ...]]) -> dict[str, str]:
    command = f"{{python}} -c '{SOAK}' soak --device {device} --quiet {amount} --output {{output}}"
    return {
        f"soak-{dtype}-{seed}": f"{command} --dtype {dtype} --seed {seed}" for dtype in seeds for seed in seeds[dtype]
    }


def _collected(*folders: str) -> dict[str, str]:
    return {"tests": f"{PYTEST} -n 0 -m gpu --collect-only {' '.join(folders)}"}


_SANITIZED = f"{PYTEST} -n 0 -m gpu tests/ops/test_topk.py tests/ops/test_ngrams.py -k"
_TIMED = "{python} benchmarks/bench_gpu.py --output {output}"
_REHEARSED = f"{_TIMED} --rehearse --rounds 1"
_FLOAT32 = "--name gpu-float32 --dtype float32"
_SLIM = "--name gpu-slim --cache x --case whisper-small-8 t5-base-32"
_WIDE = "--name gpu-wide --case bart-large-wide-1 gpt2-wide-1"
STAGES = [
    Stage(
        "build",
        "compiles the operators for the CPU and for the device",
        {"check": f"{{python}} -c '{CHECK}'"},
        {"check": f"{{python}} -c '{CHECK}'"},
    ),
    Stage(
        "operators",
        "tests of the CUDA and Triton kernels, once more under compute-sanitizer",
        {
            "tests": f"{PYTEST} -n 6 -m gpu tests/ops",
            "memcheck": f"compute-sanitizer --tool memcheck {_SANITIZED} 'topk_on_cuda or ngrams_on_cuda'",
            "racecheck": f"compute-sanitizer --tool racecheck {_SANITIZED} 'long_rows'",
        },
        {
            **_collected("tests/ops"),
            "emulated": f"{PYTEST} -n 0 tests/ops/test_emulated_cuda.py -k 'orders or sizes and random and few'",
        },
    ),
    Stage(
        "equivalence",
        "families and options of all hosts, in three precisions, with graphs and without; random cases",
        {
            "tests": f"{PYTEST} -n 10 -m gpu tests/optimizer",
            **_soaks("cuda", "--minutes 1.5", {"float32": (301, 302, 303), "float16": (311,), "bfloat16": (321,)}),
        },
        {
            **_collected("tests/optimizer"),
            **_soaks("cpu", "--count 2", {"float32": (301,), "float16": (311,), "bfloat16": (321,)}),
        },
    ),
    Stage(
        "tables",
        "FastSeq's models at the sizes of its tables, and single inputs, stock beside fastgen, in float16",
        {"float16": _TIMED},
        {"float16": _REHEARSED},
        side_by_side=False,
    ),
    Stage(
        "float32",
        "the same in float32, with every token compared",
        {"float32": f"{_TIMED} {_FLOAT32}"},
        {"float32": f"{_REHEARSED} {_FLOAT32} --case bart-large-32 fairseq-big-128"},
        side_by_side=False,
    ),
    Stage(
        "slim",
        "attention to Whisper-large's source with slim caches, whole calls with slim caches, and wide beams",
        {
            "attention": "{python} benchmarks/bench_slim.py --gpu --output {output}",
            "slim": f"{_TIMED} --minutes 4 {_SLIM}",
            "wide": f"{_TIMED} --minutes 4 {_WIDE}",
        },
        {
            "attention": "TRITON_INTERPRET=1 {python} benchmarks/bench_slim.py --gpu --rehearse --output {output}",
            "slim": f"{_REHEARSED} {_SLIM} --dtype float32",  # half precision is slow on a CPU
            "wide": f"{_REHEARSED} {_WIDE} --dtype float32",
        },
        side_by_side=False,
    ),
]
REHEARSED_AT_ONCE = 2  # commands: a CPU has few cores


def run(stage: Stage, is_rehearsal: bool, output: Path, minutes: float) -> dict[str, dict[str, object]]:
    """The commands' exit codes, seconds and last lines."""
    folder = output / stage.name
    folder.mkdir(parents=True, exist_ok=True)
    commands = stage.rehearsal if is_rehearsal else stage.commands
    ends = time.monotonic() + 60 * minutes
    # Nothing is measured in a rehearsal.
    workers = REHEARSED_AT_ONCE if is_rehearsal else len(commands) if stage.side_by_side else 1
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        found = {name: pool.submit(_run, command, folder / f"{name}.log", ends) for name, command in commands.items()}
        return {name: future.result() for name, future in found.items()}


def _run(command: str, log: Path, ends: float) -> dict[str, object]:
    command = command.format(python=sys.executable, output=log.parent)
    if command.startswith("compute-sanitizer") and shutil.which("compute-sanitizer") is None:
        return {"code": 127, "seconds": 0.0, "end": ["there is no compute-sanitizer"]}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command}"],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )
        try:
            code = process.wait(max(1.0, ends - start))
        except subprocess.TimeoutExpired:
            process.kill()
            code = 124
    lines = log.read_text(errors="replace").splitlines()
    return {"code": code, "seconds": round(time.monotonic() - start, 1), "end": lines[-12:]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="by name; default: those not run yet")
    parser.add_argument("--output", type=Path, default=Path("gpu-results"), metavar="DIR")
    parser.add_argument("--minutes", type=float, default=9.0, metavar="M", help="for each stage (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, everything tiny")
    parser.add_argument("--list", action="store_true", help="name the stages, run none")
    parser.add_argument("--needs", action="store_true", help="say what must be installed, run nothing")
    args = parser.parse_args()
    known = {stage.name: stage for stage in STAGES}
    if unknown := [name for name in args.stages if name not in known]:
        parser.error(f"there is no stage {unknown[0]!r}: the stages are {', '.join(known)}")
    if args.list or args.needs:
        print(NEEDS if args.needs else "\n".join(f"{stage.name:12} {stage.what}" for stage in STAGES))
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / ("rehearsal.json" if args.rehearse else "gpu.json")
    results = json.loads(file.read_text()) if file.exists() else {}
    names = args.stages or [
        name for name in known if any(each["code"] for each in results.get(name, {"": {"code": 1}}).values())
    ]
    for name in names:
        print(f"== {name}: {known[name].what}", flush=True)
        results[name] = run(known[name], args.rehearse, args.output.resolve(), args.minutes)
        file.write_text(json.dumps(results, indent=1) + "\n")
        for command, found in results[name].items():
            print(f"{command}: exit code {found['code']} after {found['seconds']} s")
            print(*(f"    {line[:300]}" for line in found["end"]), sep="\n", flush=True)
    return int(any(each["code"] for name in names for each in results[name].values()))


if __name__ == "__main__":
    sys.exit(main())
