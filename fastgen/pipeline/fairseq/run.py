"""One run of fastgen-generate: loads, generates, writes, and ends with fairseq-generate's summary."""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fastgen.optimizer.fairseq.foreign_code import is_known
from fastgen.optimizer.fairseq.generate.continuous_batch import why_not_refilled
from fastgen.pipeline.errors import DONE, counted, tell, writing
from fastgen.pipeline.fairseq import lines
from fastgen.pipeline.fairseq.batches import Batches
from fastgen.pipeline.fairseq.generation import Done, Generation
from fastgen.pipeline.fairseq.load import Loaded, can_travel, check, load
from fastgen.pipeline.fairseq.output import Output, logging_to
from fastgen.pipeline.fairseq.refilling import Refilling
from fastgen.pipeline.fairseq.scoring import Scoring
from fastgen.pipeline.fairseq.settings import Settings
from fastgen.pipeline.offline import REFILL
from fastgen.pipeline.progress import Progress
from fastgen.pipeline.resume import OTHER_DIGITS, Journal, contents, other_texts, precision
from fastgen.pipeline.stages import run_stages
from fastgen.pipeline.workers import WorkerPool

STOCK_TOKENS = 12000  # max_tokens of fairseq-generate if neither --batch-size nor --max-tokens is given

# Sections whose options decide the results: a resumed run may only have other values of the options in _FREE.
_SECTIONS = ("common", "common_eval", "generation", "dataset", "task", "bpe", "tokenizer", "scoring")
_FREE = {
    "no_progress_bar", "log_interval", "log_format", "log_file", "num_workers", "data_buffer_size", "cpu",
    "results_path",
}  # fmt: skip

_BLEU_OF_WORDS = (
    "BLEU score is being computed by splitting detokenized string on spaces, this is probably not what you want. "
    "Use --sacrebleu for standard 13a BLEU tokenization"
)
_BLEU_OF_SUBWORDS = (
    "If you are using BPE on the target side, the BLEU score is computed on BPE tokens, not on proper words.  "
    "Use --sacrebleu for standard 13a BLEU tokenization"
)


def run(cfg: Any, own: Settings) -> int:
    """Generate, to standard output or to --results-path; `own`: fastgen's flags. Returns the exit code."""
    check(cfg)
    if cfg.common_eval.results_path is None:
        _Run(cfg, own, Output()).run()
        return DONE
    results = Path(cfg.common_eval.results_path) / f"generate-{cfg.dataset.gen_subset}.txt"
    with writing(results.parent):
        results.parent.mkdir(parents=True, exist_ok=True)
    with Journal(results, _settings(cfg, own)).locked(resume=own.resume, overwrite=own.overwrite) as journal:
        if journal.complete:
            _warn(f"{results} is complete: nothing to resume.")
        else:
            _Run(cfg, own, Output(journal)).run()
    return DONE


def _settings(cfg: Any, own: Settings) -> dict[str, Any]:
    """The settings that must be the same for a run to be resumed."""
    settings: dict[str, Any] = {
        "auto": own.auto,
        "refill": own.refill,
        "allowed_outputs": own.allowed_outputs,
        "distributed_rank": cfg.distributed_training.distributed_rank,
        "distributed_world_size": cfg.distributed_training.distributed_world_size,
        "checkpoint_suffix": cfg.checkpoint.checkpoint_suffix,
        "checkpoint_shard_count": cfg.checkpoint.checkpoint_shard_count,
    }
    for section in _SECTIONS:
        value = cfg[section]
        if value is None:  # such as no subword codec
            continue
        plain: Any = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else vars(value)
        settings.update({f"{section}.{name}": str(plain[name]) for name in plain if name not in _FREE})
    return settings | precision() | contents(*_files(cfg, list(settings.values())))


def _files(cfg: Any, values: list[Any]) -> list[Path]:
    """Files that decide the results and might be replaced: checkpoints, codes, dictionaries, data of the subset."""
    paths = [Path(path) for value in values for path in str(value).split(os.pathsep) if os.path.isfile(path)]
    for folder in str(getattr(cfg.task, "data", None) or "").split(os.pathsep):
        if os.path.isdir(folder):
            paths += sorted({*Path(folder).glob(f"{cfg.dataset.gen_subset}*"), *Path(folder).glob("dict.*")})
    return paths


class _Run:
    def __init__(self, cfg: Any, own: Settings, output: Output) -> None:
        self.cfg, self.own, self.output = cfg, own, output
        self.logger = logging.getLogger("fairseq_cli.generate")
        self.sentences, self.tokens, self.seconds = 0, 0, 0.0
        self.has_target = True
        self.next = 0  # the number of the first batch to generate
        self.random_state: str | None = None

    def run(self) -> None:
        dataset = self.cfg.dataset
        if not self.own.auto and dataset.max_tokens is None and dataset.batch_size is None:
            dataset.max_tokens = STOCK_TOKENS
        with logging_to(self.output.log) as handler:
            self.logger.info(self.cfg)
            if words := other_texts():
                _warn(words)
            loaded = load(self.cfg, self.logger, self.own.allowed_outputs)
            batches = Batches(loaded, *self.own.auto)
            self.scoring = Scoring(loaded.scorer, loaded.task.target_dictionary, by_words=loaded.form.by_words)
            self._restore()
            if self.next:
                _warn(OTHER_DIGITS)
            with self.output.opened(handler):  # only now: a refused run must not change an earlier run's results
                self._generate(loaded, batches)
                self._summary()

    def _restore(self) -> None:
        """Restore the state that an earlier run noted in the journal."""
        if self.output.journal is None:
            return
        with self.output.journal.earlier() as records:
            for record in records:
                for entry in record["scored"]:
                    self.scoring.add(lines.Scored(*entry))
                self.sentences += record["sentences"]
                self.tokens += record["tokens"]
                self.seconds += record["seconds"]
                self.has_target, self.random_state = record["has_target"], record["random_state"]
                self.next = record["number"] + 1

    def _generate(self, loaded: Loaded, batches: Batches) -> None:
        if batches.dropped:
            _warn(
                f"fairseq leaves out {counted(batches.dropped, 'sentence')}, too long or no multiple of "
                f"{self.cfg.dataset.required_batch_size_multiple}: --required-batch-size-multiple 1 keeps the latter"
            )
        generation = Generation(loaded, batches, _warn, self.random_state)
        workers = self.own.workers if can_travel(loaded.form) else 0
        silent = self.cfg.common.no_progress_bar or self.cfg.common.log_format == "none"
        progress = Progress(batches.sentences, done=self.sentences, enabled=not silent)

        refilling = None
        why_not = why_not_refilled(loaded.generator, REFILL[self.own.refill])
        if why_not is None and not batches.plain:
            why_not = "the task makes its own batches"
        if why_not is None and not is_known(type(loaded.task).inference_step):
            why_not = f"{type(loaded.task).__name__} has its own inference_step"
        if why_not is None:
            refilling = Refilling(generation, batches, _warn)
        elif self.own.refill == "on":
            _warn(f"batch by batch, without refill: {why_not}.")

        with WorkerPool(workers, lines.build, loaded.form) as pool:

            def post_process(generated: tuple[lines.Batch, Done] | None) -> tuple[Future[Any], Done] | None:
                if generated is None or generated[1].number < self.next:  # an earlier run has it
                    return None
                batch, done = generated
                progress.update(done.sentences, done.tokens)
                return pool.submit(batch), done

            def generate(numbered: tuple[int, Any, list[int] | None]) -> tuple[Future[Any], Done] | None:
                return post_process(generation(*numbered))

            try:
                if refilling is not None:
                    source, cut = refilling.stages(self.sentences, self.next)
                    run_stages(source, post_process, self._write, cut=cut)
                else:
                    source = batches.start(self.sentences, self.next)
                    run_stages(source, generate, self._write, cut=batches.cut if batches.auto else None)
            finally:
                progress.close()

    def _write(self, result: lines.Lines, done: Done) -> None:
        """Write one batch; called in the writing thread, in order."""
        self.output.write(result.text)
        for scored in result.scored:
            self.scoring.add(scored)
        self.sentences += done.sentences
        self.tokens += done.tokens
        self.seconds += done.seconds
        self.has_target = done.has_target
        self.output.note(**vars(done), scored=[list(vars(scored).values()) for scored in result.scored])

    def _summary(self) -> None:
        """Write the last lines of fairseq-generate, word for word: scripts look for them."""
        cfg, seconds = self.cfg, max(self.seconds, 1e-9)
        self.logger.info("NOTE: hypothesis and token scores are output in base 2")
        self.logger.info(
            f"Translated {self.sentences:,} sentences ({self.tokens:,} tokens) in {self.seconds:.1f}s "
            f"({self.sentences / seconds:.2f} sentences/s, {self.tokens / seconds:.2f} tokens/s)"
        )
        if not self.has_target:
            return
        if cfg.bpe and not cfg.generation.sacrebleu:
            self.logger.warning(_BLEU_OF_WORDS if cfg.common_eval.post_process else _BLEU_OF_SUBWORDS)
        self.output.write(
            f"Generate {cfg.dataset.gen_subset} with beam={cfg.generation.beam}: {self.scoring.result()}\n"
        )


def _warn(text: str) -> None:
    tell(f"fastgen-generate: {text}")
