"""How an operator is made known to torch: schema, plain torch for every device, and shapes for tracing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastgen.ops import library

_torch_library = torch.library.Library("fastgen", "DEF")


@dataclass(frozen=True)
class Operator:
    """One of `torch.ops.fastgen`."""

    schema: str
    reference: Callable[..., Any]


OPERATORS: dict[str, Operator] = {}


def define(
    name: str, schema: str, reference: Callable[..., Any], fake: Callable[..., Any], is_seeded: bool = False
) -> Callable[..., Any]:
    """Register `torch.ops.fastgen.<name>`.

    Args:
        schema: of arguments and results, in torch's notation.
        reference: in plain torch. It is registered under CompositeExplicitAutograd; a native kernel registers under its
            own device's key, which comes first. Vectorised and without host synchronisation, so that it can be captured
            and compiled as well.
        fake: checks the arguments, and returns tensors of the results' shapes and dtypes.
        is_seeded: whether it draws random numbers.

    Returns: what calls the operator, and loads the native libraries before the first call of any.
    """
    tags = (torch.Tag.pt2_compliant_tag, *((torch.Tag.nondeterministic_seeded,) if is_seeded else ()))
    _torch_library.define(name + schema, tags=tags)
    _torch_library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastgen::{name}", fake, lib=_torch_library)
    OPERATORS[name] = Operator(schema, reference)
    operator = getattr(torch.ops.fastgen, name)

    def call(*args: Any) -> Any:
        load()
        return operator(*args)

    return call


def load() -> None:
    """Load the native libraries, unless they have been; they may have to be compiled first."""
    if not library.was_loaded():
        library.load(tuple(OPERATORS))


# `torch.compile` calls it while it compiles, and traces nothing of it: what torch.compiler.assume_constant_result says
# of a function, which would import the compiler here.
load._dynamo_marked_constant = True  # type: ignore[attr-defined]
