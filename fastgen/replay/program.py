"""Recorded operator calls as something to run: natively, without Python; or as the source of a Python function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgen import ops, phases

__phase__ = phases.PASS

# As numbers: c10::MemoryFormat.
_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}

Run = Callable[[], list[Any]]


class Made(NamedTuple):
    """Names a tensor that a call makes: an output of a step."""

    step: int
    place: int

    def __str__(self) -> str:
        return f"v{self.step}_{self.place}"


@dataclass
class Step:
    """One call of an operator; arguments are `Made`, lists with some `Made` or tensors among them, or constants."""

    function: Any
    args: list[Any]
    kwargs: dict[str, Any]
    targets: list[Made | None]  # of the outputs; None: nobody reads it
    is_tuple: bool  # the operator returns several outputs, or a list
    freed: list[Made]  # what no later step reads

    @property
    def returns_list(self) -> bool:
        returns = self.function._schema.returns
        return self.is_tuple and len(returns) == 1 and "List[Tensor]" in str(returns[0].type)


def native(steps: list[Step], returned: list[Any]) -> Run | None:
    """A function that runs the steps natively and returns `returned`; None where that can't be done."""
    if not ops.has_runtime():
        return None
    try:
        program, slots = _program(steps)
        results = [slots[one] for one in returned if isinstance(one, Made)]
    except (RuntimeError, TypeError, ValueError, KeyError):  # a constant of a kind that has no native form
        return None

    def run() -> list[Any]:
        tensors = iter(program.run(results))
        return [next(tensors) if isinstance(one, Made) else one for one in returned]

    return run


def _program(steps: list[Step]) -> tuple[Any, dict[Made, int]]:
    """The native program, and the slot of each tensor that it makes."""
    program: Any = torch.classes.fastgen.Program()
    slots: dict[Made, int] = {}
    for step in steps:
        schema = step.function._schema
        for place, argument in enumerate(schema.arguments):
            if place < len(step.args):
                value = step.args[place]
            elif argument.name in step.kwargs:
                value = step.kwargs[argument.name]
            else:
                value = argument.default_value
            _add(program, slots, value, str(argument.type))
        for target in step.targets:
            if target is not None:
                slots[target] = len(slots)
        outputs = [-1 if target is None else slots[target] for target in step.targets]
        freed = [slots[name] for name in step.freed]
        program.add_call(schema.name, schema.overload_name, outputs, step.returns_list, freed)
    return program, slots


def _add(program: Any, slots: dict[Made, int], value: Any, kind: str) -> None:
    """Add an argument of the schema's type `kind` to the program's next call."""
    if isinstance(value, Made):
        program.add_slot(slots[value])
    elif kind in ("Tensor", "Optional[Tensor]") and isinstance(value, (bool, int, float, complex)):
        program.add_number(value)
    elif value is None and kind == "Tensor":
        raise ValueError("a tensor that is missing has no native form")
    elif isinstance(value, (list, tuple)):
        _add_list(program, slots, value, kind)
    elif isinstance(value, int) and not isinstance(value, bool) and kind in ("float", "Optional[float]"):
        program.add_constant(float(value))
    elif isinstance(value, torch.memory_format):
        program.add_constant(_MEMORY_FORMATS[value])
    else:
        program.add_constant(_held(value))


def _add_list(program: Any, slots: dict[Made, int], value: Sequence[Any], kind: str) -> None:
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        program.begin_list("Optional" in kind)
        for item in value:
            if isinstance(item, Made):
                program.add_item(slots[item], None)
            else:
                program.add_item(-1, _held(item))
    elif kind in ("List[int]", "Optional[List[int]]"):
        program.add_integers(list(value))
    elif value and kind in ("List[float]", "Optional[List[float]]", "List[bool]", "Optional[List[bool]]"):
        program.add_constant([float(item) for item in value] if "float" in kind else list(value))
    elif not value and kind == "List[Optional[number]]":
        program.add_no_numbers()
    else:
        raise ValueError(f"a {kind} has no native form")


def _held(value: Any) -> Any:
    """The value as a program holds it: of a parameter another tensor on the same memory. A reference from C++ to the
    parameter itself would count as a use of it, and `torch.utils.swap_tensors` refuses tensors that others use."""
    return value.detach() if type(value) in (Tensor, nn.Parameter) else value


def python(steps: list[Step], returned: list[Any]) -> Run:
    """A Python function that calls the steps and returns `returned`."""
    namespace: dict[str, Any] = {"__phase__": __phase__}
    functions: dict[Any, str] = {}

    lines = []
    for step in steps:
        name = functions.setdefault(step.function, f"f{len(functions)}")
        namespace[name] = step.function
        arguments = [_text(value, namespace) for value in step.args]
        arguments += [f"{key}={_text(value, namespace)}" for key, value in step.kwargs.items()]
        left = ", ".join("_" if target is None else str(target) for target in step.targets)
        left += "," if step.is_tuple else ""
        lines.append(f"{left} = {name}({', '.join(arguments)})" if left else f"{name}({', '.join(arguments)})")
        lines += [f"del {freed}" for freed in step.freed]
    results = [_text(one, namespace) for one in returned]
    body = "\n    ".join(lines)
    source = f"def replay():\n    {body}\n    return [{', '.join(results)}]\n"
    exec(_compiled(source), namespace)
    # Taken out of the namespace, its globals: memory is to be freed with the tape, not by the garbage collector.
    replay: Run = namespace.pop("replay")
    return replay


def _text(value: Any, namespace: dict[str, Any]) -> str:
    """Python source for an argument or a result; constants get a name in the namespace."""
    if isinstance(value, Made):
        return str(value)
    if isinstance(value, list) and any(isinstance(item, (Made, Tensor)) for item in value):
        return f"[{', '.join(_text(item, namespace) for item in value)}]"
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    name = f"c{len(namespace)}"
    namespace[name] = value
    return name


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    """Compile `source`, once for all calls of the same shapes: they have the same source."""
    return compile(source, "<a recorded step>", "exec")
