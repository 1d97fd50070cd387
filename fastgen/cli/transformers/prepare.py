"""What a run needs before its first batch: tokenizer, model, generation config, sizes of batches."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from transformers.utils import logging

from fastgen.cli.transformers import batches, failures, flags, records, tokenizing
from fastgen.cli.transformers.generation import Generator
from fastgen.cli.transformers.load import (
    asking_the_hub,
    check_path,
    checked,
    find_device,
    generation_config,
    load_config,
    load_model,
    source_limit,
)
from fastgen.pipeline.batching import AutoBatch
from fastgen.pipeline.offline import REFILL
from fastgen.pipeline.workers import WorkerPool

AUTO = "auto"


class Prepared(NamedTuple):
    """What can be known, and refused, before the weights are loaded."""

    device: Any
    config: Any
    given: dict[str, Any]  # fields of GenerationConfig
    tokenizer: Any
    spec: tokenizing.TokenizerSpec
    language: int | None  # the token of the output's
    limit: int | None  # tokens of an input

    def token_counter(self) -> Callable[[list[str]], list[int]]:
        """What says how many tokens each of some texts has as an input of the model."""
        handle = tokenizing.handler(self.tokenizer, self.spec)  # once: it looks for the language in the vocabulary
        return lambda texts: [len(tokens) for tokens in handle(tokenizing.Encode(texts))]


def prepared(args: argparse.Namespace, warn: Callable[[str], None] = lambda text: None) -> Prepared:
    """As the command's arguments say; InputError for what can't be used."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device, given = find_device(args.device), flags.given(args)
    for name, what in ((args.model, "MODEL"), (args.tokenizer, "--tokenizer")):
        if name is not None:
            check_path(name, what)
    languages = (args.source_lang, args.target_lang)
    spec = tokenizing.TokenizerSpec(args.tokenizer or args.model, args.task_prefix, *languages)
    with asking_the_hub((args.model, spec.name), warn):
        config = load_config(args.model)
        if idle := flags.without_effect(given, checked(args.model, config, given)):
            warn(idle)
        tokenizer = tokenizing.load_tokenizer(spec)
    tokenizing.check_fits(tokenizer, config, spec.name)
    language = None if args.target_lang is None else tokenizing.target_language(tokenizer, args.target_lang)[0]
    limit = source_limit(config, tokenizer, int(given.get("max_new_tokens") or 0))
    if args.truncate:
        spec = spec._replace(truncate_to=limit)
    return Prepared(device, config, given, tokenizer, spec, language, limit)


def generator_of(
    args: argparse.Namespace,
    known: Prepared,
    pool: WorkerPool,
    source: Iterator[records.Record],
    *,
    form: str,
    warn: Callable[[str], None],
    finished: Callable[[int], set[int]] = lambda first: set(),
    first: int = 0,
) -> Generator:
    """The model, loaded, and the batches of `source` that it is for, `.source`.

    Args:
        form: of the output. Text has no place for errors or scores.
        finished: the records from a given one on that an earlier run did.
        first: the record to begin with, a multiple of `batches.WINDOW`.
    """
    model = load_model(args.model, known.config, args.dtype, known.device)
    generation = generation_config(model, known.tokenizer, known.given, known.language)
    by_tokens = args.max_tokens is not None
    size = args.max_tokens if by_tokens else args.batch_size
    auto = None
    if size == AUTO:
        auto = AutoBatch.on_device(known.device.type, batches.AUTO_TOKENS if by_tokens else batches.AUTO_SENTENCES)
    generator = Generator(
        model,
        generation,
        batches.Source(
            source,
            pool,
            known.limit,
            0 if auto else size,
            auto,
            by_tokens,
            failures.policy_of(args.on_error, form),
            finished=finished(first),
            first=first,
        ),
        seed=args.seed,
        scores=form != records.TEXT and not args.no_scores,
        warn=warn,
        tokenizer=known.tokenizer,
    )
    why_not = generator.why_not_refilled(REFILL[args.refill])
    generator.source.refill = why_not is None
    if why_not is not None and args.refill == "on":
        warn(f"batch by batch, without refill: {why_not}.")
    return generator
