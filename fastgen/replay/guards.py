"""Whether a model is still what it was: what a recorded step took from it, and will not look at again."""

from __future__ import annotations

import enum
import functools
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_PLAIN = (bool, int, float, complex, str, bytes)
# What does not change, or only as an object that others take the place of.
_IMMUTABLE: tuple[type, ...] = (*_PLAIN, type(None), type, torch.dtype, torch.device, enum.Enum)
_IMMUTABLE += (types.BuiltinFunctionType,)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_NOT_OF_THE_STEP = ("builtins", "typing")
# Of a module's own dict, those that others of the module's attributes are in.
_CONTENTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"training"}
_MISSING = object()


@dataclass(frozen=True)
class Host:
    """What a host's modules hold besides tensors, numbers and containers of those."""

    packages: tuple[str, ...]  # of the host's classes and ours; others may hold anything, and change unseen
    configs: tuple[type, ...]  # whose attributes steps may read
    ignored: tuple[type, ...] = ()  # of which no step knows
    not_of_the_step: tuple[str, ...] = ()  # modules whose classes only call the model
    class_attributes: Callable[[type], Mapping[str, Any]] = vars  # as they are while nobody decodes
    registered: Callable[[], list[dict[str, Any]]] = list  # functions that steps look up elsewhere, by name


class ModelGuards:
    """All that the Python of some modules reads: attributes, tensors, configs, code.

    Values of tensors don't count, which a captured step reads anew; but what was derived from them does, so they must
    not have been written to either. Guards keep neither a model nor weights alive, and leave no weak reference to a
    tensor: `torch.utils.swap_tensors`, and with it `Module.to`, refuses a tensor that has one.
    """

    def __init__(self, modules: Iterable[nn.Module], host: Host) -> None:
        modules, self._host = list(modules), host
        seen: dict[int, Any] = {}
        owners = self._with_bases({type(module) for module in modules})
        names = {owner.__module__ for owner in owners}
        # Whether there was nothing but what can be looked at again: anything else may change, or hold the model.
        self.is_complete = (
            all(map(self._is_plain, modules))
            and all(self._collect(value, seen) for module in modules for value in _values(module))
            and names <= sys.modules.keys()
        )
        if not self.is_complete:
            return
        self._modules = [(weakref.ref(module), type(module), _attributes(module)) for module in modules]
        self._containers = [(value, _held(self._content(value))) for value in seen.values()]
        self._tensors = [_Identity(tensor) for tensor in self._tensors_now()]
        self._classes = [(owner, tuple(vars(owner).values()), dict(host.class_attributes(owner))) for owner in owners]
        self._functions = [(name, tuple(_namespace(name).values()), _functions(name)) for name in names]
        self._registered = host.registered()

    def _is_plain(self, module: nn.Module) -> bool:
        """Whether a module is of the host's or torch's own classes, and nobody has hooked it."""
        own, packages = vars(module), (*self._host.packages, "torch")
        is_whole = all(name in own for name in (*_CONTENTS, *_HOOKS))  # a traced one has none
        if not is_whole or own["_forward_hooks"] or own["_forward_pre_hooks"]:
            return False
        roots = {base.__module__.partition(".")[0] for base in type(module).__mro__}
        return all(root in packages or root in sys.stdlib_module_names for root in roots) and "__main__" not in roots

    def is_current(self) -> bool:
        """Whether all of it is the same, and no tensor has been written to; asked only of what is complete."""
        return self.is_same_code() and self._has_tensors(_Identity.is_of)

    def is_same_memory(self) -> bool:
        """Whether all of it is the same but for the numbers in tensors, which may have been written to where they are;
        asked only of what is complete."""
        return self.is_same_code() and self._has_tensors(_Identity.has_memory_of)

    def _has_tensors(self, is_same: Callable[[_Identity, Tensor], bool]) -> bool:
        """Whether the tensors are what they were; another thread may have added one since the code was looked at."""
        now = self._tensors_now()
        return len(now) == len(self._tensors) and all(map(is_same, self._tensors, now))

    def is_same_code(self) -> bool:
        """Whether all of it is the same but for what is in tensors; asked only of what is complete."""
        return (
            all(_is_unchanged(ref(), kind, held) for ref, kind, held in self._modules)
            and all(_are_held(self._content(value), held) for value, held in self._containers)
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
        """Note, by id, the containers and configs, which may change without an attribute of a module changing.

        False if there is anything of which a change cannot be seen.
        """
        if id(value) in seen or isinstance(value, (*_IMMUTABLE, *self._host.ignored)):
            return True
        if isinstance(value, types.FunctionType):
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            return value.__closure__ is None and all(isinstance(default, _IMMUTABLE) for default in defaults)
        if type(value) is functools.partial:
            return all(self._collect(part, seen) for part in (value.func, value.args, value.keywords))
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested:
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

    def _tensors_now(self) -> list[Tensor]:
        """The tensors of modules, containers and configs, which are what they were."""
        modules = [module for ref, _, _ in self._modules if (module := ref()) is not None]
        contents = [self._content(value) for value, _ in self._containers]
        contents = [list(content.values()) if isinstance(content, dict) else content for content in contents]
        values = itertools.chain(*map(_values, modules), *contents)
        return [value for value in values if isinstance(value, Tensor)]

    def _with_bases(self, owners: set[type]) -> set[type]:
        """The classes of the modules and their bases, but for those that only call the model."""
        bases = {base for owner in owners for base in owner.__mro__}
        others = (*_NOT_OF_THE_STEP, *self._host.not_of_the_step)
        return {base for base in bases if not base.__module__.startswith(others)}


# ---------------------------------------------------------------------------------------------- what is held
def _held(content: Any) -> Any:
    """A list or a dict that keeps none of the modules and tensors alive."""
    if isinstance(content, dict):
        return {name: _held_value(value) for name, value in content.items()}
    return [_held_value(value) for value in content]


class _HeldTensor(NamedTuple):
    """A tensor of a module's: which one it is, but not what is in it, for which there is `_Identity`."""

    name: int  # the id, which another may have once this one is gone
    kind: type  # which `swap_tensors` changes


class _HeldModule(NamedTuple):
    module: weakref.ref[nn.Module]
    kind: type


def _held_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _HeldTensor(id(value), type(value))
    return _HeldModule(weakref.ref(value), type(value)) if isinstance(value, nn.Module) else value


def _are_held(now: Any, then: Any) -> bool:
    """Whether a list or a dict has what `_held` was given; numbers and strings may be other objects that are equal."""
    if len(now) != len(then):
        return False
    if isinstance(now, dict):
        if not all(map(operator.eq, list(now), then)):  # names, in their order
            return False
        now, then = list(now.values()), then.values()
    return all(mine is theirs or _is_held(mine, theirs) for mine, theirs in zip(now, then, strict=False))


def _is_held(value: Any, held: Any) -> bool:
    if type(held) is _HeldTensor:
        return id(value) == held.name and type(value) is held.kind
    if type(held) is _HeldModule:
        return value is held.module() and type(value) is held.kind
    return type(value) is type(held) and type(held) in _PLAIN and bool(value == held)


class _Attributes(NamedTuple):
    """What a module has besides hooks."""

    size: int  # attributes in all
    attributes: list[tuple[str, Any]]
    contents: list[tuple[str, list[str], list[Any]]]  # of each of _CONTENTS: names, in their order, and values


def _attributes(module: nn.Module) -> _Attributes:
    own = vars(module)
    # A copy: a model may set attributes as it runs, in another thread.
    attributes = [(name, _held_value(value)) for name, value in dict(own).items() if name not in _OF_ALL_MODULES]
    contents = [(name, list(own[name]), _held(list(own[name].values()))) for name in _CONTENTS]
    return _Attributes(len(own), attributes, contents)


def _is_unchanged(module: nn.Module | None, kind: type, held: _Attributes) -> bool:
    if type(module) is not kind or module is None:
        return False
    own = vars(module)
    if len(own) != held.size or any(own.get(name) for name in _HOOKS):
        return False
    for name, value in held.attributes:
        now = own.get(name, _MISSING)
        if now is not value and not _is_held(now, value):
            return False
    return all(
        list(own.get(name, ())) == names and _are_held(list(own[name].values()), values)
        for name, names, values in held.contents
    )


def _values(module: nn.Module) -> Iterable[Any]:
    own = dict(vars(module))  # a copy, as above
    yield from (value for name, value in own.items() if name not in _OF_ALL_MODULES)
    yield from list(own["_parameters"].values())
    yield from list(own["_buffers"].values())


class _Identity:
    """Which memory a tensor has, and how often it has been written to; the memory is not kept."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # no other has this address while we hold it
        self._place, self._version = _place(tensor), _version(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        return self.has_memory_of(tensor) and self._version == _version(tensor)

    def has_memory_of(self, tensor: Tensor) -> bool:
        return self._storage.cdata == tensor.untyped_storage()._cdata and self._place == _place(tensor)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


# ---------------------------------------------------------------------------------------------- classes and functions
def _are_identical(space: Mapping[str, Any], values: tuple[Any, ...]) -> bool:
    """Whether all of a class's, or a module's, attributes are these: the quick look."""
    return len(space) == len(values) and all(map(operator.is_, space.values(), values))


def _are_same(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    """Whether two dicts hold the same objects; numbers and strings may be other objects that are equal."""
    if list(now) != list(then):
        return False
    return all(
        mine is theirs or (type(mine) is type(theirs) and type(mine) in _PLAIN and mine == theirs)
        for mine, theirs in zip(list(now.values()), then.values(), strict=False)
    )


def _namespace(module: str) -> dict[str, Any]:
    """What is in a module; nothing if nobody has imported one of that name, as of a class that was made by hand."""
    return vars(sys.modules[module]) if module in sys.modules else {}


def _functions(module: str) -> dict[str, Any]:
    """The functions and classes that code of this module sees."""
    names = dict(_namespace(module))
    kinds = (types.FunctionType, type, functools.partial, types.MethodType)
    return {name: value for name, value in names.items() if isinstance(value, kinds)}
