"""One run of fastgen-generate-transformers: reads, tokenises, generates, detokenises, writes, scores."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import Any

from fastgen.pipeline import remote
from fastgen.pipeline.errors import DONE, INPUT_ERROR, InputError, counted, tell, writing
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.resume import OTHER_DIGITS, Journal, contents, files_beside, other_texts, precision
from fastgen.pipeline.stages import run_stages
from fastgen.pipeline.transformers import batches, failures, metrics, records, tokenizing
from fastgen.pipeline.transformers.settings import RunSettings
from fastgen.pipeline.transformers.writer import Writer
from fastgen.pipeline.workers import WorkerPool

WORKERS = 2
# Settings that don't change a run's output, so that a run may be resumed with other values.
_FREE = set(
    """workers resume overwrite on_error quiet references metrics output ray actors cpus_per_actor
    gpus_per_actor""".split()
)


def run(settings: RunSettings) -> int:
    """Generate, and show the metrics; returns the exit code."""
    if not remote.is_remote(settings.output):
        with remote.fetched(settings.input) as source:
            return _run(settings, source, Path(settings.output))
    if settings.resume:
        name = remote.shown(settings.output)
        raise InputError(f"--resume needs an OUTPUT on this machine: {name} is written at the end, as a whole.")
    if settings.output == settings.input:
        raise InputError(f"{remote.shown(settings.output)} is the input: choose another file for the output.")
    sent = remote.Sent(settings.output, overwrite=settings.overwrite)
    is_over = False
    try:
        with remote.fetched(settings.input) as source:
            code = _run(settings, source, sent.local)
        sent.send()
        is_over = True
        return code
    finally:
        if is_over or not sent.has_results():
            sent.remove()
        else:
            say(f"what was finished is in {sent.local}: go on with that file as OUTPUT, and --resume.")


def _run(settings: RunSettings, source: Path, output: Path) -> int:
    """Generate from and to these files of this machine; the settings' names are shown."""
    form = settings.output_format or records.format_of(remote.shown(settings.output))
    total = records.count_lines(source, remote.shown(settings.input))
    references, wanted = references_of(settings, total)  # bad settings are refused before anything slow
    if settings.allowed_outputs is not None and not Path(settings.allowed_outputs).is_file():
        raise InputError(f"--allowed-outputs {settings.allowed_outputs}: there is no such file.")
    if output.exists() and output.samefile(source):
        raise InputError(f"{name_of_output(settings)} is the input: choose another file for the output.")
    decisive = decisive_settings(settings) | contents(*files_of_model(settings))
    with Journal(output, decisive).locked(resume=settings.resume, overwrite=settings.overwrite) as journal:
        if journal.complete:
            _check_complete(settings, source, journal.facts, total)
            say(f"{name_of_output(settings)} is complete: nothing to resume.")
        else:
            if words := other_texts():
                say(words)
            writer = Writer(form, failures.policy_of(settings.on_error, form), journal)
            _check_input(settings, source, writer)
            _generate(settings, source, form, total, writer, journal)
        return summary(output, form, total, journal.facts.get("failed", 0), references, wanted)


def _check_input(settings: RunSettings, source: Path, writer: Writer) -> None:
    """Raise InputError if lines that an earlier run has done have changed; other lines may have been corrected."""
    with open(source, "rb") as lines:
        if not writer.knows(lines):
            raise InputError(
                f"Cannot resume {name_of_output(settings)}: lines of {remote.shown(settings.input)} that it has done "
                "have changed; --overwrite starts again."
            )


def name_of_output(settings: RunSettings) -> str:
    """What messages call OUTPUT."""
    return remote.shown(settings.output)


def _check_complete(settings: RunSettings, source: Path, facts: dict[str, Any], total: int) -> None:
    if "input" not in facts:
        raise InputError(f"{name_of_output(settings)} is complete, and was written with --ray: nothing to resume.")
    with open(source, "rb") as lines:
        crc = records.lines_crc(lines)
    if (facts.get("records"), facts["input"]) != (total, crc):
        raise InputError(
            f"Cannot resume {name_of_output(settings)}: it is complete, and {remote.shown(settings.input)} has changed "
            "since; --overwrite starts again."
        )


def references_of(settings: RunSettings, total: int) -> tuple[list[str], list[str]]:
    """The references, and the names of the metrics to show."""
    wanted = [metric for metric in settings.metrics.split(",") if metric]
    if settings.references is None:
        return [], wanted
    metrics.check(wanted)
    if settings.on_error == failures.SKIP:
        raise InputError("--on-error skip leaves lines out, and --references compares all of them: give one of them.")
    return metrics.read_references(settings.references, total), wanted


def decisive_settings(settings: RunSettings) -> dict[str, Any]:
    """The settings that decide a run's output, by name."""
    decisive = {name: value for name, value in dataclasses.asdict(settings).items() if name not in _FREE}
    decisive |= {f"generation.{name}": value for name, value in decisive.pop("generation").items()}
    is_remote = remote.is_remote(settings.input)
    decisive["input"] = remote.shown(settings.input) if is_remote else str(Path(settings.input))  # "./a" is "a"
    # The other values of --on-error write the same, so a resumed run may have another of them.
    decisive |= precision()
    return decisive | {"on_error": failures.SKIP if settings.on_error == failures.SKIP else None}


def files_of_model(settings: RunSettings) -> list[Path]:
    """Local files that decide the results and might be replaced: the model's, unless it has a name on the hub."""
    others = files_beside(settings.output)  # a run may lie in the model's folder
    others |= {Path(path).absolute() for path in (settings.input, settings.references) if path is not None}
    paths: list[Path] = []
    for name in {settings.model, settings.tokenizer or settings.model}:
        if os.path.isdir(name):
            files = (path for path in Path(name).iterdir() if not path.name.startswith("."))
            paths += [path for path in files if path.absolute() not in others]
    if settings.allowed_outputs is not None:
        paths.append(Path(settings.allowed_outputs))
    return [path for path in paths if path.is_file()]


def _generate(settings: RunSettings, source: Path, form: str, total: int, writer: Writer, journal: Journal) -> None:
    from fastgen.pipeline.transformers import prepare  # imports torch, which a driver of Ray does not need

    def read() -> Iterator[records.Record]:
        name = remote.shown(settings.input)
        form = settings.input_format or records.format_of(name)
        return records.read(source, form, text_field=settings.text_field, name=name)

    known = prepare.prepared(settings, say)
    lengths = None if known.limit is None or settings.truncate else failures.Lengths(known.limit, known.token_counter())
    failures.scan(islice(read(), writer.next, None), writer.policy, lengths)
    workers = WORKERS if settings.workers is None else settings.workers
    with WorkerPool(workers, tokenizing.build, known.spec) as pool:  # workers start while the model is loaded
        generator = prepare.generator_of(
            settings,
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
                f"each input has {generator.per_record} lines in {name_of_output(settings)}, "
                "in the order of the inputs, best first."
            )
        if journal.resuming and generator.has_scores:
            say(OTHER_DIGITS)
        progress = Progress(total, done=writer.done, enabled=not settings.quiet)
        generator.progress = progress.update

        def generate(batch: batches.Batch) -> Any:
            if not batch.records[0].usable:
                progress.update(len(batch.records), 0)
                return _nothing(), (batch.records, [], generator.per_record)
            found = generator(batch)
            return pool.submit(tokenizing.Decode(found.rows)), (batch.records, found.scores, generator.per_record)

        try:
            with journal.opened():  # only now: a refused run must not change an earlier run's results
                run_stages(generator.source, generate, writer.write, cut=generator.source.cut, depth=2)
        finally:
            progress.close()


def _nothing() -> Future[list[str]]:
    """A future without texts, for a batch that has nothing to detokenise."""
    future: Future[list[str]] = Future()
    future.set_result([])
    return future


def summary(output: Path, form: str, total: int, failed: int, references: list[str], wanted: list[str]) -> int:
    """Show failures and the metrics of a finished output; returns the exit code."""
    if failed:
        say(f"{failed} of {counted(total, 'record')} failed.")
    if references and failed < total:
        per_record = records.count_lines(output) // total if form == records.TEXT else 1
        best = records.best_outputs(output, form, per_record)
        pairs = [(text, reference) for text, reference in zip(best, references, strict=True) if text is not None]
        with writing("standard output"):
            for line in metrics.score([text for text, _ in pairs], [reference for _, reference in pairs], wanted):
                print(line, flush=True)
    return INPUT_ERROR if failed else DONE


def say(text: str) -> None:
    tell(f"fastgen-generate-transformers: {text}")
