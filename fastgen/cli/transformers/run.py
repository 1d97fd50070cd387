"""One run of fastgen-generate-transformers: read, tokenise, generate, detokenise, write, compare with references."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import Any

from fastgen.cli.transformers import batches, failures, metrics, records, tokenizing
from fastgen.cli.transformers.writer import Writer
from fastgen.pipeline.errors import DONE, INPUT_ERROR, InputError, counted, writing
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.resume import OTHER_DIGITS, Journal, contents
from fastgen.pipeline.stages import run_stages
from fastgen.pipeline.workers import WorkerPool

# Arguments that don't change what a run writes: a run may be resumed with others.
_FREE = set(
    """workers resume overwrite on_error quiet references metrics output ray actors cpus_per_actor
    gpus_per_actor""".split()
)


def run(args: argparse.Namespace) -> int:
    """Generate, and show the metrics; returns the exit code."""
    form = args.output_format or records.format_of(args.output)
    total = records.count_lines(args.input)
    references, wanted = references_of(args, total)  # what can be refused is refused before anything slow
    if args.output.exists() and args.output.samefile(args.input):
        raise InputError(f"{args.output} is the input: choose another file for the output.")
    settings = settings_of(args) | contents(*files_of_model(args))
    with Journal(args.output, settings).locked(resume=args.resume, overwrite=args.overwrite) as journal:
        if journal.complete:
            _check_complete(args, journal.facts, total)
            say(f"{args.output} is complete: nothing to resume.")
        else:
            writer = Writer(form, failures.policy_of(args.on_error, form), journal)
            _check_input(args, writer)
            _generate(args, form, total, writer, journal)
        return summary(args, form, total, journal.facts.get("failed", 0), references, wanted)


def _check_input(args: argparse.Namespace, writer: Writer) -> None:
    """InputError if lines that an earlier run has done are others now; all others may have been mended."""
    with open(args.input, "rb") as lines:
        if not writer.knows(lines):
            raise InputError(
                f"Cannot resume {args.output}: lines of {args.input} that it has done have changed; "
                "--overwrite starts again."
            )


def _check_complete(args: argparse.Namespace, facts: dict[str, Any], total: int) -> None:
    if "input" not in facts:
        raise InputError(f"{args.output} is complete, and was written with --ray: nothing to resume.")
    with open(args.input, "rb") as lines:
        crc = records.lines_crc(lines)
    if (facts.get("records"), facts["input"]) != (total, crc):
        raise InputError(
            f"Cannot resume {args.output}: it is complete, and {args.input} has changed since; "
            "--overwrite starts again."
        )


def references_of(args: argparse.Namespace, total: int) -> tuple[list[str], list[str]]:
    """The references, and the metrics that are wanted."""
    wanted = [metric for metric in args.metrics.split(",") if metric]
    if args.references is None:
        return [], wanted
    metrics.check(wanted)
    if args.on_error == failures.SKIP:
        raise InputError("--on-error skip leaves lines out, and --references compares all of them: give one of them.")
    return metrics.read_references(args.references, total), wanted


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that decide what a run writes."""
    decisive = {name: value for name, value in vars(args).items() if name not in _FREE}
    # Between the others one may change: what was written is the same.
    return decisive | {"on_error": failures.SKIP if args.on_error == failures.SKIP else None}


def files_of_model(args: argparse.Namespace) -> list[Path]:
    """What decides about the results and can be replaced; of a name on the hub, nothing."""
    output = Path(args.output).name
    paths: list[Path] = []
    for name in {args.model, args.tokenizer or args.model}:
        if os.path.isdir(name):
            paths += [path for path in Path(name).iterdir() if not path.name.startswith((".", output))]
    return [path for path in paths if path.is_file()]


def _generate(args: argparse.Namespace, form: str, total: int, writer: Writer, journal: Journal) -> None:
    from fastgen.cli.transformers import prepare  # brings torch, which a driver of Ray does without

    def read() -> Iterator[records.Record]:
        form = args.input_format or records.format_of(args.input)
        return records.read(args.input, form, text_field=args.text_field)

    known = prepare.prepared(args, say)
    lengths = None if known.limit is None or args.truncate else failures.Lengths(known.limit, known.token_counter())
    failures.scan(islice(read(), writer.next, None), writer.policy, lengths)
    with WorkerPool(args.workers, tokenizing.build, known.spec) as pool:  # starts while the model is loaded
        generator = prepare.generator_of(
            args,
            known,
            pool,
            read(),
            form=form,
            warn=say,
            finished=writer.finished,
            first=writer.next // batches.WINDOW * batches.WINDOW,
        )

        if generator.per_record > 1 and form == records.TEXT:
            say(
                f"each input has {generator.per_record} lines in {args.output}, in the order of the inputs, best first."
            )
        if journal.resuming and generator.has_scores:
            say(OTHER_DIGITS)
        progress = Progress(total, done=writer.done, enabled=not args.quiet)
        generator.progress = progress.update

        def generate(batch: batches.Batch) -> Any:
            if not batch.records[0].usable:
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
        say(f"{failed} of {counted(total, 'record')} failed.")
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
