"""Keeps a batch full: several samples decode together, and when sentences finish the next sample joins in.

Each sample has a search of its own, the host's loop, which is suspended at every step; all samples share one tree and
the model's forward passes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import chain
from typing import Any

from fairseq import search
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from torch import Tensor

from fastgen import config
from fastgen.optimizer import together
from fastgen.optimizer.fairseq import foreign_code, seams
from fastgen.optimizer.fairseq.generate.batch_decoder import BatchDecoder
from fastgen.optimizer.fairseq.generate.joining import Part, source_of
from fastgen.optimizer.fairseq.request import has_own_blocker, has_own_search, unsupported_decoder, was_changed

_PARTS = 4  # a batch is refilled in so many parts
_BY_SENTENCE = frozenset(
    "src_tokens src_lengths prev_output_tokens source features padding_mask src_lang_id tgt_lang_id".split()
)
_MOST_SAMPLES = 8  # at once: each adds its own few small operations to a step


def unrefillable(generator: Any) -> str | None:
    """Why batches of this generator cannot be kept full, or None."""
    if type(generator) not in (SequenceGenerator, SequenceGeneratorWithAlignment):
        return f"{type(generator).__name__} is not fairseq's SequenceGenerator"
    if type(generator)._generate is not seams._generate or config.current().tier not in ("auto", "compat"):
        return "fastgen is disabled, or another tier is configured"
    if generator.model.models_size > 1 or generator.lm_model is not None:
        return "several models decode together"
    if was_changed(generator.model):
        return "the models of the ensemble were exchanged after it was made"
    if not generator.model.has_encoder():
        return "the model has no encoder"
    if generator.match_source_len:  # first: with it, the search is not fairseq's plain one either
        return "match_source_len asks for the longest source of the batch"
    if type(generator.search) is not search.BeamSearch:
        return f"{type(generator.search).__name__} may know sentences by their places in the batch"
    if reason := unsupported_decoder(generator.model.single_model.decoder) or _foreign(generator):
        return reason
    return foreign_code.unsupported_reason(generator.model) or foreign_code.called_one_by_one(generator.model)


def _foreign(generator: Any) -> str | None:
    """What would see that a sample is searched for in parts, each in a thread of its own; None if nothing would."""
    model = generator.model.single_model
    if together.is_apart(next(model.parameters()).device):
        return "torch has a mode, or autocast, of this thread alone"
    if name := foreign_code.own_name(generator):
        return f"the generator has its own {name}"
    if has_own_search(generator) or has_own_blocker(generator):
        return "the search has rules of its own"
    return foreign_code.watched(model, model.encoder)


def why_not_refilled(generator: Any, wished: bool | None) -> str | None:
    """Why batches of this generator are not kept full, or None; by default they are where it pays."""
    if wished is False:
        return "it was not asked for"
    if reason := unrefillable(generator):
        return reason
    if wished is None and not config.refill_pays(next(generator.model.parameters()).device.type):
        return "batches as they are decode sooner here"
    return None


def in_order(
    infer: Callable[[dict[str, Any]], list[Any]], samples: Sequence[dict[str, Any]]
) -> Generator[list[Any], None, None]:
    """Yield what `infer(sample)`, see `run`, returns for each of `samples`, in order; parts of samples decode together.

    As many sentences and padded source tokens as the largest samples have decode at once.
    """
    shapes = [source_of(sample).shape[:2] for sample in samples]
    parts = [in_parts(sample, -(-shape[0] // _PARTS)) for sample, shape in zip(samples, shapes, strict=True)]
    owners = [index for index, of_sample in enumerate(parts) for _ in of_sample]
    found: list[dict[int, list[Any]]] = [{} for _ in samples]  # by the number of the part
    sentences = max((shape[0] for shape in shapes), default=0)
    tokens = max((shape.numel() for shape in shapes), default=0)
    done = 0
    with contextlib.closing(run(infer, chain.from_iterable(parts), sentences, tokens)) as ready:
        for number, hypotheses in ready:
            found[owners[number]][number] = hypotheses
            while done < len(samples) and len(found[done]) == len(parts[done]):
                yield [one for _, of_part in sorted(found[done].items()) for one in of_part]
                found[done] = {}
                done += 1


def run(
    infer: Callable[[dict[str, Any]], list[Any]], samples: Iterable[dict[str, Any]], sentences: int, tokens: int
) -> Generator[tuple[int, list[Any]], None, None]:
    """Yield what `infer(sample)`, which generates once, returns for each of `samples`, with a number, when ready.

    All are generated with the same generator, one that is not `unrefillable`. A sample begins when there is room for
    its sentences among the `sentences` that decode together, of as many padded source `tokens` at most.
    """
    waiting = enumerate(samples)
    following = next(waiting, None)
    live: list[Part] = []
    joint: BatchDecoder | None = None
    start, total = time.perf_counter(), 0

    def abandon() -> None:
        for part in live:
            part.close()

    with contextlib.ExitStack() as ending:
        ending.callback(abandon)
        while following is not None or live:
            entering: list[Part] = []
            while following is not None and _has_room(live, following[1], sentences, tokens):
                part = Part(infer, *following)
                following = next(waiting, None)
                live.append(part)
                part.proceed(None)
                if part.ended:
                    live.remove(part)
                    yield part.number, part.result
                else:
                    entering.append(part)
                    total += part.sentences
            if not live:
                continue
            joint = joint or ending.enter_context(contextlib.closing(BatchDecoder(live[0].request, sentences)))
            joint.regroup(entering)
            joint.step()
            ended = [part for part in live if part.ended]
            live = [part for part in live if not part.ended]
            for part in ended:
                yield part.number, part.result
        if joint is not None:
            joint.record(total, time.perf_counter() - start)


def _has_room(live: list[Part], sample: dict[str, Any], sentences: int, tokens: int) -> bool:
    source = source_of(sample)
    count = len(source) + sum(part.sentences for part in live)
    width = max([source.shape[1], *(part.width for part in live)])
    return not live or (len(live) < _MOST_SAMPLES and count <= sentences and count * width <= tokens)


def in_parts(sample: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Split the sample in parts of `size` sentences, with the same padding: the host looks at the padded length.

    A sample with inputs of the user's stays whole: nobody knows which of these have a row for each sentence.
    """
    count = len(source_of(sample))
    if not all(name in _BY_SENTENCE or value is None for name, value in sample["net_input"].items()):
        return [sample]
    return [_rows(sample, slice(first, first + size), count) for first in range(0, count, size)]


def _rows(sample: dict[str, Any], rows: slice, count: int) -> dict[str, Any]:
    part = {name: _rows(value, rows, count) if isinstance(value, dict) else value for name, value in sample.items()}
    for name, value in part.items():
        if isinstance(value, Tensor) and value.ndim and len(value) == count:
            part[name] = value[rows]
    if "nsentences" in part:
        part["nsentences"] = len(range(count)[rows])
    return part
