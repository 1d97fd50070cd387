"""Notes what the host's `generate` expands to one row per beam, so that the prompt can be read once per sentence.

For texts the expansion could be undone by its shape. Images, grids of patches and features have as many rows as the
processor likes, and 5.23 expands the encoded images of a sentence as a block.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fastgen.patching import replaced_code

# Inputs with one row per beam, or none, whatever the model.
BY_ROW = frozenset(
    """attention_mask cache cache_position decoder_attention_mask decoder_position_ids encoder_outputs
    global_attention_mask input_ids inputs_embeds labels latents logits_to_keep mm_token_type_ids moe_mm_token_type_ids
    past_key_values position_ids return_dict token_type_ids use_cache""".split()
)  # a batch may hold labels, which the host does not pass on
# Names in a configuration of the tokens that stand for what is no text.
_PLACEHOLDER = re.compile(r"(image|img|video|audio|speech|sound|media|patch)\w*_(token_id|token_index)$")
_local = threading.local()


@contextlib.contextmanager
def of_one_call(custom_generate: Any) -> Iterator[None]:
    """Inside the block, one call of the host's `generate` in this thread, the expansion is noted.

    `custom_generate`: the argument of that name; a function of the user's decodes in place of the host's searches.
    """
    before = getattr(_local, "expansion", None), is_decoded_by_users()
    _local.expansion = (None, {}, {})
    _local.is_users = callable(custom_generate) and not replaced_code.is_of(custom_generate, "fastgen")
    try:
        yield
    finally:
        _local.expansion, _local.is_users = before


def is_decoded_by_users() -> bool:
    """Whether this thread is in a call that a function of the user's will decode: it may look at all that is read."""
    return getattr(_local, "is_users", False)


def noted(stock: Any) -> Any:
    """Wrap `stock`, the host's `_expand_inputs_for_generation`, to note what is expanded; before 5.23 it is static."""
    function = stock.__func__ if isinstance(stock, staticmethod) else stock

    @functools.wraps(function)
    def _expand_inputs_for_generation(*args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "expansion", None) is None:
            return function(*args, **kwargs)
        # Copied, as the host expands the contents of some in place.
        unexpanded = {name: containers_copied(value) for name, value in kwargs.items() if name not in BY_ROW}
        tokens, expanded = function(*args, **kwargs)
        _local.expansion = tokens, unexpanded, {name: expanded.get(name) for name in unexpanded}
        return tokens, expanded

    return staticmethod(_expand_inputs_for_generation) if function is not stock else _expand_inputs_for_generation


def unexpanded_inputs(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that were expanded beside `input_ids` and not changed since, as they were before: one row per image,
    clip, sentence or whatever else. Those of `BY_ROW` are left out."""
    tokens, unexpanded, expanded = getattr(_local, "expansion", None) or (None, {}, {})
    if tokens is not input_ids:
        return {}
    return {name: value for name, value in unexpanded.items() if model_kwargs.get(name) is expanded[name]}


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The value with its dictionaries and lists copied, and `function` applied to what they hold."""
    if isinstance(value, dict):
        mapped = copy.copy(value)
        for name, item in value.items():
            mapped[name] = _mapped(function, item)
        return mapped
    if type(value) in (list, tuple):
        return type(value)(_mapped(function, item) for item in value)
    return function(value)


def containers_copied(value: Any) -> Any:
    """The value with its dictionaries and lists copied, and their tensors shared."""
    return _mapped(lambda item: item, value)


def copied(value: Any) -> Any:
    """The same data in memory of its own: some models write to their inputs."""
    return _mapped(lambda item: item.clone() if isinstance(item, Tensor) else item, value)


def is_data(value: Any) -> bool:
    """Whether an input is numbers and tensors only: another object might change while the model runs."""
    if isinstance(value, dict):
        return all(map(is_data, value.values()))
    if type(value) in (list, tuple):
        return all(map(is_data, value))
    return value is None or isinstance(value, (Tensor, int, float, str))


def arrangement(tokens: Tensor, inputs: Mapping[str, Any], config: Any) -> Hashable:
    """How images, clips and the like are spread over the sentences, as far as a model's code may care.

    Some models of the host repeat each image where they should repeat the images of a sentence together: such a model
    is proven for one image per sentence, and not for two.

    Args:
        tokens: the prompts, int64 `[B, P]`.
        inputs: the multimodal inputs by name, with one row per image or the like, or per sentence.
    """
    counts = {number: (tokens == number).sum(1).tolist() for number in sorted(_placeholders(config))}
    holding = {number: sum(map(bool, each)) for number, each in counts.items() if any(each)}
    is_even = all(len(set(each)) == 1 for each in counts.values())
    sizes = {path: _signs(size, holding.values(), len(tokens)) for path, size in _sizes("", inputs)}
    return is_even, tuple(sorted(holding)), tuple(sorted(sizes.items()))


def _placeholders(config: Any) -> set[int]:
    """The tokens that stand for what is no text, by a configuration and its parts."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    found = {value for name, value in vars(config).items() if _PLACEHOLDER.match(name) and isinstance(value, int)}
    return found.union(*(_placeholders(part) for part in parts if hasattr(part, "to_dict")))


def _signs(size: int, holding: Any, sentences: int) -> tuple[int, ...]:
    """Whether there are fewer or more rows than sentences, and than sentences that hold each kind of placeholder."""
    return tuple((size > number) - (size < number) for number in (sentences, *holding))


def _sizes(path: str, value: Any) -> Iterator[tuple[str, int]]:
    """The lengths of the lists of one tensor per image, and of the tensors of one row per image, by where they are."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _sizes(f"{path}.{name}", item)
    elif isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.ndim):
        yield path, len(value)
