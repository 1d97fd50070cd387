"""fastgen-generate-transformers MODEL INPUT OUTPUT: generate from a file with a Hugging Face model.

Nothing of transformers is imported before `main`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import fastgen
from fastgen.cli import metrics, records
from fastgen.pipeline.errors import (
    DONE,
    EXIT_CODES,
    INPUT_ERROR,
    INTERRUPTED,
    InputError,
    WorkerError,
    first_line,
    writing,
)
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.resume import Journal, journal_path
from fastgen.pipeline.stages import run_stages
from fastgen.pipeline.workers import WorkerPool

NAME = "fastgen-generate-transformers"
AUTO = "auto"
WORKERS = 2
SHOWN_ERRORS = 10

# Arguments that don't change what a run writes: a run may be resumed with others.
_FREE_SETTINGS = {"workers", "resume", "quiet", "references", "metrics", "output"}


def _size(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number above 0 nor {AUTO!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message[:1].upper()}{message[1:].rstrip('.')}; --help lists the flags.")


def parser() -> argparse.ArgumentParser:
    """The command's flags, one for every field of GenerationConfig among them."""
    from fastgen.cli.generation_flags import add_flags

    result = _Parser(
        prog=NAME,
        description="Generate text for every line of a file with a Hugging Face model, accelerated by fastgen.",
        epilog=f"{EXIT_CODES}. A record that fails becomes an error record in JSONL output: the others are done, the "
        f"failures are counted, and the exit code is {INPUT_ERROR}. With text output the run stops there.",
        allow_abbrev=False,
    )
    result.add_argument("model", metavar="MODEL", help="name or folder of the model")
    result.add_argument("input", metavar="INPUT", type=Path, help="text, one input a line, or .jsonl")
    result.add_argument("output", metavar="OUTPUT", type=Path, help="text, or .jsonl for all hypotheses and scores")
    forms = (records.TEXT, records.JSONL)
    result.add_argument("--input-format", choices=forms, help="default: by the name of the file")
    result.add_argument("--output-format", choices=forms, help="default: by the name of the file")
    result.add_argument("--text-field", default="text", metavar="NAME", help="of JSONL input (default: %(default)s)")
    result.add_argument("--tokenizer", metavar="NAME", help="default: the model's")
    result.add_argument("--task-prefix", default="", metavar="TEXT", help="put before each input, as T5 needs")
    result.add_argument("--source-lang", metavar="LANG", help="as the tokenizer calls it: en, en_XX, eng_Latn, ...")
    result.add_argument("--target-lang", metavar="LANG")
    result.add_argument(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="auto: as the model was saved (default)",
    )
    result.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    sizes = result.add_mutually_exclusive_group()
    sizes.add_argument("--batch-size", type=_size, metavar="N|auto", help="records in a batch (default: 32)")
    sizes.add_argument("--max-tokens", type=_size, metavar="N|auto", help="padded input tokens in a batch")
    result.add_argument("--truncate", action="store_true", help="cut inputs that are too long instead of refusing them")
    result.add_argument("--no-scores", action="store_true", help="no scores in JSONL: fastgen is faster without")
    result.add_argument("--seed", type=_count, default=1, metavar="N", help="of sampling (default: %(default)s)")
    result.add_argument("--references", type=Path, metavar="FILE", help="one a line: metrics are shown at the end")
    result.add_argument(
        "--metrics", default=",".join(metrics.METRICS), metavar="LIST", help="with --references (default: %(default)s)"
    )
    result.add_argument(
        "--workers",
        type=_count,
        default=WORKERS,
        metavar="N",
        help="processes that tokenise and detokenise; 0: none (default: %(default)s)",
    )
    result.add_argument("--resume", action="store_true", help="go on with the killed run that wrote OUTPUT")
    result.add_argument("--quiet", action="store_true", help="no progress line")
    add_flags(result)
    return result


class _Writer:
    """Puts results back into the order of the input; runs in the writing thread.

    What can't be written yet, because an earlier record is still to come, is kept in the journal.
    """

    def __init__(self, args: argparse.Namespace, form: str, journal: Journal, earlier: list[dict[str, Any]]) -> None:
        self._path, self._form, self._journal = args.output, form, journal
        self.next = int(earlier[-1]["next"]) if earlier else 0
        held = {int(index): text for record in earlier for index, text in record["held"]}
        self._held = {index: text for index, text in held.items() if index >= self.next}
        self.errors_shown = 0
        with writing(self._path):
            self._file = open(self._path, "a" if earlier else "w", encoding="utf-8", newline="\n")  # noqa: SIM115

    @property
    def finished(self) -> set[int]:
        return {*range(self.next), *self._held}

    def write(self, texts: list[str], note: tuple[list[records.Record], list[float | None], int]) -> None:
        """`texts` of a batch, `per_record` for each record without an error."""
        batch, scores, per_record = note
        pairs = iter(zip(texts, scores, strict=True))
        new: list[tuple[int, str]] = []
        for record in batch:
            outputs = [] if record.error else [next(pairs) for _ in range(per_record)]
            if record.index < self.next or record.index in self._held:
                continue  # of an earlier run
            self._show(record)
            new.append((record.index, records.render(record, outputs, self._form)))
        self._held.update(new)
        ready: list[str] = []
        while (text := self._held.pop(self.next, None)) is not None:
            ready.append(text)
            self.next += 1
        with writing(self._path):
            self._file.write("".join(ready))
            self._file.flush()
            size = os.fstat(self._file.fileno()).st_size
        self._journal.batch(size, next=self.next, held=[entry for entry in new if entry[0] >= self.next])

    def _show(self, record: records.Record) -> None:
        if record.error is not None and self.errors_shown <= SHOWN_ERRORS:
            more = self.errors_shown == SHOWN_ERRORS
            print(f"{NAME}: {'more errors are in the output' if more else record.error}", file=sys.stderr)
            self.errors_shown += 1

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


def _check(args: argparse.Namespace) -> tuple[str, str, int, list[str], list[str]]:
    """What can be refused before anything slow: formats, the number of records, references, metrics."""
    form = args.input_format or records.format_of(args.input)
    output_form = args.output_format or records.format_of(args.output)
    total = records.count_lines(args.input)
    references: list[str] = []
    wanted = [metric for metric in args.metrics.split(",") if metric]
    if args.references is not None:
        metrics.check(wanted)
        references = metrics.read_references(args.references, total)
    if args.output.exists() and args.output.samefile(args.input):
        raise InputError(f"{args.output} is the input: choose another file for the output.")
    return form, output_form, total, references, wanted


def _earlier(args: argparse.Namespace, journal: Journal, form: str, total: int) -> list[dict[str, Any]] | None:
    """What an earlier run did; None if it did everything."""
    if not args.resume or not args.output.exists():
        journal.start()
        return []
    if not journal_path(args.output).exists():
        per_record = int(vars(args).get("generation.num_return_sequences") or 1) if form == records.TEXT else 1
        if records.count_lines(args.output) == total * per_record:
            return None
        raise InputError(f"Cannot resume: there is no {journal_path(args.output)}; start without --resume.")
    return journal.resume()


def run(args: argparse.Namespace) -> int:
    """Generate; returns the exit code."""
    form, output_form, total, references, wanted = _check(args)
    settings = {name: value for name, value in vars(args).items() if name not in _FREE_SETTINGS}
    journal = Journal(args.output, settings)
    earlier = _earlier(args, journal, output_form, total)
    if earlier is None:
        print(f"{NAME}: {args.output} is complete: nothing to resume.", file=sys.stderr)
    else:
        writer, finished = _Writer(args, output_form, journal, earlier), False
        try:
            _generate(args, form, output_form, total, writer)
            writer.close()
            finished = True
        finally:
            journal.close(finished=finished)
    return _summary(args, output_form, total, references, wanted)


def _generate(args: argparse.Namespace, form: str, output_form: str, total: int, writer: _Writer) -> None:
    import torch
    from transformers.utils import logging

    from fastgen.cli import generation_flags, tokenizing, transformers_run

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    flags = generation_flags.given(args)
    config = transformers_run.load_config(args.model)
    plain = tokenizing.TokenizerSpec(
        args.tokenizer or args.model, args.task_prefix, args.source_lang, args.target_lang, None
    )
    tokenizer = tokenizing.load_tokenizer(plain)
    language = None if args.target_lang is None else tokenizing.target_language(tokenizer, args.target_lang)[0]
    new_tokens = int(flags.get("max_new_tokens") or 0)
    limit = transformers_run.source_limit(config, tokenizer, new_tokens)
    spec = tokenizing.TokenizerSpec(
        plain.name, plain.task_prefix, plain.source_lang, plain.target_lang, limit if args.truncate else None
    )
    with WorkerPool(args.workers, tokenizing.build, spec) as pool:  # starts while the model is loaded
        model = transformers_run.load_model(args.model, config, args.dtype, device)
        generation = transformers_run.generation_config(model, tokenizer, flags, language)
        by_tokens = args.max_tokens is not None
        size = args.max_tokens if by_tokens else args.batch_size or 32
        auto = transformers_run.auto_batch(device, by_tokens=by_tokens) if size == AUTO else None
        source = transformers_run.Source(
            records.read(args.input, form, text_field=args.text_field),
            pool,
            limit,
            0 if auto else size,
            auto,
            by_tokens,
            stop_at_error=output_form == records.TEXT,
            finished=writer.finished,
            first=writer.next // transformers_run.WINDOW * transformers_run.WINDOW,
        )
        generator = transformers_run.Generator(
            model,
            generation,
            source,
            seed=args.seed,
            scores=output_form == records.JSONL and not args.no_scores,
            warn=lambda text: print(f"{NAME}: {text}", file=sys.stderr),
        )
        progress = Progress(total, done=len(source.finished), enabled=not args.quiet)

        def generate(batch: transformers_run.Batch) -> Any:
            if batch.records[0].error is not None:
                progress.update(len(batch.records), 0)
                return transformers_run.nothing(), (batch.records, [], generator.per_record)
            found = generator(batch)
            progress.update(len(batch.records), found.tokens)
            return pool.submit(tokenizing.Decode(found.rows)), (batch.records, found.scores, generator.per_record)

        try:
            run_stages(source, generate, writer.write, cut=source.cut, depth=2)
        finally:
            progress.close()


def _summary(args: argparse.Namespace, form: str, total: int, references: list[str], wanted: list[str]) -> int:
    per_record = records.count_lines(args.output) // total if form == records.TEXT else 1
    best = records.best_outputs(args.output, form, per_record)
    done = [i for i, text in enumerate(best) if text is not None]
    if failed := total - len(done):
        print(f"{NAME}: {failed} of {total} records failed.", file=sys.stderr)
    if references and done:
        outputs = [text for text in best if text is not None]
        for line in metrics.score(outputs, [references[i] for i in done], wanted):
            print(line)
    return INPUT_ERROR if failed else DONE


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    try:
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            message = f"transformers is needed: pip install 'fastgen[transformers]' ({first_line(error)})."
            raise InputError(message) from error
        return run(parser().parse_args(argv))
    except InputError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return INPUT_ERROR
    except WorkerError as error:
        print(f"{NAME}: {first_line(error)}.\n{error}", file=sys.stderr)
        return INPUT_ERROR
    except fastgen.FallbackError as error:
        print(f"{NAME}: FASTGEN_STRICT is set, and fastgen cannot accelerate this: {error}.", file=sys.stderr)
        return INPUT_ERROR
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; what was finished is kept, --resume goes on.", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
