"""Finds what on fairseq's models is the user's: hooks, classes, replaced functions, kinds of tensors.

Over the tree the host's code runs on views of modules, and our attention replaces the host's. Code of the user's has to
be called on the user's object, as often as in stock and on inputs of the same shapes.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.modules import LayerDropModuleList
from torch import Tensor, nn

from fastgen.patching.foreign_code import is_quantised

_PACKAGES = ("fairseq", "fastgen", "torch")
# Functions that the host calls where we call something else.
_BYPASSED: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (torch, "torch", ("bmm", "cat", "logsumexp", "matmul", "softmax", "topk")),
    (F, "torch.nn.functional", ("dropout", "linear", "log_softmax", "multi_head_attention_forward", "softmax")),
    (utils, "fairseq.utils", ("log_softmax", "softmax")),
)
_LIBRARY = ("abc", "contextlib", "functools", "typing")  # decorators and bases of the host's own classes
_CALLING = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__setattr__", "modules", "named_modules")
_looked_at: weakref.WeakKeyDictionary[type, tuple[dict[str, Any], tuple[str, ...]]] = weakref.WeakKeyDictionary()
CONTAINERS = (nn.ModuleList, LayerDropModuleList)
_PARTS = ("encoder", "decoder")
_VIEWED = ("layers", "embed_positions", "self_attn", "encoder_attn")  # what a view has in place of the module's
_SOFTMAX = ("get_normalized_probs", "get_normalized_probs_scriptable")
# Names that a class of the user's may define: none of them runs between the first and the last step of a search.
_NOT_IN_A_SEARCH = frozenset(
    """__abstractmethods__ __annotate_func__ __annotations__ __annotations_cache__ __dict__ __doc__ __firstlineno__
    __init__ __module__ __orig_bases__ __parameters__ __qualname__ __repr__ __static_attributes__ __weakref__ _abc_impl
    add_args eval extra_repr from_pretrained hub_models load_state_dict make_generation_fast_ max_positions
    prepare_for_inference_ reset_parameters set_beam_size set_num_updates state_dict train upgrade_state_dict
    upgrade_state_dict_named""".split()
)


def unsupported_reason(ensemble: Any) -> str | None:
    """Why code of the user's requires that the host runs these models; None if there is no such code."""
    for owner, where, names in _BYPASSED:
        for name in names:
            if not is_known(getattr(owner, name)):
                return f"something of yours has replaced {where}.{name}"
    if nn.modules.module._has_any_global_hook():
        return "a global hook of yours sees the calls of all modules"
    if own := own_name(ensemble):
        return f"{type(ensemble).__name__} has its own {own}"
    return next(filter(None, map(unsupported_model, ensemble.models)), None)


def unsupported_model(model: Any) -> str | None:
    """Why one model with a Transformer decoder is left to the host; None if it is not."""
    for part in _PARTS:
        if not is_known(getattr(type(model), part, None)):
            return f"{type(model).__name__} has its own {part}"
    encoder = getattr(model, "encoder", None)
    if not is_known(getattr(encoder, "reorder_encoder_out", None)):
        return f"{type(encoder).__name__} has its own reorder_encoder_out"
    for part in filter(None, (encoder, model.decoder)):
        for module in part.modules():
            if kind := _other_tensor(module):
                return f"{path_of(model, module)} has weights of the class {kind}"
            if is_quantised(module):
                return f"{path_of(model, module)} is quantised, or observed, over all rows of a product at once"
    return _unsupported_decoder(model)


def _unsupported_decoder(model: Any) -> str | None:
    """Why views cannot replace the decoder, layers and attention, or what else keeps a state; None if all is well."""
    decoder = model.decoder
    viewed = [decoder, decoder.layers]
    for layer in layers_of(decoder):
        viewed += filter(None, (layer, layer.self_attn, layer.encoder_attn))
    for module in viewed:
        if name := next((name for name in _VIEWED if hasattr(type(module), name)), None):
            return f"{type(module).__name__} has its own {name}"
        # Probabilities are exempt: only the model asks a decoder for them, and it asks the decoder itself.
        if own := own_name(module, except_for=_SOFTMAX):
            return f"{type(module).__name__} has its own {own}"
        if module is not decoder and (seen := _seen_by(module)):  # the host calls no more than its `forward`
            return f"{path_of(model, module)} {seen}"
    for layer in layers_of(decoder):
        for module in (*_of_the_source(layer), *_of_the_weights(layer)):
            if foreign := _foreign(module):
                return f"{path_of(model, module)} {foreign}"
    places = [module._incremental_state_id for module in viewed if hasattr(module, "_incremental_state_id")]
    if len(set(places)) < len(places):
        return "two of its attentions keep their keys in the same place, as copies of a layer do"
    known = {id(module) for module in viewed}
    for module in decoder.modules():
        reorder = getattr(module, "reorder_incremental_state", None)
        if reorder is not None and not (id(module) in known and is_known(reorder)):
            return f"{path_of(model, module)} keeps a state of its own from step to step"
    return None


def called_one_by_one(ensemble: Any) -> str | None:
    """Why each step has to call the models' modules as stock does, so that no step may be skipped, joined or recorded.

    None if only the results count.
    """
    for model in ensemble.models:
        for part in (model, model.decoder):
            if not all(is_known(getattr(part, name, None)) for name in _SOFTMAX):
                return f"{type(part).__name__} has its own get_normalized_probs"
        if reason := watched(model, model.decoder):
            return reason
    return None


def watched(model: Any, part: Any) -> str | None:
    """What code of the user's sees calls of modules in `part`, the model's encoder or decoder; None if none does."""
    if _draws(part):
        return "its layers draw random numbers in each step (LayerDrop)"
    for module in part.modules():
        if foreign := _foreign(module):
            return f"{path_of(model, module)} {foreign}"
    return None


def layers_of(part: Any) -> list[Any]:
    """The layers of an encoder or a decoder. Iterating over the host's own list may draw random numbers."""
    return [*part.layers._modules.values()]


def path_of(model: Any, module: Any) -> str:
    """The path of the module in the model."""
    return next((name for name, each in model.named_modules() if each is module), type(module).__name__)


def own_name(module: Any, except_for: tuple[str, ...] = ()) -> str | None:
    """The name of an attribute or method of the module that is not the host's code; None if there is none."""
    for name, value in vars(module).items():
        if name in except_for:
            continue
        if callable(value) and not isinstance(value, nn.Module) and _is_on(type(module), name) and not is_known(value):
            return name
    return _own_name_of(type(module), except_for)


def _own_name_of(kind: type, except_for: tuple[str, ...] = ()) -> str | None:
    """The name of a method of the class that is not the host's, ours or torch's code; None if there is none."""
    for place, owner in enumerate(kind.__mro__[:-1]):
        if owner.__module__.partition(".")[0] in (*_PACKAGES, *_LIBRARY):
            if name := next((name for name in _replaced_in(owner) if name not in except_for), None):
                return name
            continue
        for name in vars(owner):
            is_called = name not in (*except_for, *_NOT_IN_A_SEARCH) and not name.startswith("build_")
            if is_called and any(name in vars(base) for base in kind.__mro__[place + 1 :]):
                return name
    return None


def _replaced_in(owner: type) -> tuple[str, ...]:
    """The names of methods that somebody has replaced in a class that is not the user's."""
    seen = _looked_at.get(owner)
    if seen is None or vars(owner) != seen[0]:
        names = _CALLING if owner is nn.Module else [*vars(owner)]
        seen = dict(vars(owner)), tuple(name for name in names if not is_known(vars(owner).get(name)))
        _looked_at[owner] = seen
    return seen[1]


def _is_on(kind: type, name: str) -> bool:
    return any(name in vars(base) for base in kind.__mro__)


def is_known(value: Any) -> bool:
    """Whether an attribute is no code, or code of the host's, ours or torch's.

    The module of the code decides: a function that replaces another may bear the same name. What a decorator of
    torch's such as `no_grad` wraps counts, too.
    """
    if isinstance(value, property):
        return all(map(is_known, (value.fget, value.fset, value.fdel)))
    if isinstance(value, functools.partial):
        return is_known(value.func)
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        home = function.__globals__.get("__name__", "")
    elif callable(function) and not isinstance(function, (type, types.BuiltinFunctionType)):
        home = type(function).__module__
    else:
        return True
    inner = getattr(function, "__wrapped__", None) if isinstance(function, types.FunctionType) else None
    return home.partition(".")[0] in (*_PACKAGES, *_LIBRARY, "builtins") and (inner is None or is_known(inner))


def _foreign(module: nn.Module) -> str | None:
    """What on the module is the user's, as the end of a sentence; None if all is the host's or torch's."""
    if observer := _set_on(module):
        return observer
    if _own_name_of(type(module)):
        return f"is {type(module).__name__} with code of yours"
    return None


def _set_on(module: nn.Module) -> str | None:
    """What the user has set on this one module, as the end of a sentence; None if nothing."""
    if seen := _seen_by(module):
        return seen
    # What the code of its class calls on `self`, such as a layer's `activation_fn`, is called as often as its forward.
    if name := next((name for name, value in vars(module).items() if callable(value) and not is_known(value)), None):
        return "has a forward of yours" if name == "forward" else f"has a function of yours, {name}"
    return None


def _seen_by(module: nn.Module) -> str | None:
    """Why the module itself, not a view, has to be called, as the end of a sentence; None if it need not be."""
    if not all(map(is_known, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))):
        return "has hooks of yours"
    if isinstance(module, torch.jit.ScriptModule) or getattr(module, "_compiled_call_impl", None) is not None:
        return "has been compiled"
    return None


def _other_tensor(module: nn.Module) -> str | None:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return next((type(x).__name__ for x in tensors if type(x) not in (nn.Parameter, Tensor, type(None))), None)


def _draws(part: Any) -> bool:
    return isinstance(getattr(part, "layers", None), LayerDropModuleList)


def _of_the_source(layer: Any) -> Iterable[nn.Module]:
    """What is called on a row for each sentence, not for each hypothesis."""
    if layer.encoder_attn is not None:
        for projection in (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj):
            yield from projection.modules()


def _of_the_weights(layer: Any) -> Iterable[nn.Module]:
    """What is called on the weights of attention, which our attention does not compute one by one."""
    for attention in filter(None, (layer.self_attn, layer.encoder_attn)):
        yield from attention.dropout_module.modules()
