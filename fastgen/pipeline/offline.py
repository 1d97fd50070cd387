"""Generates for a list of sources that is longer than a batch."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastgen import config
from fastgen.pipeline.batch_effects import configured, listed, padding_token, sees_others, sees_padding
from fastgen.pipeline.padding import padded_together

if TYPE_CHECKING:
    from torch import Tensor

REFILL = {"auto": None, "on": True, "off": False}  # the commands' names for `refill` of `generate`
# The commands keep a batch full within a stretch of so many batches; no others follow the last sentences of a stretch.
# A resumed run begins a stretch anew, so that the same sentences share a batch and scores are equal to the last digit.
STRETCH = 16
_PARTS = 4  # a batch is refilled in so many parts
_NOT_OPTIONS = """inputs input_ids attention_mask inputs_embeds decoder_input_ids encoder_outputs cache
    past_key_values return_dict_in_generate streamer""".split()
_ALLOWED = "prefix_allowed_tokens_fn"
_PER_SOURCE = ("latents", "decoder_start_token_id")  # may have a part for each source


def generate(
    model: Any,
    sources: Sequence[Any],
    *,
    batch_size: int = 64,
    refill: bool | None = None,
    progress: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Generate for all `sources` with a model of Hugging Face transformers, sources of like length together.

    Each source gets what `model.generate` returns for it alone, whatever shares the batch. Sentences leave the batch
    when they finish; with `refill`, waiting sentences take their places, each at another position. Where `max_length`
    or `min_length` counts the tokens of prompts, only prompts of equal length share a batch.

    Args:
        model: on its device, in evaluation mode.
        sources: the token ids of each, a sequence of ints or a 1-D tensor, without padding; decoder-only models
            continue them.
        batch_size: the most sentences that decode together.
        refill: keep the batch full. By default on a GPU without `cuda_graphs`, where a step takes equally long however
            few sentences are left; on a CPU a smaller batch is faster. Models that cannot do it decode batch by batch.
        progress: show a progress line on standard error.
        options: options of `model.generate`: `num_beams`, `max_new_tokens`, ...

    Returns: for each source, in order, int64 `[num_return_sequences, length]`, padded only to the source's longest.

    Raises:
        ValueError: a source is empty, or an option cannot be used here.
    """
    from fastgen.pipeline.progress import Progress

    _check(model, sources, batch_size, options)
    found: list[Any] = [None] * len(sources)
    show = Progress(len(sources), enabled=progress)
    pad, ends = padding_token(model, options), listed(configured(model, options, "eos_token_id"))
    is_stopped, ends_early = _stop_strings(model, options), _ends_early(model, options)
    refilling = len(sources) > 0 and why_not_refilled(model, min(sources, key=len), refill, options) is None
    try:
        for part, result, width in generated(model, sources, options, batch_size=batch_size, refill=refilling):
            sequences = getattr(result, "sequences", result)
            for index, hypotheses in zip(part, sequences.unflatten(0, (len(part), -1)), strict=True):
                prompt, own = 1, hypotheses
                if not model.config.is_encoder_decoder:
                    prompt, own = len(sources[index]), hypotheses[:, width - len(sources[index]) :]
                found[index] = _without_padding(own, prompt, pad, ends, is_stopped, ends_early)
                show.update(1, int(found[index].numel()))
    finally:
        show.close()
    return found


def _check(model: Any, sources: Sequence[Any], batch_size: int, options: dict[str, Any]) -> None:
    """Raise ValueError for arguments of `generate` that cannot be used."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is not 1 or more")
    for name in _NOT_OPTIONS:
        value = options.get(name)
        if value is not None and value is not False:
            raise ValueError(f"{name} is not for fastgen.generate; call model.generate instead")
    for name in _PER_SOURCE:
        if _is_per_source(value := configured(model, options, name)) and len(value) != len(sources):
            raise ValueError(f"{name} has {len(value)} rows for {len(sources)} sources")
    allowed = options.get(_ALLOWED)
    if (count := getattr(allowed, "num_sentences", None)) not in (None, len(sources)):
        raise ValueError(f"{_ALLOWED} is a trie for {count} sources, and there are {len(sources)}")
    for name, value in options.items():
        if name not in _PER_SOURCE and getattr(value, "ndim", 0) > 1 and len(sources) > 1:
            raise ValueError(f"{name} has rows, and fastgen.generate sorts the sources; call model.generate instead")
    for index, source in enumerate(sources):
        if len(source) == 0:
            raise ValueError(f"source {index} has no tokens")


def generate_samples(
    generator: Any, samples: Iterable[dict[str, Any]], *, refill: bool | None = None, progress: bool = False
) -> list[Any]:
    """Generate for all of fairseq's `samples`; returns what `generator.generate` returns for each, in order.

    Args:
        generator: a SequenceGenerator whose models are in evaluation mode.
        samples: as fairseq's iterators collate them, on the models' device; of an iterator all are taken first.
        refill: let sentences of the next samples take the rows of finished ones; as many sentences decode together as
            the largest sample has. By default on a GPU without `cuda_graphs`. Generators that cannot do it decode
            sample by sample.
        progress: show a progress line on standard error.
    """
    from fastgen.optimizer.fairseq.generate.continuous_batch import in_order, why_not_refilled
    from fastgen.optimizer.suspending import Stopped
    from fastgen.pipeline.progress import Progress

    def infer(sample: dict[str, Any]) -> Any:
        return generator.generate(list(generator.model.models), sample)

    def note(hypotheses: list[Any]) -> None:
        found.append(hypotheses)
        show.update(len(hypotheses), sum(len(best[0]["tokens"]) for best in hypotheses if best))

    samples, found = list(samples), list[Any]()  # refill looks at them twice
    show = Progress(None, enabled=progress)
    why_not = why_not_refilled(generator, refill)
    try:
        if why_not is None:
            for hypotheses in in_order(infer, samples):
                note(hypotheses)
        else:
            for sample in samples:  # a StopIteration would silently end a `map`
                note(infer(sample))
    except Stopped as stopped:
        raise stopped.error from None
    finally:
        show.close()
    return found


def why_not_refilled(model: Any, source: Any, wished: bool | None, options: dict[str, Any]) -> str | None:
    """Why batches are not kept full, or None; `source`: any source, to ask `model.generate` what it would do.

    Args:
        wished: what the user asks for; None: where it pays, see `generate`.
    """
    if wished is None:
        wished = config.refill_pays(model.device.type)
    if not wished:
        return "it was not asked for"
    if (allowed := options.get(_ALLOWED)) is not None and not _is_trie(allowed):
        return f"{_ALLOWED}, which is no trie, is asked for all sentences of a batch until its end"
    try:
        import fastgen.optimizer.transformers.generate.continuous_batch  # noqa: F401  # for `generated`
        from fastgen.optimizer.transformers.generate.shareable import unrefillable
    except ImportError:
        return "fastgen leaves this version of transformers alone"
    return unrefillable(model, padded(model, [source], _options_of(model, [source], [0], options)))


def generated(
    model: Any,
    sources: Sequence[Any],
    options: dict[str, Any],
    *,
    batch_size: int,
    refill: bool,
) -> Iterator[tuple[list[int], Any, int]]:
    """Yield what `model.generate` returns for sources that were padded together, as soon as it is ready.

    Yields the sources' indices, in the order of the rows, the result, and the length that they were padded to. `refill`
    needs calls for which `why_not_refilled` is None. Where padding would count, a call has sources of one length alone;
    where other sources would, it has one source.
    """
    size = max(1, batch_size // _PARTS) if refill else batch_size
    size = 1 if sees_others(model, options, sources) else size
    apart = sees_padding(model, options, sources)
    # The longest first: so a batch that doesn't fit into memory shows at once.
    order = sorted(range(len(sources)), key=lambda index: -len(sources[index]))
    alike = [list(group) for _, group in itertools.groupby(order, lambda index: len(sources[index]) if apart else 0)]
    parts = [group[first : first + size] for group in alike for first in range(0, len(group), size)]
    calls = (
        padded(model, [sources[index] for index in part], _options_of(model, sources, part, options)) for part in parts
    )
    if refill:
        from fastgen.optimizer.transformers.generate.continuous_batch import run

        results = run(model, calls, batch_size)
    else:
        results = ((number, model.generate(**call)) for number, call in enumerate(calls))
    for number, result in results:
        yield parts[number], result, len(sources[parts[number][0]])


def _options_of(model: Any, sources: Sequence[Any], part: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """The options of these sources, the longest first: where one has a part for each source, only theirs.

    Such are latents, start tokens, a trie, and a function of allowed tokens, which may go by the number of the source.
    """
    for name in _PER_SOURCE:
        if _is_per_source(value := configured(model, options, name)):
            some = [value[number] for number in part] if isinstance(value, (list, tuple)) else value[part]
            options = {**options, name: some}
    if (allowed := options.get(_ALLOWED)) is None:
        return options
    each = _numbers_per_source(model, options)
    numbers = [number for number in part for _ in range(each)]
    if _is_trie(allowed):
        return {**options, _ALLOWED: allowed.select(numbers)}
    longest = 0 if model.config.is_encoder_decoder else len(sources[part[0]])
    padding = [max(longest - len(sources[number]), 0) for number in numbers]
    return {**options, _ALLOWED: _AsIfAlone(allowed, numbers, padding)}


def _is_per_source(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0


class _AsIfAlone:
    """A function of allowed tokens of the user's, for a batch of some of the sources.

    It gets the number of the source among all, and its tokens without the padding that only the batch needs.
    """

    def __init__(self, function: Callable[[int, Tensor], Any], numbers: list[int], padding: list[int]) -> None:
        """For each number that the host gives: the source's, and how many tokens of padding it has on the left."""
        self._function, self._numbers, self._padding = function, numbers, padding

    def __call__(self, batch_id: int, input_ids: Tensor) -> Any:
        return self._function(self._numbers[batch_id], input_ids[self._padding[batch_id] :])


def _is_trie(allowed: Any) -> bool:
    from fastgen.decoding.trie import Trie

    return isinstance(allowed, Trie)


def _numbers_per_source(model: Any, options: dict[str, Any]) -> int:
    """How many numbers the host gives each source when it asks for allowed tokens: 1, or one for each sample where it
    counts those, as older versions do."""
    from transformers.generation.utils import GenerationMixin

    code = getattr(inspect.unwrap(GenerationMixin._get_logits_processor), "__code__", None)
    if code is None or "num_return_sequences" in code.co_names:
        return 1
    beams, samples = (configured(model, options, name) or 1 for name in ("num_beams", "num_return_sequences"))
    return 1 if beams > 1 else int(samples)


def _stop_strings(model: Any, options: dict[str, Any]) -> Callable[[Tensor], bool] | None:
    """Says whether a hypothesis, int64 `[length]`, ends in one of the `stop_strings`; None without any."""
    strings, tokenizer = configured(model, options, "stop_strings"), options.get("tokenizer")
    if not strings or tokenizer is None:
        return None
    from transformers.generation import StopStringCriteria

    criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
    return lambda hypothesis: bool(criterion(hypothesis[None], None)[0])


def padded(model: Any, sources: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `model.generate` for these sources, padded together; a trie begins after the padded prompt."""
    pad, known = padding_token(model, options), configured(model, options, "pad_token_id")
    if known is not None and known < 0:  # no embedding has this number, and rows that have finished are fed it
        options = {**options, "pad_token_id": pad}
    ids, mask = padded_together(sources, pad, on_left=not model.config.is_encoder_decoder)
    allowed: Any = options.get(_ALLOWED)
    if _is_trie(allowed) and not model.config.is_encoder_decoder:
        options = {**options, _ALLOWED: allowed.after(ids.shape[1])}
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device), **options}


def _ends_early(model: Any, options: dict[str, Any]) -> bool:
    """Whether a hypothesis may end before the longest, and not with an end token."""
    return bool(options.get("stopping_criteria") or configured(model, options, "stop_strings"))


def _without_padding(
    hypotheses: Tensor,
    prompt: int,
    pad: int,
    ends: list[int],
    is_stopped: Callable[[Tensor], bool] | None,
    ends_early: bool,
) -> Tensor:
    """Cut off columns after the end of every hypothesis, `[n, length]`.

    Without an end token it ends before the padding if it `ends_early`, else with the batch: what looks like padding is
    then what the model has generated. `is_stopped`: see `_stop_strings`.
    """
    import torch

    generated = hypotheses[:, prompt:]
    is_end = torch.isin(generated, torch.tensor(ends, dtype=generated.dtype, device=generated.device))
    # The host fills up with padding or, in beam search if padding is token 0, with an end token.
    if len(generated) and bool(is_end.any(1).all()):
        before = is_end.int().argmax(1).tolist()  # tokens before the first end token
        lengths = [
            count + (is_stopped is None or not count or not is_stopped(own[: prompt + count]))
            for count, own in zip(before, hypotheses, strict=True)
        ]
        return hypotheses[:, : prompt + max(lengths)]
    length = hypotheses.shape[1]
    if not ends_early:
        return hypotheses
    padded = (hypotheses == pad).all(0).tolist()
    while length and padded[length - 1]:
        length -= 1
    return hypotheses[:, :length]
