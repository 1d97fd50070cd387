"""The functions that replace methods of fairseq.

Users compile generators with TorchScript, which reads the source of the class's methods. So `_generate` is plain
enough to compile, hides code that TorchScript can't compile behind `is_scripting()`, and ends in the stock function.
No `from __future__ import annotations` here: TorchScript needs annotations that are types.
"""

import types
from collections.abc import Callable
from typing import Any, Dict, Optional  # noqa: UP035

import torch
from torch import Tensor

from fastgen.patching import hosts

STOCK_GENERATE = "_fastgen_stock_generate"
stock: dict[str, Callable[..., Any]] = {}  # kept when fastgen is disabled, so that running calls end as they began


def renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A copy of `function` called `name`: TorchScript names a compiled method after its `__name__`."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = dict(function.__annotations__)
    copy.__dict__.update(function.__dict__)
    copy.__module__, copy.__doc__ = function.__module__, function.__doc__
    return copy


def _generate(  # type: ignore[no-untyped-def]
    self,
    sample: Dict[str, Dict[str, Tensor]],  # noqa: UP006
    prefix_tokens: Optional[Tensor] = None,  # noqa: UP045
    constraints: Optional[Tensor] = None,  # noqa: UP045
    bos_token: Optional[int] = None,  # noqa: UP045
):
    """fairseq's search, over the beam tree where the request allows it."""
    if not torch.jit.is_scripting():
        return _run(self, sample, prefix_tokens, constraints, bos_token)
    return self._fastgen_stock_generate(sample, prefix_tokens, constraints, bos_token)


def _run(generator: Any, *arguments: Any) -> Any:
    """Run the call. Apart from `_generate`, as TorchScript refuses imports even in code that it does not compile."""
    if not hosts.is_on():  # called by a function that others have put over this one, which stays
        return stock["_generate"](generator, *arguments)
    # The host is still being imported when this module is: these are imported at the first call.
    from fastgen.optimizer.fairseq import dispatch
    from fastgen.optimizer.fairseq.request import Request

    return dispatch.run(Request(generator, *arguments), stock["_generate"])


def set_decoder_beam_size(self: Any, beam_size: int) -> None:
    """Tell the models a new generator's beam size, except BART.

    BART writes the beam size into the layers and stops reordering the encoder output, and both outlive the generator:
    the next search with other beams, or a plain forward pass, goes wrong. BART's layers need neither.
    """
    from fairseq.models.bart import BARTModel

    for model in self.models:
        set_beam_size = getattr(model, "set_beam_size", None)
        if getattr(set_beam_size, "__func__", None) is BARTModel.set_beam_size:
            if beam_size > 1:
                next(iter(model.decoder.layers), None)  # as stock goes over them, which may draw random numbers
            for layer in model.decoder.layers._modules.values():
                if getattr(layer.encoder_attn, "beam_size", 1) != 1:
                    layer.encoder_attn.set_beam_size(1)
            own = vars(model.encoder).get("reorder_encoder_out")
            if beam_size > 1 or getattr(own, "__name__", "") == "_reorder_encoder_out":  # else it is the user's
                vars(model.encoder).pop("reorder_encoder_out", None)
        elif set_beam_size is not None and beam_size > 1:
            set_beam_size(beam_size)
