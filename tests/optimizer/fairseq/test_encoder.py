"""The encoder with products of our own: its output is the host's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq.sequence_generator import EnsembleModel

from fastgen.layers import packed_weights
from fastgen.optimizer.fairseq.model import encoder

pytestmark = pytest.mark.usefixtures("always_packed")


def _both(model: Any, sample: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    ensemble = EnsembleModel([model])
    with torch.no_grad():
        torch.manual_seed(1)
        stock = ensemble.forward_encoder(sample["net_input"])[0]
        torch.manual_seed(1)
        ours = encoder.with_own_products(ensemble).forward_encoder(sample["net_input"])[0]
    return stock, ours


@pytest.mark.parametrize("lengths", [(9, 5, 12, 7), (6, 6), (1,)])
@pytest.mark.parametrize(
    "name", ["post-norm", "pre-norm", "learned", "layernorm-embedding", "bart", "mbart", "align", "prophetnet"]
)
def test_states(name: str, lengths: tuple[int, ...]) -> None:
    stock, ours = _both(models.load(name), models.batch(lengths))
    # Of up to 12 rows products read the weights where they are.
    is_packed = len(lengths) * (max(lengths) + 1) > 12
    assert packed_weights.count() == 6 * len(models.load(name).encoder.layers) * is_packed
    assert stock.keys() == ours.keys()
    torch.testing.assert_close(stock["encoder_out"], ours["encoder_out"], rtol=1e-5, atol=1e-5)
    assert torch.equal(stock["encoder_padding_mask"][0], ours["encoder_padding_mask"][0])


def _own_forward(model: Any) -> None:
    forward = model.encoder.forward
    model.encoder.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def _own_layers(model: Any) -> None:
    for layer in model.encoder.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kwargs: forward(*args, **kwargs)


def _hooked_projection(model: Any) -> None:
    """Stock never calls it, so its hook never runs."""
    for layer in model.encoder.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: output * 0.0)


def _hooked_attention(model: Any) -> None:
    for layer in model.encoder.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: (output[0] * 0.5, None))


def _hooked_layers(model: Any) -> None:
    """Hooks see the module itself."""
    for layer in model.encoder.layers:
        layer.register_forward_hook(lambda module, args, output: setattr(module, "calls", module.calls + 1))
        layer.fc1.register_forward_hook(lambda module, args, output: setattr(module, "calls", module.calls + 1))
        layer.calls = layer.fc1.calls = 0


def _dropout(model: Any) -> None:
    """That of attention is kept."""
    for layer in model.encoder.layers:
        layer.self_attn.dropout_module.p = 0.5
        layer.self_attn.dropout_module.apply_during_inference = True


@pytest.mark.parametrize(
    ("change", "packed"),
    [
        (_own_forward, 0),
        (_own_layers, 0),
        (_hooked_projection, 2),
        (_hooked_attention, 2),
        (_hooked_layers, 0),
        (_dropout, 2),
    ],
)
def test_what_stays_the_hosts(change: Callable[[Any], None], packed: int) -> None:
    """`packed`: weights of each layer that are multiplied by all the same."""
    model = copy.deepcopy(models.load("post-norm"))
    change(model)
    stock, ours = _both(model, models.batch())
    assert packed_weights.count() == packed * len(model.encoder.layers)
    torch.testing.assert_close(stock["encoder_out"], ours["encoder_out"], rtol=1e-5, atol=1e-5)
    if change is _hooked_layers:
        assert all(layer.calls == layer.fc1.calls == 2 for layer in model.encoder.layers)


def test_a_source_of_padding_alone() -> None:
    sample = models.batch()
    sample["net_input"]["src_tokens"][1] = models.PAD
    stock, ours = _both(models.load("post-norm"), sample)
    torch.testing.assert_close(stock["encoder_out"], ours["encoder_out"], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_hypotheses() -> None:
    for name in ("post-norm", "bart"):
        judge.compare(lambda name=name: models.generate(name, models.batch()))
        assert packed_weights.count() == 6 * 2 + 10 * 3 + 1
        packed_weights.release()


def test_padding_that_is_read_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    own, calls = encoder._Attention.__call__, []

    def unmasked(self: Any, *args: Any, key_padding_mask: Any = None, **options: Any) -> Any:
        calls.append(key_padding_mask)
        return own(self, *args, **options)

    monkeypatch.setattr(encoder._Attention, "__call__", unmasked)
    stock, ours = _both(models.load("post-norm"), models.batch())
    assert calls and calls[0] is not None
    assert not torch.allclose(stock["encoder_out"][0], ours["encoder_out"][0], atol=1e-3)
