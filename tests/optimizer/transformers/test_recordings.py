"""A recorded step that later calls replay, with their own prompt and source, while the model is what it was."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import harness
import numpy
import pytest
import torch
import zoo
from emulated_graph import Graph
from transformers.modeling_utils import AttentionInterface
from transformers.models.bart import modeling_bart
from transformers.models.llama import modeling_llama

import fastgen
from fastgen.bench.soak.modes import default_dtype
from fastgen.cache.tree import BeamTree
from fastgen.cache.tree_layer import TreeLayer
from fastgen.decoding.beam_search import BeamSearch
from fastgen.memory import limits
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.optimizer.transformers.replay.guards import guards_of_steps
from fastgen.optimizer.transformers.replay.step_state import State
from fastgen.optimizer.transformers.versions import CACHE
from fastgen.replay import replayer, statistics, store
from fastgen.replay.guards import ModelGuards

pytestmark = [
    pytest.mark.skipif(not versions.COUNTS_IN_TENSORS, reason="steps of this version are never replayed"),
    pytest.mark.usefixtures("recording"),
]

LONG = dict(num_beams=3, min_new_tokens=12, max_new_tokens=12, return_dict_in_generate=False)


def _inputs(family: str, seed: int = 0, **shape: Any) -> dict[str, Any]:
    return {**zoo.inputs_for(family, seed=seed, **shape), **zoo.FAMILIES[family].generate}


def _captures(model: Any, inputs: dict[str, Any], *, proofs_alone: bool = False, **options: Any) -> int:
    """Compare a call with stock's; how many model steps it has captured (compat: the search is the host's)."""
    before = copy.copy(statistics.counts(model))
    harness.compare(model, inputs, **{"tier": "compat", **LONG, **options})
    after = statistics.counts(model)
    assert after.replays > before.replays or proofs_alone, "nothing was replayed"
    return after.captures - before.captures


def _recorded(family: str) -> Any:
    """A model with one recording, of calls like `_inputs(family)`."""
    model = copy.deepcopy(zoo.load(family))
    assert _captures(model, _inputs(family)) == 1 and store.count(model) == 1
    return model


@pytest.mark.parametrize("family", sorted(zoo.ACCELERATED))
def test_later_calls(family: str, recording: type[replayer.GraphBackend]) -> None:
    model = _recorded(family)
    assert "1 kept for later calls" in fastgen.status().replayed[type(model).__name__]
    for seed in (1, 2):
        assert _captures(model, _inputs(family, seed)) == 0
    # Our loop gives the model the same inputs as the host's; its own steps are recorded too where nothing may wait.
    assert _captures(model, _inputs(family, 3), tier="fast") <= 1 + int(recording is Graph)
    for seed in (4, 5):
        assert _captures(model, _inputs(family, seed), tier="fast") == 0


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_sources_of_like_lengths(family: str) -> None:
    model = copy.deepcopy(zoo.load(family))
    counts = [
        _captures(model, _inputs(family, length, length=length, ragged=ragged))
        for length, ragged in ((16, False), (3, False), (14, True), (1, False), (17, True), (20, False), (9, True))
    ]
    assert counts == [1, 0, 0, 0, 1, 0, 0]


def test_without_a_mask() -> None:
    inputs = _inputs("whisper")
    model = _recorded("whisper")
    assert "attention_mask" not in inputs and _captures(model, _inputs("whisper", 5)) == 0


@pytest.mark.parametrize("length", [9, 16])
@pytest.mark.parametrize("beams", [1, 3])
def test_what_the_user_passes_is_not_written_to(beams: int, length: int) -> None:
    model, options = copy.deepcopy(zoo.load("bart")), {**LONG, "num_beams": beams}
    passed = []
    for seed in range(3):
        inputs = _inputs("bart", seed, length=length, batch=2)
        stock = harness.run_stock(model, inputs, **options)
        with fastgen.disabled(), torch.no_grad():
            outputs = model.get_encoder()(**inputs)
        passed.append((outputs.last_hidden_state, inputs["attention_mask"]))
        passed.append(tuple(tensor.clone() for tensor in passed[-1]))
        inputs = {"attention_mask": inputs["attention_mask"], "encoder_outputs": outputs}
        with harness.configured(tier="compat"):
            assert torch.equal(stock, zoo.generate(model, inputs, **options))
    assert statistics.counts(model).captures == 1
    for now, before in zip(passed[::2], passed[1::2], strict=True):
        assert all(map(torch.equal, now, before))


@pytest.mark.parametrize(
    "other",
    [
        dict(num_beams=2),
        dict(max_new_tokens=20, min_new_tokens=20),
        dict(repetition_penalty=1.5),
        dict(num_beams=1, do_sample=True, top_k=0, num_return_sequences=3),
    ],
)
def test_other_searches_between(other: dict[str, Any]) -> None:
    model = _recorded("bart")
    for options in (other, {}, other):
        harness.compare(model, _inputs("bart", 1), **{**LONG, **options})
        assert _captures(model, _inputs("bart", 2), **options) == 0


def _growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree is outgrown every few steps, and captured again at once."""
    monkeypatch.setattr("fastgen.cache.tree.FIRST_STEPS", 5)
    monkeypatch.setattr("fastgen.cache.retained._OUTGROWN", 100)
    monkeypatch.setattr(replayer, "_PATIENCE", 1)


@pytest.mark.parametrize("family", ["bart", "t5", "whisper", "llama", "gpt2", "gemma2"])
def test_a_call_that_grew(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call grows into the same buffers."""
    _growing(monkeypatch)
    model = copy.deepcopy(zoo.load(family))
    counts = [_captures(model, _inputs(family, seed)) for seed in (0, 0, 1, 0, 1)]
    assert counts[0] > 1 and store.count(model) == 1
    assert counts[1] == counts[3] == counts[4] == 0, "as far as it grew in the same steps"
    longer = dict(max_new_tokens=20, min_new_tokens=20)
    assert _captures(model, _inputs(family), **longer) > counts[0], "a longer one has a recording of its own"
    assert [_captures(model, _inputs(family), **each) for each in (longer, {})] == [0, 0]


def test_what_is_outgrown_is_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only sizes in which a step was captured, and few: wrong tokens if a step outlived its memory."""
    model, options = copy.deepcopy(zoo.load("llama")), dict(num_beams=3, max_new_tokens=40, min_new_tokens=40)
    monkeypatch.setattr("fastgen.cache.tree.FIRST_STEPS", 4)
    sizes = []
    for patience, most in ((10, 100), (1, 100), (1, 2)):
        store.release()
        monkeypatch.setattr(replayer, "_PATIENCE", patience)
        monkeypatch.setattr("fastgen.cache.retained._OUTGROWN", most)
        for seed in (0, 0, 1):
            _captures(model, _inputs("llama", seed), **options)
        (kept,) = store._kept[model].recordings.values()
        sizes.append(len(kept.state.tree.retained._by_epoch))
        assert kept.captured.keys() <= kept.state.tree.retained._by_epoch.keys()
        each = [sum(tensor.nbytes for tensor in here.values()) for here in kept.state.tree.retained._by_epoch.values()]
        assert store.nbytes(model) >= sum(each) > each[0]
        assert most > 2 or sum(each) <= 3 * max(each)
    assert max(sizes[0], sizes[2]) < sizes[1], sizes


def test_what_is_outgrown_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it is let go at once, with the steps that were captured there."""
    _growing(monkeypatch)
    held = []
    grow = TreeLayer.grow

    def noting(layer: TreeLayer) -> None:
        grow(layer)
        held.append(layer.tree.retained_bytes - layer.tree.nbytes)

    monkeypatch.setattr(TreeLayer, "grow", noting)
    model = copy.deepcopy(zoo.load("llama"))
    with monkeypatch.context() as patch:
        patch.setattr(store, "may_keep", lambda more, device: more == 0)
        assert _captures(model, _inputs("llama")) > 1 and store.count(model) == 0
    assert held and not any(held)
    assert _captures(model, _inputs("llama")) > 1 and any(held) and store.count(model) == 1


_LEAVING = dict(num_beams=4, max_new_tokens=20, min_new_tokens=0, early_stopping=True, length_penalty=-1.0)


def _left(model: Any, inputs: dict[str, Any], **options: Any) -> tuple[int, list[int]]:
    """Captures of a call, and how many sentences there were after each time that some left."""
    left, select = [], BeamTree.select

    def noting(self: BeamTree, sentences: torch.Tensor) -> None:
        left.append(len(sentences))
        select(self, sentences)

    if "decoder_input_ids" in inputs:
        inputs["decoder_input_ids"] = torch.full((6, 1), zoo.START)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BeamTree, "select", noting)
        return _captures(model, inputs, tier="fast", **{**_LEAVING, **options}), left


@pytest.mark.parametrize("is_slim", [False, True], ids=["kv", "x"])
@pytest.mark.parametrize("family", ["bart", "whisper", "gpt2", "llama"])
def test_sentences_leave(family: str, is_slim: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was captured before is kept; the next call begins where this one began, with all of its sentences."""
    _growing(monkeypatch)
    model = copy.deepcopy(zoo.load(family))
    with harness.configured(cache="x" if is_slim else "kv"):
        first, left = _left(model, _inputs(family, batch=6))
        assert left and first > 2 and store.count(model) == 1
        for seed in (0, 1, 0):
            again, _ = _left(model, _inputs(family, seed, batch=6))
            assert again < first or seed, "what is captured after some have left alone"
        assert _left(model, _inputs(family, 2, batch=6), min_new_tokens=20)[1] == []


def test_no_room_for_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(zoo.load("bart"))
    with monkeypatch.context() as patch:
        patch.setattr(store, "may_keep", lambda more, device: more == 0)
        # So few steps are left to each capture that none is replayed after its proof.
        _, left = _left(model, _inputs("bart", batch=6), proofs_alone=True)
        assert left and store.count(model) == 0
    assert _left(model, _inputs("bart", batch=6), proofs_alone=True)[1] == left and store.count(model) == 1


@pytest.mark.parametrize(
    "spoiled",
    [
        BeamTree.restore_first_buffers,
        TreeLayer.restore_first_buffers,
        State.restore_first_buffers,
        State.retain_buffers,
    ],
)
def test_the_way_back_is_needed(spoiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _growing(monkeypatch)
    model = copy.deepcopy(zoo.load("bart"))
    monkeypatch.setattr(f"{spoiled.__module__}.{spoiled.__qualname__}", lambda *_: None)
    with pytest.raises(Exception, match=r"differ|size|shape|nothing|count|assert|NoneType"):
        for _ in range(2):
            _left(model, _inputs("bart", batch=6))
            assert store.count(model) == 1


def test_what_the_result_holds_is_not_written_to() -> None:
    model = _recorded("bart")
    options = {**LONG, "return_dict_in_generate": True}
    result = zoo.generate(model, _inputs("bart", 1), **options)
    before = [layer.keys.clone() for layer in getattr(result, CACHE).self_attention_cache.layers]
    again = zoo.generate(model, _inputs("bart", 1), **options)
    zoo.generate(model, _inputs("bart", 2), **LONG)
    for cache in (getattr(result, CACHE), getattr(again, CACHE)):
        for layer, keys in zip(cache.self_attention_cache.layers, before, strict=True):
            assert torch.equal(layer.keys, keys)


# ---------------------------------------------------------------------------------------------- changes
def _scale(model: Any, patch: Any) -> None:
    for layer in model.get_decoder().layers:
        layer.self_attn.scaling = layer.encoder_attn.scaling = -10.0


def _edit(model: Any, patch: Any) -> None:
    with torch.no_grad():
        model.get_decoder().layers[0].fc1.weight.mul_(-1)


def _edit_data(model: Any, patch: Any) -> None:
    """As adapters merge themselves: no version tells."""
    layer = model.get_decoder().layers[0]
    for projection in (layer.fc1, layer.self_attn.q_proj, layer.self_attn.v_proj):
        projection.weight.data.mul_(-1)
        projection.bias.data.add_(1)


def _replace_weight(model: Any, patch: Any) -> None:
    layer = model.get_decoder().layers[0].fc2
    layer.weight = torch.nn.Parameter(-layer.weight.detach())


def _replace_data(model: Any, patch: Any) -> None:
    layer = model.get_decoder().layers[0].fc2
    layer.weight.data = -layer.weight.detach()


def _replace_module(model: Any, patch: Any) -> None:
    layer = model.get_decoder().layers[0]
    layer.fc1 = torch.nn.Linear(32, 48)


def _drop_layer(model: Any, patch: Any) -> None:
    del model.get_decoder().layers[1]
    model.config.decoder_layers = 1


def _replace_activation(model: Any, patch: Any) -> None:
    for layer in model.get_decoder().layers:
        layer.activation_fn = torch.nn.Tanh()


def _patch_function(model: Any, patch: Any) -> None:
    patch.setattr(modeling_llama, "rotate_half", lambda x: x)


def _patch_class(model: Any, patch: Any) -> None:
    forward = modeling_bart.BartDecoderLayer.forward

    def negated(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, -hidden_states, *args, **kwargs)

    patch.setattr(modeling_bart.BartDecoderLayer, "forward", negated)


def _patch_layer_norm(model: Any, patch: Any) -> None:
    forward = torch.nn.LayerNorm.forward
    patch.setattr(torch.nn.LayerNorm, "forward", lambda self, x: forward(self, x).flip(-1))


def _register_for_all(model: Any, patch: Any) -> None:
    stock = AttentionInterface._global_mapping["sdpa"]
    patch.setitem(modeling_bart.ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", _negated(stock))


def _patch_torch(model: Any, patch: Any) -> None:
    norm = torch.nn.functional.layer_norm
    patch.setattr(torch.nn.functional, "layer_norm", lambda *args, **kwargs: norm(*args, **kwargs).flip(-1))


def _patch_attention(model: Any, patch: Any) -> None:
    stock = AttentionInterface._global_mapping["sdpa"]
    patch.setitem(AttentionInterface._global_mapping, "sdpa", _negated(stock))


def _negated(stock: Any) -> Any:
    def negated(*args: Any, **kwargs: Any) -> Any:
        output, weights = stock(*args, **kwargs)
        return -output, weights

    return negated


def _patch_buffer(model: Any, patch: Any) -> None:
    model.final_logits_bias[0, ::2] += 2


def _add_hook(model: Any, patch: Any) -> None:
    model.get_decoder().layers[0].fc1.register_forward_hook(lambda module, args, output: -output)


CHANGES: list[Callable[[Any, Any], None]] = [
    _scale,
    _edit,
    _edit_data,
    _replace_weight,
    _replace_data,
    _replace_module,
    _drop_layer,
    _replace_activation,
    _patch_function,
    _patch_class,
    _patch_layer_norm,
    _patch_torch,
    _patch_attention,
    _register_for_all,
    _patch_buffer,
    _add_hook,
]


# Somebody else's code: what has it is left to the host.
_FOREIGN = [
    _patch_function,
    _patch_class,
    _patch_layer_norm,
    _patch_torch,
    _patch_attention,
    _register_for_all,
    _add_hook,
]
# Of which a recording would never know by itself.
_UNSEEN = [_scale, _replace_module, _replace_activation]


def _changeable(change: Callable[[Any, Any], None]) -> tuple[Any, dict[str, Any]]:
    family = "llama" if change is _patch_function else "bart"
    return _recorded(family), _inputs(family, 1)


@pytest.mark.parametrize("packing", ["off", "always"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed(
    change: Callable[[Any, Any], None], packing: str, recording: type[replayer.GraphBackend], monkeypatch: Any
) -> None:
    if recording is Graph and packing == "always":
        pytest.skip("weights are packed on the CPU, where there are no graphs")
    with harness.configured(packing=packing):
        model, inputs = _changeable(change)
        before = harness.run_stock(model, inputs, **LONG)
        change(model, monkeypatch)
        expected = "fallback" if change in _FOREIGN else "accelerated"
        after = harness.compare(model, inputs, expected=expected, **LONG)
        assert not torch.equal(before, after), "the change changes nothing"


@pytest.mark.parametrize("change", _UNSEEN)
def test_the_snapshot_is_what_tells(change: Callable[[Any, Any], None], monkeypatch: Any) -> None:
    """Without it the old step would be replayed."""
    model, inputs = _changeable(change)
    monkeypatch.setattr(ModelGuards, "is_current", lambda self: True)
    change(model, monkeypatch)
    with pytest.raises(AssertionError, match=r"differ|reads memory that nobody keeps"):
        harness.compare(model, inputs, tier="compat", **LONG)


@pytest.mark.parametrize("cache", ["kv", "x", "k"])
@pytest.mark.parametrize("is_half", [False, True], ids=["float", "half"])
def test_products_on_copies_of_weights_that_have_changed(
    is_half: bool, cache: str, recording: type[replayer.GraphBackend]
) -> None:
    """Of each model one recording is kept: what holds old weights is let go."""
    if recording is Graph:
        pytest.skip("weights are packed on the CPU, where there are no graphs")
    options = {**LONG, "num_beams": 5}  # 15 rows: on packed copies; 5: on weights, or on halves
    for batch in (3, 1):
        model = copy.deepcopy(zoo.load("bart"))
        if is_half:
            model.half().float()
        with harness.configured(packing="always", cache=cache):
            for _ in range(3):
                harness.compare(model, _inputs("bart", batch=batch), tier="compat", **options)
                assert store.count(model) == 1
                for layer in model.get_decoder().layers:
                    for product in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.fc1, layer.fc2):
                        product.weight.data.normal_(std=0.4)
                        product.bias.data.normal_()


class _Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return -result if function is torch.nn.functional.gelu else result


def test_what_a_mode_sees_is_shared_with_nobody() -> None:
    model = _recorded("bart")
    with _Mode():
        harness.compare(model, _inputs("bart", 1), expected="fallback", **LONG)
    assert _captures(model, _inputs("bart", 1)) == 0


def test_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then what is kept is freed, and who tries again finds room."""
    model = _recorded("bart")
    for error, count in ((RuntimeError("something else"), 1), (torch.OutOfMemoryError("no memory"), 0)):

        def choose(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(BeamSearch, "running", choose)
            with pytest.raises(type(error)):
                harness.run_fastgen(model, _inputs("bart", batch=5), tier="fast", num_beams=3, max_new_tokens=5)
        assert store.count(model) == count
    assert _captures(model, _inputs("bart", 1)) == 1


def _snapshot(model: Any) -> ModelGuards:
    found = guards_of_steps(model)
    assert found.is_complete and found.is_current()
    return found


@pytest.mark.parametrize(
    "edit",
    [
        lambda model: setattr(model.config, "decoder_layers", 1),
        lambda model: model.config.id2label.update({7: "x"}),
        lambda model: setattr(model.get_decoder(), "numbers", [1, 3]),
        lambda model: model.get_decoder().some.append(3),
        lambda model: model.get_decoder().some[0].update(a=2),
        lambda model: model.get_decoder().scale.fill_(2),
        lambda model: setattr(model.get_decoder(), "scale", torch.tensor(1.0)),
        lambda model: model.get_decoder().layers[0].fc1.register_buffer("b", torch.ones(1)),
        lambda model: model.get_decoder().layers.append(copy.deepcopy(model.get_decoder().layers[0])),
    ],
)
def test_a_snapshot_sees(edit: Callable[[Any], Any]) -> None:
    model = copy.deepcopy(zoo.load("bart"))
    model.get_decoder().some, model.get_decoder().scale = [{"a": 1}, 2], torch.tensor(1.0)
    before = _snapshot(model)
    edit(model)
    assert not before.is_current()


@pytest.mark.parametrize(
    "make",
    [
        object,
        lambda: numpy.ones(2),
        lambda: (torch.nn.Linear(2, 2),),
        lambda: [SimpleNamespace(scale=2)],
        lambda: torch.ones(2).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2)]),
    ],
    ids=["object", "array", "module", "namespace", "sparse", "nested"],
)
def test_what_cannot_be_looked_at_again(make: Callable[[], Any]) -> None:
    """A model with something in it that may change unseen, or hold the model, has no recordings."""
    model = copy.deepcopy(zoo.load("bart"))
    model.get_decoder().something = make()
    for seed in range(2):
        assert _captures(model, _inputs("bart", seed)) == 1 and store.count(model) == 0


def test_methods_and_closures_keep_no_model_alive() -> None:
    for value in (lambda model: model.generate, lambda model: lambda: model, lambda model: partial(print, model)):
        model = copy.deepcopy(zoo.load("bart"))
        model.something = value(model)
        assert _captures(model, _inputs("bart")) == 1 and store.count(model) == 0


class _OfAUser(modeling_bart.BartForConditionalGeneration):
    """Ignores padding."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_model_that_nobody_has_tested_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _OfAUser(copy.deepcopy(zoo.load("bart").config)).eval()
    model.load_state_dict(zoo.load("bart").state_dict())
    model.generation_config = copy.deepcopy(zoo.load("bart").generation_config)
    for seed in range(2):
        harness.compare(model, _inputs("bart", seed, ragged=False), expected="fallback", **LONG)
        with harness.configured(foreign_code="trial"):
            harness.compare(model, _inputs("bart", seed, ragged=False), **LONG)
        assert store.count(model) == statistics.counts(model).captures == 0


def test_weights_that_the_model_has_no_longer_are_let_go() -> None:
    model = _recorded("bart")
    Graph.made.clear()
    old = weakref.ref(model.get_decoder().layers[0].fc1.weight)
    model.get_decoder().layers[0].fc1 = copy.deepcopy(model.get_decoder().layers[0].fc1)
    harness.compare(model, _inputs("bart"), **{**LONG, "num_beams": 2})
    gc.collect()
    assert old() is None and store.count(model) == 1


def test_surroundings() -> None:
    """All that a step depends on tells recordings apart."""
    cpu = torch.device("cpu")
    keys = [store.surroundings(cpu)]
    for packing in ("off", "always"):
        with fastgen.configured(packing=packing):
            keys.append(store.surroundings(cpu))
    with torch.inference_mode():
        keys.append(store.surroundings(cpu))
    torch.use_deterministic_algorithms(True)
    keys.append(store.surroundings(cpu))
    torch.use_deterministic_algorithms(False)
    with default_dtype(torch.float64):
        keys.append(store.surroundings(cpu))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        keys.append(store.surroundings(cpu))
    assert len(set(keys)) == len(keys) and store.surroundings(cpu) == keys[0]


def test_interrupted_while_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is listed has not been closed."""
    model = _recorded("bart")

    def interrupt(*_: Any, **__: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(limits, "may_keep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            zoo.generate(model, _inputs("bart", 1), **LONG)
    store.nbytes()
    harness.compare(model, _inputs("bart", 2), tier="compat", **LONG)


def test_the_source_is_what_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _recorded("bart")
    monkeypatch.setattr(State, "fill", lambda self, other: self.tree.reset_from(other.tree))
    with pytest.raises(AssertionError, match="differ"):
        harness.compare(model, _inputs("bart", 1), tier="compat", **LONG)


def test_leftovers_are_not_seen() -> None:
    """Whatever the last call has left in memory."""
    model = _recorded("llama")
    (recording,) = store._kept[model].recordings.values()
    for layer in recording.state.tree.layers:
        for stored in layer.stored():
            stored.fill_(torch.nan)
    assert _captures(model, _inputs("llama", 1)) == 0


# ---------------------------------------------------------------------------------------------- whose they are
def test_inference_mode_has_its_own() -> None:
    model = _recorded("bart")
    stock = harness.run_stock(model, _inputs("bart", 1), **LONG)
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(stock, zoo.generate(model, _inputs("bart", 1), **LONG))
        assert _captures(model, _inputs("bart", 2)) == 0


def test_threads_have_their_own() -> None:
    model = _recorded("bart")
    stock = [harness.run_stock(model, _inputs("bart", seed), **LONG) for seed in range(4)]
    outputs: list[Any] = [None] * 4

    def run(seed: int) -> None:
        for _ in range(3):
            outputs[seed] = zoo.generate(model, _inputs("bart", seed), **LONG)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, stock, outputs))
    assert 1 <= store.count(model) <= store._MOST


def test_a_call_that_fails_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _recorded("bart")

    def failing(self: Any) -> None:
        if self.steps == 6:
            raise ValueError("six")
        advance(self)

    advance = BeamTree.advance
    with monkeypatch.context() as patch:
        patch.setattr(BeamTree, "advance", failing)
        with pytest.raises(ValueError, match="six"):
            zoo.generate(model, _inputs("bart", 1), **LONG)
    assert store.count(model) == 0
    assert _captures(model, _inputs("bart", 1)) == 1


def test_they_die_with_the_model() -> None:
    model = _recorded("bart")
    Graph.made.clear()
    (recording,) = store._kept[model].recordings.values()
    tree, weight = weakref.ref(recording.state.tree.layers[0].stored()[0]), weakref.ref(model.lm_head.weight)
    gone = weakref.ref(model)
    del recording
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None and tree() is None and weight() is None
    finally:
        gc.enable()


def test_a_copy_of_the_model_has_none() -> None:
    model = _recorded("bart")
    other = copy.deepcopy(model)
    assert store.count(other) == 0 and _captures(other, _inputs("bart", 1)) == 1


def test_release() -> None:
    model = _recorded("bart")
    assert store.nbytes() > 0
    fastgen.release()
    assert store.count(model) == store.nbytes() == 0
    assert _captures(model, _inputs("bart", 1)) == 1


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _recorded("bart")
    for beams in (2, 4, 5, 6):
        _captures(model, _inputs("bart"), num_beams=beams)
    assert store.count(model) == store._MOST
    assert _captures(model, _inputs("bart"), num_beams=2) == 0
    assert _captures(model, _inputs("bart")) == 1  # the oldest had gone
    monkeypatch.setattr(limits, "may_keep", lambda size, taken: False)
    _captures(model, _inputs("bart"))
    assert store.count(model) == 0


def test_nothing_is_widened_that_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeDecoder, "_widen_source", lambda self: pytest.fail("widened"))
    with harness.configured(replay="off"):
        harness.compare(zoo.load("bart"), _inputs("bart"), **LONG)
