"""Models whose steps have two rows per beam: one of the last token, and one that predicts the next token.

ProphetNet (Qi et al. 2020, https://arxiv.org/abs/2001.04063, section 3.2) has a main stream and, for each of the
next n tokens, a predicting stream, which sees the main stream and itself. Generation needs only the first predicting
stream, and these streams do not see each other, so the others are left out of a step. UniLM (`fastgen.models.unilm`)
has a `[MASK]` behind the last token.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastgen import phases
from fastgen.layers.attention import stream_attention
from fastgen.optimizer.transformers import interception
from fastgen.optimizer.transformers.versions import CACHE, FINDS_EAGER
from fastgen.patching.replaced_code import is_of, is_replaced, is_watched

__phase__ = phases.BY_LINE

Forward = Callable[..., Any]

_PROPHETNET = "transformers.models.prophetnet.modeling_prophetnet"
_UNILM = "fastgen.models.unilm.modeling"
_STREAMS = 2  # main and predicting
_AHEAD = (0, 1)  # so many positions the streams are ahead of the last token
_OWN_BUCKET = 0  # of the distance from a predicting stream to itself


def folding(owner: Any) -> Callable[[Forward], Forward] | None:
    """The wrapper that folds a class of such a model; None for classes of other models."""
    if owner.__module__ == _UNILM and owner.__name__ == "UnilmSelfAttention":
        return _unilms_attention
    if owner.__module__ == _PROPHETNET and FINDS_EAGER:
        return _PROPHETNETS.get(owner.__name__)
    return None


def unsupported_model(model: Any, modules: Iterable[Any]) -> str | None:
    """Why this model, one of those above, cannot decode over the tree; None if it can or is another.

    `modules`: all modules of the model.
    """
    ours = [module for module in modules if type(module).__module__ in (_PROPHETNET, _UNILM)]
    decoders = [m for m in ours if folding(type(m)) is _prophetnets_decoder]
    if decoders and folding(type(model)) is not _prophetnets_logits:
        return "of ProphetNet, only ProphetNetForConditionalGeneration has been tried"
    if any(decoder.position_embeddings.padding_idx for decoder in decoders):
        return "ProphetNet steps only with pad_token_id=0, for its positions begin behind it"
    own = [m for m in ours if folding(type(m)) is _unilms_attention]
    for decoder in decoders:
        own += [model, model.prophetnet, *decoder.modules()]
    if own and (is_watched(own) or _are_methods_replaced(own)):
        return "its steps leave out what hooks, or parts that somebody has replaced, would see"
    return None


def _are_methods_replaced(modules: list[Any]) -> bool:
    kinds = {type(module) for module in modules if type(module).__module__ in (_PROPHETNET, _UNILM)}
    attributes = [(kind, *each) for kind in kinds for each in dict(vars(kind)).items()]
    methods = [(kind, name) for kind, name, value in attributes if inspect.isfunction(value)]
    host = sys.modules.get(_PROPHETNET)
    functions = [getattr(host, name) for name in ("softmax", "compute_relative_buckets") if host is not None]
    return any(is_replaced(*method) for method in methods) or not all(is_of(f, "transformers") for f in functions)


def sees_padding(model: Any) -> bool:
    """Whether generated tokens attend to padding of the prompt."""
    return folding(type(model)) is not None


def _folding_session(rows: Tensor | None, positions: int) -> Any:
    """This thread's session, if its step has these rows, `[B*M, positions, ...]`; else None."""
    session = interception.current()
    if rows is None or session is None or not session.is_active or rows.shape[1] != positions:
        return None
    return session if session.folds_rows(rows.shape[0]) else None


def _prophetnets_logits(forward: Forward) -> Forward:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs).arguments
        if _folding_session(call.get("decoder_input_ids"), 1) is None:
            return forward(self, *args, **kwargs)
        names = ("decoder_input_ids", "attention_mask", "encoder_outputs", CACHE, "use_cache")
        outputs = self.prophetnet(**{name: call.get(name) for name in names}, return_dict=True)
        host: Any = sys.modules[_PROPHETNET]
        logits = self.lm_head(outputs.last_hidden_state_ngram)
        return host.ProphetNetSeq2SeqLMOutput(logits=logits, **{CACHE: getattr(outputs, CACHE)})

    return step


def _prophetnets_decoder(forward: Forward) -> Forward:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def decoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs).arguments
        tokens: Any = call.get("input_ids")
        if (session := _folding_session(tokens, 1)) is None:
            return forward(self, *args, **kwargs)
        host: Any = sys.modules[_PROPHETNET]
        tree, embeddings = session.tree, self.position_embeddings
        # Positions are numbered from 1 on. The embeddings' `forward` would number them anew.
        position = torch.as_tensor(tree.position, device=tokens.device).view(1, 1) + 1
        main = self.word_embeddings(tokens) + embeddings._forward(position)  # [B*M, 1, d]
        # The host takes row n - 1 for stream n = 0, 1, ..., so the last row for the first stream.
        predicting = self.ngram_embeddings.weight[-1] + embeddings._forward(position + 1)
        states = self.embeddings_layer_norm(torch.cat([main, predicting.expand_as(main)], dim=1))

        # The tree numbers positions from 0 on. [B or 1, 2, width]
        places = torch.stack([tree.positions() + 1 - ahead for ahead in _AHEAD], dim=1)
        relative = places - position
        buckets = host.compute_relative_buckets(self.num_buckets, self.relative_max_distance, relative).long()
        bias = session.cross_bias(call.get("encoder_attention_mask"), states.dtype)
        if bias is not None:
            bias = bias.expand(-1, self.config.num_decoder_attention_heads, -1, -1)  # the host insists
        for layer in self.layers:
            states = layer(
                states,
                encoder_hidden_states=call.get("encoder_hidden_states"),
                encoder_attn_mask=bias,
                main_relative_position_buckets=buckets,
                **{CACHE: call.get(CACHE)},
            )[0]
        return host.ProphetNetDecoderModelOutput(
            last_hidden_state=states[:, :1],
            last_hidden_state_ngram=states[:, 1:],
            **{CACHE: call.get(CACHE)},
        )

    return decoder


def _prophetnets_attention(forward: Forward) -> Forward:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def attend(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (session := _folding_session(hidden_states, _STREAMS)) is None:
            return forward(self, hidden_states, *args, **kwargs)
        call = signature.bind(self, hidden_states, *args, **kwargs).arguments
        batch, beams, heads = session.tree.batch, session.tree.beams, self.num_attn_heads

        def per_head(states: Tensor) -> Tensor:
            return states.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)  # [B*M, H, 2, D]

        query = per_head(self.query_proj(hidden_states))
        key, value = per_head(self.key_proj(hidden_states)), per_head(self.value_proj(hidden_states))
        cache = call[CACHE].self_attention_cache
        keys, values = cache.update(key[:, :, :1], value[:, :, :1], self.layer_idx)
        session.folded()

        # The bias of a query for each bucket of distances.
        relative = self.relative_pos_embeddings(hidden_states).unflatten(-1, (self.num_buckets, heads))
        by_bucket = relative.unflatten(0, (batch, beams)).permute(0, 4, 1, 2, 3)  # [B, H, M, 2, buckets]
        buckets = call["main_relative_position_buckets"]
        index = buckets[:, None, None].expand(batch, heads, beams, -1, -1)
        bias = by_bucket.gather(-1, index) + session.self_bias(None, query.dtype)[:, :, :, None]
        own_bias = relative[:, 1:, _OWN_BUCKET].transpose(1, 2)  # [B*M, H, 1]
        own = key[:, :, 1:], value[:, :, 1:]
        output = stream_attention(query, keys, values, *own, bias, own_bias, self.head_dim**-0.5)
        return self.out_proj(output.flatten(2)), None, None

    return attend


def _prophetnets_source_attention(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def attend(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (session := _folding_session(hidden_states, _STREAMS)) is None:
            return forward(self, hidden_states, *args, **kwargs)
        rows = hidden_states.view(session.tree.batch, -1, hidden_states.shape[-1])  # [B*M, 2, d] -> [B, M*2, d]
        output, *rest = forward(self, rows, *args, **kwargs)
        session.folded()
        return (output.reshape(hidden_states.shape), *rest)

    return attend


def _unilms_attention(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def attend(self: Any, hidden_states: Tensor, attention_mask: Any = None, cache: Any = None) -> Tensor:
        if (session := _folding_session(hidden_states, _STREAMS)) is None:
            output: Tensor = forward(self, hidden_states, attention_mask, cache)
            return output
        query, key, value = (self._heads(linear(hidden_states)) for linear in (self.query, self.key, self.value))
        keys, values = cache.update(key[:, :, :1], value[:, :, :1], self.layer_idx)
        session.folded()
        own = key[:, :, 1:], value[:, :, 1:]
        bias = session.self_bias(None, query.dtype)[:, :, :, None]  # [B, 1, M, 1, width]
        return stream_attention(query, keys, values, *own, bias, None, self.scaling).flatten(2)

    return attend


_PROPHETNETS = {
    "ProphetNetForConditionalGeneration": _prophetnets_logits,
    "ProphetNetDecoder": _prophetnets_decoder,
    "ProphetNetNgramSelfAttention": _prophetnets_attention,
    "ProphetNetAttention": _prophetnets_source_attention,
}
