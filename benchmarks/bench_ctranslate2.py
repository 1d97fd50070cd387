"""Beam search by transformers, stock and with fastgen, and by CTranslate2 in float32: compared, then timed in turn.

    pip install ctranslate2
    python benchmarks/bench_ctranslate2.py                      # random models of well-known shapes
    python benchmarks/bench_ctranslate2.py --shared DIR         # the trained translation model too

Exit status: 0 if fastgen's outputs are all identical to stock's, 1 if some differ; CTranslate2's may (see README.md).
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import bench_generate
import scenarios
import torch
import transformers
from bench_generate import Job, Round, Verified
from ctranslate2_side import Engine
from measuring import SIDES, OtherProcesses, aligned, environment, ratios, running
from tqdm import tqdm

import fastgen
from fastgen.bench.runners.convert import names_of, spec_of

try:
    import ctranslate2  # to convert with: that doesn't slow torch, decoding in the same process does
    from ctranslate2.converters import transformers as converters
except ImportError:
    sys.exit("bench_ctranslate2.py needs CTranslate2: pip install ctranslate2")

ALL_SIDES = (*SIDES, "ctranslate2")
_NAMES = ("transformer-base-32", "transformer-base-1", "bart-8x512", "bart-8x1022", "gpt2-4x512", "ddtp")
SCENARIOS = {name: bench_generate.SCENARIOS[name] for name in _NAMES}
# One side's threads spin for some milliseconds when they have nothing left to do; the next side waits for them.
_PAUSE = 1.0


def _is_seq2seq(job: Job) -> bool:
    return bool(job.model.config.is_encoder_decoder)


def _spec(model: Any) -> Any:
    # Not the loader of Marian's: it takes the last token for padding and removes it.
    loader = converters.GPT2Loader() if model.config.model_type == "gpt2" else converters.BartLoader()
    return spec_of(model, loader)


def _options(job: Job) -> dict[str, Any]:
    """Of `translate_batch`, or of `generate_batch` for prompts."""
    beams, new, least = (job.options.get(name) for name in ("num_beams", "max_new_tokens", "min_new_tokens"))
    if _is_seq2seq(job):
        lengths = {"max_decoding_length": new, "min_decoding_length": least or 1, "max_input_length": 0}
    else:  # the prompt in one forward pass
        lengths = {"max_length": new, "min_length": least or 0, "include_prompt_in_result": False}
    return {"beam_size": beams, **lengths}


@dataclass
class Compared:
    """CTranslate2's best hypotheses next to stock's."""

    outputs: int
    different: list[int]
    same_tokens: float  # the part of stock's tokens that have the same token in the same place
    tokens: int  # decoded by CTranslate2, end tokens left out
    stock_tokens: int


def compare(job: Job, engine: Engine, bar: tqdm[Any]) -> tuple[Verified, Compared]:
    """All sides once: fastgen must be equal to stock, CTranslate2 is compared with it. This is the warm-up too."""
    stock: list[list[int]] = []
    verified = bench_generate.verify(job, bar, stock)
    bar.set_description("ctranslate2")
    theirs = []
    for hypotheses in engine.decode():
        theirs += hypotheses
        bar.update()
    prompts = [1 if _is_seq2seq(job) else len(row) for batch in job.batches for row in batch["input_ids"]]
    stock = [_new_tokens(job, row, prompt) for row, prompt in zip(stock, prompts, strict=True)]
    pairs = list(zip(stock, theirs, strict=True))
    same = sum(a == b for ours, other in pairs for a, b in zip(ours, other, strict=False))
    tokens = sum(map(len, stock))
    different = [i for i, (ours, other) in enumerate(pairs) if ours != other]
    return verified, Compared(len(pairs), different, same / tokens, sum(map(len, theirs)), tokens)


def _new_tokens(job: Job, row: list[int], prompt: int) -> list[int]:
    """What was generated, without the end token and what pads it."""
    new, end = row[prompt:], job.model.config.eos_token_id
    return new[: new.index(end)] if end in new else new


def time_rounds(job: Job, engine: Engine, rounds: int, bar: tqdm[Any]) -> list[Round]:
    """The sides take turns, and take turns at being first."""
    results = []
    for number in range(rounds):
        one, first = Round(), number % len(ALL_SIDES)
        for side in (*ALL_SIDES[first:], *ALL_SIDES[:first]):
            bar.set_description(f"{side:>11}")
            time.sleep(_PAUSE)
            others, ours = OtherProcesses(), engine.cpu_seconds
            started = time.perf_counter()
            _run(job, engine, side, bar)
            one.total[side] = time.perf_counter() - started
            one.other_processes[side] = others.cores(besides=engine.cpu_seconds - ours)
        results.append(one)
    return results


def _run(job: Job, engine: Engine, side: str, bar: tqdm[Any]) -> None:
    if side == "ctranslate2":
        for _ in engine.decode():
            bar.update()
        return
    with running(side):
        for inputs in job.batches:
            job.model.generate(**inputs, **job.options)
            bar.update()


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    job = SCENARIOS[name].build(args)
    if args.new_tokens:
        job.options.update(max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens)
    batches = [names_of(batch) for batch in job.batches]
    with (
        Engine(_spec(job.model), _is_seq2seq(job), batches, args.threads, _options(job)) as engine,
        tqdm(total=3 * (1 + args.rounds) * len(job.batches), unit="batch", leave=False) as bar,
    ):
        verified, compared = compare(job, engine, bar)
        rounds = [] if verified.different else time_rounds(job, engine, args.rounds, bar)
    totals = [one.total for one in rounds]
    pairs = [("stock", "fastgen"), ("ctranslate2", "fastgen"), ("stock", "ctranslate2")]
    return {
        "scenario": name,
        "what": SCENARIOS[name].what,
        **environment(transformers, fastgen, ctranslate2),
        "options": job.options,
        "dtype": str(job.model.dtype),
        "verified": asdict(verified),
        "ctranslate2_compared": asdict(compared),
        "end_to_end": {f"{a} / {b}": ratios(totals, (a, b)) for a, b in pairs} if rounds else None,
        "rounds": [{"total": one.total, "other_processes": one.other_processes} for one in rounds],
    }


def table(results: list[dict[str, Any]]) -> str:
    header = ("scenario", "ctranslate2 as stock", "stock s", "fastgen s", "ctranslate2 s")
    ratio_names = ("stock / fastgen", "ctranslate2 / fastgen", "stock / ctranslate2")
    return aligned([(*header, *ratio_names), *(_cells(result) for result in results)])


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    verified, compared = result["verified"], result["ctranslate2_compared"]
    if result["end_to_end"] is None:
        wrong = f"{len(verified['different'])} of {verified['outputs']} differ"
        return (result["scenario"], wrong, *[""] * 6)
    both, fast = result["end_to_end"]["stock / ctranslate2"], result["end_to_end"]["stock / fastgen"]
    same = compared["outputs"] - len(compared["different"])
    return (
        result["scenario"],
        f"{same} of {compared['outputs']} ({compared['same_tokens']:.1%} of tokens)",
        f"{both['stock']:.2f}",
        f"{fast['fastgen']:.2f}",
        f"{both['ctranslate2']:.2f}",
        *(f"{one['ratio']:.2f}x ({one['min']:.2f} to {one['max']:.2f})" for one in result["end_to_end"].values()),
    )


def main() -> int:
    what = "Beam search by stock transformers, by fastgen and by CTranslate2: compared, then timed in turn."
    folders = {"shared": "holds data/ and models/: ddtp"}
    numbers = {"new-tokens": "in place of the scenario's own: what a step takes is the difference between two"}
    args = scenarios.parse(what, SCENARIOS, folders, numbers=numbers)
    bench_generate.quieten()
    prefix = f"ctranslate2-{args.new_tokens}-tokens-" if args.new_tokens else "ctranslate2-"
    return scenarios.run(args, SCENARIOS, measure, table, prefix=prefix)


if __name__ == "__main__":
    sys.exit(main())
