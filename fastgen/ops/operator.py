"""Registers operators with torch: schema, an implementation in plain torch, and shapes for tracing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastgen.ops import library


@dataclass(frozen=True)
class Operator:
    """One operator of `torch.ops.fastgen`."""

    schema: str
    reference: Callable[..., Any]


OPERATORS: dict[str, Operator] = {}
_libraries: dict[str, Any] = {}  # torch's, by operator, which is registered for as long as its library lives


def define(
    name: str, schema: str, reference: Callable[..., Any], fake: Callable[..., Any], is_seeded: bool = False
) -> Callable[..., Any]:
    """Register `torch.ops.fastgen.<name>`.

    Args:
        schema: of arguments and results, in torch's notation.
        reference: the operator in plain torch. It is registered under CompositeExplicitAutograd; a native kernel
            registers under the key of a device, which comes first. It is vectorised and does not wait for the device,
            so that it can be captured and compiled, too.
        fake: checks the arguments, and returns tensors of the results' shapes and dtypes.
        is_seeded: whether it draws random numbers.

    Returns: a function that calls the operator, and loads the native libraries before the first call of any operator.
    """
    tags = (torch.Tag.pt2_compliant_tag, *((torch.Tag.nondeterministic_seeded,) if is_seeded else ()))
    register(name, schema, reference, "CompositeExplicitAutograd", fake, tags)
    OPERATORS[name] = Operator(schema, reference)
    operator = getattr(torch.ops.fastgen, name)

    def call(*args: Any) -> Any:
        load()
        try:
            return operator(*args)
        except RuntimeError as error:
            raise _named(error) from None

    return call


def register(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    key: str,
    fake: Callable[..., Any] | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """Register an operator and its kernel under a dispatch key, wholly or not at all, once in a process.

    An import that is interrupted, as by the first call in a notebook, is done anew, and torch takes a name only once.
    """
    if name in _libraries:
        return
    with contextlib.ExitStack() as undone:
        made = torch.library.Library("fastgen", "FRAGMENT")
        undone.callback(made._destroy)
        made.define(name + schema, tags=tags)
        made.impl(name, kernel, key)
        if fake is not None:
            torch.library.register_fake(f"fastgen::{name}", fake, lib=made)
        _libraries[name] = made
        undone.pop_all()


def _named(error: RuntimeError) -> Exception:
    """The exception that a kernel names: through torch's stable ABI every one arrives as a RuntimeError."""
    name, _, sentence = str(error).partition(": ")
    kind = {"ValueError": ValueError, "TypeError": TypeError, "IndexError": IndexError}.get(name)
    return error if kind is None else kind(sentence)


def load() -> None:
    """Load the native libraries, unless they have been; they may have to be compiled first."""
    if not library.was_loaded():
        library.load(tuple(OPERATORS))


# `torch.compile` calls `load` while it compiles, and does not trace it. This attribute is what
# torch.compiler.assume_constant_result sets, which would import the compiler here.
load._dynamo_marked_constant = True  # type: ignore[attr-defined]
