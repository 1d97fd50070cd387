"""fastgen-generate: fairseq-generate, with reading, generation, post-processing and writing overlapped.

Same flags, same lines in the same order, same summary. Nothing of fairseq is imported before `main`, so that worker
processes, which import this module again, start quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import fastgen
from fastgen.cli import fairseq_lines
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

NAME = "fastgen-generate"
WORKERS = 2
AUTO = "auto"

# Flags that don't change what a run writes: a run may be resumed with others.
_FREE_SETTINGS = ("no_progress_bar", "log_interval", "log_format", "log_file", "num_workers", "data_buffer_size", "cpu")


def _count_or_auto(text: str) -> int | str:
    return AUTO if text == AUTO else int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _refuse(message: str) -> NoReturn:
    raise InputError(f"{message[:1].upper()}{message[1:].rstrip('.')}; --help lists the flags.")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """fairseq's arguments, from its own parser, and fastgen's."""
    from fairseq import options

    parser = options.get_generation_parser()
    # As fairseq-generate's own entry point does, for tasks that read the model's arguments.
    parser.add_argument("--arch", "-a", metavar="ARCH", default="wav2vec2", help="model architecture")
    parser.epilog = EXIT_CODES
    parser.error = _refuse  # type: ignore[method-assign]
    for action in parser._actions:
        if action.dest in ("batch_size", "max_tokens"):
            action.type = _count_or_auto
            action.help = f"{action.help or ''} ('{AUTO}': the largest that fits, found by doubling)".strip()
    group = parser.add_argument_group("fastgen")
    group.add_argument(
        "--workers",
        dest="fastgen_workers",
        type=_count,
        default=WORKERS,
        metavar="N",
        help="processes for post-processing; 0: none, it runs between batches (default: %(default)s)",
    )
    group.add_argument(
        "--resume",
        dest="fastgen_resume",
        action="store_true",
        help="go on with the killed or interrupted run that wrote to --results-path",
    )
    args = options.parse_args_and_arch(parser, list(argv))
    own = argparse.Namespace(
        workers=args.fastgen_workers,
        resume=args.fastgen_resume,
        auto=[name for name in ("batch_size", "max_tokens") if getattr(args, name) == AUTO],
    )
    if len(own.auto) == 2:
        raise InputError("Only one of --batch-size and --max-tokens can be auto.")
    for name in own.auto:
        setattr(args, name, None)
        setattr(args, f"{name}_valid", None)
    if own.resume and not args.results_path:
        raise InputError("--resume needs --results-path, the folder of the run to go on with.")
    del args.fastgen_workers, args.fastgen_resume
    return args, own


@contextlib.contextmanager
def _arguments(argv: Sequence[str] | None) -> Iterator[list[str]]:
    """fairseq reads --user-dir from sys.argv while it builds its parser."""
    before = sys.argv
    if argv is not None:
        sys.argv = [NAME, *argv]
    try:
        yield sys.argv[1:]
    finally:
        sys.argv = before


class Output:
    """Where the lines go: standard output, or a file with a journal beside it."""

    def __init__(self, file: TextIO, name: str, journal: Journal | None) -> None:
        self.file, self.name, self.journal = file, name, journal

    def write(self, text: str) -> None:
        with writing(self.name):
            self.file.write(text)
            self.file.flush()

    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size


class _Handler(logging.StreamHandler):  # generic only since Python 3.11
    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: where a log line can't be written, a result can't either, and that ends the run."""


@contextlib.contextmanager
def _logging_to(results: TextIO) -> Iterator[logging.StreamHandler[Any]]:
    """Log lines as fairseq-generate has them, and where it has them.

    It means to have them among the results, but where an import has set up logging before (in fairseq 0.12.3.1 one
    does, unless tensorboardX is installed) they come out on standard error.
    """
    root = logging.getLogger()
    handler = _Handler(sys.stderr if root.handlers else results)
    handler.setFormatter(
        logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    )
    before, level = list(root.handlers), root.level
    for other in before:
        if type(other) is logging.StreamHandler:  # the import's; it would say everything again, hydra's chatter too
            root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
    try:
        yield handler
    finally:
        root.setLevel(level)
        root.handlers[:] = before


def _settings(cfg: Any, own: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for a run to be resumed."""
    from omegaconf import OmegaConf

    sections = ("common", "common_eval", "generation", "dataset", "task", "bpe", "tokenizer", "scoring")
    settings: dict[str, Any] = {"auto": own.auto, "distributed_rank": cfg.distributed_training.distributed_rank}
    for section in sections:
        value = cfg[section]
        if value is None:  # no subword codec, for one
            continue
        plain: Any = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else vars(value)
        for name, setting in plain.items():
            if name not in _FREE_SETTINGS and name != "results_path":
                settings[f"{section}.{name}"] = str(setting)
    return settings


def run(cfg: Any, own: argparse.Namespace) -> int:
    """One run, to standard output or to --results-path."""
    from fastgen.cli import fairseq_run

    fairseq_run.check(cfg)
    if cfg.common_eval.results_path is None:
        return _Run(cfg, own, Output(sys.stdout, "standard output", None), []).run()
    results = Path(cfg.common_eval.results_path) / f"generate-{cfg.dataset.gen_subset}.txt"
    journal = Journal(results, _settings(cfg, own))
    records: list[dict[str, Any]] = []
    with writing(results.parent):
        results.parent.mkdir(parents=True, exist_ok=True)
    if own.resume and results.exists():
        if not journal_path(results).exists():
            if _is_finished(results):
                print(f"{NAME}: {results} is complete: nothing to resume.", file=sys.stderr)
                return DONE
            raise InputError(f"Cannot resume: there is no {journal_path(results)}; start without --resume.")
        records = journal.resume()
    finished = False
    with writing(results):
        file = open(results, "a" if records else "w", encoding="utf-8")  # noqa: SIM115
    try:
        if not records:
            journal.start()
        code = _Run(cfg, own, Output(file, str(results), journal), records).run()
        finished = True
        return code
    finally:
        # On a full disk the last lines can't be flushed; an error about it is under way.
        with contextlib.nullcontext() if finished else contextlib.suppress(OSError):
            file.close()
        journal.close(finished=finished)


def _is_finished(results: Path) -> bool:
    with open(results, "rb") as file:
        file.seek(max(0, results.stat().st_size - 4096))
        tail = file.read().decode("utf-8", errors="replace").splitlines()
    return any(line.startswith("Generate ") or "| Translated " in line for line in tail[-3:])


class _Run:
    def __init__(self, cfg: Any, own: argparse.Namespace, output: Output, records: list[dict[str, Any]]) -> None:
        self.cfg, self.own, self.output, self.records = cfg, own, output, records
        self.logger = logging.getLogger("fairseq_cli.generate")
        self.sentences = sum(record["sentences"] for record in records)
        self.tokens = sum(record["tokens"] for record in records)
        self.seconds = sum(record["seconds"] for record in records)
        self.has_target = bool(records[-1]["has_target"]) if records else True

    def run(self) -> int:
        with _logging_to(self.output.file) as handler:
            stream = handler.stream
            if self.records:  # what loading says is already in the results
                handler.setStream(sys.stderr)
            self.logger.info(self.cfg)
            loaded = self._load()
            handler.setStream(stream)
            self._generate(loaded)
            self._summary(loaded)
        return DONE

    def _load(self) -> Any:
        from fastgen.cli import fairseq_run

        if not self.own.auto and self.cfg.dataset.max_tokens is None and self.cfg.dataset.batch_size is None:
            self.cfg.dataset.max_tokens = fairseq_run.STOCK_TOKENS
        loaded = fairseq_run.load(self.cfg, self.logger)
        self.scoring = fairseq_run.Scoring(loaded)
        for record in self.records:
            for entry in record["scored"]:
                self.scoring.add(fairseq_lines.Scored(*entry))
        return loaded

    def _generate(self, loaded: Any) -> None:
        from fastgen.cli import fairseq_run

        by_tokens = self.own.auto == ["max_tokens"]
        auto = fairseq_run.auto_batch(self.cfg, loaded.device, by_tokens=by_tokens) if self.own.auto else None
        batches = fairseq_run.Batches(loaded, auto, by_tokens)
        if batches.dropped:
            self._warn(
                f"fairseq leaves out {batches.dropped} sentences, too long or no multiple of "
                f"{self.cfg.dataset.required_batch_size_multiple}: --required-batch-size-multiple 1 keeps the latter"
            )
        generation = fairseq_run.Generation(loaded, batches, auto, self._warn)
        if self.records:
            generation.before = self.records[-1]["random_state"]
        workers = self.own.workers if fairseq_run.can_travel(loaded.form) else 0
        silent = self.cfg.common.no_progress_bar or self.cfg.common.log_format == "none"
        progress = Progress(batches.sentences, done=self.sentences, enabled=not silent)

        with WorkerPool(workers, fairseq_lines.build, loaded.form) as pool:

            def generate(numbered: tuple[int, Any]) -> Any:
                generated = generation(*numbered)
                if generated is None:
                    return None
                batch, done = generated
                progress.update(done.sentences, done.tokens)
                return pool.submit(batch), done

            try:
                source = batches.start(self.sentences, self.records[-1]["number"] + 1 if self.records else 0)
                run_stages(source, generate, self._write, cut=batches.cut if auto else None)
            finally:
                progress.close()

    def _write(self, result: fairseq_lines.Lines, done: Any) -> None:
        self.output.write(result.text)
        for scored in result.scored:
            self.scoring.add(scored)
        self.sentences += done.sentences
        self.tokens += done.tokens
        self.seconds += done.seconds
        self.has_target = done.has_target
        if self.output.journal is not None:
            self.output.journal.batch(
                self.output.size(),
                number=done.number,
                sentences=done.sentences,
                tokens=done.tokens,
                seconds=done.seconds,
                has_target=done.has_target,
                random_state=done.random_state,
                scored=[list(vars(scored).values()) for scored in result.scored],
            )

    def _summary(self, loaded: Any) -> None:
        """As fairseq-generate ends, word for word: scripts look for these lines."""
        self.logger.info("NOTE: hypothesis and token scores are output in base 2")
        seconds = max(self.seconds, 1e-9)
        self.logger.info(
            f"Translated {self.sentences:,} sentences ({self.tokens:,} tokens) in {self.seconds:.1f}s "
            f"({self.sentences / seconds:.2f} sentences/s, {self.tokens / seconds:.2f} tokens/s)"
        )
        if not self.has_target:
            return
        cfg = self.cfg
        if cfg.bpe and not cfg.generation.sacrebleu:
            if cfg.common_eval.post_process:
                self.logger.warning(
                    "BLEU score is being computed by splitting detokenized string on spaces, this is probably not "
                    "what you want. Use --sacrebleu for standard 13a BLEU tokenization"
                )
            else:
                self.logger.warning(
                    "If you are using BPE on the target side, the BLEU score is computed on BPE tokens, not on proper "
                    "words.  Use --sacrebleu for standard 13a BLEU tokenization"
                )
        self.output.write(
            f"Generate {cfg.dataset.gen_subset} with beam={cfg.generation.beam}: {self.scoring.result()}\n"
        )

    def _warn(self, text: str) -> None:
        print(f"{NAME}: {text}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    try:
        with _arguments(argv) as arguments:
            return _main(arguments)
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
        print(f"{NAME}: interrupted; what was finished is kept.", file=sys.stderr)
        return INTERRUPTED


def _main(arguments: list[str]) -> int:
    try:
        import fairseq  # noqa: F401
    except ImportError as error:
        raise InputError(f"fairseq is needed: pip install 'fastgen[fairseq]' ({first_line(error)}).") from error
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    args, own = parse(arguments)
    return run(convert_namespace_to_omegaconf(args), own)


if __name__ == "__main__":
    sys.exit(main())
