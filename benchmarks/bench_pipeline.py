"""The pipeline of fastgen-generate: post-processing alone, and the whole command against generation alone.

    python benchmarks/bench_pipeline.py --data DATA-BIN --path CHECKPOINT

1. Hypotheses of the test set are generated once and then replayed at once, as a fast GPU would deliver them: stock's
   post-processing (its own loop, tensors) against ours (plain lists, worker processes, scoring, writing), in lines/s.
2. The test set repeated to `--lines` sentences: the time of all generate calls against the time from the first batch
   to the last written line.

Needs fairseq. Exit status 1 if the lines of the two sides differ.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import logging
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fastgen.cli import fairseq_lines, fairseq_run, generate
from fastgen.pipeline import WorkerPool, run_stages

RESULTS = Path(__file__).parent / "results"


def load(args: argparse.Namespace) -> Any:
    flags = [
        str(args.data), "--path", str(args.path), "--beam", str(args.beam), "--nbest", str(args.nbest), "--cpu",
        "--max-tokens", str(args.max_tokens), "--remove-bpe", "sentencepiece", "--num-workers", "0",
    ]  # fmt: skip
    with generate._arguments(flags) as arguments:
        parsed, _ = generate.parse(arguments)
    cfg = convert_namespace_to_omegaconf(parsed)
    return fairseq_run.load(cfg, logging.getLogger("bench"))


def stock_lines(loaded: Any, recorded: list[tuple[Any, Any]], output: Any) -> int:
    """What fairseq-generate does after each inference step, with fairseq's own functions on tensors."""
    task, cfg, scorer = loaded.task, loaded.cfg, loaded.scorer
    source, target = task.source_dictionary, task.target_dictionary
    remove, ignored = cfg.common_eval.post_process, set(loaded.form.ignored)
    before = output.tell()
    for sample, hypotheses in recorded:
        for i, name in enumerate(sample["id"].tolist()):
            source_tokens = utils.strip_pad(sample["net_input"]["src_tokens"][i, :], target.pad())
            target_tokens = utils.strip_pad(sample["target"][i, :], target.pad()).int().cpu()
            source_text = source.string(source_tokens, remove)
            target_text = target.string(target_tokens, remove, escape_unk=True, extra_symbols_to_ignore=ignored)
            print(f"S-{name}\t{source_text}", file=output)
            print(f"T-{name}\t{target_text}", file=output)
            for rank, hypothesis in enumerate(hypotheses[i][: cfg.generation.nbest]):
                _, text, _ = utils.post_process_prediction(
                    hypo_tokens=hypothesis["tokens"].int().cpu(),
                    src_str=source_text,
                    alignment=hypothesis["alignment"],
                    align_dict=None,
                    tgt_dict=target,
                    remove_bpe=remove,
                    extra_symbols_to_ignore=ignored,
                )
                score = hypothesis["score"] / math.log(2)
                print(f"H-{name}\t{score}\t{text}", file=output)
                print(f"D-{name}\t{score}\t{text}", file=output)
                positional = " ".join(f"{x:.4f}" for x in (hypothesis["positional_scores"] / math.log(2)).tolist())
                print(f"P-{name}\t{positional}", file=output)
                if rank == 0:
                    scorer.add(
                        target.encode_line(target_text, add_if_not_exist=True),
                        target.encode_line(text, add_if_not_exist=True),
                    )
    assert output.tell() >= before
    return output.getvalue().count("\n")


def our_lines(loaded: Any, recorded: list[tuple[Any, Any]], output: Any, pool: WorkerPool) -> int:
    scoring = fairseq_run.Scoring(loaded)
    generation = fairseq_run.Generation(loaded, fairseq_run.Batches(loaded, None, False), None, print)
    nbest = loaded.cfg.generation.nbest

    def replay(entry: tuple[Any, Any]) -> Any:
        sample, hypotheses = entry
        plain = generation._plain(sample["id"].tolist(), sample, [best[:nbest] for best in hypotheses])
        return pool.submit(plain), None

    def write(result: fairseq_lines.Lines, _: None) -> None:
        output.write(result.text)
        for scored in result.scored:
            scoring.add(scored)

    run_stages(recorded, replay, write)
    return output.getvalue().count("\n")


def post_processing(args: argparse.Namespace) -> dict[str, Any]:
    loaded = load(args)
    generation = fairseq_run.Generation(loaded, fairseq_run.Batches(loaded, None, False), None, print)
    samples = list(loaded.batches.next_epoch_itr(shuffle=False))
    recorded = [(sample, generation._infer(sample)) for sample in samples] * args.repeat
    rounds: list[dict[str, float]] = []
    with WorkerPool(args.workers, fairseq_lines.build, loaded.form) as pool:
        for future in [pool.submit(fairseq_lines.Batch([], [], [], None, None, [])) for _ in range(args.workers)]:
            future.result()  # the workers have started
        for number in range(args.rounds):
            seconds: dict[str, float] = {}
            texts: dict[str, str] = {}
            for side in ("stock", "ours") if number % 2 == 0 else ("ours", "stock"):
                output = io.StringIO()
                started = time.perf_counter()
                lines = (
                    stock_lines(loaded, recorded, output)
                    if side == "stock"
                    else our_lines(loaded, recorded, output, pool)
                )
                seconds[side], texts[side] = lines / (time.perf_counter() - started), output.getvalue()
            if texts["stock"] != texts["ours"]:
                sys.exit("The lines of the two sides differ.")
            rounds.append(seconds)
    ratio = statistics.median(one["ours"] / one["stock"] for one in rounds)
    for side in ("stock", "ours"):
        print(f"{side:>6}: {statistics.median(one[side] for one in rounds):10,.0f} lines/s")
    print(
        f" ratio: {ratio:10.2f} with {args.workers} workers, {texts['ours'].count(chr(10)):,} lines, output identical"
    )
    return {"ratio": ratio, "rounds": rounds, "workers": args.workers}


def whole_command(args: argparse.Namespace) -> dict[str, Any]:
    loaded = load(args)
    batches = fairseq_run.Batches(loaded, None, False)
    generation = fairseq_run.Generation(loaded, batches, None, print)
    samples = list(loaded.batches.next_epoch_itr(shuffle=False))
    count = sum(sample["id"].numel() for sample in samples)
    samples = samples * -(-args.lines // count)
    generation(0, samples[0])  # warm
    results: list[dict[str, float]] = []
    for _ in range(args.rounds):
        started = time.perf_counter()
        for sample in samples:
            generation._infer(sample)
        alone = time.perf_counter() - started
        output, scoring = io.StringIO(), fairseq_run.Scoring(loaded)
        with WorkerPool(args.workers, fairseq_lines.build, loaded.form) as pool:

            def generate_one(numbered: tuple[int, Any], pool: WorkerPool = pool) -> Any:
                generated = generation(*numbered)
                assert generated is not None
                return pool.submit(generated[0]), generated[1]

            def write(result: Any, _: Any, output: Any = output, scoring: Any = scoring) -> None:
                output.write(result.text)
                for scored in result.scored:
                    scoring.add(scored)

            started = time.perf_counter()
            run_stages(enumerate(samples), generate_one, write)
            whole = time.perf_counter() - started
        results.append({"alone": alone, "whole": whole})
    ratio = statistics.median(one["whole"] / one["alone"] for one in results)
    print(f" whole: {ratio - 1:+.1%} of generation alone, {count * -(-args.lines // count):,} sentences")
    return {"ratio": ratio, "rounds": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="a fairseq data-bin with a test set and references")
    parser.add_argument("--path", type=Path, required=True, help="the model's checkpoint")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--nbest", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3, help="times the hypotheses are replayed")
    parser.add_argument("--lines", type=int, default=5000, help="sentences of the whole command")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("post-processing", "whole-command"))
    args = parser.parse_args()
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if args.only != "whole-command":
        result["post_processing"] = post_processing(args)
    if args.only != "post-processing":
        result["whole_command"] = whole_command(args)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"pipeline-{datetime.date.today()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"Written to {path}.")


if __name__ == "__main__":
    main()
