"""Notes what the host's `generate` expands to one row per beam, so that the prompt can be read once per sentence.

For texts the expansion could be undone by its shape. Images, grids of patches and features have as many rows as the
processor likes, and 5.24 expands the encoded images of a sentence as a block.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

_local = threading.local()
# Names in a configuration of the tokens that stand for what is no text.
_PLACEHOLDER = re.compile(r"(image|img|video|audio|speech|sound|media|patch)\w*_(token_id|token_index)$")


@contextlib.contextmanager
def of_one_call() -> Iterator[None]:
    """Inside the block, one call of the host's `generate` in this thread, the expansion is kept."""
    before = getattr(_local, "expansion", None)
    _local.expansion = None
    try:
        yield
    finally:
        _local.expansion = before


def noted(stock: Any) -> Any:
    """Wrap `stock`, the host's `_expand_inputs_for_generation`, to note what is expanded; before 5.23 it is static."""
    function = stock.__func__ if isinstance(stock, staticmethod) else stock

    @functools.wraps(function)
    def _expand_inputs_for_generation(*args: Any, **kwargs: Any) -> Any:
        single = {name: containers_copied(value) for name, value in kwargs.items()}  # it expands some in place
        tokens, expanded = function(*args, **kwargs)
        _local.expansion = tokens, single
        return tokens, expanded

    return staticmethod(_expand_inputs_for_generation) if function is not stock else _expand_inputs_for_generation


def single_rows(input_ids: Tensor) -> Mapping[str, Any] | None:
    """The inputs that were expanded beside `input_ids`, one row per sentence; None if these tokens are none of the
    running call's."""
    tokens, single = getattr(_local, "expansion", None) or (None, None)
    return single if tokens is input_ids else None


def containers_copied(value: Any) -> Any:
    """The value with its dictionaries and lists copied, and their tensors shared."""
    if isinstance(value, dict):
        return type(value)(**{name: containers_copied(item) for name, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(containers_copied(item) for item in value)
    return value


def is_data(value: Any) -> bool:
    """Whether an input is numbers and tensors only: another object might change while the model runs."""
    if isinstance(value, dict):
        return all(map(is_data, value.values()))
    if type(value) in (list, tuple):
        return all(map(is_data, value))
    return value is None or isinstance(value, (Tensor, int, float, str))


def copied(value: Any) -> Any:
    """The same data in memory of its own: some models write to their inputs."""
    if isinstance(value, dict):
        return type(value)(**{name: copied(item) for name, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value.clone() if isinstance(value, Tensor) else value


def arrangement(tokens: Tensor, inputs: Iterable[Any], config: Any) -> Hashable:
    """How images, clips and the like are spread over the sentences, as far as a model's code may care.

    Some models of the host repeat each image where they should repeat those of a sentence together: such a model is
    proven for one image per sentence, and not for two.

    Args:
        tokens: the prompts, int64 `[B, P]`.
        inputs: what the model takes beside texts, one row per image or the like, or per sentence.
    """
    numbers = {value for name, value in vars(config).items() if _PLACEHOLDER.match(name) and isinstance(value, int)}
    counts = [(tokens == number).sum(1) for number in sorted(numbers)]
    holding = sum(int(any(row)) for row in zip(*(each.tolist() for each in counts), strict=True)) or len(tokens)
    is_even = all(bool((each == each[0]).all()) for each in counts)
    return is_even, frozenset(_sign(len(each) - holding) for each in _sized(inputs))


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _sized(values: Iterable[Any]) -> Iterator[Any]:
    """The lists of one tensor per image, and the tensors of one row per image, among these values."""
    for value in values:
        if isinstance(value, dict):
            yield from _sized(value.values())
        elif isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.ndim):
            yield value
