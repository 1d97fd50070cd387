"""Whether what the host returns for a source depends on what shares the batch: other sources, or padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastgen.pipeline.batch_trial import Sees, seen_by

DEFAULT_TOKENS = 20  # that the host generates where nobody says how many


def sees_padding(model: Any, options: dict[str, Any], sources: Sequence[Any]) -> bool:
    """Whether the host counts the padding beside these sources, or takes it for tokens of theirs.

    Lengths that count a prompt do; n-grams, penalties, watermarks and sequences that are banned may.
    """

    def asked(name: str) -> Any:
        return configured(model, options, name)

    if asked("encoder_repetition_penalty") not in (None, 1.0):
        return True
    if model.config.is_encoder_decoder:  # whose other processors see the output, or ban the padding behind padding
        return asked("encoder_no_repeat_ngram_size") in (1, 2)  # also where the decoder may begin with padding
    shortest = min(map(len, sources), default=1)
    sizes = [size for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size") if (size := asked(name))]
    return (
        _counts_prompts(model, options)
        or (bool(sizes) and (1 in sizes or _is_word(padding_token(model, options), asked("eos_token_id"), sources)))
        or (asked("forced_bos_token_id") is not None and shortest == 1)  # behind such a prompt alone
        or (asked("repetition_penalty") not in (None, 1.0) and _penalises_padding())
        or (asked("max_new_tokens") is None and _outgrows_positions(model, sources))
        or rotates_by_longest(model, options, sources)
        or seen_by(model, sources, padding_token(model, options)) is Sees.PADDING
        or _width_of(asked("watermarking_config")) > shortest
        or any(len(one) > shortest and padding_token(model, options) in one for one in _sequences(asked))
    )


def sees_others(model: Any, options: dict[str, Any], sources: Sequence[Any]) -> bool:
    """Whether an output of the host depends on the other sources of a batch, even on such of the same length.

    Some models mix them up. Older versions have the penalty on tokens of the sources reach as many rows as there are
    sources, be they beams of the first source alone.
    """
    if seen_by(model, sources, padding_token(model, options)) is Sees.OTHERS:
        return True
    if configured(model, options, "encoder_repetition_penalty") in (None, 1.0):
        return False
    rows = [configured(model, options, name) or 1 for name in ("num_beams", "num_return_sequences")]
    return max(rows) > 1 and not _is_new(lambda versions: versions.penalises_all_rows())


def rotates_by_longest(model: Any, options: dict[str, Any], sources: Sequence[Any]) -> bool:
    """Whether positions of all sources would be rotated as the longest says, with its padding and new tokens.

    So it is with rotations of the types `longrope` and `dynamic`, from some length on.
    """
    try:
        from fastgen.optimizer.transformers.model.modules import rotates_by_length_from
    except ImportError:  # the host is not installed, or left alone
        return False
    longest, new = max(map(len, sources), default=0), configured(model, options, "max_new_tokens")
    total = longest + DEFAULT_TOKENS if new is None else longest + int(new)
    if new is None:
        total = max(total, int(configured(model, options, "max_length") or 0))
    return bool(total >= rotates_by_length_from(model.modules()))


def _counts_prompts(model: Any, options: dict[str, Any]) -> bool:
    """Whether a length that is asked for counts the tokens of a prompt, and so the padding before it."""
    if model.config.is_encoder_decoder:
        return False
    from transformers import GenerationConfig

    unset = GenerationConfig()  # of some versions 20 tokens, which then count without the prompt
    for total, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        value = configured(model, options, total)
        is_set = value and (total in options or value != getattr(unset, total))
        if is_set and configured(model, options, new) is None:
            return True
    return False


def _outgrows_positions(model: Any, sources: Sequence[Any]) -> bool:
    """Whether the host cuts the tokens that it generates by default at the model's last position, padding counted."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return positions is not None and max(map(len, sources), default=0) + DEFAULT_TOKENS > positions


def _width_of(watermark: Any) -> int:
    """How many tokens before the next one a watermark goes by; one of SynthID's leaves out the prompt."""
    found = watermark.get("context_width") if isinstance(watermark, dict) else getattr(watermark, "context_width", None)
    return 1 if found is None else int(found)


def _sequences(asked: Callable[[str], Any]) -> list[Sequence[int]]:
    """All but the last tokens of the sequences that are banned or get a bias."""
    biases = asked("sequence_bias") or ()
    listed = biases if isinstance(biases, dict) else [tokens for tokens, _ in biases]
    return [tokens[:-1] for tokens in [*(asked("bad_words_ids") or ()), *listed]]


def _is_word(pad: int, ends: Any, sources: Sequence[Any]) -> bool:
    """Whether the padding token may stand in a text that goes on: in a source, or behind it if it is no end token."""
    return pad not in listed(ends) or any(pad in source for source in sources)


def _penalises_padding() -> bool:
    """Whether the host's repetition penalty takes the padding of a prompt for tokens, as in older versions."""
    return not _is_new(lambda versions: versions.penalty_ignores_padding())


def _is_new(has: Callable[[Any], bool]) -> bool:
    """What `has` says of the differences between versions of the host; False of one that fastgen leaves alone."""
    try:
        from fastgen.optimizer.transformers import versions
    except ImportError:
        return False
    return has(versions)


def configured(model: Any, options: dict[str, Any], name: str) -> Any:
    """What `generate` takes for an option: the user's, else what the user's configuration has, else the model's."""
    if name in options:
        return options[name]
    configs = options.get("generation_config"), getattr(model, "generation_config", None)
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def padding_token(model: Any, options: dict[str, Any]) -> int:
    """The padding token that `generate` will use, or any; below 0, as in some old configurations, there is none."""

    def first(name: str) -> Any:
        found = configured(model, options, name)
        return getattr(model.config, name, None) if found is None else found

    pad = first("pad_token_id")
    tokens = [pad, *listed(first("eos_token_id")), 0]
    return int(next(token for token in tokens if token is not None and token >= 0))


def listed(tokens: Any) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)
