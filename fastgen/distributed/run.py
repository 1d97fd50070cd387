"""One run of `fastgen-generate-transformers ... --ray`: generates the blocks of a corpus in a pool of actors."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from fastgen.distributed import blocks
from fastgen.distributed.actors import Told, results
from fastgen.distributed.blocks import Block
from fastgen.distributed.connection import connected
from fastgen.distributed.job import Job
from fastgen.distributed.parts import Mark, Parts
from fastgen.distributed.placement import nodes_of, placement
from fastgen.distributed.worker import BlockWorker, Done
from fastgen.pipeline import remote
from fastgen.pipeline.errors import DONE, INPUT_ERROR, InputError, WorkerError, counted, first_line, writing
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.resume import Journal, contents, other_texts
from fastgen.pipeline.transformers import records
from fastgen.pipeline.transformers.batches import WINDOW
from fastgen.pipeline.transformers.failures import STOP, Policy, policy_of, scan
from fastgen.pipeline.transformers.run import decisive_settings, files_of_model, references_of, say, summary
from fastgen.pipeline.transformers.settings import RunSettings

_SHOWN_ERRORS = 10
_CORPUS = "corpus"  # of the journal's facts


def run(settings: RunSettings) -> int:
    """Generate on a cluster; returns the exit code."""
    form = settings.output_format or records.format_of(settings.output)
    if settings.shards:
        if settings.references is not None:
            raise InputError("--references needs one output file: leave out --shards, or compare afterwards.")
        form = settings.output_format or records.JSONL
    elif "://" in settings.output:
        name = remote.shown(settings.output)
        raise InputError(f"One file in order is written here, not at {name}: give a path, or --shards.")
    files = blocks.sources(settings.input, settings.input_format)
    with connected(settings.ray or "", say):
        cuts = _cut(files)
        corpus = blocks.numbered(files, cuts)
        if not corpus:
            raise InputError(f"{remote.shown(settings.input)} is empty: it should hold one record a line.")
        total = sum(block.count for block in corpus)
        references, wanted = references_of(settings, total)
        decisive = decisive_settings(settings) | contents(*files_of_model(settings))
        if settings.shards:
            parts = Parts(settings.output, form)
            if words := other_texts():
                say(words)
            marks = _generate(settings, form, corpus, parts, decisive)
            return _exit(sum(mark.failed for mark in marks.values()), total)
        output = Path(settings.output)
        if output.is_dir():
            raise InputError(f"{output} is a folder: --shards leaves the parts in it.")
        if any(output.exists() and Path(file.path).exists() and output.samefile(file.path) for file in files):
            raise InputError(f"{output} is the input: choose another file for the output.")
        parts = Parts(f"{output}.parts", form, private=True)
        # If there are parts of a killed run, the output file is from an older run, or was being merged by that run.
        goes_on = settings.resume and parts.exist()
        with Journal(output, decisive).locked(
            resume=settings.resume and not goes_on, overwrite=settings.overwrite or goes_on
        ) as journal:
            if journal.complete:
                _check_complete(output, journal.facts, corpus)
                say(f"{output} is complete: nothing to resume.")
            elif journal.resuming:
                raise InputError(f"Cannot resume {output}: it was begun without --ray; go on without it.")
            else:
                if words := other_texts():
                    say(words)
                marks = _generate(settings, form, corpus, parts, decisive)
                failed = sum(mark.failed for mark in marks.values())
                journal.facts = {"failed": failed, _CORPUS: _stamp(corpus)}
                _merge(parts, corpus, marks, journal)
            if parts.exist():
                parts.remove()
            return summary(output, form, total, journal.facts.get("failed", 0), references, wanted)


def _check_complete(output: Path, facts: dict[str, Any], corpus: list[Block]) -> None:
    if _CORPUS not in facts:
        raise InputError(f"{output} is complete, and was written without --ray: nothing to resume.")
    if facts[_CORPUS] != _stamp(corpus):
        raise InputError(
            f"Cannot resume {output}: it is complete, and the input has changed since; --overwrite starts again."
        )


def _stamp(corpus: list[Block]) -> str:
    """A checksum that changes with the content of the corpus."""
    stamps = [[block.name, block.count, block.stamp] for block in corpus]
    return f"{zlib.crc32(json.dumps(stamps).encode()):08x}"


def _exit(failed: int, total: int) -> int:
    if failed:
        say(f"{failed} of {counted(total, 'record')} failed.")
    return INPUT_ERROR if failed else DONE


def _cut(files: list[blocks.Source]) -> list[list[blocks.Cut]]:
    """Cut each file into blocks."""
    return _each([(file, WINDOW) for file in files], blocks.cut)


def _each(arguments: list[tuple[Any, ...]], function: Callable[..., Any]) -> list[Any]:
    """Call the function with each of these arguments, on the cluster if there are several."""
    if len(arguments) == 1:
        return [function(*arguments[0])]
    remote = ray.remote(num_cpus=1)(function)
    try:
        return list(ray.get([remote.remote(*each) for each in arguments]))
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, InputError) else error from None


def _generate(
    settings: RunSettings, form: str, corpus: list[Block], parts: Parts, decisive: dict[str, Any]
) -> dict[int, Mark]:
    """Generate all parts; returns their marks by number of the block."""
    nodes = nodes_of(ray.nodes())
    how = placement(settings.actors, settings.cpus_per_actor, settings.gpus_per_actor, nodes)
    if not settings.resume:  # before an earlier run's parts are replaced
        _scan(settings, form, corpus)
    marks = parts.begin(decisive, corpus, resume=settings.resume, overwrite=settings.overwrite)
    todo = [block for block in corpus if block.number not in marks]
    if not todo:
        say("all blocks are done: nothing to resume.")
        return marks
    if settings.resume:
        _scan(settings, form, todo)
    if not any(node.cpus >= how.cpus and node.gpus >= how.gpus for node in nodes):
        say(f"no node has room for an actor (CPUs: {how.cpus:g}, GPUs: {how.gpus:g}): waiting for one that has.")
    total = sum(block.count for block in corpus)
    progress = _Following(Progress(total, done=sum(mark.count for mark in marks.values()), enabled=not settings.quiet))
    job = Job(_absolute(settings), form)
    shown = 0
    try:
        found = results(BlockWorker, (job, parts.path), how, todo, progress.running, say)
        with contextlib.closing(found):
            for one in found:
                for warning in one.warnings:
                    say(warning)
                if one.mark is None:
                    raise _problem(one)
                for error in one.mark.errors[: max(0, _SHOWN_ERRORS - shown)]:
                    say(error)
                shown += len(one.mark.errors)
                marks[one.block.number] = one.mark
                progress.done(one.block.number, one.mark)
    except ray.exceptions.RayError as error:
        left = [block for block in todo if block.number not in marks]
        names = ", ".join(f"{block.name} from record {block.begins}" for block in left[:4])
        raise WorkerError(
            f"Ray gave up, {len(left)} of {len(corpus)} blocks are left ({names}{', ...' if len(left) > 4 else ''}); "
            f"--resume goes on: {first_line(error)}\n{error}"
        ) from error
    finally:
        progress.line.close()
    return marks


def _scan(settings: RunSettings, form: str, corpus: list[Block]) -> None:
    """Raise InputError for a line that would end the run, before a model is loaded; not for texts that are too long."""
    policy = policy_of(settings.on_error, form)
    if STOP not in policy:
        return
    files: dict[str, list[Block]] = {}
    for block in corpus:
        files.setdefault(block.path, []).append(block)
    _each([(of_file, settings.text_field, policy) for of_file in files.values()], _scan_file)


def _scan_file(corpus: list[Block], text_field: str, policy: Policy) -> None:
    for block in corpus:
        scan(blocks.read(block, text_field), policy)


class _Following:
    """Feeds the progress line with finished blocks and with the progress of running ones."""

    def __init__(self, line: Progress) -> None:
        self.line = line
        self._done = self._shown = (0, 0)  # records, tokens
        self._running: Told = {}

    def running(self, told: Told) -> None:
        self._running = told
        self._show()

    def done(self, number: int, mark: Mark) -> None:
        self._running.pop(number, None)
        self._done = self._done[0] + mark.count, self._done[1] + mark.tokens
        self._show()

    def _show(self) -> None:
        records, tokens = (sum(pair) for pair in zip(self._done, *self._running.values(), strict=True))
        self.line.update(records - self._shown[0], tokens - self._shown[1])
        self._shown = records, tokens


def _absolute(settings: RunSettings) -> RunSettings:
    """The settings with absolute paths, as workers have another working directory."""
    paths = {name: getattr(settings, name) for name in ("model", "tokenizer")}
    there: Any = {name: str(Path(path).absolute()) for name, path in paths.items() if path and Path(path).exists()}
    return dataclasses.replace(settings, **there)


def _problem(done: Done) -> Exception:
    """The exception for a worker's problem: InputError if the worker raised one, else WorkerError with the trace."""
    if done.trace.strip().splitlines()[-1].startswith(f"{InputError.__module__}.{InputError.__qualname__}"):
        return InputError(done.problem)
    return WorkerError(f"{done.problem}\n{done.trace.strip()}")


def _merge(parts: Parts, corpus: list[Block], marks: dict[int, Mark], journal: Journal) -> None:
    """Merge all parts into one file, in the order of the input."""
    with journal.opened() as file:
        if parts.form != records.PARQUET:
            for block in corpus:
                journal.write(parts.read(block.number, marks[block.number]).decode())
            return
        import io

        import pyarrow.parquet

        from fastgen.distributed.parts import SCHEMA

        with writing(journal.results), pyarrow.parquet.ParquetWriter(file.buffer, SCHEMA) as writer:
            for block in corpus:
                writer.write_table(
                    pyarrow.parquet.read_table(io.BytesIO(parts.read(block.number, marks[block.number])))
                )
