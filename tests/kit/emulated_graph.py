"""What a CUDA graph does, on any device: operations recorded, and done again at the same addresses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from fastgen.replay import tape


class Graph(tape.DecomposingMode):
    """Records the operators of a function with its tensors and with numbers baked in, as a CUDA graph does.

    A replay computes each anew from the same memory into the same memory. Views cost nothing: they lie there.

    Like a CUDA graph it keeps only the memory alive that the function has allocated. Whether somebody else still has
    all other memory is read off the storages' counts of references, before each replay.
    """

    has_run = False
    draws = True
    made: ClassVar[list[Graph]] = []

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self.written: list[torch.Tensor] = []  # a graph does not know
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._calls: list[tuple[Any, Any, Any, Any, bool]] = []  # the last: whether new tensors came of it
        self._allocated: set[int] = set()  # storages
        self._others: dict[int, tuple[torch.Tensor, int, str]] = {}  # by storage: one of ours, how many, an operator
        Graph.made.append(self)

    def capture(self, function: Callable[[], Any], device: torch.device) -> Any:
        random = torch.get_rng_state()
        try:
            with self:
                result = function()
        finally:  # a graph only records
            torch.set_rng_state(random)
            for tensor, before in reversed(self._written):
                tensor.copy_(before)
            self._written.clear()
            made = [outputs for _, _, _, outputs, is_fresh in self._calls if is_fresh]
            for tensor in pytree.tree_leaves(made):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    tensor.fill_(float("nan"))  # nothing has been computed yet
        self._result = result
        return result

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        if tape.depends_on_values(function, args):
            raise RuntimeError(f"{function} waits for a value")
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._written += [(each, each.clone()) for each in pytree.tree_leaves(value)]
        outputs = function(*args, **kwargs)
        is_fresh = _is_fresh(function, args, outputs)
        if is_fresh or function is torch.ops.aten.lift_fresh.default:  # of a number, which on a GPU is baked in
            self._allocated |= {_storage(x) for x in _tensors(outputs)}
        own = functools.partial(self._own, str(function))
        mine = [pytree.tree_map_only(torch.Tensor, own, each) for each in (args, kwargs, outputs)]
        self._calls.append((function, *mine, is_fresh))
        return outputs

    def _own(self, function: str, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor or, of memory that was there before, one more reference to it."""
        storage = _storage(tensor)
        if storage in self._allocated or not storage:
            return tensor
        mine = tensor.detach()
        first, count, name = self._others.get(storage, (mine, 0, function))
        self._others[storage] = first, count + 1, name
        return mine

    def _check(self) -> None:
        for mine, count, function in self._others.values():
            references = torch._C._storage_Use_Count(_storage(mine))
            assert references > count + 1, f"{function} reads memory that nobody keeps"  # one is `untyped_storage`'s

    def replay(self) -> Any:
        self.replays += 1
        self._check()
        for function, args, kwargs, outputs, is_fresh in self._calls:
            if tape.may_be_view(function) and not is_fresh:
                continue
            again = function(*args, **kwargs)
            if is_fresh:
                for kept, new in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(again), strict=True):
                    if isinstance(kept, torch.Tensor):
                        assert kept.shape == new.shape, f"{function} made {kept.shape}, and now {new.shape}"
                        kept.copy_(new)
        return self._result


def _is_fresh(function: Any, args: Any, outputs: Any) -> bool:
    """Whether its outputs are new tensors."""
    if all(output.alias_info is None for output in function._schema.returns):
        return True
    return tape.may_be_view(function) and not {_memory(x) for x in _tensors(outputs)} <= {
        _memory(x) for x in _tensors(args)
    }


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
