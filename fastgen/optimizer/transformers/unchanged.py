"""Whether a model is still what it was: what a recorded step took from it, and will not look at again."""

from __future__ import annotations

import operator
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_utils import AttentionInterface

from fastgen.optimizer.transformers import session

_PLAIN = (bool, int, float, complex, str, bytes)
_NOT_OF_THE_STEP = ("torch.", "builtins", "typing", "transformers.generation.")
# Of a module's own dict, those that others of its attributes are in.
_CONTENTS = ("_parameters", "_buffers", "_modules")
_OF_ALL_MODULES = frozenset(vars(nn.Module()))  # the others of these are hooks, which a replayed model has none of


class Snapshot:
    """All that the Python of some modules reads: attributes, tensors, configs, code.

    Values of tensors don't count, which a recording reads anew; but what was derived from them does, so they must not
    have been written to either.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Of the modules, and of what their attributes hold, only the modules are not kept alive."""
        modules = list(modules)
        self._modules = [(weakref.ref(module), _attributes(module)) for module in modules]
        seen: dict[int, Any] = {}
        for _, attributes in self._modules:
            for value in _values(attributes):
                _collect(value, seen)
        self._containers = [(value, _content(value)) for value in seen.values() if not isinstance(value, Tensor)]
        self._tensors = [(value, _identity(value)) for value in seen.values() if isinstance(value, Tensor)]
        types_of = {type(module) for module in modules}
        self._classes = [(owner, session.stock_attributes(owner)) for owner in _with_bases(types_of)]
        self._functions = [(name, _functions(name)) for name in {owner.__module__ for owner, _ in self._classes}]
        self._attention = dict(AttentionInterface._global_mapping)

    def is_current(self) -> bool:
        """Whether all of it is the same."""
        return (
            all(_is_unchanged(module(), attributes) for module, attributes in self._modules)
            and all(_are_same(_content(value), content) for value, content in self._containers)
            and all(_identity(tensor) == identity for tensor, identity in self._tensors)
            and all(_are_same(session.stock_attributes(owner), attributes) for owner, attributes in self._classes)
            and all(_are_same(_functions(name), functions) for name, functions in self._functions)
            and _are_same(AttentionInterface._global_mapping, self._attention)
        )


def _attributes(module: nn.Module) -> tuple[dict[str, Any], ...]:
    own = vars(module)
    return (dict(own), *(dict(own[name]) for name in _CONTENTS))


def _is_unchanged(module: nn.Module | None, attributes: tuple[dict[str, Any], ...]) -> bool:
    if module is None:
        return False
    own = vars(module)
    return _are_same(own, attributes[0]) and all(
        _are_same(own[name], content) for name, content in zip(_CONTENTS, attributes[1:], strict=True)
    )


def _are_same(now: Any, then: Any) -> bool:
    """Whether two dicts or lists hold the same objects; numbers and strings may be other objects that are equal."""
    if isinstance(now, Mapping):
        if list(now) != list(then):
            return False
        now, then = now.values(), then.values()
    elif len(now) != len(then):
        return False
    return all(map(operator.is_, now, then)) or all(
        mine is theirs or (type(mine) is type(theirs) and type(mine) in _PLAIN and mine == theirs)
        for mine, theirs in zip(now, then, strict=True)
    )


def _values(attributes: tuple[dict[str, Any], ...]) -> Iterable[Any]:
    own, *contents = attributes
    yield from (value for name, value in own.items() if name not in _OF_ALL_MODULES)
    for content in contents:
        yield from content.values()


def _collect(value: Any, seen: dict[int, Any]) -> None:
    """Note, by id, the tensors and whatever else may change without an attribute of a module changing."""
    if id(value) in seen:
        return
    if isinstance(value, Tensor):
        seen[id(value)] = value
    elif isinstance(value, (list, tuple, set, dict, PretrainedConfig)):
        seen[id(value)] = value
        content = _content(value)
        for item in content.values() if isinstance(content, dict) else content:
            _collect(item, seen)


def _content(value: Any) -> Any:
    """A copy of what is in a container or a config."""
    if isinstance(value, PretrainedConfig):
        return dict(vars(value))
    return dict(value) if isinstance(value, Mapping) else list(value)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.shape, tensor.stride(), tensor.dtype


def _with_bases(owners: set[type]) -> set[type]:
    """Those classes of the modules, and of their bases, that are not torch's own nor what calls the model."""
    bases = {base for owner in owners for base in owner.__mro__}
    return {base for base in bases if not base.__module__.startswith(_NOT_OF_THE_STEP)}


def _functions(name: str) -> dict[str, Any]:
    """The functions and classes that code of this module sees."""
    return {
        name: value for name, value in vars(sys.modules[name]).items() if isinstance(value, (types.FunctionType, type))
    }
