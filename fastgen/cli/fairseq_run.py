"""What fastgen-generate does with fairseq: load, iterate, generate, and turn hypotheses into plain lists."""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import math
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils, scoring, tasks, utils
from fairseq.data import Dictionary
from fairseq.data.iterators import EpochBatchIterator

from fastgen.cli import fairseq_lines as lines
from fastgen.pipeline.batching import AutoBatch, memory_for_double, run_with_backoff
from fastgen.pipeline.errors import InputError, first_line

AUTO_SENTENCES = 8
AUTO_TOKENS = 512
STOCK_TOKENS = 12000  # what fairseq-generate takes when neither --batch-size nor --max-tokens is given


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Errors of fairseq while it reads `what` become one sentence: it raises bare Exceptions for bad input."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"Cannot load {what}: {first_line(error)} ({type(error).__name__}).") from error


def check(cfg: Any) -> None:
    """What fairseq-generate asserts, and files that must be there, as sentences."""
    paths = cfg.common_eval.path
    if not paths:
        raise InputError("--path is needed: the model's checkpoint, or several separated by a colon.")
    if cfg.generation.sampling and cfg.generation.nbest != cfg.generation.beam:
        raise InputError("--sampling needs --nbest to be equal to --beam.")
    if cfg.generation.replace_unk is not None and cfg.dataset.dataset_impl != "raw":
        raise InputError("--replace-unk needs the raw text: --dataset-impl raw.")
    for path in [*utils.split_paths(paths), *([cfg.generation.lm_path] if cfg.generation.lm_path else [])]:
        sharded = cfg.checkpoint.checkpoint_suffix or cfg.checkpoint.checkpoint_shard_count > 1
        if "://" not in path and not sharded and not os.path.isfile(path):
            raise InputError(f"There is no checkpoint file {path}.")
    for folder in str(getattr(cfg.task, "data", None) or "").split(os.pathsep):
        if folder and "://" not in folder and not os.path.isdir(folder):
            raise InputError(f"There is no data folder {folder}.")


def load_models(paths: list[str], **options: Any) -> tuple[list[Any], Any]:
    """`checkpoint_utils.load_model_ensemble`, with `weights_only` left on.

    torch >= 2.6 refuses classes that it doesn't know; a fairseq checkpoint holds its command line (Namespace) and
    meters of the training besides tensors.
    """
    from fairseq.dataclass import constants
    from fairseq.logging import meters

    known: list[Any] = [argparse.Namespace, np.dtype, np.ndarray, type(np.dtype("float64")), type(np.dtype("int64"))]
    for module in (constants, meters):
        own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
        known += [value for value in own if isinstance(value, type)]
    numpy_core: Any = getattr(np, "_core", None) or np.core  # its name before numpy 2
    known.append((numpy_core.multiarray.scalar, "numpy.core.multiarray.scalar"))
    known.append(numpy_core.multiarray.scalar)
    with loading(f"the checkpoint {os.pathsep.join(paths)}"), torch.serialization.safe_globals(known):
        return checkpoint_utils.load_model_ensemble(paths, **options)


@dataclass
class Loaded:
    """A task, its models and what decodes with them."""

    cfg: Any
    task: Any
    models: list[Any]
    generator: Any
    batches: Any  # EpochBatchIterator, or what the task makes of it
    scorer: Any
    device: torch.device
    form: lines.Format

    @property
    def sampling(self) -> bool:
        return bool(self.cfg.generation.sampling)


def load(cfg: Any, logger: Any) -> Loaded:
    """In stock's order, so that random numbers and log lines are stock's too."""
    utils.import_user_module(cfg.common)
    if cfg.common.seed is not None and not cfg.generation.no_seed_provided:
        np.random.seed(cfg.common.seed)
        utils.set_torch_seed(cfg.common.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and not cfg.common.cpu else "cpu")
    data = getattr(cfg.task, "data", None)
    with loading(f"the data of {data}"):
        task = tasks.setup_task(cfg.task)
    try:
        overrides = ast.literal_eval(cfg.common_eval.model_overrides)
    except (ValueError, SyntaxError):
        text = cfg.common_eval.model_overrides
        raise InputError(f"--model-overrides takes a Python dictionary, not {text!r}.") from None
    logger.info("loading model(s) from %s", cfg.common_eval.path)
    models, saved = load_models(
        utils.split_paths(cfg.common_eval.path),
        arg_overrides=overrides,
        task=task,
        suffix=cfg.checkpoint.checkpoint_suffix,
        strict=cfg.checkpoint.checkpoint_shard_count == 1,
        num_shards=cfg.checkpoint.checkpoint_shard_count,
    )
    subset = cfg.dataset.gen_subset
    with loading(f"the subset {subset} of {data}"):
        task.load_dataset(subset, task_cfg=saved.task)
    language_models: list[Any] = [None]
    if cfg.generation.lm_path is not None:
        overrides["data"] = cfg.task.data
        language_models, _ = load_models([cfg.generation.lm_path], arg_overrides=overrides, task=None)
    for model in chain(models, language_models):
        if model is not None:
            if cfg.common.fp16:
                model.half()
            if device.type == "cuda" and not cfg.distributed_training.pipeline_model_parallel:
                model.cuda()
            model.prepare_for_inference_(cfg)
    align_dict = utils.load_align_dict(cfg.generation.replace_unk)
    with loading(f"the subset {subset} of {data}"):  # a sentence longer than the model's positions is named here
        batches = task.get_batch_iterator(
            dataset=task.dataset(subset),
            max_tokens=cfg.dataset.max_tokens,
            max_sentences=cfg.dataset.batch_size,
            max_positions=utils.resolve_max_positions(
                task.max_positions(), *[model.max_positions() for model in models]
            ),
            ignore_invalid_inputs=cfg.dataset.skip_invalid_size_inputs_valid_test,
            required_batch_size_multiple=cfg.dataset.required_batch_size_multiple,
            seed=cfg.common.seed,
            num_shards=cfg.distributed_training.distributed_world_size,
            shard_id=cfg.distributed_training.distributed_rank,
            num_workers=cfg.dataset.num_workers,
            data_buffer_size=cfg.dataset.data_buffer_size,
        )
    generator = task.build_generator(
        models,
        cfg.generation,
        extra_gen_cls_kwargs={"lm_model": language_models[0], "lm_weight": cfg.generation.lm_weight},
    )
    with loading("the tokenizer or the subword model"):
        tokenizer, subwords = task.build_tokenizer(cfg.tokenizer), task.build_bpe(cfg.bpe)
    form = _format(cfg, task, generator, tokenizer, subwords, align_dict)
    scorer = scoring.build_scorer(cfg.scoring, task.target_dictionary)
    return Loaded(cfg, task, models, generator, batches, scorer, device, form)


def _format(cfg: Any, task: Any, generator: Any, tokenizer: Any, subwords: Any, align_dict: Any) -> lines.Format:
    try:
        source = getattr(task, "source_dictionary", None)
    except NotImplementedError:
        source = None
    target = task.target_dictionary
    ignored = getattr(generator, "symbols_to_strip_from_output", None) or {generator.eos}
    return lines.Format(
        source=None if source is None else plain_dictionary(source, cfg.common_eval.post_process),
        target=plain_dictionary(target, cfg.common_eval.post_process),
        pad=target.pad(),
        unk_word=target.unk_string(),
        post_process=cfg.common_eval.post_process,
        ignored=frozenset(int(i) for i in ignored),
        subwords=subwords,
        tokenizer=tokenizer,
        align_dict=align_dict,
        quiet=cfg.common_eval.quiet,
        print_alignment=cfg.generation.print_alignment and str(cfg.generation.print_alignment),
        print_step=cfg.generation.print_step,
        history=cfg.generation.retain_iter_history,
    )


def plain_dictionary(dictionary: Any, post_process: str | None) -> Any:
    """The strings of `dictionary` alone, where that is all that its `string` uses; else the object itself."""
    kind = type(dictionary)
    own = any(getattr(kind, name) is not getattr(Dictionary, name) for name in ("string", "__getitem__", "unk_string"))
    if own or post_process not in lines.POST_PROCESSORS:
        return dictionary
    return lines.Symbols(
        list(dictionary.symbols), dictionary.bos(), dictionary.eos(), dictionary.unk(), dictionary.unk_word
    )


def can_travel(form: lines.Format) -> bool:
    """Whether workers can have `form`: some subword codecs hold objects that can't be pickled."""
    try:
        pickle.dumps(form)
    except (TypeError, AttributeError, pickle.PicklingError):
        return False
    return True


class Batches:
    """Stock's batches in stock's order, or, with an AutoBatch, the same sentences in batches of its sizes."""

    def __init__(self, loaded: Loaded, auto: AutoBatch | None, by_tokens: bool) -> None:
        self._epoch = loaded.batches
        self._dataset = loaded.task.dataset(loaded.cfg.dataset.gen_subset)
        self._auto, self._by_tokens = auto, by_tokens
        self.plain = isinstance(self._epoch, EpochBatchIterator)
        if auto is not None and not self.plain:
            raise InputError(f"The task {loaded.cfg.task._name} makes its own batches: give --batch-size a number.")
        self._ids: list[int] = []
        if self.plain:
            rank, size = self._epoch.shard_id, self._epoch.num_shards
            self._ids = [int(i) for batch in self._epoch.frozen_batches[rank::size] for i in batch]
        self.sentences = len(self._ids) if self.plain else None
        # fairseq's batches leave out the last sentences when their number is no multiple; equality goes first.
        self.dropped = 0
        if self.plain and loaded.cfg.dataset.required_batch_size_multiple > 1:
            self.dropped = len(self._dataset) - sum(map(len, self._epoch.frozen_batches))

    def start(self, sentences_done: int, batches_done: int) -> Iterator[Any]:
        """What an earlier run left: numbered samples, or with automatic sizes the ids that `cut` takes."""
        if self._auto is None:
            samples = self._epoch.next_epoch_itr(shuffle=False)
            return islice(enumerate(samples), batches_done, None)
        return iter([(batches_done, self._ids[sentences_done:])])

    def cut(self, rest: tuple[int, list[int]]) -> Iterator[tuple[int, Any]]:
        """Numbered samples, each of the size that is right when it is asked for."""
        number, ids = rest
        position = 0
        while position < len(ids):
            taken = self._take(ids, position)
            yield number, self.collate(taken)
            number, position = number + 1, position + len(taken)

    def _take(self, ids: Sequence[int], position: int) -> list[int]:
        """From `position`, as many as the size allows; never none."""
        assert self._auto is not None
        if not self._by_tokens:
            return list(ids[position : position + self._auto.size])
        taken: list[int] = []
        longest = 0
        for i in islice(ids, position, None):
            longest = max(longest, int(self._dataset.num_tokens(i)))
            if taken and longest * (len(taken) + 1) > self._auto.size:
                break
            taken.append(i)
        return taken

    def units(self, ids: Sequence[int]) -> int:
        """The size of a batch as the AutoBatch counts."""
        return max(int(self._dataset.num_tokens(i)) for i in ids) * len(ids) if self._by_tokens else len(ids)

    def collate(self, ids: Sequence[int]) -> Any:
        return self._epoch.collate_fn([self._dataset[i] for i in ids])


@dataclass(frozen=True)
class Done:
    """What the writer needs to know of a batch besides its lines."""

    number: int
    sentences: int
    tokens: int
    seconds: float
    has_target: bool
    random_state: str | None


class Generation:
    """Generates samples, in smaller parts where memory runs out."""

    def __init__(self, loaded: Loaded, batches: Batches, auto: AutoBatch | None, warn: Any) -> None:
        self._loaded, self._batches, self._auto, self._warn = loaded, batches, auto, warn
        generation = loaded.cfg.generation
        # Stock's diverse beam search takes rows by dataset id where it means positions in the batch, and crashes;
        # without ids it counts positions.
        self._hide_ids = generation.diverse_beam_groups > 0
        self.before: str | None = None  # the random state to begin with, of a run that is resumed

    def __call__(self, number: int, sample: Any) -> tuple[lines.Batch, Done] | None:
        if "net_input" not in sample:  # the empty batch that evens out shards
            return None
        if self.before is not None:
            set_random_state(self.before)
            self.before = None
        started = time.perf_counter()
        ids = sample["id"].tolist()
        hypotheses = self._hypotheses(ids, sample)
        seconds = time.perf_counter() - started
        nbest = self._loaded.cfg.generation.nbest
        tokens = sum(len(best[0]["tokens"]) for best in hypotheses)
        done = Done(
            number,
            sample["nsentences"] if "nsentences" in sample else sample["id"].numel(),
            tokens,
            seconds,
            sample["target"] is not None,
            random_state() if self._loaded.sampling else None,
        )
        return self._plain(ids, sample, [best[:nbest] for best in hypotheses]), done

    def _hypotheses(self, ids: list[int], sample: Any) -> list[Any]:
        """Per sentence of `sample`, its hypotheses, best first."""

        def run(part: Sequence[int]) -> list[Any]:
            chosen = sample if len(part) == len(ids) else self._batches.collate(part)
            started = time.perf_counter()
            found = self._infer(chosen)
            if self._auto is not None:
                work = sum(len(best[0]["tokens"]) for best in found) + chosen.get("ntokens", 0)
                self._auto.succeeded(self._batches.units(part), work / (time.perf_counter() - started))
            if chosen is sample:
                return found
            by_id = dict(zip(chosen["id"].tolist(), found, strict=True))  # collating sorts by length
            return [by_id[i] for i in part]

        def out_of_memory(part: Sequence[int]) -> None:
            if self._auto is not None:
                self._auto.failed(self._batches.units(part))
            self._warn(f"out of memory with {len(part)} sentences in a batch: going on with halves")

        # Only of a plain dataset can parts be collated again.
        return run_with_backoff(ids, run, out_of_memory) if self._batches.plain else run(ids)

    def _infer(self, sample: Any) -> list[Any]:
        loaded = self._loaded
        if loaded.device.type == "cuda":
            sample = utils.move_to_cuda(sample)
        prefix = None
        if loaded.cfg.generation.prefix_size > 0:
            prefix = sample["target"][:, : loaded.cfg.generation.prefix_size]
        if self._hide_ids:
            sample = {name: value for name, value in sample.items() if name != "id"}
        return loaded.task.inference_step(
            loaded.generator,
            loaded.models,
            sample,
            prefix_tokens=prefix,
            constraints=sample.get("constraints"),
        )

    def _plain(self, ids: list[int], sample: Any, hypotheses: list[list[Any]]) -> lines.Batch:
        loaded = self._loaded
        source_texts = target_texts = None
        if loaded.form.align_dict is not None:
            dataset = loaded.task.dataset(loaded.cfg.dataset.gen_subset)
            source_texts = [dataset.src.get_original_text(i) for i in ids]
            if sample["target"] is not None:
                target_texts = [dataset.tgt.get_original_text(i) for i in ids]
        sources = sample["net_input"].get("src_tokens") if loaded.form.source is not None else None
        targets = sample["target"]
        return lines.Batch(
            ids,
            None if sources is None else sources.tolist(),
            None if targets is None else targets.tolist(),
            source_texts,
            target_texts,
            plain_hypotheses(hypotheses, history=loaded.form.history),
        )


def plain_hypotheses(hypotheses: list[list[Any]], *, history: bool = False) -> list[list[lines.Hypothesis]]:
    """Lists instead of tensors, with one transfer from the device for each kind of number, not one a hypothesis."""
    flat = [hypothesis for best in hypotheses for hypothesis in best]
    if not flat:
        return [[] for _ in hypotheses]
    tokens = _lists([h["tokens"] for h in flat])
    # Base 2, divided in the tensors' own precision as stock does.
    scores = (torch.stack([torch.as_tensor(h["score"]) for h in flat]) / math.log(2)).tolist()
    positional = _lists([h["positional_scores"] for h in flat], divisor=math.log(2))
    plain = iter(
        [
            lines.Hypothesis(
                tokens[k],
                scores[k],
                positional[k],
                [] if h["alignment"] is None or torch.is_tensor(h["alignment"]) else list(h["alignment"]),
                h.get("steps"),
                [step["tokens"].tolist() for step in h["history"]] if history else [],
            )
            for k, h in enumerate(flat)
        ]
    )
    return [list(islice(plain, len(best))) for best in hypotheses]


def _lists(tensors: list[torch.Tensor], divisor: float | None = None) -> list[list[Any]]:
    together = torch.cat([tensor.reshape(-1) for tensor in tensors])
    numbers = iter((together if divisor is None else together / divisor).tolist())
    return [list(islice(numbers, tensor.numel())) for tensor in tensors]


class Scoring:
    """Feeds stock's scorer, sentence by sentence and in order: it holds state, and the dictionary may grow."""

    def __init__(self, loaded: Loaded) -> None:
        self._scorer = loaded.scorer
        self._dictionary = loaded.task.target_dictionary
        self._by_text = hasattr(loaded.scorer, "add_string")
        self._encode = loaded.form.align_dict is not None or loaded.form.post_process is not None

    def add(self, scored: lines.Scored) -> None:
        if self._by_text:
            self._scorer.add_string(scored.target, scored.hypothesis)
        elif self._encode:
            # What was cut out of the subwords are no tokens of the dictionary: words are, and new ones are added.
            encode = self._dictionary.encode_line
            self._scorer.add(
                encode(scored.target, add_if_not_exist=True), encode(scored.hypothesis, add_if_not_exist=True)
            )
        else:
            self._scorer.add(
                torch.tensor(scored.target_tokens, dtype=torch.int32),
                torch.tensor(scored.hypothesis_tokens, dtype=torch.int32),
            )

    def result(self) -> str:
        return self._scorer.result_string()


def random_state() -> str:
    """torch's random state, as text; of the GPU in use too."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return ",".join(base64.b64encode(state.numpy().tobytes()).decode("ascii") for state in states)


def set_random_state(text: str) -> None:
    states = [torch.frombuffer(bytearray(base64.b64decode(part)), dtype=torch.uint8) for part in text.split(",")]
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


def auto_batch(cfg: Any, device: torch.device, *, by_tokens: bool) -> AutoBatch:
    return AutoBatch(
        AUTO_TOKENS if by_tokens else AUTO_SENTENCES,
        by_speed=device.type == "cpu",
        fits=lambda: memory_for_double(device.type),
    )
