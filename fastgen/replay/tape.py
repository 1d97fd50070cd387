"""Records the operators of a step as a program that calls them again, without the model's own Python.

At few rows on a CPU, a fifth of a step is Python: modules, shapes, attention's arguments. They are the same each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.replay import program
from fastgen.replay.program import Made, Step


class DecomposingMode(TorchDispatchMode):
    """A dispatch mode that sees each composite operator as its parts, in inference mode, too.

    Under `torch.inference_mode` torch hands over operators such as `to`, `reshape`, `matmul` or `is_nonzero` whole,
    which elsewhere arrive as their parts. Only of the parts is it known which read values, and which make views.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the compiler would be imported, a third of a second, to be told to keep out

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(function):
            with self:
                outputs = function.decompose(*args, **kwargs)
            if outputs is not NotImplemented:
                return outputs
        return self._call(function, args, kwargs)

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


@functools.cache
def _is_composite(function: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"))


class Tape(DecomposingMode):
    """Records the operators of a function. A replay makes anew the tensors that the function made, and reads all others
    where they are; numbers are baked in."""

    has_run = True  # capturing computes the result

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self.written: list[Tensor] = []  # tensors that the function writes to and has not made
        self.draws = False  # the function draws random numbers

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        if depends_on_values(function, args):
            raise RuntimeError(f"{function} waits for a value")
        self.draws = self.draws or draws(function, args, kwargs)
        outputs = function(*args, **kwargs)
        if function is torch.ops.aten.lift_fresh.default:
            # A tensor that the step has made from a number, and may write to: a replay copies the present values.
            function, args = torch.ops.aten.clone.default, (args[0].clone(),)
        self._calls.append((function, args, kwargs, outputs))
        return outputs

    def capture(self, function: Callable[[], Any], device: torch.device) -> Any:
        random = torch.get_rng_state()
        try:
            with _Refusing(), self:
                result = function()
        except BaseException:
            if self.draws:  # the step will run again, and draw the same numbers
                torch.set_rng_state(random)
            raise
        leaves, self._spec = pytree.tree_flatten(result)
        script = _Script(self._calls)
        self.written = script.written
        returned = script.finish(leaves)
        self._calls.clear()
        self._function = program.native(script.steps, returned) or program.python(script.steps, returned)
        return result

    def replay(self) -> Any:
        """Call the operators again."""
        return pytree.tree_unflatten(self._function(), self._spec)


def depends_on_values(function: Any, args: Any) -> bool:
    """Whether an operator returns a number, or a tensor of a shape, that depends on the values of tensors."""
    if not _may_depend_on_values(function):
        return False
    # Indexing depends on values only if an index is a mask.
    return not function.overloadpacket.__name__.startswith("index") or any(
        index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1])
    )


_DRAWS_UNLESS = {"dropout_p": 0, "train": False}  # arguments of attention and of dropout


def draws(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call of an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    for place, argument in enumerate(function._schema.arguments):
        if argument.name in _DRAWS_UNLESS:
            value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            if value == _DRAWS_UNLESS[argument.name]:
                return False
    return True


class _Refusing(TorchFunctionMode):
    """Raises where Python reads values without calling an operator."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READERS or (function in _READERS_OF_PARTS and _holds_tensors(args)):
            raise RuntimeError(f"{function.__name__} waits for a value")
        return function(*args, **(kwargs or {}))


_READERS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
_READERS_OF_PARTS = {torch.tensor, torch.as_tensor, torch.asarray, torch.tensor_split, Tensor.tensor_split}


def _holds_tensors(args: Any) -> bool:
    """Whether there are tensors beyond the first argument, or within it if it is a list."""
    inner = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    return next(_tensors([*inner, *args[1:]]), None) is not None


class Drawing(DecomposingMode):
    """Notes whether this thread draws random numbers; all operators run as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        self.draws = self.draws or draws(function, args, kwargs)
        return function(*args, **kwargs)


class Noting(DecomposingMode):
    """Notes operators that depend on values, and the tensors written to; all operators run as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: str | None = None
        self._made: set[int] = set()  # storages; the number of a freed one can only go to another that is made
        self._written: dict[int, Tensor] = {}  # by storage

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        if depends_on_values(function, args):
            self.waits = str(function)
        before = {_storage(tensor) for tensor in _tensors((args, *kwargs.values()))}
        for tensor in mutated(function, args, kwargs):
            if _storage(tensor) not in self._made:
                self._written[_storage(tensor)] = tensor
        outputs = function(*args, **kwargs)
        self._made |= {_storage(made) for made in _tensors(outputs)} - before
        return outputs

    @property
    def written(self) -> list[Tensor]:
        """The tensors that were written to and had been there before."""
        return [*self._written.values()]


@functools.cache
def _may_depend_on_values(function: Any) -> bool:
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(function.tags)


@functools.cache
def may_be_view(function: Any) -> bool:
    """Whether an operator changes nothing and may return a view of an argument (`_reshape_alias` mostly does)."""
    return not function._schema.is_mutable and any(output.alias_info for output in function._schema.returns)


def mutated(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments that it writes to."""
    if function._schema.is_mutable:
        for place, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _tensors(args[place] if place < len(args) else kwargs.get(argument.name))


def _storage(tensor: Tensor) -> int:
    """A number of the tensor's storage, unique while it is alive; tensors packed by oneDNN show no storage."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or outputs, those in lists included."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


class _Script:
    """Recorded calls, with tensors that calls make by name: as Python source, or as a native program."""

    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        self._names: dict[_Place, Made] = {}  # of tensors that calls make; all are alive in `calls`
        self._made: set[int] = set()  # their storages
        self.steps: list[Step] = []
        self._last_use: dict[Made, int] = {}
        self.written: list[Tensor] = []  # tensors that the calls write to and have not made
        for function, args, kwargs, outputs in calls:
            tensors = list(_tensors((args, *kwargs.values())))
            used = [name for name in map(self._name, tensors) if name]
            self.written += (one for one in mutated(function, args, kwargs) if self._name(one) is None)
            # A view of memory that stays where it is needs no new call.
            if used or not may_be_view(function) or not _share_memory(tensors, outputs):
                self._write(function, args, kwargs, outputs, used)

    def finish(self, results: list[Any]) -> list[Any]:
        """Note in each step what no later one reads; returns what stands for the function's results."""
        returned = [self._reference(result) for result in results]
        kept = {one for one in returned if isinstance(one, Made)}
        for name, line in self._last_use.items():
            if name not in kept:
                self.steps[line].freed.append(name)  # later tensors can use the memory
        return returned

    def _write(self, function: Any, args: Any, kwargs: Any, outputs: Any, used: list[Made]) -> None:
        line = len(self.steps)
        arguments = [self._reference(value) for value in args]
        named = {key: self._reference(value) for key, value in kwargs.items()}
        self._last_use.update(dict.fromkeys(used, line))
        targets: list[Made | None] = []
        returns = function._schema.returns
        listed = outputs if isinstance(outputs, (list, tuple)) else [outputs] if returns else []
        if (returns and not listed) or any(isinstance(output, (list, tuple)) for output in listed):
            raise RuntimeError(f"{function} returns what the tape has no name for")
        for place, output in enumerate(listed):
            target = None
            alias = returns[min(place, len(returns) - 1)].alias_info  # a list is one return
            if isinstance(output, Tensor) and not (alias and alias.is_write):  # a tensor that was written to has a name
                target, where = Made(line, place), _place(output)
                self._names[where] = target
                self._made.add(where[0])
                self._last_use[target] = line
            targets.append(target)
        self.steps.append(Step(function, arguments, named, targets, isinstance(outputs, (list, tuple)), []))

    def _reference(self, value: Any) -> Any:
        """A tensor that a call has made by its name, in a list too; anything else as it is."""
        if isinstance(value, Tensor) and (known := self._name(value)):
            return known
        if isinstance(value, (list, tuple)) and next(_tensors(value), None) is not None:
            return [self._reference(item) for item in value]
        return value

    def _name(self, tensor: Tensor) -> Made | None:
        if tensor.layout is not torch.strided:
            return None  # what oneDNN has packed
        if tensor.is_conj() or tensor.is_neg():
            raise RuntimeError("a tensor is conjugate or negated without having been computed")
        place = _place(tensor)
        if place not in self._names and place[0] in self._made:
            raise RuntimeError("a view was made that the tape has not seen")
        return self._names.get(place)


def _share_memory(tensors: list[Tensor], outputs: Any) -> bool:
    """Whether each output shares a storage with one of these tensors."""
    return {_storage(output) for output in _tensors(outputs)} <= set(map(_storage, tensors))


# Identifies a tensor: the storage and the part of it. Not the object, for autograd copies the objects of views.
_Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def _place(tensor: Tensor) -> _Place:
    storage = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype
