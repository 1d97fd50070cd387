"""The pipeline of fastgen-generate: post-processing alone, and the whole pipeline against generation alone.

    python benchmarks/bench_pipeline.py --data DATA-BIN --path CHECKPOINT

1. Hypotheses of the test set are generated once and then replayed at once, as a fast GPU would deliver them: stock's
   post-processing (its own loop, tensors) against ours (plain lists, worker processes, scoring, writing), in lines/s.
2. The time of all generate calls by themselves against that of the command, with results and journal on disk, from its
   first batch to its end.

Needs fairseq. Exit status 1 if the lines or the score of the two sides differ.
"""

from __future__ import annotations

import argparse
import io
import logging
import math
import statistics
import sys
import tempfile
import time
import unittest.mock
import warnings
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the workers import this file again, and should start as quickly as the command's
    from measuring import RESULTS, environment, write

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import fairseq
        from fairseq import utils
        from fairseq.dataclass.utils import convert_namespace_to_omegaconf

        from fastgen.cli import generate
        from fastgen.pipeline.fairseq import lines
        from fastgen.pipeline.fairseq.batches import Batches
        from fastgen.pipeline.fairseq.generation import Generation
        from fastgen.pipeline.fairseq.load import Loaded, load
        from fastgen.pipeline.fairseq.scoring import Scoring

    from fastgen.pipeline import WorkerPool, run_stages


def flags_of(args: argparse.Namespace) -> list[str]:
    return [
        str(args.data), "--path", str(args.path), "--beam", str(args.beam), "--nbest", str(args.nbest), "--cpu",
        "--max-tokens", str(args.max_tokens), "--remove-bpe", "sentencepiece", "--num-workers", "0",
        "--gen-subset", args.subset, "--required-batch-size-multiple", "1",
    ]  # fmt: skip


def loaded_as(args: argparse.Namespace) -> Loaded:
    parsed, _ = generate.parse(flags_of(args))
    return load(convert_namespace_to_omegaconf(parsed), logging.getLogger("bench"))


def stock_lines(loaded: Loaded, recorded: list[tuple[Any, Any]], output: io.StringIO) -> int:
    """What fairseq-generate does after each inference step, with fairseq's own functions on tensors."""
    task, cfg, scorer = loaded.task, loaded.cfg, loaded.scorer
    source, target = task.source_dictionary, task.target_dictionary
    remove, ignored = cfg.common_eval.post_process, set(loaded.form.ignored)
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
    return output.getvalue().count("\n")


def our_lines(loaded: Loaded, recorded: list[tuple[Any, Any]], output: io.StringIO, pool: WorkerPool) -> int:
    scoring = scoring_of(loaded)
    generation = Generation(loaded, Batches(loaded), print)

    def write(result: lines.Lines, _: None) -> None:
        output.write(result.text)
        for scored in result.scored:
            scoring.add(scored)

    run_stages(recorded, lambda entry: (pool.submit(generation.plain(*entry)), None), write)
    return output.getvalue().count("\n")


def scoring_of(loaded: Loaded) -> Scoring:
    return Scoring(loaded.scorer, loaded.task.target_dictionary, by_words=loaded.form.by_words)


def started(pool: WorkerPool, workers: int) -> None:
    """Wait until the workers are there: stock has none to start."""
    for future in [pool.submit(lines.Batch([], [], [], None, None, [])) for _ in range(4 * workers)]:
        future.result()


def post_processing(args: argparse.Namespace) -> dict[str, Any]:
    loaded = loaded_as(args)
    generation = Generation(loaded, Batches(loaded), print)
    samples = list(loaded.batches.next_epoch_itr(shuffle=False))
    recorded = [(sample, generation.infer(sample)) for sample in samples] * args.repeat
    rounds: list[dict[str, float]] = []
    with WorkerPool(args.workers, lines.build, loaded.form) as pool:
        started(pool, args.workers)
        for number in range(args.rounds + 1):
            one: dict[str, float] = {}
            texts: dict[str, str] = {}
            for side in ("stock", "ours") if number % 2 == 0 else ("ours", "stock"):
                loaded.scorer.reset()
                output = io.StringIO()
                start = time.perf_counter()
                count = (
                    stock_lines(loaded, recorded, output)
                    if side == "stock"
                    else our_lines(loaded, recorded, output, pool)
                )
                one[side] = count / (time.perf_counter() - start)
                texts[side] = output.getvalue() + loaded.scorer.result_string()
            if texts["stock"] != texts["ours"]:
                sys.exit("The lines or the scores of the two sides differ.")
            if number:  # in the first round the dictionary learns its new words
                rounds.append(one)
    ratios = [one["ours"] / one["stock"] for one in rounds]
    for side in ("stock", "ours"):
        print(f"{side:>6}: {statistics.median(one[side] for one in rounds):10,.0f} lines/s")
    print(
        f" ratio: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"{args.workers} workers, {count:,} lines, output and score identical"
    )
    return {"ratio": statistics.median(ratios), "rounds": rounds, "workers": args.workers}


def whole_command(args: argparse.Namespace) -> dict[str, Any]:
    loaded = loaded_as(args)
    generation = Generation(loaded, Batches(loaded), print)
    samples = list(loaded.batches.next_epoch_itr(shuffle=False))
    sentences = sum(sample["id"].numel() for sample in samples)
    rounds: list[dict[str, float]] = []
    for sample in samples[:3]:  # warm
        generation.infer(sample)
    for number in range(args.rounds):
        one: dict[str, float] = {}
        for side in ("alone", "whole") if number % 2 == 0 else ("whole", "alone"):
            if side == "whole":
                one[side] = command_seconds(args, sentences)
                continue
            start = time.perf_counter()
            for sample in samples:
                generation.infer(sample)
            one[side] = time.perf_counter() - start
        rounds.append(one)
    ratios = [one["whole"] / one["alone"] for one in rounds]
    print(
        f" whole: {statistics.median(ratios) - 1:+.1%} ({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}) on top of "
        f"{statistics.median(one['alone'] for one in rounds):.1f} s of generation alone, {sentences:,} sentences"
    )
    return {"ratio": statistics.median(ratios), "rounds": rounds, "sentences": sentences}


def command_seconds(args: argparse.Namespace, sentences: int) -> float:
    """The command itself, with its results and journal on disk, from the first batch to its end."""
    first: list[float] = []
    call = Generation.__call__

    def noting(self: Generation, *batch: Any) -> Any:
        if not first:
            first.append(time.perf_counter())
        return call(self, *batch)

    with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(Generation, "__call__", noting):
        code = generate.main([*flags_of(args), "--results-path", folder, "--workers", str(args.workers)])
        end = time.perf_counter()
        results = (Path(folder) / f"generate-{args.subset}.txt").read_text(encoding="utf-8")
    if code != 0 or results.count("\nS-") + results.startswith("S-") != sentences:
        sys.exit("The command did not write every sentence.")
    return end - first[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="a fairseq data-bin with a test set and references")
    parser.add_argument("--path", type=Path, required=True, help="the model's checkpoint")
    parser.add_argument("--subset", default="test", help="of the data-bin (default: %(default)s)")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--nbest", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3, help="times the hypotheses are replayed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("post-processing", "whole"))
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="where the JSON goes")
    args = parser.parse_args()
    result: dict[str, Any] = environment(fairseq)
    if args.only != "whole":
        result["post_processing"] = post_processing(args)
    if args.only != "post-processing":
        result["whole"] = whole_command(args)
    path = write(args.output, f"pipeline{f'-{args.only}' if args.only else ''}", result, indent=1)
    print(f"Written to {path}.")


if __name__ == "__main__":
    main()
