"""`fastgen-generate-transformers ... --ray`: the blocks of a corpus through a pool of actors."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import ray.data

from fastgen.cli.transformers import records
from fastgen.cli.transformers.batches import WINDOW
from fastgen.cli.transformers.run import files_of_model, references_of, say, settings_of, summary
from fastgen.distributed import blocks
from fastgen.distributed.blocks import Block
from fastgen.distributed.connection import connected
from fastgen.distributed.counter import start_counter
from fastgen.distributed.parts import Mark, Parts
from fastgen.distributed.placement import Placement, nodes_of, placement
from fastgen.distributed.worker import BlockWorker, Job
from fastgen.pipeline.errors import DONE, INPUT_ERROR, InputError, WorkerError, first_line, writing
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.resume import Journal, contents

_MOST_TASKS = 5_000  # of Ray: beyond, a task has several blocks
_SHOWN_ERRORS = 10
_POLL_SECONDS = 0.5


def run(args: argparse.Namespace) -> int:
    """Generate on a cluster; returns the exit code."""
    form = args.output_format or records.format_of(args.output)
    if args.shards:
        if args.references is not None:
            raise InputError("--references needs one output file: leave out --shards, or compare afterwards.")
        form = args.output_format or records.JSONL
    elif "://" in args.output:
        raise InputError(f"One file in order is written here, not at {args.output}: give a path, or --shards.")
    files = blocks.sources(args.input, args.input_format)
    context = ray.data.DataContext.get_current()  # the command has a progress line of its own
    context.enable_progress_bars = context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with connected(args.ray):
        cuts = _cut(files)
        corpus = blocks.numbered(files, cuts)
        if not corpus:
            raise InputError(f"{args.input} is empty: it should hold one record a line.")
        total = sum(block.count for block in corpus)
        references, wanted = references_of(args, total)
        stamps = {f"content of {file.path}": list(file.stamp) for file in files}
        settings = settings_of(args) | stamps | contents(*files_of_model(args))
        if args.shards:
            parts = Parts(args.output, form)
            marks = _generate(args, form, corpus, parts, settings)
            return _exit(sum(mark.failed for mark in marks.values()), total)
        output = Path(args.output)
        if output.is_dir():
            raise InputError(f"{output} is a folder: --shards leaves the parts in it.")
        if any(output.exists() and Path(file.path).exists() and output.samefile(file.path) for file in files):
            raise InputError(f"{output} is the input: choose another file for the output.")
        parts = Parts(f"{output}.parts", form)
        # With parts of a run that was killed, the file is an older one's, or what that run had put together.
        resume = args.resume and not parts.exist()
        with Journal(output, settings).locked(resume=resume) as journal:
            if journal.complete:
                say(f"{output} is complete: nothing to resume.")
            elif journal.resuming:
                raise InputError(f"Cannot resume {output}: it was begun without --ray; go on without it.")
            else:
                marks = _generate(args, form, corpus, parts, settings)
                journal.facts = {"failed": sum(mark.failed for mark in marks.values())}
                _merge(parts, corpus, journal)
            parts.remove()
            return summary(args, form, total, journal.facts.get("failed", 0), references, wanted)


def _exit(failed: int, total: int) -> int:
    if failed:
        say(f"{failed} of {total} records failed.")
    return INPUT_ERROR if failed else DONE


def _cut(files: list[blocks.Source]) -> list[list[tuple[int, int, int]]]:
    """The blocks of each file; of several, the cluster looks for them."""
    if len(files) == 1:
        return [blocks.cut(files[0], WINDOW)]
    remote = ray.remote(num_cpus=1)(blocks.cut)
    try:
        return list(ray.get([remote.remote(file, WINDOW) for file in files]))
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, InputError) else error from None


def _generate(
    args: argparse.Namespace, form: str, corpus: list[Block], parts: Parts, settings: dict[str, Any]
) -> dict[int, Mark]:
    """All parts: by the numbers of their blocks what each one holds."""
    marks = parts.begin(settings, resume=args.resume)
    todo = [block for block in corpus if block.number not in marks]
    if not todo:
        say(f"all {len(corpus)} blocks are done: nothing to resume.")
        return marks
    nodes = nodes_of(ray.nodes())
    how = placement(args.actors, args.cpus_per_actor, args.gpus_per_actor, nodes)
    if not any(node.cpus >= how.cpus and node.gpus >= how.gpus for node in nodes):
        say(f"no node has {how.cpus:g} CPUs and {how.gpus:g} GPUs now: waiting until one joins the cluster.")
    total = sum(block.count for block in corpus)
    progress = Progress(total, done=sum(mark.count for mark in marks.values()), enabled=not args.quiet)
    counter = start_counter()
    dataset = pool(_dataset(todo), BlockWorker, (Job(_absolute(args), form), parts.path, counter), how, batch_size=1)
    shown = 0
    try:
        with _following(counter, progress):
            for row in dataset.iter_rows():
                one = json.loads(row["summary"])
                for warning in one["warnings"]:
                    say(warning)
                if one["problem"]:
                    raise _problem(one)
                for error in one["errors"][: max(0, _SHOWN_ERRORS - shown)]:
                    say(error)
                shown += len(one["errors"])
                marks[one["number"]] = Mark(0, 0, one["count"], one["failed"], one["tokens"], one["errors"])
    except (ray.exceptions.RayError, ray.data.exceptions.RayDataUserCodeException) as error:
        left = [block for block in todo if block.number not in marks]
        names = ", ".join(f"{block.name} from record {block.first - block.before + 1}" for block in left[:4])
        raise WorkerError(
            f"Ray gave up, {len(left)} of {len(corpus)} blocks are left ({names}{', ...' if len(left) > 4 else ''}); "
            f"--resume goes on: {first_line(error)}\n{error}"
        ) from error
    finally:
        progress.close()
    if missing := len(corpus) - len(marks):
        raise WorkerError(f"Ray ended without {missing} of {len(corpus)} blocks; --resume goes on with them")
    return marks


def _absolute(args: argparse.Namespace) -> argparse.Namespace:
    """For workers, which have another working directory."""
    args = argparse.Namespace(**vars(args))
    for name in ("model", "tokenizer"):
        if (given := getattr(args, name)) is not None and Path(given).exists():
            setattr(args, name, str(Path(given).absolute()))
    return args


def _problem(row: dict[str, Any]) -> Exception:
    """What a worker couldn't do; its own sentences are the user's already."""
    if row["trace"].strip().splitlines()[-1].startswith(f"{InputError.__module__}.{InputError.__qualname__}"):
        return InputError(row["problem"])
    return WorkerError(f"{row['problem']}\n{row['trace'].strip()}")


def _dataset(todo: list[Block]) -> ray.data.Dataset:
    items = [{"block": json.dumps(asdict(block))} for block in todo]
    return ray.data.from_items(items, override_num_blocks=min(len(todo), _MOST_TASKS))


def pool(
    dataset: ray.data.Dataset, worker: type, arguments: tuple[Any, ...], how: Placement, **options: Any
) -> ray.data.Dataset:
    """`dataset` through actors of `worker`, built once each with `arguments`."""
    return dataset.map_batches(
        worker,
        fn_constructor_args=arguments,
        compute=ray.data.ActorPoolStrategy(min_size=how.least, max_size=how.most, max_tasks_in_flight_per_actor=2),
        num_cpus=how.cpus,
        num_gpus=how.gpus,
        **options,
    )


@contextlib.contextmanager
def _following(counter: Any, progress: Progress) -> Iterator[None]:
    """The progress line shows what the counter says."""
    ended = threading.Event()
    seen = (0, 0)

    def follow() -> None:
        nonlocal seen
        last = False
        while not last:
            last = ended.wait(_POLL_SECONDS)
            with contextlib.suppress(ray.exceptions.RayError):
                now = ray.get(counter.total.remote(), timeout=10)
                progress.update(now[0] - seen[0], now[1] - seen[1])
                seen = now

    thread = threading.Thread(target=follow, name="fastgen-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _merge(parts: Parts, corpus: list[Block], journal: Journal) -> None:
    """One file in the order of the input."""
    with journal.opened() as file:
        if parts.form != records.PARQUET:
            for block in corpus:
                journal.write(parts.read(block.number).decode())
            return
        import io

        import pyarrow.parquet

        from fastgen.distributed.parts import SCHEMA

        with writing(journal.results), pyarrow.parquet.ParquetWriter(file.buffer, SCHEMA) as writer:
            for block in corpus:
                writer.write_table(pyarrow.parquet.read_table(io.BytesIO(parts.read(block.number))))
