"""One run of fastgen-generate-transformers: read, tokenise, generate, detokenise, write, compare with references."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fastgen.cli.transformers import batches, metrics, records, tokenizing
from fastgen.cli.transformers.writer import Writer
from fastgen.pipeline.errors import DONE, INPUT_ERROR, InputError, writing
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.resume import Journal, contents
from fastgen.pipeline.stages import run_stages
from fastgen.pipeline.workers import WorkerPool

# Arguments that don't change what a run writes: a run may be resumed with others.
_FREE = set("workers resume quiet references metrics output ray actors cpus_per_actor gpus_per_actor".split())


def run(args: argparse.Namespace) -> int:
    """Generate, and show the metrics; returns the exit code."""
    form = args.output_format or records.format_of(args.output)
    total = records.count_lines(args.input)
    references, wanted = references_of(args, total)  # what can be refused is refused before anything slow
    if args.output.exists() and args.output.samefile(args.input):
        raise InputError(f"{args.output} is the input: choose another file for the output.")
    settings = settings_of(args) | contents(args.input, *files_of_model(args))
    with Journal(args.output, settings).locked(resume=args.resume) as journal:
        if journal.complete:
            say(f"{args.output} is complete: nothing to resume.")
        else:
            _generate(args, form, total, journal)
        return summary(args, form, total, journal.facts.get("failed", 0), references, wanted)


def references_of(args: argparse.Namespace, total: int) -> tuple[list[str], list[str]]:
    """The references, and the metrics that are wanted."""
    wanted = [metric for metric in args.metrics.split(",") if metric]
    if args.references is None:
        return [], wanted
    metrics.check(wanted)
    return metrics.read_references(args.references, total), wanted


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that decide what a run writes."""
    return {name: value for name, value in vars(args).items() if name not in _FREE}


def files_of_model(args: argparse.Namespace) -> list[Path]:
    """What decides about the results and can be replaced; of a name on the hub, nothing."""
    output = Path(args.output).name
    paths: list[Path] = []
    for name in {args.model, args.tokenizer or args.model}:
        if Path(name).is_dir():
            paths += [path for path in Path(name).iterdir() if not path.name.startswith((".", output))]
    return [path for path in paths if path.is_file()]


def _generate(args: argparse.Namespace, form: str, total: int, journal: Journal) -> None:
    from fastgen.cli.transformers import prepare  # brings torch, which a driver of Ray does without

    known = prepare.prepared(args)
    with WorkerPool(args.workers, tokenizing.build, known.spec) as pool:  # starts while the model is loaded
        writer = Writer(form, journal)
        generator = prepare.generator_of(
            args,
            known,
            pool,
            records.read(args.input, args.input_format or records.format_of(args.input), text_field=args.text_field),
            form=form,
            warn=say,
            finished=writer.finished,
            first=writer.next // batches.WINDOW * batches.WINDOW,
        )

        progress = Progress(total, done=writer.done, enabled=not args.quiet)
        generator.progress = progress.update

        def generate(batch: batches.Batch) -> Any:
            if batch.records[0].error is not None:
                progress.update(len(batch.records), 0)
                return _nothing(), (batch.records, [], generator.per_record)
            found = generator(batch)
            return pool.submit(tokenizing.Decode(found.rows)), (batch.records, found.scores, generator.per_record)

        try:
            with journal.opened():  # not before: what is refused leaves an earlier run's results alone
                run_stages(generator.source, generate, writer.write, cut=generator.source.cut, depth=2)
        finally:
            progress.close()


def _nothing() -> Future[list[str]]:
    """The texts of a batch that has nothing to detokenise."""
    future: Future[list[str]] = Future()
    future.set_result([])
    return future


def summary(
    args: argparse.Namespace, form: str, total: int, failed: int, references: list[str], wanted: list[str]
) -> int:
    """Shows failures and metrics; returns the exit code."""
    if failed:
        say(f"{failed} of {total} records failed.")
    if references and failed < total:
        per_record = records.count_lines(args.output) // total if form == records.TEXT else 1
        best = records.best_outputs(args.output, form, per_record)
        pairs = [(text, reference) for text, reference in zip(best, references, strict=True) if text is not None]
        with writing("standard output"):
            for line in metrics.score([text for text, _ in pairs], [reference for _, reference in pairs], wanted):
                print(line, flush=True)
    return INPUT_ERROR if failed else DONE


def say(text: str) -> None:
    print(f"fastgen-generate-transformers: {text}", file=sys.stderr)
