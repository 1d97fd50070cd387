"""ProphetNet, whose steps have two rows a beam: prompts, numbers of streams, and what stays with the host."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import harness
import pytest
import torch
import transformers
import zoo

import fastgen
from fastgen.layers import attention
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.model import streams
from fastgen.optimizer.transformers.versions import FINDS_EAGER

pytestmark = pytest.mark.skipif(not FINDS_EAGER, reason="before 5.0 its attention is not folded")

OPTIONS: dict[str, Any] = dict(num_beams=4, num_return_sequences=2, max_new_tokens=20)
PROMPT = torch.tensor([[zoo.START, 7, 9, 11], [zoo.START, 40, 6, 7], [zoo.START, 8, 8, 50]])


def _built(seed: int = 0, cls: str = "ProphetNetForConditionalGeneration", **options: Any) -> Any:
    config = zoo.load("prophetnet").config.to_dict() | options
    torch.manual_seed(seed)
    model = getattr(transformers, cls)(transformers.ProphetNetConfig(**config)).eval().requires_grad_(False)
    zoo._roughen(model)
    model.generation_config.eos_token_id = 9
    return model


@pytest.mark.parametrize("ngram", [1, 2, 4])
def test_any_number_of_streams(ngram: int) -> None:
    harness.compare(_built(ngram=ngram), zoo.inputs_for("prophetnet"), **OPTIONS)


@pytest.mark.parametrize("buckets", [2, 32])
def test_buckets(buckets: int) -> None:
    """Of distances; the largest ones share the last one."""
    harness.compare(
        _built(num_buckets=buckets, relative_max_distance=buckets + 3), zoo.inputs_for("prophetnet"), **OPTIONS
    )


@pytest.mark.parametrize("tier", ["fast", "compat"])
def test_prompts(tier: str) -> None:
    inputs = {**zoo.inputs_for("prophetnet"), "decoder_input_ids": PROMPT}
    harness.compare(zoo.load("prophetnet"), inputs, tier=tier, **OPTIONS)
    mask = torch.ones_like(PROMPT)
    harness.compare(zoo.load("prophetnet"), {**inputs, "decoder_attention_mask": mask}, tier=tier, **OPTIONS)


def test_padded_prompts() -> None:
    """The steps of the host's ProphetNet see the padding; the tree would not."""
    mask = torch.ones_like(PROMPT)
    mask[1, 0] = 0
    inputs = {**zoo.inputs_for("prophetnet"), "decoder_input_ids": PROMPT, "decoder_attention_mask": mask}
    if not versions.PREFILLS:
        harness.compare(zoo.load("prophetnet"), inputs, expected="fallback", **OPTIONS)
        return
    harness.compare(zoo.load("prophetnet"), inputs, **OPTIONS)
    last = fastgen.status().calls[-1]
    assert last.cache == "rows" and last.plan == "its steps attend to the padding of a prompt"


@pytest.mark.parametrize("batch", [1, 5])
def test_long_outputs(batch: int) -> None:
    """The tree grows, is pruned, and sentences leave it."""
    inputs = zoo.inputs_for("prophetnet", batch=batch)
    harness.compare(zoo.load("prophetnet"), inputs, num_beams=3, max_new_tokens=58, eos_token_id=None)
    harness.compare(zoo.load("prophetnet"), inputs, num_beams=3, max_new_tokens=58, return_dict_in_generate=False)


@pytest.mark.parametrize("cls", ["ProphetNetForCausalLM"])
def test_others_are_not_on_the_tree(cls: str) -> None:
    model = _built(cls=cls, add_cross_attention=False)
    inputs = dict(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT))
    expected = "accelerated" if versions.PREFILLS else "fallback"
    harness.compare(model, inputs, expected=expected, num_beams=3, max_new_tokens=8)
    assert not versions.PREFILLS or fastgen.status().calls[-1].cache == "rows"


def test_positions_behind_padding_stay_with_the_host() -> None:
    """The host's own steps refuse them."""
    other, tested = _built(pad_token_id=1), zoo.load("prophetnet")
    assert "pad_token_id" in (streams.unsupported_model(other, other.modules()) or "")
    assert streams.unsupported_model(tested, tested.modules()) is None


def test_only_two_rows_a_beam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that nobody asks for are not computed."""
    shapes: list[torch.Size] = []

    def noting(*args: Any) -> torch.Tensor:
        shapes.append(args[0].shape)
        return attention.stream_attention(*args)

    monkeypatch.setattr(streams, "stream_attention", noting)
    model = _built(ngram=4)
    harness.run_fastgen(model, zoo.inputs_for("prophetnet"), num_beams=2, max_new_tokens=3, eos_token_id=None)
    assert shapes == [(6, 4, 2, 8)] * 2 * len(model.prophetnet.decoder.layers)


def _hook_on_the_model(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.register_forward_hook(lambda *_: None)


def _hook_on_positions(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.prophetnet.decoder.position_embeddings.register_forward_hook(lambda *_: None)


def _forward_of_its_own(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.forward = functools.partial(model.forward)


def _other_head(model: Any, patch: pytest.MonkeyPatch) -> None:
    stock = type(model).forward

    def banned(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = stock(self, *args, **kwargs)
        outputs.logits[..., 53] = -1e4
        return outputs

    patch.setattr(type(model), "forward", banned)


def _other_buckets(model: Any, patch: pytest.MonkeyPatch) -> None:
    kind = type(model.prophetnet.decoder.layers[0].self_attn)
    stock = kind.get_predict_relative_pos_embeddings
    patch.setattr(kind, "get_predict_relative_pos_embeddings", lambda self, *args: 2 * stock(self, *args))


def _other_softmax(model: Any, patch: pytest.MonkeyPatch) -> None:
    host = sys.modules[type(model).__module__]
    stock = host.softmax
    patch.setattr(host, "softmax", lambda states, *args, **kwargs: stock(states / 2, *args, **kwargs))


@pytest.mark.parametrize(
    "change",
    [_hook_on_the_model, _hook_on_positions, _other_head, _other_buckets, _other_softmax],
)
def test_what_is_changed_stays_with_the_host(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(zoo.load("prophetnet"))
    change(model, monkeypatch)
    harness.compare(model, zoo.inputs_for("prophetnet"), expected="fallback", num_beams=3, max_new_tokens=8)


def test_a_forward_that_is_the_hosts_own_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the tree, which looks at the class's alone."""
    model = copy.deepcopy(zoo.load("prophetnet"))
    _forward_of_its_own(model, monkeypatch)
    expected = "accelerated" if versions.PREFILLS else "fallback"
    harness.compare(model, zoo.inputs_for("prophetnet"), expected=expected, num_beams=3, max_new_tokens=8)
    assert not versions.PREFILLS or fastgen.status().calls[-1].cache == "rows"


def _blind(patch: pytest.MonkeyPatch) -> None:
    """The predicting stream does not see itself."""

    def attend(*args: Any) -> torch.Tensor:
        query, key, value, own_key, own_value, bias, own_bias, scale = args
        return attention.stream_attention(
            query, key, value, own_key, own_value, bias, own_bias + torch.finfo(query.dtype).min, scale
        )

    patch.setattr(streams, "stream_attention", attend)


def _level(patch: pytest.MonkeyPatch) -> None:
    """Both streams stand at the same place."""
    patch.setattr(streams, "_AHEAD", (0, 0))


@pytest.mark.parametrize("broken", [_blind, _level])
def test_negative_controls(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        harness.compare(zoo.load("prophetnet"), zoo.inputs_for("prophetnet"), output_scores=True, **OPTIONS)
