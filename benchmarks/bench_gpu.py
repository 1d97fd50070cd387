"""FastSeq's models at the sizes of its tables, and single inputs, on a CUDA device: stock and fastgen in turn.

    python benchmarks/bench_gpu.py                          # all cases, in float16
    python benchmarks/bench_gpu.py --case bart-large-32 --dtype float32
    python benchmarks/bench_gpu.py --profile bart-large-1   # which operators a call spends its time in
    python benchmarks/bench_gpu.py --rehearse               # tiny cases on the CPU: does the program itself work?

Random weights in the models' true shapes, so lengths are forced equal. All sides run in one process: stock with
fastgen disabled, fastgen as it is by default, and fastgen without CUDA graphs. Each case is warmed up once
for each side, which compares the outputs, and is then timed in turns. Results are written after each case. The exit
code is 1 if a case failed or tokens in float32 differ where stock has no near-tie, 2 if the time was up. "bound" is
what a decode step takes at least: the decoder's weights and the cache, each read once, at the bandwidth measured here.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_ops import copy_bandwidth
from measuring import RESULTS, environment, quieten, write

import fastgen
from fastgen.bench import fairseq_models, models
from fastgen.bench.machine import describe
from fastgen.bench.tasks import Task
from fastgen.config import CACHES

WITHOUT = "fastgen without graphs"
SIDES = ("stock", "fastgen", WITHOUT)


@dataclass(frozen=True)
class Case:
    """A model by name, on a host, and the sizes of a call."""

    name: str
    host: str
    model: str
    sizes: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        return Task(self.name, self.name, self.model, ("transformers",), **self.sizes, options=self.options)


_SUMMARY = dict(source=1024, new=140, beams=4)
_BANS = {"no_repeat_ngram_size": 3}
_FEW_WORDS = 500
CASES = [
    Case("bart-large-32", "transformers", "bart-large", dict(batch=32, **_SUMMARY), _BANS),
    Case("bart-large-1", "transformers", "bart-large", dict(batch=1, **_SUMMARY), _BANS),
    Case("fairseq-big-128", "fairseq", "transformer-big", dict(batch=128, source=25, new=30, beams=4)),
    Case("fairseq-bart-large-32", "fairseq", "bart-large", dict(batch=32, **_SUMMARY)),
    Case("gpt2-16", "transformers", "gpt2", dict(batch=16, source=512, new=128, beams=4), _BANS),
    Case("t5-base-32", "transformers", "t5-base", dict(batch=32, source=512, new=140, beams=4), _BANS),
    Case("transformer-base-1", "transformers", "transformer-base", dict(batch=1, source=25, new=30, beams=4)),
    Case("fairseq-big-1", "fairseq", "transformer-big", dict(batch=1, source=25, new=30, beams=4)),
    Case("distilbart-32", "transformers", "distilbart-12-6", dict(batch=32, **_SUMMARY), _BANS),
    Case("bart-large-128", "transformers", "bart-large", dict(batch=128, **_SUMMARY), _BANS),
    Case("whisper-small-8", "transformers", "whisper-small", dict(batch=8, new=120, beams=5)),
    Case("prophetnet-32", "transformers", "prophetnet-large", dict(batch=32, source=512, new=64, beams=4), _BANS),
    Case("t5-base-greedy-1", "transformers", "t5-base", dict(batch=1, source=128, new=128, beams=1)),
    Case("gpt2-greedy-1", "transformers", "gpt2", dict(batch=1, source=512, new=128, beams=1)),
    Case("fairseq-gpt2-16", "fairseq", "gpt2", dict(batch=16, source=256, new=128, beams=4)),
]
# Only by name: --case.
WIDE = [
    Case("bart-large-wide-1", "transformers", "bart-large", dict(batch=1, source=512, new=64, beams=64)),
    Case("gpt2-wide-1", "transformers", "gpt2", dict(batch=1, source=512, new=64, beams=64)),
]


def _tiny(case: Case) -> Case:
    few = {"layers": 1, "batch": min(2, case.sizes["batch"]), "new": 8, "source": min(16, case.sizes.get("source", 0))}
    return Case(case.name, case.host, case.model, case.sizes | few, case.options)


def _make_inputs_small() -> None:
    """Small vocabularies, and short sounds for Whisper: they take most of a rehearsal's time on a CPU."""
    last = _FEW_WORDS - 1
    fewer: dict[str | tuple[str, ...], dict[str, int]] = {
        "GPT2": {"vocab_size": _FEW_WORDS, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), last)},
        "Whisper": {"max_source_positions": 50},  # whose special tokens come last
        ("Bart", "Marian", "T5", "ProphetNet"): {"vocab_size": _FEW_WORDS},
    }
    for name, shape in models.SHAPES.items():
        for kind, config in fewer.items():
            if shape.cls.startswith(kind):
                models.SHAPES[name] = replace(shape, config=shape.config | config)
    for name, (architecture, _, sizes) in fairseq_models.ARCHITECTURES.items():
        fairseq_models.ARCHITECTURES[name] = (architecture, _FEW_WORDS, sizes)


def _runner(case: Case, device: str, dtype: str) -> Any:
    from fastgen.bench.runners import fairseq as on_fairseq
    from fastgen.bench.runners import transformers as on_transformers

    order = {"task": case.task.as_dict(), "folders": {}, "device": device, "dtype": dtype, "options": {}}
    with torch.device(device):  # where random weights are drawn sooner
        return (on_fairseq if case.host == "fairseq" else on_transformers).Runner(order)


class Timer:
    """Runs a side of a case and waits for the device."""

    def __init__(self, device: str, cache: str) -> None:
        self._cache = cache
        self._wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._is_cuda = device == "cuda"

    def __call__(self, side: str, runner: Any) -> tuple[float, int, Any]:
        """Seconds, the most bytes allocated, and the outputs."""
        with ExitStack() as stack:
            if side == "stock":
                stack.enter_context(fastgen.disabled())
            else:
                stack.enter_context(fastgen.configured(cuda_graphs=side != WITHOUT, cache=self._cache, history=8))
            if self._is_cuda:
                torch.cuda.reset_peak_memory_stats()
            self._wait()
            start = time.perf_counter()
            found = runner.generate()
            self._wait()
            seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if self._is_cuda else 0
        return seconds, peak, runner.outputs(found)


def _verdict(case: Case, runner: Any) -> str:
    """In float32, why tokens may differ, judged as the tests judge: only where stock itself has a near-tie."""
    from fastgen.optimizer.transformers import judge

    def run(**more: Any) -> Any:
        return runner.model.generate(**runner.batches[0], **{**runner.options, **more})

    def stock(**more: Any) -> Any:
        with fastgen.disabled():
            return run(**more)

    verdict = judge.judged(stock, run, case.sizes["beams"])
    return f"{verdict.kind}: {verdict.why}"


def measure(
    case: Case, device: str, dtype: str, rounds: int, bandwidth: float | None, sides: tuple[str, ...], cache: str
) -> dict[str, Any]:
    """One case's record."""
    runner, timed = _runner(case, device, dtype), Timer(device, cache)
    found: dict[str, Any] = {"case": case.name, "task": case.task.as_dict(), "host": case.host, "dtype": dtype}
    outputs, peaks, paths = {}, {}, {}
    for side in sides:
        fastgen.report.reset()
        _, peaks[side], outputs[side] = timed(side, runner)
        paths[side] = [f"{call.tier}{f' ({call.reason})' if call.reason else ''}" for call in fastgen.status().calls]
    rows = outputs["stock"]["tokens"]
    equal = {side: sum(a == b for a, b in zip(rows, outputs[side]["tokens"], strict=True)) for side in sides[1:]}
    if dtype == "float32" and case.host == "transformers" and min(equal.values()) < len(rows):
        found["verdict"] = _verdict(case, runner)
    times = [{side: timed(side, runner)[0] for side in sides} for _ in range(rounds)]
    found |= {"rows": len(rows), "equal": equal, "peak": peaks, "paths": paths, "rounds": times}
    found["median"] = {side: statistics.median(each[side] for each in times) for side in sides}
    for side in sides[1:]:
        ratios = [each["stock"] / each[side] for each in times]
        found.setdefault("ratio", {})[side] = [statistics.median(ratios), min(ratios), max(ratios)]
    found["step_ms"] = {side: 1e3 * seconds / case.sizes["new"] for side, seconds in found["median"].items()}
    if bandwidth:
        found["bound_ms"] = 1e3 * _bytes_of_a_step(runner.model, case, dtype) / bandwidth
    found["replayed"] = dict(fastgen.status().replayed)
    return found


def _bytes_of_a_step(model: Any, case: Case, dtype: str) -> int:
    """Weights that a decode step reads, and the cache at its middle: the source's once, each beam's own tokens."""
    decoder = getattr(model, "decoder", None) or (model.get_decoder() if case.model != "gpt2" else model)
    weights = {id(each): each.nbytes for each in decoder.parameters()}
    head = getattr(model, "lm_head", None)
    weights |= {id(each): each.nbytes for each in head.parameters()} if head is not None else {}
    sizes, size = case.sizes, torch.empty((), dtype=getattr(torch, dtype)).element_size()
    layers = getattr(decoder, "layers", None) or getattr(decoder, "h", None) or getattr(decoder, "block", None) or ()
    # A key and a value of the decoder's width for each position and layer.
    width = next((each.shape[-1] for each in decoder.parameters() if each.ndim == 2), 0)
    positions = sizes["batch"] * (sizes.get("source", 1500) + sizes["beams"] * sizes["new"] // 2)
    return sum(weights.values()) + 2 * len(layers) * width * positions * size


def _profile(case: Case, device: str, dtype: str, cache: str) -> str:
    """The kernels, or on a CPU operators, that take fastgen's call the most time."""
    from torch.profiler import ProfilerActivity, profile

    runner, timed, is_cuda = _runner(case, device, dtype), Timer(device, cache), device == "cuda"
    for _ in range(2):
        timed("fastgen", runner)
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as found:
        seconds, _, _ = timed("fastgen", runner)
    order = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
    table = found.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80)
    return f"== {case.name}: {seconds:.3f} s under the profiler\n{table}"


def _line(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{found['case']:24} {found['dtype']:9} {found['error']}"
    sides = "  ".join(
        f"{side} {found['ratio'][side][0]:.2f}x, {found['equal'][side]} of {found['rows']} rows equal, "
        f"{found['peak'][side] / 2**30:.1f} GiB, {found['paths'][side][-1:]}"
        for side in found["ratio"]
    )
    bound = f", bound {found['bound_ms']:.2f}" if "bound_ms" in found else ""
    steps = " / ".join(f"{each:.2f}" for each in found["step_ms"].values())
    return (
        f"{found['case']:24} {found['dtype']:9} stock {found['median']['stock']:.2f} s, "
        f"{found['peak']['stock'] / 2**30:.1f} GiB; {sides}; ms a step {steps}{bound}"
        f"{'; ' + found['verdict'] if 'verdict' in found else ''}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [case.name for case in (*CASES, *WIDE)]
    parser.add_argument("--case", nargs="+", default=[], choices=names, metavar="NAME")
    parser.add_argument("--dtype", nargs="+", default=["float16"], choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--side", nargs="+", default=SIDES[1:], choices=SIDES[1:], help="beside stock")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no case after so long")
    parser.add_argument("--profile", nargs="+", default=[], choices=names, metavar="NAME")
    parser.add_argument("--cache", default="auto", choices=CACHES, help="fastgen's option (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="where the JSON goes")
    parser.add_argument("--name", default="gpu", help="of the results")
    args = parser.parse_args()
    quieten()
    device = "cpu" if args.rehearse else "cuda"
    asked = (*args.case, *args.profile)
    cases = [case for case in (*CASES, *WIDE) if (case.name in asked if asked else case in CASES)]
    if args.rehearse:
        _make_inputs_small()
        cases = list(map(_tiny, cases))
    start, records = time.monotonic(), []
    for case in cases:
        if case.name in args.profile:
            print(_profile(case, device, args.dtype[0], args.cache), flush=True)
    bandwidth = copy_bandwidth(torch.device(device)) if device == "cuda" else None
    wanted = [case for case in cases if case.name in args.case or not asked]
    code = 0
    for dtype in args.dtype:
        for case in wanted:
            if time.monotonic() - start > 60 * args.minutes:
                print(f"{case.name}: not begun, the time is up")
                code = 2
                continue
            try:
                records.append(measure(case, device, dtype, args.rounds, bandwidth, ("stock", *args.side), args.cache))
            except Exception as error:  # the other cases are worth their time
                records.append({"case": case.name, "dtype": dtype, "error": f"{type(error).__name__}: {error}"[:500]})
            print(_line(records[-1]), flush=True)
            if "error" in records[-1] or records[-1].get("verdict", "").startswith("different"):
                code = 1
            gc.collect()
            fastgen.release()
            if device == "cuda":
                torch.cuda.empty_cache()
            about = environment(transformers) | {"device": describe(device, torch.get_num_threads())["device"]}
            write(args.output, args.name, {**about, "bandwidth": bandwidth, "records": records})
    return code


if __name__ == "__main__":
    sys.exit(main())
