"""Weights that are edited by whatever means, between two calls or within one: the next step is stock's, with them.

Every edit here moves columns by pairs: what the numbers of a row, or of a pair, add up to stays the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import harness
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import fastgen
from fastgen import report
from fastgen.layers import checked_products, linear, packed_weights
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.cache import planning
from fastgen.optimizer.transformers.generate import continuous_batch

VOCABULARY, SIZE = 67, 32
Edit = Callable[[nn.Module, Tensor], None]  # of a layer, to these numbers


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    fastgen.release()
    with harness.configured(packing="always"):
        yield
    fastgen.release()


def model_of(seed: int = 0) -> Any:
    """A model whose weights are halves, so that all kinds of copies can be had."""
    torch.manual_seed(seed)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=SIZE,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        init_std=0.4,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    model = transformers.BartForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    return model


def generate(model: Any, sentences: int = 4, **options: Any) -> Tensor:
    source = torch.randint(4, VOCABULARY, (sentences, 9), generator=torch.Generator().manual_seed(3))
    options = {"num_beams": 4, "max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False, **options}
    found: Tensor = model.generate(input_ids=source, attention_mask=torch.ones_like(source), **options)
    return found


def stock(model: Any, **options: Any) -> Tensor:
    with harness.configured(tier="stock"):
        return generate(model, **options)


def moved(weight: Tensor) -> Tensor:
    """Its columns, in pairs, in another order."""
    return weight.detach().unflatten(1, (-1, 2)).flip(1).flatten(1).clone()


# ---------------------------------------------------------------------------------------------- edits
def _data(layer: nn.Module, numbers: Tensor) -> None:
    layer.weight.data.copy_(numbers)  # type: ignore[union-attr, operator]


def _numpy(layer: nn.Module, numbers: Tensor) -> None:
    layer.weight.data.numpy()[...] = numbers.numpy()  # type: ignore[union-attr, operator]


def _dlpack(layer: nn.Module, numbers: Tensor) -> None:
    torch.from_dlpack(layer.weight.detach()).copy_(numbers)  # type: ignore[operator]


def _other_storage(layer: nn.Module, numbers: Tensor) -> None:
    layer.weight.data = numbers  # type: ignore[union-attr]


def _set(layer: nn.Module, numbers: Tensor) -> None:
    with torch.no_grad():
        layer.weight.set_(numbers)  # type: ignore[operator]


def _swapped(layer: nn.Module, numbers: Tensor) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(numbers))  # type: ignore[arg-type]


def _in_place(layer: nn.Module, numbers: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(numbers)  # type: ignore[operator]


def _in_inference_mode(layer: nn.Module, numbers: Tensor) -> None:
    with torch.inference_mode():
        layer.weight.data.copy_(numbers)  # type: ignore[union-attr, operator]


def _optimizer(layer: nn.Module, numbers: Tensor) -> None:
    weight: Any = layer.weight
    weight.grad = weight.detach() - numbers
    torch.optim.SGD([weight], lr=1.0).step()
    weight.grad = None


def _assigned(layer: nn.Module, numbers: Tensor) -> None:
    layer.load_state_dict({**layer.state_dict(), "weight": numbers}, assign=True)


def _replaced(layer: nn.Module, numbers: Tensor) -> None:
    layer.weight = nn.Parameter(numbers)


def _at_the_same_address(layer: nn.Module, numbers: Tensor) -> None:
    """As where memory is freed and used again: another parameter, as new as the first, in the same place."""
    memory = layer.weight.data  # type: ignore[union-attr]
    memory.copy_(numbers)  # type: ignore[operator]
    layer.weight = nn.Parameter(memory)  # type: ignore[arg-type]


EDITS: list[Edit] = [
    _data,
    _numpy,
    _dlpack,
    _other_storage,
    _set,
    _swapped,
    _in_place,
    _in_inference_mode,
    _optimizer,
    _assigned,
    _replaced,
    _at_the_same_address,
]


# ---------------------------------------------------------------------------------------------- copies
def _packed(model: Any) -> tuple[dict[str, Any], list[Any]]:
    return {}, [layer.fc2 for layer in model.model.decoder.layers]


def _joint(model: Any) -> tuple[dict[str, Any], list[Any]]:
    return {}, [layer.self_attn.k_proj for layer in model.model.decoder.layers]


def _halves(model: Any) -> tuple[dict[str, Any], list[Any]]:
    return {"sentences": 2}, [layer.fc1 for layer in model.model.decoder.layers]


def _screening(model: Any) -> tuple[dict[str, Any], list[Any]]:
    return {"sentences": 2, "num_beams": 1, "min_new_tokens": None}, [model.lm_head]


def _slim(model: Any) -> tuple[dict[str, Any], list[Any]]:
    return {}, [layer.self_attn.v_proj for layer in model.model.decoder.layers]


COPIES: dict[str, Any] = {
    "packed": (_packed, lambda model: len(packed_weights._copies)),
    "joint": (_joint, lambda model: len(packed_weights._joint)),
    "halves": (_halves, lambda model: len(packed_weights._halves)),
    "screening": (_screening, lambda model: len(packed_weights._screenings)),
    "slim": (_slim, lambda model: len(planning._judged[model].caches.layer_caches)),
}


def _skip_without(kind: str) -> None:
    if kind in ("slim", "screening") and not versions.FINDS_EAGER:
        pytest.skip("this version keeps keys and values, and computes all logits")
    if kind in ("halves", "screening") and linear._skinny() is None:
        pytest.skip("there is no native operator here")


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__[1:])
def test_an_edit_between_two_calls(edit: Edit, kind: str) -> None:
    _skip_without(kind)
    if kind == "slim" and edit is _swapped:
        pytest.skip("torch swaps no weight that a view is kept of, as caches do")
    model = model_of()
    prepare, count = COPIES[kind]
    options, layers = prepare(model)
    with harness.configured(cache="k" if kind == "slim" else "kv"):
        before = generate(model, **options)
        assert before.equal(stock(model, **options))
        assert generate(model, **options).equal(before)  # with what the first has left
        assert count(model) > 0
        for layer in layers:
            edit(layer, moved(layer.weight))
        after, expected = generate(model, **options), stock(model, **options)
        assert after.equal(expected)
        assert not expected.equal(before)  # or nothing would be shown
        assert count(model) > 0
        assert {call.tier for call in report.calls()} <= {"fast", "compat", "stock"}


def _unchecked(rows: Tensor, weights: checked_products.Weights, bias: Tensor | None) -> Tensor:
    """`checked_products.multiply` that does not look at the weight."""
    product: Tensor = torch.ops.fastgen.packed_linear(rows, weights.packed, len(weights.weight), bias)
    return product


@pytest.mark.parametrize("kind", COPIES)
def test_the_old_copies_would_give_other_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: where the guard sees nothing, the edit is missed, so the copy was in use."""
    _skip_without(kind)
    model = model_of()
    prepare, count = COPIES[kind]
    options, layers = prepare(model)
    monkeypatch.setattr(packed_weights, "state_of", lambda weight: (weight.dtype, weight.shape, 0))
    monkeypatch.setattr(checked_products, "multiply", _unchecked)  # of steps between which others' code runs
    monkeypatch.setattr(planning, "state_of_weights", lambda weights: None)
    with harness.configured(cache="k" if kind == "slim" else "kv"):
        generate(model, **options)
        assert count(model) > 0
        for layer in layers:
            _data(layer, moved(layer.weight))
        assert not generate(model, **options).equal(stock(model, **options))


def test_an_edit_that_is_undone_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    before = generate(model)
    weight = model.model.decoder.layers[0].fc2.weight
    kept, packed = weight.detach().clone(), packed_weights._copies.copy()
    assert packed
    with torch.no_grad():
        weight.zero_()
        weight.copy_(kept)
    monkeypatch.setattr(packed_weights, "pack", None)
    assert generate(model).equal(before)


@pytest.mark.parametrize("name", ["fc2", "self_attn.k_proj"])
def test_an_edited_bias(name: str) -> None:
    """Of a product of its own, and of a joint one, for which biases are put together."""
    model = model_of()
    before = generate(model)
    for layer in model.model.decoder.layers:
        bias = layer.get_submodule(name).bias
        bias.data.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(1)))
    if name.endswith("k_proj"):  # a key's bias moves all scores of a row by the same
        for layer in model.model.decoder.layers:
            layer.self_attn.v_proj.bias.data.fill_(0.7)
    after = generate(model)
    assert after.equal(stock(model)) and not after.equal(before)


# ---------------------------------------------------------------------------------------------- within a call
class _Editor:
    """Edits the weights of some layers at its third call, by one of the ways above."""

    def __init__(self, layers: list[Any], edit: Edit) -> None:
        self._layers, self._edit, self._calls = layers, edit, 0

    def count(self) -> None:
        self._calls += 1
        if self._calls == 3:
            for layer in self._layers:
                self._edit(layer, moved(layer.weight))


class _Processor(_Editor, LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        self.count()
        return scores


class _Criterion(_Editor, StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Tensor:
        self.count()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class _Streamer(_Editor):
    def put(self, value: Any) -> None:
        self.count()

    def end(self) -> None:
        pass


def _as_prefix_function(editor: _Editor) -> dict[str, Any]:
    def allowed(batch: int, tokens: Any) -> list[int]:
        editor.count()
        return list(range(VOCABULARY))

    return {"prefix_allowed_tokens_fn": allowed}


WAYS: dict[str, tuple[Any, dict[str, Any], Callable[[Any], dict[str, Any]]]] = {
    "processor": (_Processor, {}, lambda one: {"logits_processor": LogitsProcessorList([one])}),
    "criterion": (_Criterion, {}, lambda one: {"stopping_criteria": StoppingCriteriaList([one])}),
    "streamer": (_Streamer, {"num_beams": 1, "sentences": 1}, lambda one: {"streamer": one}),
    "prefix function": (_Editor, {}, _as_prefix_function),
}


@pytest.mark.parametrize("sentences", [1, 2, 5])
@pytest.mark.parametrize("cache", ["kv", "x", "k"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("edit", [_data, _other_storage, _replaced], ids=lambda edit: edit.__name__[1:])
def test_an_edit_within_a_call(edit: Edit, way: str, cache: str, sentences: int) -> None:
    kind, options, given = WAYS[way]
    options = {"sentences": sentences, **options}
    original = model_of()
    generate(original, sentences=sentences)  # leaves copies
    found = []
    for run in (generate, stock):
        model = copy.deepcopy(original)
        with harness.configured(cache=cache):
            before = run(model, **options)
            layers = [layer.get_submodule(n) for layer in model.model.decoder.layers for n in _EDITED]
            found.append(run(model, **options, **given(kind(layers, edit))))
    assert found[0].equal(found[1])
    assert not found[0].equal(before)


_EDITED = ("fc1", "fc2", "self_attn.k_proj", "self_attn.v_proj", "encoder_attn.out_proj")


def test_an_edit_by_a_hook() -> None:
    found = []
    for run in (generate, stock):
        model = model_of()
        before = run(model)
        editor = _Editor([model.model.decoder.layers[1].fc2], _data)
        model.model.decoder.layers[0].register_forward_hook(lambda *_, editor=editor: editor.count())
        found.append(run(model))
    assert found[0].equal(found[1]) and not found[0].equal(before)


def test_an_edit_while_calls_share_a_batch() -> None:
    """Who takes a result edits the weights: calls that begin later are stock's with the new ones."""
    sources = torch.randint(4, VOCABULARY, (3, 1, 9), generator=torch.Generator().manual_seed(5))
    options = dict(num_beams=4, max_new_tokens=10, do_sample=False)
    calls = [dict(input_ids=x, attention_mask=torch.ones_like(x), **options) for x in sources]
    model = model_of()
    found = {}
    for number, result in continuous_batch.run(model, iter(calls), 1):  # one after the other
        found[number] = result
        if number == 0:
            layer = model.model.decoder.layers[0].fc2
            _data(layer, moved(layer.weight))
    with harness.configured(tier="stock"):
        expected = [model.generate(**call) for call in calls]
    assert found[1].equal(expected[1]) and found[2].equal(expected[2])
    assert not found[0].equal(expected[0])
