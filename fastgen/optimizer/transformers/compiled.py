"""The decode step through torch.compile, for `configure(compile=True)`: one graph a step, on the CPU in float32.

What the graph cannot hold stays outside it, as operators opaque to the compiler: products on packed weights (those of
few rows it can hold), and the tree with its attention. So slots that grow by `M` a step are no dimension of the graph,
and nothing breaks it.
"""

from __future__ import annotations

import functools
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import exc
from transformers.pytorch_utils import Conv1D

from fastgen import config, products, report
from fastgen.optimizer.transformers import modules
from fastgen.optimizer.transformers import session as sessions

Forward = Callable[..., Any]

_local = threading.local()
_lock = threading.Lock()
_steps: weakref.WeakKeyDictionary[nn.Module, CompiledStep] = weakref.WeakKeyDictionary()
_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()  # by id: a graph holds numbers


@torch.compiler.assume_constant_result
def is_ours() -> bool:
    """Whether what the compiler traces in this thread is a step of ours, and not code of the user's."""
    return getattr(_local, "is_ours", False)


class CompiledStep:
    """The compiled `forward` of a model; once the compiler has failed, `failure` says why."""

    def __init__(self) -> None:
        self.packing = config.current().packing  # decides about products in the graph
        self.graphs = 0
        self.seconds = 0.0  # of calls that compiled
        self.failure: str | None = None
        # Compiled code hangs on a code object: one of its own for each model, so that it goes with the model.
        function = types.FunctionType(_forward.__code__.replace(), globals())
        self._function = torch.compile(function, fullgraph=True, dynamic=True, backend=self._compile)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with _lock:
            self.graphs += 1
        _local.has_compiled = True
        return torch._inductor.compile(graph, inputs)

    def __call__(self, stock: Forward, model: nn.Module, kwargs: dict[str, Any]) -> Any:
        """`stock(model, **kwargs)`; if it cannot be compiled, by itself, from then on."""
        if self.failure:
            return stock(model, **kwargs)
        _local.is_ours, _local.has_compiled, start = True, False, time.perf_counter()
        try:
            return self._function(stock, model, kwargs)
        except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:  # before anything has run
            _local.has_compiled = True
            self.failure = " ".join(str(error).split())[:200] or type(error).__name__
            report.log(f"{type(model).__name__} is not compiled: {self.failure}")
        finally:
            _local.is_ours = False
            if _local.has_compiled:
                with _lock:
                    self.seconds += time.perf_counter() - start
        return stock(model, **kwargs)

    def __str__(self) -> str:
        compiled = f"{self.graphs} graph{'' if self.graphs == 1 else 's'}, {self.seconds:.1f} s cold"
        return f"not compiled: {self.failure} ({self.seconds:.1f} s)" if self.failure else compiled


def _forward(stock: Forward, model: nn.Module, kwargs: dict[str, Any]) -> Any:
    return stock(model, **kwargs)


def step_of(model: nn.Module) -> CompiledStep | None:
    """The model's compiled step, compiled when it is first called; None where steps run as they are."""
    if not config.current().compile:
        return None
    with _lock:
        if model not in _steps or _steps[model].packing != config.current().packing:
            unsupported = _unsupported(model)
            _steps[model] = CompiledStep()
            _steps[model].failure = unsupported
        step = _steps[model]
        for module in model.modules():
            _modules[id(module)] = module
    return None if step.failure else step


def _unsupported(model: nn.Module) -> str | None:
    if any(tensor.device.type != "cpu" or tensor.dtype != torch.float32 for tensor in model.parameters()):
        return "only float32 models on the CPU are compiled"
    if "forward" in vars(model):
        return "the model's forward has been replaced"
    if modules.hand_written_attention(model):
        return "its attention is folded at the module's boundary"
    for module in model.modules():
        attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if attention not in (None, "sdpa"):
            return f"its attention is {attention!r}, and only 'sdpa' is compiled"
    return None


def seam(model: nn.Module) -> dict[tuple[type, str], modules.Wrapper]:
    """The wrapper, by class and attribute, that runs a session's steps compiled."""
    return {(type(model), "forward"): _compiled}


def _compiled(stock: Forward) -> Forward:
    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or is_ours() or args:
            return stock(self, *args, **kwargs)
        session = sessions.current()
        step = None if session is None else session.compiled_step_of(self)
        # Never where autograd runs; and what autocast does to dtypes the operators here don't foresee.
        if step is None or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return stock(self, *args, **kwargs)
        return step(stock, self, kwargs)

    return forward


def steps() -> dict[str, str]:
    """How each model that was to be compiled has fared, by class."""
    with _lock:
        return {type(model).__name__: str(step) for model, step in _steps.items()}


def release() -> None:
    """Drop all compiled code."""
    with _lock:
        _steps.clear()


# What a traced step calls in place of the tree's attention and of layers' products.


def linear(layer: nn.Module, rows: Tensor, transposed: bool) -> Tensor:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if not transposed and products.are_few(rows.shape) and _is_read_in_place(id(layer)):
        output: Tensor = torch.ops.fastgen.skinny_linear(rows, [weight], layer.bias)
        return output
    output = _ops.linear(rows, id(layer), weight.shape[1 if transposed else 0], transposed)
    return output


@torch.compiler.assume_constant_result
def _is_read_in_place(layer: int) -> bool:
    return config.current().packing != "off" and products.is_read_in_place(_modules[layer])


def append(session: sessions.Session, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Write to the tree; what is returned has the shape of all slots in use, and no more."""
    token, tree = _ops.append(keys, values, layer), session.tree
    shape = (tree.batch, keys.shape[1], tree.used)
    return token.expand(*shape, keys.shape[3]), token.expand(*shape, values.shape[3])


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    bias, scale = kwargs.get("position_bias"), kwargs.get("scaling")
    return _ops.attend(query, key, value, attention_mask, bias, scale, id(module)), None


def _linear(rows: Tensor, layer: int, out: int, transposed: bool) -> Tensor:
    owner: Any = Conv1D if transposed else nn.Linear
    output: Tensor = owner.forward(_modules[layer], rows)  # the session's own products
    return output.contiguous()


def _append(keys: Tensor, values: Tensor, layer: int) -> Tensor:
    session = _session()
    tree_layer = session.tree.layers[layer]
    session.appended(tree_layer)
    tree_layer.append(keys, values)
    return keys.new_empty(1, 1, 1, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any, scale: Any, module: int) -> Tensor:
    layer = _modules[module]
    return _session().attend_compiled(layer, query, key, value, mask, position_bias=bias, scaling=scale)


def _session() -> sessions.Session:
    session = sessions.current()
    assert session is not None, "a compiled step runs in a session"
    return session


_library = torch.library.Library("fastgen_step", "DEF")
_ops: Any = torch.ops.fastgen_step
_OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "linear(Tensor rows, int layer, int out, bool transposed) -> Tensor": (
        _linear,
        lambda rows, layer, out, transposed: rows.new_empty(*rows.shape[:-1], out),
    ),
    "append(Tensor keys, Tensor values, int layer) -> Tensor": (
        _append,
        lambda keys, values, layer: keys.new_empty(1, 1, 1, 1),
    ),
    "attend(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, float? scale, int module) -> Tensor": (
        _attend,
        lambda query, key, value, *_: query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3]),
    ),
}
for _schema, (_kernel, _fake) in _OPERATORS.items():
    _name = _library.define(_schema)
    _library.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"fastgen_step::{_name}", _fake, lib=_library)
