"""What a call of an operator costs more by torch's stable ABI, which boxes arguments, than by ATen; per decode step.

    python benchmarks/bench_boxing.py

An operator that does nothing, with the arguments of a linear layer, is compiled both ways and called in turn. The
difference, times the native operators that are called in a step of one sentence, is set beside the step's time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
import transformers
from measuring import OtherProcesses, aligned, begin, environment, options, quieten, say_if_disturbed, write
from torch.profiler import ProfilerActivity, profile
from torch.utils import cpp_extension

import fastgen
from fastgen.bench import models

CALLS = 100_000
SCHEMA = "nothing(Tensor rows, Tensor weight, Tensor? bias, int width) -> Tensor"
BODY = """
TENSOR nothing(const TENSOR& rows, const TENSOR& weight, const std::optional<TENSOR>& bias, int64_t width) {
  return rows;
}
"""
# torch 2.10 is the first whose stable ABI suffices, as for fastgen's own operators.
STABLE = f"""
#define TORCH_TARGET_VERSION 0x020a000000000000
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <optional>
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif
{BODY.replace("TENSOR", "torch::stable::Tensor")}
STABLE_TORCH_LIBRARY(boxing_stable, m) {{ m.def("{SCHEMA}"); }}
STABLE_TORCH_LIBRARY_IMPL(boxing_stable, CPU, m) {{ m.impl("nothing", TORCH_BOX(&nothing)); }}
"""
ATEN = f"""
#include <ATen/core/Tensor.h>
#include <torch/library.h>
{BODY.replace("TENSOR", "at::Tensor")}
TORCH_LIBRARY(boxing_aten, m) {{ m.def("{SCHEMA}"); }}
TORCH_LIBRARY_IMPL(boxing_aten, CPU, m) {{ m.impl("nothing", &nothing); }}
"""


def compiled(name: str, source: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        cpp_extension.load_inline(
            name, source, extra_cflags=["-O3"], build_directory=folder, is_python_module=False, no_implicit_headers=True
        )
    return getattr(torch.ops, name).nothing.default


def microseconds(operator: Any) -> float:
    """Of one call."""
    rows, weight, bias = torch.zeros(4, 8), torch.zeros(8, 8), torch.zeros(8)
    start = time.perf_counter()
    for _ in range(CALLS):
        operator(rows, weight, bias, 8)
    return (time.perf_counter() - start) / CALLS * 1e6


def step(name: str, beams: int, rounds: int) -> dict[str, Any]:
    """Native operators in a step of one sentence, and its milliseconds."""
    new = 30
    task = dict(name=name, model=name, batch=1, source=25, new=new, beams=beams, layers=0, options={}, limit=0)
    job = models.build(task, {})

    def once() -> float:
        start = time.perf_counter()
        job.model.generate(**job.batches[0], **job.options)
        return time.perf_counter() - start

    for _ in range(3):
        once()
    fastgen.configure(replay="off")  # a recorded program calls the same operators, unseen
    once()
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        once()
    fastgen.configure(replay="auto")
    calls = sum(each.count for each in watched.key_averages() if each.key.startswith("fastgen::"))
    seconds = statistics.median(once() for _ in range(rounds))
    return {"model": name, "beams": beams, "operators": calls / new, "milliseconds": seconds / new * 1e3}


def main() -> None:
    args = options(__doc__ or "", rounds=9).parse_args()
    begin(args)
    quieten()
    sides = {"aten": compiled("boxing_aten", ATEN), "stable": compiled("boxing_stable", STABLE)}
    others = OtherProcesses()
    with torch.no_grad():
        rounds = [{name: microseconds(each) for name, each in sides.items()} for _ in range(args.rounds)]
        steps = [step("transformer-base", beams, args.rounds) for beams in (1, 4)]
    more = statistics.median(one["stable"] - one["aten"] for one in rounds)
    for each in steps:
        each["share"] = each["operators"] * more / 1e3 / each["milliseconds"]
    medians = {name: statistics.median(one[name] for one in rounds) for name in sides}
    rows = [("step of one sentence", "operators", "ms", "boxing")]
    rows += [
        (
            f"{one['model']}, beams: {one['beams']}",
            f"{one['operators']:.0f}",
            f"{one['milliseconds']:.1f}",
            f"{one['share']:.2%}",
        )
        for one in steps
    ]
    print(f"A call takes {medians['aten']:.2f} us by ATen, {medians['stable']:.2f} us boxed: {more:.2f} us more.\n")
    print(aligned(rows))
    busy = others.cores()
    say_if_disturbed(busy)
    document = {"microseconds": medians, "more": more, "rounds": rounds, "steps": steps, "other_processes": busy}
    print(write(args.output, "boxing", {**environment(transformers), **document}))


if __name__ == "__main__":
    main()
