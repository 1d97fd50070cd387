"""Prepares a run up to the first batch: tokenizer, model, generation config, sizes of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from transformers.utils import logging

from fastgen.pipeline.batching import AutoBatch
from fastgen.pipeline.offline import REFILL
from fastgen.pipeline.transformers import allowed_outputs, batches, failures, generation_fields, records, tokenizing
from fastgen.pipeline.transformers.generation import Generator
from fastgen.pipeline.transformers.load import (
    asking_the_hub,
    check_path,
    checked,
    find_device,
    generation_config,
    load_config,
    load_model,
    most_tokens,
    source_limit,
)
from fastgen.pipeline.transformers.settings import ModelSettings, RunSettings
from fastgen.pipeline.workers import WorkerPool

AUTO = "auto"


class Prepared(NamedTuple):
    """All that can be found out, and refused, before the weights are loaded."""

    device: Any
    config: Any
    given: dict[str, Any]  # fields of GenerationConfig
    tokenizer: Any
    spec: tokenizing.TokenizerSpec
    language: int | None  # the token of the output's language
    limit: int | None  # most tokens of an input

    def token_counter(self) -> Callable[[list[str]], list[int]]:
        """A function that counts the tokens of each of some texts, as inputs of the model."""
        handle = tokenizing.handler(self.tokenizer, self.spec)  # once: it searches the vocabulary for the language
        return lambda texts: [len(tokens) for tokens in handle(tokenizing.Encode(texts))]


def prepared(settings: ModelSettings, warn: Callable[[str], None] = lambda text: None) -> Prepared:
    """Prepare these settings as far as possible without the weights; InputError for what can't be used."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device, given = find_device(settings.device), settings.generation
    for name, what in ((settings.model, "MODEL"), (settings.tokenizer, "--tokenizer")):
        if name is not None:
            check_path(name, what)
    languages = (settings.source_lang, settings.target_lang)
    spec = tokenizing.TokenizerSpec(settings.tokenizer or settings.model, settings.task_prefix, *languages)
    with asking_the_hub((settings.model, spec.name), warn):
        config = load_config(settings.model)
        generation = checked(settings.model, config, given)
        if idle := generation_fields.without_effect(given, generation):
            warn(idle)
        tokenizer = tokenizing.load_tokenizer(spec)
    tokenizing.check_fits(tokenizer, config, spec.name)
    language = None if settings.target_lang is None else tokenizing.target_language(tokenizer, settings.target_lang)[0]
    # A run has one configuration; each request to a service says how many tokens it wants.
    total = most_tokens(config, generation) if isinstance(settings, RunSettings) else None
    limit = source_limit(config, tokenizer, int(given.get("max_new_tokens") or 0), total)
    if settings.truncate:
        spec = spec._replace(truncate_to=limit)
    return Prepared(device, config, given, tokenizer, spec, language, limit)


def generator_of(
    settings: RunSettings,
    known: Prepared,
    pool: WorkerPool,
    source: Iterator[records.Record],
    *,
    form: str,
    warn: Callable[[str], None],
    finished: Callable[[int], set[int]] = lambda first: set(),
    first: int = 0,
) -> Generator:
    """Load the model and make a Generator, whose `.source` makes batches of `source`.

    Args:
        form: form of the output. Text has no place for errors or scores.
        finished: returns the records, from a given one on, that an earlier run has done.
        first: the record to begin with, a multiple of `batches.WINDOW`.
    """
    model = load_model(settings.model, known.config, settings.dtype, known.device)
    generation = generation_config(model, known.tokenizer, known.given, known.language)
    trie = None
    if settings.allowed_outputs is not None:
        path = settings.allowed_outputs
        trie = allowed_outputs.load(path, known.tokenizer, settings.target_lang, model, generation)
    by_tokens = settings.max_tokens is not None
    size: Any = settings.max_tokens if by_tokens else settings.batch_size
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
            failures.policy_of(settings.on_error, form),
            finished=finished(first),
            first=first,
        ),
        seed=settings.seed,
        scores=form != records.TEXT and not settings.no_scores,
        warn=warn,
        tokenizer=known.tokenizer,
        trie=trie,
    )
    why_not = generator.why_not_refilled(REFILL[settings.refill])
    generator.source.refill = why_not is None
    if why_not is not None and settings.refill == "on":
        warn(f"batch by batch, without refill: {why_not}.")
    return generator
