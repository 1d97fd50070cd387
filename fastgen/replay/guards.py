"""Whether a model is still what it was: what a recorded step took from it, and will not look at again."""

from __future__ import annotations

import enum
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes)
# What does not change, or only as an object that others take the place of.
_IMMUTABLE: tuple[type, ...] = (*_PLAIN, type(None), type, torch.dtype, torch.device, enum.Enum)
_IMMUTABLE += (types.BuiltinFunctionType,)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_NOT_OF_THE_STEP = ("builtins", "typing")
# Of a module's own dict, those that others of its attributes are in.
_CONTENTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_ALL_MODULES = frozenset(vars(nn.Module()))  # the others of these are hooks, which a replayed model has none of


@dataclass(frozen=True)
class Host:
    """What a host's modules hold besides tensors, numbers and containers of those."""

    configs: tuple[type, ...]  # whose attributes steps may read
    ignored: tuple[type, ...] = ()  # of which no step knows
    not_of_the_step: tuple[str, ...] = ()  # modules whose classes only call the model
    class_attributes: Callable[[type], Mapping[str, Any]] = vars  # as they are while nobody decodes
    registered: Callable[[], list[dict[str, Any]]] = list  # functions that steps look up elsewhere, by name


class ModelGuards:
    """All that the Python of some modules reads: attributes, tensors, configs, code.

    Values of tensors don't count, which a recording reads anew; but what was derived from them does, so they must not
    have been written to either.
    """

    def __init__(self, modules: Iterable[nn.Module], host: Host) -> None:
        """It keeps alive what the modules' attributes hold, but not the modules it is made of."""
        modules, self._host = list(modules), host
        self._modules = [(weakref.ref(module), type(module), _attributes(module)) for module in modules]
        seen: dict[int, Any] = {}
        # Whether there was nothing but what can be looked at again: anything else may change, or hold the model.
        self.is_complete = all(
            self._collect(value, seen) for _, _, attributes in self._modules for value in _values(attributes)
        ) and all(name in vars(module) for module in modules for name in _CONTENTS)  # a traced one has none
        self._containers = [(value, self._content(value)) for value in seen.values() if not isinstance(value, Tensor)]
        self._tensors = [(value, _identity(value)) for value in seen.values() if isinstance(value, Tensor)]
        owners = self._with_bases({type(module) for module in modules})
        self._classes = [(owner, tuple(vars(owner).values()), dict(host.class_attributes(owner))) for owner in owners]
        names = {owner.__module__ for owner in owners}
        self._functions = [(name, tuple(_namespace(name).values()), _functions(name)) for name in names]
        self.is_complete = self.is_complete and names <= sys.modules.keys()
        self._registered = host.registered()

    def is_current(self) -> bool:
        """Whether all of it is the same, and no tensor has been written to."""
        return self.is_same_code() and all(_identity(tensor) == identity for tensor, identity in self._tensors)

    def is_same_code(self) -> bool:
        """Whether all of it is the same but for what is in tensors."""
        return (
            all(_is_unchanged(module(), kind, attributes) for module, kind, attributes in self._modules)
            and all(_are_same(self._content(value), content) for value, content in self._containers)
            and all(
                _are_identical(vars(owner), values) or _are_same(self._host.class_attributes(owner), attributes)
                for owner, values, attributes in self._classes
            )
            and all(
                _are_identical(_namespace(name), values) or _are_same(_functions(name), functions)
                for name, values, functions in self._functions
            )
            and all(map(_are_same, self._host.registered(), self._registered))
        )

    def _collect(self, value: Any, seen: dict[int, Any]) -> bool:
        """Note, by id, the tensors and whatever else may change without an attribute of a module changing.

        False if there is anything of which that cannot be seen.
        """
        if id(value) in seen or isinstance(value, (*_IMMUTABLE, *self._host.ignored)):
            return True
        if isinstance(value, types.FunctionType):
            return value.__closure__ is None
        if type(value) is functools.partial:
            return all(self._collect(part, seen) for part in (value.func, value.args, value.keywords))
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested:
            seen[id(value)] = value
            return True
        if isinstance(value, self._host.configs) or type(value) in _CONTAINERS:
            seen[id(value)] = value
            content = self._content(value)
            items = content.values() if isinstance(content, dict) else content
            return all(self._collect(item, seen) for item in items)
        return False

    def _content(self, value: Any) -> Any:
        """A copy of what is in a container or a config."""
        if isinstance(value, self._host.configs):
            return dict(vars(value))
        return dict(value) if isinstance(value, dict) else list(value)

    def _with_bases(self, owners: set[type]) -> set[type]:
        """The classes of the modules and their bases, but for those that only call the model."""
        bases = {base for owner in owners for base in owner.__mro__}
        others = (*_NOT_OF_THE_STEP, *self._host.not_of_the_step)
        return {base for base in bases if not base.__module__.startswith(others)}


def _attributes(module: nn.Module) -> tuple[dict[str, Any], ...]:
    own = vars(module)
    return (dict(own), *(dict(own.get(name, ())) for name in (*_CONTENTS, *_HOOKS)))


def _is_unchanged(module: nn.Module | None, kind: type, attributes: tuple[dict[str, Any], ...]) -> bool:
    if type(module) is not kind:
        return False
    own = vars(module)
    return all(map(_are_same, (own, *(own.get(name, {}) for name in (*_CONTENTS, *_HOOKS))), attributes))


def _are_identical(space: Mapping[str, Any], values: tuple[Any, ...]) -> bool:
    """Whether all of a class's, or a module's, attributes are these: the quick look."""
    return len(space) == len(values) and all(map(operator.is_, space.values(), values))


def _are_same(now: Any, then: Any) -> bool:
    """Whether two dicts or lists hold the same objects; numbers and strings may be other objects that are equal."""
    if len(now) != len(then):
        return False
    if isinstance(now, Mapping):
        if not all(map(operator.eq, now, then)):  # names, in their order
            return False
        now, then = now.values(), then.values()
    return all(map(operator.is_, now, then)) or all(
        mine is theirs or (type(mine) is type(theirs) and type(mine) in _PLAIN and mine == theirs)
        for mine, theirs in zip(now, then, strict=True)
    )


def _values(attributes: tuple[dict[str, Any], ...]) -> Iterable[Any]:
    own, parameters, buffers, *_ = attributes
    yield from (value for name, value in own.items() if name not in _OF_ALL_MODULES)
    yield from parameters.values()
    yield from buffers.values()


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.shape, tensor.stride(), tensor.dtype


def _namespace(module: str) -> dict[str, Any]:
    """What is in a module; nothing if nobody has imported one of that name, as of a class that was made by hand."""
    return vars(sys.modules[module]) if module in sys.modules else {}


def _functions(module: str) -> dict[str, Any]:
    """The functions and classes that code of this module sees."""
    names = dict(_namespace(module))
    return {name: value for name, value in names.items() if isinstance(value, (types.FunctionType, type))}
