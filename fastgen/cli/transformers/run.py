"""One run of fastgen-generate-transformers: read, tokenise, generate, detokenise, write, compare with references."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from transformers.utils import logging

from fastgen.cli.transformers import batches, flags, metrics, records, tokenizing
from fastgen.cli.transformers.generation import Generator
from fastgen.cli.transformers.load import find_device, generation_config, load_config, load_model, source_limit
from fastgen.cli.transformers.writer import Writer
from fastgen.pipeline.batching import AutoBatch
from fastgen.pipeline.errors import DONE, INPUT_ERROR, InputError, writing
from fastgen.pipeline.offline import REFILL
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.resume import Journal, contents
from fastgen.pipeline.stages import run_stages
from fastgen.pipeline.workers import WorkerPool

AUTO = "auto"

# Arguments that don't change what a run writes: a run may be resumed with others.
_FREE = {"workers", "resume", "quiet", "references", "metrics", "output"}


def run(args: argparse.Namespace) -> int:
    """Generate, and show the metrics; returns the exit code."""
    form = args.output_format or records.format_of(args.output)
    total = records.count_lines(args.input)
    references, wanted = _references(args, total)  # what can be refused is refused before anything slow
    if args.output.exists() and args.output.samefile(args.input):
        raise InputError(f"{args.output} is the input: choose another file for the output.")
    settings = {name: value for name, value in vars(args).items() if name not in _FREE}
    with Journal(args.output, settings | contents(*_files(args))).locked(resume=args.resume) as journal:
        if journal.complete:
            _say(f"{args.output} is complete: nothing to resume.")
        else:
            _generate(args, form, total, journal)
        return _summary(args, form, total, journal.facts.get("failed", 0), references, wanted)


def _references(args: argparse.Namespace, total: int) -> tuple[list[str], list[str]]:
    wanted = [metric for metric in args.metrics.split(",") if metric]
    if args.references is None:
        return [], wanted
    metrics.check(wanted)
    return metrics.read_references(args.references, total), wanted


def _files(args: argparse.Namespace) -> list[Path]:
    """What decides about the results and can be replaced; of a name on the hub, nothing."""
    paths = [args.input]
    for name in {args.model, args.tokenizer or args.model}:
        if Path(name).is_dir():
            paths += [path for path in Path(name).iterdir() if not path.name.startswith((".", args.output.name))]
    return [path for path in paths if path.is_file()]


def _generate(args: argparse.Namespace, form: str, total: int, journal: Journal) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = find_device(args.device)
    given = flags.given(args)
    config = load_config(args.model)
    languages = (args.source_lang, args.target_lang)
    spec = tokenizing.TokenizerSpec(args.tokenizer or args.model, args.task_prefix, *languages, None)
    tokenizer = tokenizing.load_tokenizer(spec)
    language = None if args.target_lang is None else tokenizing.target_language(tokenizer, args.target_lang)[0]
    limit = source_limit(config, tokenizer, int(given.get("max_new_tokens") or 0))
    if args.truncate:
        spec = tokenizing.TokenizerSpec(spec.name, spec.task_prefix, *languages, limit)
    with WorkerPool(args.workers, tokenizing.build, spec) as pool:  # starts while the model is loaded
        model = load_model(args.model, config, args.dtype, device)
        generation = generation_config(model, tokenizer, given, language)
        by_tokens = args.max_tokens is not None
        size = args.max_tokens if by_tokens else args.batch_size
        auto = None
        if size == AUTO:
            auto = AutoBatch.on_device(device.type, batches.AUTO_TOKENS if by_tokens else batches.AUTO_SENTENCES)
        writer = Writer(form, journal)
        first = writer.next // batches.WINDOW * batches.WINDOW
        source = batches.Source(
            records.read(args.input, args.input_format or records.format_of(args.input), text_field=args.text_field),
            pool,
            limit,
            0 if auto else size,
            auto,
            by_tokens,
            stop_at_error=form == records.TEXT,
            finished=writer.finished(first),
            first=first,
        )
        scores = form == records.JSONL and not args.no_scores
        progress = Progress(total, done=writer.done, enabled=not args.quiet)
        generator = Generator(
            model,
            generation,
            source,
            seed=args.seed,
            scores=scores,
            warn=_say,
            progress=progress.update,
            tokenizer=tokenizer,
        )
        why_not = generator.why_not_refilled(REFILL[args.refill])
        source.refill = why_not is None
        if why_not is not None and args.refill == "on":
            _say(f"batch by batch, without refill: {why_not}.")

        def generate(batch: batches.Batch) -> Any:
            if batch.records[0].error is not None:
                progress.update(len(batch.records), 0)
                return _nothing(), (batch.records, [], generator.per_record)
            found = generator(batch)
            return pool.submit(tokenizing.Decode(found.rows)), (batch.records, found.scores, generator.per_record)

        try:
            with journal.opened():  # not before: what is refused leaves an earlier run's results alone
                run_stages(source, generate, writer.write, cut=source.cut, depth=2)
        finally:
            progress.close()


def _nothing() -> Future[list[str]]:
    """The texts of a batch that has nothing to detokenise."""
    future: Future[list[str]] = Future()
    future.set_result([])
    return future


def _summary(
    args: argparse.Namespace, form: str, total: int, failed: int, references: list[str], wanted: list[str]
) -> int:
    if failed:
        _say(f"{failed} of {total} records failed.")
    if references and failed < total:
        per_record = records.count_lines(args.output) // total if form == records.TEXT else 1
        best = records.best_outputs(args.output, form, per_record)
        pairs = [(text, reference) for text, reference in zip(best, references, strict=True) if text is not None]
        with writing("standard output"):
            for line in metrics.score([text for text, _ in pairs], [reference for _, reference in pairs], wanted):
                print(line, flush=True)
    return INPUT_ERROR if failed else DONE


def _say(text: str) -> None:
    print(f"fastgen-generate-transformers: {text}", file=sys.stderr)
