"""Products on packed weights: the same hypotheses, and the model stays as it is."""

from __future__ import annotations

import copy
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq.modules.quant_noise import quant_noise

import fastgen
from fastgen.layers import packed_weights

pytestmark = pytest.mark.usefixtures("always_packed")


@pytest.mark.parametrize("name", ["post-norm", "pre-norm", "shared", "bart", "align", "adaptive", "prophetnet"])
def test_translators(name: str) -> None:
    """Every linear layer is packed: 4 + 2 in the encoder's, 4 + 4 + 2 in the decoder's, and that to the vocabulary.

    ProphetNet has one more in each of the decoder's layers, for relative positions.
    """
    model = copy.deepcopy(models.load(name))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for beams in (1, 4):
        judge.compare(lambda beams=beams: models.generate(model, models.batch(), beam_size=beams))
    layers = 6 * len(model.encoder.layers) + (10 + (name == "prophetnet")) * len(model.decoder.layers)
    assert packed_weights.count() == layers + (name != "adaptive")
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_language_models_and_ensembles() -> None:
    judge.compare(lambda: models.prompted("lm", beam_size=3))
    packed = packed_weights.count()
    assert packed == 6 * 3 + 1
    two = [models.load("post-norm"), models.load("post-norm", seed=1)]
    judge.compare(lambda: models.generate(two, models.batch(), lm_model=models.load("lm"), lm_weight=0.3))
    assert packed_weights.count() == packed + 2 * 43


def test_weights_that_change() -> None:
    """Between two calls, in place and by assignment, also of an embedding that the output shares."""
    model = copy.deepcopy(models.load("shared"))
    assert model.decoder.output_projection.weight is model.decoder.embed_tokens.weight

    def run() -> Any:
        return models.generate(model, models.batch())

    first = judge.compare(run)
    with torch.no_grad():
        model.decoder.embed_tokens.weight.mul_(0.8)
    second = judge.compare(run)
    model.decoder.layers[1].fc1.weight = torch.nn.Parameter(model.decoder.layers[1].fc1.weight.detach() * -1)
    third = judge.compare(run)
    for one, other in ((first, second), (second, third)):
        with pytest.raises(AssertionError):
            judge.assert_same(one, other)


def test_hooks_and_changed_layers() -> None:
    """Layers with hooks, with another forward, or that are no plain nn.Linear, are left alone."""
    seen: list[tuple[int, ...]] = []
    model = copy.deepcopy(models.load("pre-norm"))
    first, second, third = model.decoder.layers
    first.fc1.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    first.fc2.register_forward_hook(lambda module, args, output: output * 0.5)
    quant_noise(second.fc1, 0.1, 8)
    torch.nn.utils.parametrizations.weight_norm(second.fc2)
    torch.nn.utils.weight_norm(second.self_attn.q_proj)
    forward = third.fc1.forward
    third.fc1.forward = lambda rows: forward(rows) + 0.1
    expected = judge.compare(lambda: models.generate(model, models.batch()))
    assert seen
    left = (first.fc1, first.fc2, second.fc1, second.fc2, second.self_attn.q_proj, third.fc1)
    assert not any(map(packed_weights.copies_of, left))
    # 12 of the encoder; and of the decoder, whose weights hooks might edit between two layers, those that are compared
    # with the weight before each product: our own operator does that.
    assert packed_weights.count() == 12 + 25 * packed_weights.is_native()
    with pytest.raises(AssertionError):
        judge.assert_same(expected, judge.stock(lambda: models.generate("pre-norm", models.batch())))


def test_an_edit_within_a_call() -> None:
    """By a hook, at the third step: moved columns, of which neither versions nor sums tell."""

    def run(after: int) -> Any:
        model, calls = copy.deepcopy(models.load("pre-norm")), 0

        def edit(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == after:
                for layer in model.decoder.layers:
                    weight = layer.fc2.weight.data
                    weight.copy_(weight.unflatten(1, (-1, 2)).flip(1).flatten(1))

        model.decoder.layers[0].self_attn.out_proj.register_forward_hook(edit)
        return models.generate(model, models.batch())

    models.generate("pre-norm", models.batch())
    assert packed_weights.count() == 43
    judge.assert_same(run(3), judge.stock(lambda: run(3)))
    with pytest.raises(AssertionError):
        judge.assert_same(run(3), run(0))


def test_off() -> None:
    fastgen.configure(packing="off")
    judge.compare(lambda: models.generate("post-norm", models.batch()))
    assert packed_weights.count() == 0
