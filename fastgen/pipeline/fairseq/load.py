"""Loads fairseq's task, models, data and scorer, in stock's order."""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from logging import Logger
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils, scoring, tasks, utils
from fairseq.data import Dictionary, data_utils
from fairseq.models import FairseqEncoderDecoderModel

from fastgen.optimizer.fairseq import checkpoints
from fastgen.pipeline.errors import InputError, first_line, tell, why_unloadable
from fastgen.pipeline.fairseq import allowed_outputs, lines, options


@dataclass
class Loaded:
    """A task, with models, generator, batches and scorer."""

    cfg: Any
    task: Any
    models: list[Any]
    generator: Any
    batches: Any  # EpochBatchIterator, or what the task makes of it; None for texts that are not in the data
    scorer: Any
    device: torch.device
    form: lines.Format


def check(cfg: Any) -> None:
    """Raise InputError for all that can be refused before anything is loaded."""
    options.check(cfg)


def load(cfg: Any, logger: Logger, outputs: str | None = None) -> Loaded:
    """Load all in stock's order, so that random numbers and log lines are stock's, too.

    `outputs`: the file of `--allowed-outputs`.
    """
    device, task = _begin(cfg)
    data, subset = getattr(cfg.task, "data", None), cfg.dataset.gen_subset
    with _loading(f"the scorer of --scoring {_name(cfg.scoring)}"):  # before the models: a package may be missing
        scorer = scoring.build_scorer(cfg.scoring, task.target_dictionary)
    models, saved = _ensemble(cfg, task, logger)
    with _loading(f"the subset {subset} of {data}"):
        task.load_dataset(subset, task_cfg=saved.task)
    _check_data(task.dataset(subset), f"the subset {subset} of {data}")
    language_model = _language_model(cfg)
    _prepare([*models, language_model], cfg, device)
    with _loading(f"the alignment dictionary {cfg.generation.replace_unk}"):
        align_dict = utils.load_align_dict(cfg.generation.replace_unk)
    with _loading(f"the subset {subset} of {data}"):  # a sentence longer than the model's positions is named here
        batches = _batches(cfg, task, models)
    generator = _generator(cfg, task, models, language_model, outputs)
    form = _format(cfg, task, generator, *_codecs(cfg, task), align_dict)
    return Loaded(cfg, task, models, generator, batches, scorer, device, form)


def load_for_lines(cfg: Any, logger: Logger) -> Loaded:
    """Load what is needed for texts that are not in the data: no batches and no scorer; see `load`."""
    device, task = _begin(cfg)
    models, _ = _ensemble(cfg, task, logger)
    language_model = _language_model(cfg)
    _prepare([*models, language_model], cfg, device)
    generator = _generator(cfg, task, models, language_model, None)
    form = _format(cfg, task, generator, *_codecs(cfg, task), None)
    return Loaded(cfg, task, models, generator, None, None, device, form)


def _begin(cfg: Any) -> tuple[torch.device, Any]:
    """Set the seed; returns the device and the task."""
    utils.import_user_module(cfg.common)
    if cfg.common.seed is not None and not cfg.generation.no_seed_provided:
        np.random.seed(cfg.common.seed)
        utils.set_torch_seed(cfg.common.seed)
    with _loading(f"the data of {getattr(cfg.task, 'data', None)}"):
        task = tasks.setup_task(cfg.task)
    _check_post_process(task.target_dictionary, cfg.common_eval.post_process)
    return torch.device("cuda" if torch.cuda.is_available() and not cfg.common.cpu else "cpu"), task


def _ensemble(cfg: Any, task: Any, logger: Logger) -> tuple[list[Any], Any]:
    """The models of --path, and the settings that they were saved with."""
    overrides = _overrides(cfg)
    logger.info("loading model(s) from %s", cfg.common_eval.path)
    return _load_models(
        utils.split_paths(cfg.common_eval.path),
        arg_overrides=overrides,
        task=task,
        suffix=cfg.checkpoint.checkpoint_suffix,
        strict=cfg.checkpoint.checkpoint_shard_count == 1,
        num_shards=cfg.checkpoint.checkpoint_shard_count,
    )


def _language_model(cfg: Any) -> Any:
    """The model of --lm-path, or None."""
    if cfg.generation.lm_path is None:
        return None
    overrides = {**_overrides(cfg), "data": cfg.task.data}
    (model, *_), _ = _load_models([cfg.generation.lm_path], arg_overrides=overrides, task=None)
    if isinstance(model, FairseqEncoderDecoderModel):
        raise InputError(f"--lm-path {cfg.generation.lm_path} is no language model: it has an encoder.")
    return model


def _codecs(cfg: Any, task: Any) -> tuple[Any, Any]:
    """What --tokenizer and --bpe name, None for none."""
    with _loading("the tokenizer or the subword model"):
        return task.build_tokenizer(cfg.tokenizer), task.build_bpe(cfg.bpe)


def _generator(cfg: Any, task: Any, models: list[Any], language_model: Any, outputs: str | None) -> Any:
    more: dict[str, Any] = {}
    if outputs is not None:
        codecs = [*_codecs(cfg, task)]
        more["prefix_allowed_tokens_fn"] = allowed_outputs.load(outputs, task.target_dictionary, codecs)
    extra = {"lm_model": language_model, "lm_weight": cfg.generation.lm_weight}
    try:
        generator = task.build_generator(models, cfg.generation, extra_gen_cls_kwargs=extra, **more)
    except (ValueError, AssertionError) as error:
        raise InputError(f"fairseq refuses these flags: {first_line(error)}.") from error
    except TypeError as error:
        if outputs is None:
            raise
        raise InputError(f"--allowed-outputs is not for this task: {first_line(error)}.") from error
    if outputs is not None:
        allowed_outputs.check(generator, more["prefix_allowed_tokens_fn"])
    return generator


def _batches(cfg: Any, task: Any, models: list[Any]) -> Any:
    """Stock's iterator over the subset."""
    return task.get_batch_iterator(
        dataset=task.dataset(cfg.dataset.gen_subset),
        max_tokens=cfg.dataset.max_tokens,
        max_sentences=cfg.dataset.batch_size,
        max_positions=utils.resolve_max_positions(task.max_positions(), *[model.max_positions() for model in models]),
        ignore_invalid_inputs=cfg.dataset.skip_invalid_size_inputs_valid_test,
        required_batch_size_multiple=cfg.dataset.required_batch_size_multiple,
        seed=cfg.common.seed,
        num_shards=cfg.distributed_training.distributed_world_size,
        shard_id=cfg.distributed_training.distributed_rank,
        num_workers=cfg.dataset.num_workers,
        data_buffer_size=cfg.dataset.data_buffer_size,
    )


def _check_post_process(dictionary: Any, symbol: str | None) -> None:
    if type(dictionary).string is not Dictionary.string:
        return
    try:
        data_utils.post_process("", symbol)
    except NotImplementedError as error:
        message = f"--remove-bpe (or --post-process) {symbol!r} is nothing that fairseq knows: '@@ ' or sentencepiece"
        raise InputError(f"{message}, for example.") from error


def _check_data(dataset: Any, what: str) -> None:
    empty = False
    with contextlib.suppress(TypeError, NotImplementedError):  # a stream has no length
        empty = not len(dataset)
    if empty:
        raise InputError(f"There is nothing to generate: {what} is empty.")
    texts = getattr(getattr(dataset, "src", None), "lines", None)  # of raw data
    if texts and texts[0].startswith("\ufeff"):
        message = f"{what} begins with a byte order mark, which fairseq takes for a part of the first word"
        tell(f"fastgen-generate: {message}")


def _name(choice: Any) -> str:
    return str(getattr(choice, "_name", choice))


@contextlib.contextmanager
def _loading(what: str) -> Iterator[None]:
    """Turn errors of fairseq while it reads `what` into an InputError: it raises bare Exceptions for bad input."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"Cannot load {what}: {why_unloadable(error)} ({type(error).__name__}).") from error


def _load_models(paths: list[str], **options: Any) -> tuple[list[Any], Any]:
    """Load models, with the allow-list even if fastgen is disabled: torch >= 2.6 refuses the checkpoints without."""
    with _loading(f"the checkpoint {os.pathsep.join(paths)}"):
        return checkpoints.loading(checkpoint_utils.load_model_ensemble)(paths, **options)


def _overrides(cfg: Any) -> dict[str, Any]:
    text = cfg.common_eval.model_overrides
    try:
        overrides = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        overrides = None
    if not isinstance(overrides, dict):
        raise InputError(f"--model-overrides takes a Python dictionary, not {text!r}.")
    return overrides


def _prepare(models: list[Any], cfg: Any, device: torch.device) -> None:
    for model in models:
        if model is None:
            continue
        if cfg.common.fp16:
            model.half()
        if device.type == "cuda" and not cfg.distributed_training.pipeline_model_parallel:
            model.cuda()
        model.prepare_for_inference_(cfg)


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
    """The dictionary as `Symbols`, if its method `string` is fairseq's own; else the object itself."""
    kind = type(dictionary)
    own = any(getattr(kind, name) is not getattr(Dictionary, name) for name in ("string", "__getitem__", "unk_string"))
    if own or post_process not in lines.POST_PROCESSORS:
        return dictionary
    return lines.Symbols(
        list(dictionary.symbols), dictionary.bos(), dictionary.eos(), dictionary.unk(), dictionary.unk_word
    )


def can_travel(form: lines.Format) -> bool:
    """Whether `form` can be sent to workers: some subword codecs hold objects that can't be pickled."""
    try:
        pickle.dumps(form)
    except (TypeError, AttributeError, pickle.PicklingError):
        return False
    return True
