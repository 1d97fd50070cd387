"""Finds code on a model that is neither the host's nor ours: hooks, subclasses, replaced functions, wrapped layers.

Such code may see that a beam search reads a prompt once for all beams, that steps are replayed without their Python,
or that a linear layer multiplies by a packed copy. So before a call begins, each module that the steps will run is
compared with what the host has shipped; differences are named, with the module's path in the model.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fastgen.patching import replaced_code

# Modules of torch that compile or trace: a compiled part of a model would see other shapes than it was made for.
_COMPILING = ("torch._dynamo", "torch._inductor", "torch.jit", "torch.fx", "torch._functorch")
_DISTRIBUTED = ("torch.nn.parallel", "torch.distributed")
_QUANTISING = ("torch.ao.", "torch.quantization.", "torch.nn.quantized", "torch.nn.qat", "torch.nn.intrinsic")
_LAYERS = ("torch.nn.", "torch.ao.nn.quantized.")
# Methods of `nn.Module` that a call of a module runs; the others load, save, move or print it.
_OF_CALLS = frozenset("forward __call__ _call_impl _wrapped_call_impl _slow_forward __getattr__".split())
_NEVER_IN_STEPS = frozenset(
    """__init__ __init_subclass__ __repr__ __str__ __doc__ __module__ __qualname__ __annotations__ __annotate__ __dict__
    __weakref__ __firstlineno__ __static_attributes__ __orig_bases__ __parameters__ __abstractmethods__ _abc_impl
    _init_weights set_input_embeddings set_output_embeddings get_input_embeddings set_decoder set_encoder tie_weights
    _tie_weights extra_repr generate""".split()
)
_PRINTS = {"extra_repr", "__repr__"}  # which libraries of quantised weights set on the layer
_PARAMETERS = (Tensor, nn.Parameter)
_GLOBAL: Any = nn.modules.module
_PLAIN_OBJECTS = frozenset("builtins operator typing weakref".split())  # modules of classes that call no foreign code
_ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module()))  # hooks among them, which are checked apart


class Finding(NamedTuple):
    """One piece of foreign code."""

    where: str  # the module's path in the model, "" for the model itself
    what: str  # in words
    name: str = ""  # of the method concerned, if it is one
    code: tuple[_Identity, ...] = ()  # what tells it from other code in the same place

    def __str__(self) -> str:
        return f"{self.where or 'the model'} {self.what}"


@dataclass(frozen=True)
class HostCode:
    """What counts as the host's own code."""

    packages: tuple[str, ...]  # packages of the host's classes
    utilities: tuple[str, ...] = ()  # modules of base classes of which steps use only the methods `in_steps`
    in_steps: frozenset[str] = frozenset()
    # Other libraries' layers and weights, by the full name of the class, and whether one treats rows one by one.
    row_local: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    class_attributes: Callable[[type], Mapping[str, Any]] = vars  # a class's attributes while nobody decodes
    runs_hooks: bool = True  # whether steps call each module, so that hooks run: torch's own do no harm then
    _checked: dict[type, Any] = field(default_factory=dict, compare=False)

    def find(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Finding]:
        """The foreign code in these modules, given with their paths in the model."""
        if nn.modules.module._has_any_global_hook():
            yield Finding("", "is called with hooks of yours on all modules", code=identities(*_global_hooks()))
        if replaced := replaced_code.replaced_functions():
            what = f"calls {next(iter(replaced))}, which is not torch's own"
            yield Finding("", what, code=identities(*replaced.values()))
        kinds: dict[type, tuple[str, ...] | None] = {}
        for path, module in modules:
            kind = type(module)
            if self._is_row_local(module):
                yield from self._of_instance(path, module, _root(kind.__module__))
                continue
            if kind not in kinds:
                kinds[kind] = self._of_class(kind)
            if (found := kinds[kind]) is not None:
                what, name = (*found, "")[:2]
                yield Finding(path, what, name, identities(getattr(kind, name, None) if name else kind))
            else:
                yield from self._of_instance(path, module)
        for name in {base.__module__ for kind in kinds for base in kind.__mro__ if self._owns(base)}:
            yield from self._of_namespace(name)

    def _is_row_local(self, thing: Any) -> bool:
        rule = self.row_local.get(f"{type(thing).__module__}.{type(thing).__qualname__}")
        return rule is not None and rule(thing)

    def _owns(self, kind: type) -> bool:
        return _root(kind.__module__) in self.packages

    def _of_class(self, kind: type) -> tuple[str, ...] | None:
        """What is foreign about a class and its bases."""
        full_name = f"{kind.__module__}.{kind.__qualname__}"
        if kind.__module__.startswith((*_COMPILING, *_DISTRIBUTED)):
            return (f"is a {full_name}",)
        for place, base in enumerate(kind.__mro__):
            if base is object or _root(base.__module__) in sys.stdlib_module_names:
                continue
            attributes = self.class_attributes(base)
            if self._owns(base) or base.__module__.startswith(_LAYERS):
                for name, value in attributes.items():
                    if self._matters(base, name) and not self._is_shipped(value, base):
                        return f"has another {name} than {_root(base.__module__)}'s {base.__name__}", name
                continue
            inherited = kind.__mro__[place + 1 :]
            for name in attributes:
                owner = next((other for other in inherited if name in vars(other)), None)
                special = name in ("__getattribute__", "__setattr__", "__delattr__")
                if owner is not None and (
                    special or (owner is not object and self._overrides(attributes, owner, name))
                ):
                    return f"is of the class {base.__name__}, which has its own {name}", name
        return None

    def _overrides(self, attributes: Mapping[str, Any], owner: type, name: str) -> bool:
        """Whether a class that is neither the host's nor torch's overrides code of the host's or torch's."""
        is_code = any(map(_is_code, (attributes[name], vars(owner).get(name))))
        return is_code and self._matters(owner, name)

    def _matters(self, owner: type, name: str) -> bool:
        """Whether a step may call this attribute of a class of the host's or torch's."""
        if name in _NEVER_IN_STEPS:
            return False
        if owner is nn.Module:
            return name in _OF_CALLS
        if owner.__module__.startswith(self.utilities):
            return name in self.in_steps or name in _OF_CALLS
        return True

    def _is_shipped(self, value: Any, owner: type) -> bool:
        """Whether an attribute of a class is data, or code of the host's, torch's or ours."""
        if not _is_code(value):
            return True
        return all(self._is_host_code(function, _root(owner.__module__)) for function in _functions(value))

    def _is_host_code(self, function: Any, *packages: str) -> bool:
        home = home_of(function)
        if home.startswith(_COMPILING):
            # A function marked as not to be compiled is wrapped by the compiler's module, and otherwise unchanged.
            inner = getattr(function, "__wrapped__", None)
            return getattr(function, "_torchdynamo_disable", False) and inner is not None and self._is_host_code(inner)
        root = _root(home)
        if root in (*packages, *self.packages, "torch", "fastgen"):
            return True
        if isinstance(function, functools._lru_cache_wrapper):
            return self._is_host_code(function.__wrapped__, *packages)
        # Of the standard library's objects, a Mock or the like calls whatever it was given.
        is_function = isinstance(function, (types.FunctionType, types.BuiltinFunctionType, types.MethodType))
        return root in (sys.stdlib_module_names if is_function else _PLAIN_OBJECTS)

    def _of_instance(self, path: str, module: nn.Module, *packages: str) -> Iterator[Finding]:
        """The foreign code on this one object; code of these `packages` is none."""
        own, kind = vars(module), cast(Any, type(module))
        for hook in (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()):
            if not all(map(self._is_host_code, _functions(hook))):
                yield Finding(path, "has hooks of yours", code=identities(hook))
            elif not self.runs_hooks and _root(home_of(hook)) == "torch":
                yield Finding(path, f"has hooks of {home_of(hook)}", code=identities(hook))
        if own.get("_compiled_call_impl") is not None:
            yield Finding(path, "is compiled")
        for name, value in (*own["_parameters"].items(), *own["_buffers"].items()):
            if value is not None and type(value) not in _PARAMETERS and not self._is_row_local(value):
                yield Finding(path, f"has a {type(value).__name__} as its {name}")
        for name in own.keys() - _ATTRIBUTES_OF_MODULES:
            value = own[name]
            if not callable(value) or isinstance(value, type) or name not in _names_in_code(kind) - _PRINTS:
                continue
            if not all(self._is_host_code(function, *packages) for function in _functions(value)):
                yield Finding(path, f"has a {name} of its own", name, identities(value))

    def _of_namespace(self, name: str) -> Iterator[Finding]:
        """Find functions in one of the host's modules that somebody has put in place of the host's."""
        module = sys.modules.get(name)
        if module is None or name.startswith(self.utilities):
            return
        defined, imported = _shipped_names(name)
        for attribute, value in list(vars(module).items()):
            if not isinstance(value, (types.FunctionType, functools.partial, types.MethodType)):
                continue
            is_import = attribute not in defined and _root(home_of(value)) in imported
            if not is_import and not all(map(self._is_host_code, _functions(value))):
                what = f"calls {name}.{attribute}, which is not the host's own"
                yield Finding("", what, attribute, identities(value))


def is_quantised(module: nn.Module) -> bool:
    """Whether torch quantises what this module computes, or notes the range of that: both go by all rows at once."""
    if type(module).__module__.startswith(_QUANTISING):
        return True
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(home_of(hook).startswith(_QUANTISING) for hook in hooks)


def _global_hooks() -> list[Any]:
    return [*_GLOBAL._global_forward_pre_hooks.values(), *_GLOBAL._global_forward_hooks.values()]


def around_all_models() -> Hashable:
    """What tells the code that runs with any model: hooks on every module, and functions in place of torch's."""
    replaced = replaced_code.replaced_functions()
    names = bool(nn.modules.module._has_any_global_hook()), *replaced
    return names, identities(*_global_hooks(), *replaced.values())


# The mode of `with torch.device(...)` says where tensors are made, and our own modes count.
_HARMLESS_MODES = ("torch.utils._device", "fastgen.bench.counts")


def active_mode() -> str | None:
    """The name of a torch mode of the user's that sees each operation of this thread, or None."""
    functions = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    dispatched = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    for mode in (*functions, *dispatched):
        if not type(mode).__module__.startswith(_HARMLESS_MODES):
            return type(mode).__name__
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func"
    return None


def home_of(function: Any) -> str:
    """The module that the code of a function is in; for another object, the module of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        return str(function.__globals__.get("__name__", ""))
    if isinstance(function, types.BuiltinFunctionType):
        return str(function.__module__ or "builtins")
    return type(function).__module__


class _Identity:
    """Equal to another one of the same object while that is alive, without keeping it alive if that can be."""

    def __init__(self, thing: Any) -> None:
        self._id = id(thing)
        self._get: Callable[[], Any]
        try:
            self._get = weakref.ref(thing)
        except TypeError:  # a built-in one
            self._get = lambda: thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and (thing := self._get()) is not None and thing is other._get()

    def __hash__(self) -> int:
        return self._id


def identities(*functions: Any) -> tuple[_Identity, ...]:
    """What tells these functions, and the objects that they are bound to, from any others."""
    parts = (part for each in functions for part in (getattr(each, "__func__", each), getattr(each, "__self__", None)))
    return tuple(_Identity(part) for part in parts if part is not None)


def _root(module: str) -> str:
    return module.partition(".")[0]


def _is_code(value: Any) -> bool:
    return not isinstance(value, type) and (
        callable(value) or isinstance(value, (property, staticmethod, classmethod, functools.cached_property))
    )


def _functions(value: Any) -> list[Any]:
    """The functions that an attribute consists of, wrapped ones included: a wrapper of the host's may call foreign
    code."""
    if isinstance(value, property):
        found = [value.fget, value.fset, value.fdel]
    elif isinstance(value, functools.partial):
        found = [value.func, *value.args, *value.keywords.values()]
        found = [part for part in found if _is_code(part) and not isinstance(part, type)]
    else:
        found = [getattr(value, "__func__", None) or getattr(value, "func", None) or value]
    found = [function for function in found if function is not None and not isinstance(function, type)]
    inner = [getattr(function, "__wrapped__", None) for function in found if isinstance(function, types.FunctionType)]
    return [*found, *(function for function in inner if isinstance(function, types.FunctionType))]


# By class, which may hold what its methods do.
_names: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def _names_in_code(kind: Any) -> frozenset[str]:
    """The names that the methods of a class and of all bases but `nn.Module` use."""
    if (known := _names.get(kind)) is not None:
        return known
    names = {"forward"}
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        attributes = dict(vars(base))  # a copy: another thread may put something there for a while
        for value in attributes.values():
            for function in _functions(value) if _is_code(value) else ():
                if isinstance(function, types.FunctionType):
                    names |= set(_names_of(function.__code__))
        names |= {name for name, value in attributes.items() if _is_code(value)}
    _names[kind] = frozenset(names)
    return _names[kind]


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)


@functools.cache
def _shipped_names(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """The functions and classes that a module's source defines, and the packages that it names.

    None of either where there is no source: the host may have been updated or removed since it was imported.
    """
    loader: Any = getattr(sys.modules[module], "__loader__", None)
    code = None
    with contextlib.suppress(ImportError, OSError, SyntaxError):
        code = loader.get_code(module) if hasattr(loader, "get_code") else None
    if code is None:
        return frozenset(), frozenset()
    defined = {constant.co_name for constant in code.co_consts if isinstance(constant, types.CodeType)}
    return frozenset(defined), frozenset(_root(name) for name in _names_of(code))
