"""Wrappers for modules that compute attention themselves, or that would wait for a device to know a position.

Most models look the attention function up in `AttentionInterface`; the session folds attention there. A few do not:
those listed here are folded at the module's boundary, `[B*M, 1, d]` as `[B, M, d]`; a model with any other attention
module of that kind cannot run on the tree.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from fastgen.optimizer.transformers import interception
from fastgen.optimizer.transformers.families import FAMILIES, FOLDED_AT_THE_BOUNDARY
from fastgen.optimizer.transformers.interception import Wrapper
from fastgen.optimizer.transformers.model import streams
from fastgen.optimizer.transformers.versions import CACHE_LENGTH, CACHE_PARAMETERS, FINDS_EAGER

# FSMT's class names are common ones. `[1, B*M, d]` becomes `[M, B, d]`: beams are treated as positions.
_FSMT = "transformers.models.fsmt.modeling_fsmt"

# These modules would wait for a device to know a token's position.
# Before each look-up they compare the position with the table's length, to make the table longer.
# Class -> static method that numbers positions.
_WITH_GROWING_TABLES = {"M2M100SinusoidalPositionalEmbedding": "create_position_ids_from_input_ids"}
# These make a Python range of positions unless positions are passed. Class -> the shape of the positions of one step.
_NUMBERING_UNLESS_TOLD = {
    "BertEmbeddings": (1, 1),
    "BertGenerationEmbeddings": (1, 1),
    "ElectraEmbeddings": (1, 1),
    "ErnieEmbeddings": (1, 1),
    "RoCBertEmbeddings": (1, 1),
    "TrOCRLearnedPositionalEmbedding": (1,),
}
_NUMBERING = "LEDLearnedPositionalEmbedding"  # takes no positions, but is an embedding of positions
_MASK_OF_FEATURES = "_get_feature_vector_attention_mask"  # speech: the encoder output's mask from the input's
# An attention module in which this is set computes eager attention in a method of its own, past the attention function
# that it looks up.
_PAST_THE_FUNCTION = "reorder_and_upcast_attn"


def _computes_attention_itself(forward: Any) -> bool:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and _attends(code)


@functools.cache
def _attends(code: types.CodeType) -> bool:
    """Whether code computes attention itself. Not asked of the function: one of the user's may hold the model."""
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    caches = any(name in parameters for name in CACHE_PARAMETERS) and "update" in code.co_names
    return caches and "ALL_ATTENTION_FUNCTIONS" not in code.co_names


def hand_written_attention(kinds: Iterable[type]) -> dict[tuple[type, str], Wrapper]:
    """Wrappers, by class and attribute, that fold attention at the boundary of modules of these classes."""
    wrappers = {(owner, "forward"): _folding(owner) for owner in kinds}
    return {seam: wrapper for seam, wrapper in wrappers.items() if wrapper is not None}


def _folding(owner: Any) -> Wrapper | None:
    """The wrapper that folds a class which computes attention itself; None if there is none."""
    if _is_fsmts(owner, "Attention"):
        return _folded_with_time_first
    if (streamed := streams.folding(owner)) is not None:
        return streamed
    mask_name = FOLDED_AT_THE_BOUNDARY.get(owner.__name__)
    return None if mask_name is None else functools.partial(_folded, mask_name=mask_name)


def replayable_inputs(kinds: Iterable[type]) -> dict[tuple[type, str], Wrapper]:
    """Wrappers, by class and attribute, of methods that would wait for a device to know a position or a mask."""
    wrappers: dict[tuple[type, str], Wrapper] = {}
    for owner in kinds:
        if owner.__name__ in _WITH_GROWING_TABLES:
            wrappers[owner, "forward"] = _of_grown_table
        elif owner.__name__ in _NUMBERING_UNLESS_TOLD:
            wrappers[owner, "forward"] = _told_its_position
        elif owner.__name__ == _NUMBERING:
            wrappers[owner, "forward"] = _of_one_position
        elif _is_fsmts(owner, "SinusoidalPositionalEmbedding"):
            wrappers[owner, "forward"] = _of_grown_weight
        # Only in the class that defines it: subclasses would wrap the wrapped method.
        if (base := next((base for base in owner.__mro__ if _MASK_OF_FEATURES in vars(base)), None)) is not None:
            wrappers[base, _MASK_OF_FEATURES] = _finished_mask
    return wrappers


def unfoldable_attention(kinds: Iterable[Any]) -> str | None:
    """The name of an attention class among these that cannot be folded; None if there is none."""
    hand_written = [owner for owner in kinds if _computes_attention_itself(getattr(owner, "forward", None))]
    return next((owner.__name__ for owner in hand_written if _folding(owner) is None), None)


def past_the_function(modules: Iterable[torch.nn.Module]) -> str | None:
    """The class of the first of these modules that does not call the attention function it looks up; None if none."""
    for module in modules:
        eager = getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
        if eager and getattr(module, _PAST_THE_FUNCTION, False):
            return type(module).__name__
    return None


def _is_fsmts(owner: Any, name: str) -> bool:
    """Whether `owner` is this class of FSMT, in a version that numbers tokens by the cache's length."""
    if owner.__name__ != name or owner.__module__ != _FSMT or not FINDS_EAGER:
        return False
    numbering = sys.modules[_FSMT].SinusoidalPositionalEmbedding.forward
    return CACHE_LENGTH in inspect.signature(numbering).parameters


def takes_plain_mask(kinds: Iterable[type]) -> bool:
    """Whether the code of these classes needs a source mask in two dimensions, `[B, N]`."""
    return any(hasattr(owner, _MASK_OF_FEATURES) or _is_fsmts(owner, "Attention") for owner in kinds)


def are_the_hosts_own(kinds: Iterable[Any]) -> bool:
    """Whether the forward methods of these classes are all the host's, torch's or our own (`fastgen.models`).

    A subclass of the user's may have other methods, too: `foreign_code` says which matter.
    """
    owners = [next(base for base in kind.__mro__ if "forward" in vars(base)) for kind in kinds]
    return {owner.__module__.partition(".")[0] for owner in owners} <= {"torch", "transformers", "fastgen"}


def is_of_tested_family(model: Any) -> bool:
    """Whether the model's family is one of those that the test suite compares with stock."""
    config = getattr(model.config, "decoder", None)
    model_type = getattr(config if hasattr(config, "model_type") else model.config, "model_type", None)
    return model_type in FAMILIES and FINDS_EAGER  # where eager attention can't be found, not even these are safe


def is_causal(model: Any) -> bool:
    """Whether no token of a prompt attends to later ones.

    In Gemma they may, by `use_bidirectional_attention`, and in any decoder-only model by `config.is_causal`: then what
    is computed for a prompt's beginning depends on all of the prompt. In an encoder-decoder only sources are prompts.
    """
    if model.config.is_encoder_decoder:
        return True
    config = model.config.get_text_config(decoder=True)
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return False
    return all(getattr(module, "is_causal", True) for module in decoder_modules(model))


def rotates_by_length_from(modules: Iterable[Any]) -> float:
    """From how many positions on the rotation of each position may depend on the longest row; inf if it never does.

    The host's `dynamic_rope_update` computes the frequencies of all rows from the highest position among them.
    """
    found = [math.inf]
    for module in modules:
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:  # by type of layer, or of all alike
            if isinstance(kind, str) and "dynamic" in kind:
                found.append(getattr(module, "original_max_seq_len", 0))
            elif kind == "longrope":
                found.append(_original_length(getattr(module, "config", None)))
    return min(found)


def _original_length(config: Any) -> int:
    """Up to how many positions `longrope` rotates as for short texts, by a configuration; 0 if it does not say."""
    found: list[int] = []
    waiting: list[Any] = [] if config is None else [vars(config)]
    while waiting:
        value = waiting.pop()
        if isinstance(length := value.get("original_max_position_embeddings"), int):
            found.append(length)
        waiting += [item for item in value.values() if isinstance(item, Mapping)]
    return min(found, default=0)


def decoder_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules that a decode step may call: all but those that only the encoder has."""
    return (module for _, module in named_decoder_modules(model))


def named_decoder_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that a decode step may call, each with one path to it; the model's own path is empty."""
    encoder: Any = model.get_encoder() if model.config.is_encoder_decoder else None  # type: ignore[operator, union-attr]
    seen, waiting = {encoder} - {model}, [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module not in seen:
            seen.add(module)
            yield path, module
            # Not `named_children`, which leaves out a child that is there under two names.
            children = [(name, child) for name, child in module._modules.items() if child is not None]
            waiting += [(f"{path}.{name}" if path else name, child) for name, child in children]


def _folded(forward: Callable[..., Any], mask_name: str) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def folded(self: torch.nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        session = interception.current()
        if session is None or not session.folds_rows(hidden_states.shape[0]):
            return forward(self, hidden_states, *args, **kwargs)
        tree = session.tree
        beams = hidden_states.view(tree.batch, tree.beams, -1)  # [B*M, 1, d] -> [B, M, d]
        call = signature.bind(self, beams, *args, **kwargs)
        bias: torch.Tensor | None
        if call.arguments.get("key_value_states") is None:
            bias = session.self_bias(None, beams.dtype)
        else:
            bias = session.cross_bias(call.arguments.get(mask_name), beams.dtype)
        if bias is not None:
            call.arguments[mask_name] = bias.expand(-1, -1, tree.beams, -1)
        output, *rest = forward(*call.args, **call.kwargs)
        session.folded()
        return (output.reshape(hidden_states.shape), *rest)

    return folded


def _folded_with_time_first(forward: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def folded(self: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        session = interception.current()
        if session is None or len(query) != 1 or not session.folds_rows(query.shape[1]):
            return forward(self, query, *args, **kwargs)
        tree = session.tree
        beams = query.view(tree.batch, tree.beams, -1).transpose(0, 1)  # [1, B*M, d] -> [M, B, d]
        call = signature.bind(self, beams, *args, **kwargs)
        if not self.encoder_decoder_attention:
            call.arguments["attn_mask"] = session.self_bias(None, beams.dtype)
        output, *rest = forward(*call.args, **call.kwargs)
        session.folded()
        return (output.transpose(0, 1).reshape(query.shape), *rest)

    return folded


def _replayable() -> Any:
    """This thread's session, if its steps may be replayed, else None: the wrappers are there for all threads."""
    session = interception.current()
    return session if session is not None and session.tree.is_static else None


def _most_positions(tree: Any) -> int:
    """How many positions there may be before the tree's buffers grow: the longest that is allowed may be any number."""
    return int(tree.prompt_length + min(tree.capacity, tree.max_steps))


def _long_enough(module: Any, table: torch.Tensor, session: Any) -> torch.Tensor:
    """A module's table of positions, `[positions, d]`, with more behind it if the tree may need more.

    The module's own stays as it is: how many are needed is not known before the text has ended.
    """
    longest = module.padding_idx + 1 + _most_positions(session.tree)
    if longest <= len(table):
        session.held.append(table)  # another thread may make a longer one
        return table
    known = session.tables.get(module)
    if known is None or len(known) < longest:
        more = module.get_embedding(longest, module.embedding_dim, module.padding_idx)
        known = session.tables[module] = torch.cat([table, more[len(table) :].to(table)])
    return known


def _of_grown_table(forward: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def positions(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        session, number = _replayable(), getattr(self, _WITH_GROWING_TABLES[type(self).__name__], None)
        call = {} if session is None else signature.bind(self, *args, **kwargs).arguments
        input_ids, before = call.get("input_ids"), call.get(CACHE_LENGTH)
        if session is None or number is None or input_ids is None or not torch.is_tensor(before):
            stock: torch.Tensor = forward(self, *args, **kwargs)
            return stock
        table = _long_enough(self, self.weights, session)
        ids = number(input_ids, self.padding_idx, before)
        return table.index_select(0, ids.flatten()).unflatten(0, ids.shape).detach()

    return positions


def _of_grown_weight(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def positions(self: Any, input: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        session, before = _replayable(), kwargs.get(CACHE_LENGTH)
        if session is None or not torch.is_tensor(before):
            stock: torch.Tensor = forward(self, input, **kwargs)
            return stock
        table = _long_enough(self, self.weight, session)
        numbers = self.make_positions(input, self.padding_idx) + before
        return torch.nn.functional.embedding(numbers, table, self.padding_idx)

    return positions


def _told_its_position(forward: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def embeddings(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = signature.bind(self, *args, **kwargs)
        if _replayable() is not None and call.arguments.get("position_ids") is None:
            position = call.arguments[CACHE_LENGTH]  # a tensor: the tree's
            call.arguments["position_ids"] = position.view(_NUMBERING_UNLESS_TOLD[type(self).__name__])
        embedded: torch.Tensor = forward(*call.args, **call.kwargs)
        return embedded

    return embeddings


def _of_one_position(forward: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def positions(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _replayable() is not None:
            before: torch.Tensor = signature.bind(self, *args, **kwargs).arguments[CACHE_LENGTH]
            return torch.nn.Embedding.forward(self, before.view(1))
        stock: torch.Tensor = forward(self, *args, **kwargs)
        return stock

    return positions


def _finished_mask(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `stock` to return a mask of four dimensions; the host would first look whether there is any padding."""

    @functools.wraps(stock)
    def mask_of(self: Any, length: int, attention_mask: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mask: torch.Tensor = stock(self, length, attention_mask, *args, **kwargs)
        return mask if _replayable() is None else mask[:, None, None].bool()

    return mask_of
