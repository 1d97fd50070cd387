"""Ambient modes of torch and Python in which a user may generate: each is entered around a call, and left after it."""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Generate = Callable[..., Any]  # generate(model, inputs, **options)
ACCELERATED, FALLBACK, EITHER = "accelerated", "fallback", "either"


@dataclass(frozen=True)
class Mode:
    """`entered` is around the call; `wrapped` makes another call of the same model out of `generate`."""

    name: str
    entered: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    wrapped: Callable[[Generate], Generate] = lambda generate: generate
    half: str = ""  # the dtype of products, if of half precision
    is_born_inside: bool = False  # the model and its inputs are made inside
    is_left_between: bool = False  # a call inside, one outside, one inside again
    expected: str = ACCELERATED


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block tensors have this dtype where nobody names one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---------------------------------------------------------------------------------------------- modes of the user's
_PRODUCTS = frozenset("matmul mm bmm addmm baddbmm linear".split())


def rounded(output: Any) -> Any:
    """Numbers to the next 1/16: enough to change tokens."""
    is_number = isinstance(output, torch.Tensor) and output.is_floating_point()
    return (output * 16).round() / 16 if is_number else output


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function)).partition(".")[0]


class CountingFunctions(TorchFunctionMode):
    """Counts the calls of torch's functions by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[_name(function)] += 1
        return function(*args, **(kwargs or {}))


class CountingOperators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[_name(function)] += 1
        return function(*args, **(kwargs or {}))


class RoundingFunctions(TorchFunctionMode):
    """Rounds what each product returns."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        return rounded(output) if _name(function) in _PRODUCTS else output


class RoundingOperators(TorchDispatchMode):
    """Rounds what each product returns."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        return rounded(output) if _name(function) in _PRODUCTS else output


# ---------------------------------------------------------------------------------------------- other ways to call
def _with_gradients(generate: Generate) -> Generate:
    """`generate` without the decorator that turns gradients off."""

    def call(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        bare = inspect.unwrap(_host_generate(model))
        with torch.enable_grad():
            return bare(model, **inputs, **options)

    return call


def _host_generate(model: Any) -> Any:
    import transformers

    return transformers.GenerationMixin.generate


def _compiled(generate: Generate) -> Generate:
    """A compiled function that calls `generate`."""

    def call(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(lambda: generate(model, inputs, **options), backend="eager")()

    return call


class _Caller(torch.nn.Module):
    def __init__(self, model: Any, generate: Generate) -> None:
        super().__init__()
        self.model, self._generate = model, generate

    def forward(self, inputs: dict[str, Any], options: dict[str, Any]) -> Any:
        return self._generate(self.model, inputs, **options)


def _functional(generate: Generate) -> Generate:
    """A copy of the model with other weights, by `torch.func.functional_call`.

    transformers 4.57 ties weights anew as it generates, so that the model itself would keep some of the others.
    """

    def call(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        model = copy.deepcopy(model)
        weights = {f"model.{name}": 1.03 * weight.detach() for name, weight in model.named_parameters()}
        return torch.func.functional_call(_Caller(model, generate), weights, (inputs, options))

    return call


def _mapped(generate: Generate) -> Generate:
    """`generate` inside `torch.vmap`, of nothing that is mapped."""

    def call(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        outputs: list[Any] = []

        def once(number: torch.Tensor) -> torch.Tensor:
            outputs.append(generate(model, inputs, **options))
            return number

        torch.vmap(once, randomness="same")(torch.zeros(2))
        return outputs[0]

    return call


def _autocast(dtype: torch.dtype) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield

    return entered


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("plain"),
        Mode("no_grad", torch.no_grad),
        Mode("inference_mode", torch.inference_mode),
        Mode("inference_mode_between", torch.inference_mode, is_left_between=True),
        Mode("inference_mode_born", torch.inference_mode, is_born_inside=True),
        Mode("autocast_bf16", _autocast(torch.bfloat16), half="bfloat16"),
        Mode("autocast_fp16", _autocast(torch.float16), half="float16"),
        Mode("autocast_between", _autocast(torch.bfloat16), half="bfloat16", is_left_between=True),
        Mode("deterministic", _deterministic),
        Mode("default_float64", lambda: default_dtype(torch.float64)),
        Mode("default_bfloat16", lambda: default_dtype(torch.bfloat16)),
        Mode("device_context", lambda: torch.device("cpu")),
        Mode("default_device", _default_device),
        Mode("threads_between", lambda: _threads(2), is_left_between=True),
        Mode("gradients", wrapped=_with_gradients, expected=FALLBACK),
        Mode("warnings_as_errors", _warnings_as_errors),
        Mode("counting_functions", CountingFunctions, expected=FALLBACK),
        Mode("counting_operators", CountingOperators, expected=FALLBACK),
        Mode("rounding_functions", RoundingFunctions, expected=FALLBACK),
        Mode("rounding_operators", RoundingOperators, expected=FALLBACK),
        Mode("compiled_caller", wrapped=_compiled, expected=EITHER),
        Mode("functional_call", wrapped=_functional),
        Mode("vmap", wrapped=_mapped, expected=EITHER),
    )
}
