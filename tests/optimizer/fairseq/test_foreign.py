"""What is the user's runs on the user's object, as often as in stock, or stock has the call, for a reason."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq import search, utils
from fairseq.models.multilingual_transformer import MultilingualTransformerModel, base_multilingual_architecture
from fairseq.models.transformer import TransformerDecoder, TransformerEncoder
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
from torch import nn

import fastgen
from fastgen.bench.soak import modes
from fastgen.cache.slim import accuracy
from fastgen.replay import statistics

LONG = dict(beam_size=3, min_len=8, max_len_b=12)


def compare_with_state(run: Callable[[], Any], state: Callable[[], Any], is_fast: bool = False, **options: Any) -> None:
    """On stock, over the tree and in our loop: the same hypotheses, and the same state afterwards.

    `state` also sets it back to what it was at first.
    """
    state()
    expected = judge.stock(run)
    of_stock = state()
    assert of_stock, "in stock nothing was noted"
    for tier in ("auto", "fast"):
        with judge.configured(tier=tier, **options):
            result, calls = judge.ours(run, strict=is_fast or tier == "auto")
        judge.assert_same(expected, result)
        assert calls[-1].tier == ("fast" if is_fast and tier == "fast" else "compat"), calls
        assert state() == of_stock


def compare_left_to_stock(run: Callable[[], Any], state: Callable[[], Any], reason: str) -> None:
    state()
    expected = judge.stock(run)
    of_stock = state()
    assert of_stock, "in stock nothing was noted"
    result, (call,) = judge.ours(run, strict=False)
    assert (call.tier, call.reason) == ("stock", reason)
    judge.assert_same(expected, result, exactly=True)
    assert state() == of_stock


def taken(notes: list[Any]) -> Callable[[], list[Any]]:
    """The notes so far, which are then empty."""

    def take() -> list[Any]:
        found = notes[:]
        notes.clear()
        return found

    return take


# ---------------------------------------------------------------------------------------------- properties
@functools.cache
def multilingual() -> Any:
    """Its encoder and its decoder are properties of the class."""
    words = models.dictionary()
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (
        ("layers", 2), ("embed_dim", 16), ("ffn_embed_dim", 24), ("attention_heads", 2))}  # fmt: skip
    args = argparse.Namespace(**sizes, lang_pairs=["in-out", "out-in"], dropout=0.0)
    base_multilingual_architecture(args)
    task = MultilingualTranslationTask.__new__(MultilingualTranslationTask)
    task.dicts, task.langs, task.model_lang_pairs = {"in": words, "out": words}, ["in", "out"], args.lang_pairs
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = MultilingualTransformerModel.build_model(args, task)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.35)
    return model.eval()


@pytest.mark.parametrize("packing", ["off", "always"])
@pytest.mark.parametrize("options", [{}, dict(unk_penalty=0.7), LONG], ids=str)
def test_a_decoder_that_is_a_property(options: dict[str, Any], packing: str) -> None:
    with judge.configured(packing=packing):
        judge.compare(lambda: models.generate(multilingual(), models.batch(), **{"beam_size": 3, **options}))


def test_a_decoder_that_is_a_property_in_recorded_steps() -> None:
    with judge.configured(replay="always"):
        judge.compare(lambda: models.generate(multilingual(), models.batch(), **LONG))
    assert statistics.counts(multilingual()).replays


def test_an_ensemble_of_models_with_properties() -> None:
    judge.compare(lambda: models.generate([multilingual(), "learned"], models.batch()))


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_property_of_the_users(part: str) -> None:
    """It may be another at each look."""
    looks: list[int] = []
    model = models.changed(bool)
    inner = model._modules.pop(part)

    def look(self: Any) -> Any:
        looks.append(1)
        return inner

    model.__class__ = type("Mine", (type(model),), {part: property(look)})
    generator = SequenceGenerator([model], models.dictionary(), beam_size=2, max_len_b=9)
    expected = judge.stock(lambda: generator.generate([model], models.batch()))
    result, (call,) = judge.ours(lambda: generator.generate([model], models.batch()), strict=False)
    assert (call.tier, call.reason) == ("stock", f"Mine has its own {part}")
    judge.assert_same(expected, result, exactly=True)


# ---------------------------------------------------------------------------------------------- attributes
def _counting(base: type, name: str) -> type:
    """A class whose method `name` counts its calls in `self`."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return getattr(super(kind, self), name)(*args, **kwargs)

    kind = type("Mine", (base,), {name: method})
    return kind


def _count_of(thing: Any) -> Callable[[], Any]:
    return lambda: vars(thing).pop("count", 0)


@pytest.mark.parametrize("name", ["_prefix_tokens", "replicate_first_beam", "finalize_hypos", "is_finished"])
def test_a_generator_that_counts(name: str) -> None:
    model, (sample, prefix) = models.load("post-norm"), models.staggered(6)
    generator = _counting(SequenceGenerator, name)([model], models.dictionary(), beam_size=3, max_len_b=10)
    run = functools.partial(generator.generate, [model], sample, prefix_tokens=prefix)
    compare_with_state(run, _count_of(generator))


def test_a_generator_that_looks_at_itself_while_it_runs() -> None:
    """What a method has written, another object sees that holds the generator."""
    seen: list[int] = []

    class Mine(SequenceGenerator):
        def finalize_hypos(self, step: int, *args: Any) -> Any:
            self.last = step
            return super().finalize_hypos(step, *args)

    class Watching(search.BeamSearch):
        def prune_sentences(self, batch_idxs: Any) -> None:
            seen.append(generator.last)

    model, strategy = models.load("post-norm"), search.BeamSearch(models.dictionary())
    generator = Mine([model], models.dictionary(), beam_size=3, max_len_b=10, search_strategy=strategy)
    strategy.prune_sentences = functools.partial(Watching.prune_sentences, strategy)
    sample, prefix = models.staggered(6)
    compare_with_state(lambda: generator.generate([model], sample, prefix_tokens=prefix), taken(seen))


@pytest.mark.parametrize(
    "name", ["forward_encoder", "forward_decoder", "reorder_encoder_out", "reorder_incremental_state"]
)
def test_an_ensemble_that_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a class, on one object, or in fairseq's own class."""
    model = models.load("post-norm")
    mine = _counting(EnsembleModel, name)([model])
    generator = SequenceGenerator(mine, models.dictionary(), beam_size=3, max_len_b=9)
    reason = "the models are held by Mine, not by fairseq's EnsembleModel"
    compare_left_to_stock(lambda: generator.generate([model], models.batch()), _count_of(mine), reason)

    calls: list[str] = []
    inner = getattr(EnsembleModel, name)

    @functools.wraps(inner)
    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return inner(*args, **kwargs)

    generator = SequenceGenerator([model], models.dictionary(), beam_size=3, max_len_b=9)
    run = functools.partial(generator.generate, [model], models.batch())
    setattr(generator.model, name, functools.partial(noting, generator.model))
    compare_left_to_stock(run, taken(calls), f"EnsembleModel has its own {name}")
    delattr(generator.model, name)
    monkeypatch.setattr(EnsembleModel, name, noting)
    compare_left_to_stock(run, taken(calls), f"EnsembleModel has its own {name}")


@pytest.mark.parametrize("name", ["post-norm", "lm"])
def test_a_model_that_counts(name: str) -> None:
    """Its softmax runs on the model itself, once a step, a prompt or none."""
    model = models.changed(lambda m: setattr(m, "__class__", _counting(type(m), "get_normalized_probs")), name)
    run = functools.partial(models.prompted if name == "lm" else models.generate, model)
    run = functools.partial(run, models.prompts() if name == "lm" else models.batch(), beam_size=3, max_len_b=12)
    compare_with_state(run, _count_of(model), replay="always")


@pytest.mark.parametrize("name", ["post-norm", "lm"])
def test_a_decoder_whose_softmax_counts(name: str) -> None:
    """The model calls it on the decoder itself."""
    model = models.changed(
        lambda m: setattr(m.decoder, "__class__", _counting(type(m.decoder), "get_normalized_probs")), name
    )
    run = functools.partial(models.prompted if name == "lm" else models.generate, model)
    run = functools.partial(run, models.prompts() if name == "lm" else models.batch(), beam_size=3, max_len_b=12)
    compare_with_state(run, _count_of(model.decoder), replay="always")


@pytest.mark.parametrize("name", ["buffered_future_mask", "output_layer", "reorder_incremental_state", "__call__"])
def test_a_decoder_that_counts(name: str) -> None:
    """Also in what a step of fairseq's calls only at times."""
    kind = _counting(TransformerDecoder, name)
    model = models.changed(lambda m: setattr(m.decoder, "__class__", kind))
    judge.compare_fallback(lambda: models.generate(model, models.batch()), f"Mine has its own {name}")
    if name in ("output_layer", "reorder_incremental_state"):
        run = functools.partial(models.generate, model, models.batch())
        compare_left_to_stock(run, _count_of(model.decoder), f"Mine has its own {name}")


def test_a_layer_that_counts() -> None:
    model = models.changed(bool)
    for layer in model.decoder.layers:
        layer.__class__ = _counting(type(layer), "residual_connection")
    compare_left_to_stock(
        lambda: models.generate(model, models.batch()),
        lambda: sum(_count_of(layer)() for layer in model.decoder.layers),
        "Mine has its own residual_connection",
    )


def test_subclasses_that_change_nothing_of_a_search() -> None:
    class Mine(TransformerDecoder):
        def __init__(self) -> None:
            raise NotImplementedError

        def build_decoder_layer(self, *args: Any) -> Any:
            raise NotImplementedError

        def something_else(self) -> None:
            raise NotImplementedError

    class Layer(TransformerDecoderLayerBase):
        pass

    def change(model: Any) -> None:
        model.decoder.__class__ = Mine
        model.decoder.layers[1].__class__ = Layer

    model = models.changed(change)
    judge.compare(lambda: models.generate(model, models.batch()), is_fast=True)


@pytest.mark.parametrize("name", ["forward_embedding", "forward", "forward_torchscript"])
def test_an_encoder_that_counts(name: str) -> None:
    """It is run itself; the decoder runs over the tree."""
    model = models.changed(lambda m: setattr(m.encoder, "__class__", _counting(TransformerEncoder, name)))
    state = _count_of(model.encoder)
    expected = judge.stock(lambda: models.generate(model, models.batch()))
    of_stock = state()
    result, calls = judge.ours(lambda: models.generate(model, models.batch()))
    judge.assert_over_the_tree(calls)
    judge.assert_same(expected, result)
    assert of_stock and state() == of_stock


def test_an_encoder_that_is_asked_at_each_step() -> None:
    kind = _counting(TransformerEncoder, "reorder_encoder_out")
    model = models.changed(lambda m: setattr(m.encoder, "__class__", kind))
    run = functools.partial(models.generate, model, models.batch())
    compare_left_to_stock(run, _count_of(model.encoder), "Mine has its own reorder_encoder_out")


def test_layers_of_the_encoder_that_count() -> None:
    model = models.changed(bool)
    for layer in model.encoder.layers:
        layer.__class__ = _counting(type(layer), "residual_connection")
    state = lambda: sum(_count_of(layer)() for layer in model.encoder.layers)  # noqa: E731
    expected = judge.stock(lambda: models.generate(model, models.batch()))
    of_stock = state()
    result, calls = judge.ours(lambda: models.generate(model, models.batch()))
    judge.assert_over_the_tree(calls)
    judge.assert_same(expected, result)
    assert of_stock and state() == of_stock


class Caching(nn.Module):
    """Remembers the last rows, and is told when hypotheses are reordered."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.count = inner, 0

    def forward(self, rows: torch.Tensor) -> Any:
        return self.inner(rows)

    def reorder_incremental_state(self, incremental_state: Any, new_order: torch.Tensor) -> None:
        self.count += 1


def test_a_module_with_a_state_of_its_own() -> None:
    model = models.changed(lambda m: setattr(m.decoder.layers[1], "fc1", Caching(m.decoder.layers[1].fc1)))

    def state() -> int:
        module = model.decoder.layers[1].fc1
        found, module.count = module.count, 0
        return int(found)

    reason = "decoder.layers.1.fc1 keeps a state of its own from step to step"
    compare_left_to_stock(lambda: models.generate(model, models.batch()), state, reason)


def test_a_blocker_of_ones_own() -> None:
    class Mine(NGramRepeatBlock):
        def forward(self, tokens: Any, lprobs: Any, bsz: int, beam_size: int, step: int) -> Any:
            self.count = getattr(self, "count", 0) + 1
            lprobs[:, 5 + step % 7] = -torch.inf
            return lprobs

    model = models.load("post-norm")
    generator = SequenceGenerator([model], models.dictionary(), beam_size=3, max_len_b=9)
    generator.repeat_ngram_blocker = Mine(3)
    compare_with_state(lambda: generator.generate([model], models.batch()), _count_of(generator.repeat_ngram_blocker))


def test_beams_that_one_model_is_told() -> None:
    """What a new generator tells its models, however they take it."""
    told: list[int] = []
    model = models.changed(bool, "bart")
    model.set_beam_size = told.append
    SequenceGenerator([model], models.dictionary(), beam_size=3)
    model = models.changed(bool)
    model.set_beam_size = told.append
    SequenceGenerator([model], models.dictionary(), beam_size=4)
    assert told == [3, 4]


# ---------------------------------------------------------------------------------------------- hooks and the like
class Noisy(nn.Module):
    """Notes its calls and draws random numbers."""

    def __init__(self, inner: nn.Module, notes: list[Any]) -> None:
        super().__init__()
        self.inner, self.notes = inner, notes

    def forward(self, rows: torch.Tensor) -> Any:
        self.notes.append(tuple(rows.shape))
        output = self.inner(rows)
        return output + torch.rand(output.shape[-1]) * 0.1


def _hook(path: str) -> Callable[[Any, list[Any]], None]:
    def change(model: Any, notes: list[Any]) -> None:
        module = model.get_submodule(path)
        hook = lambda m, args, output: notes.append((m is module, tuple(args[0].shape)))  # noqa: E731
        module.register_forward_hook(hook)

    return change


def _pre_hook(path: str) -> Callable[[Any, list[Any]], None]:
    def change(model: Any, notes: list[Any]) -> None:
        module = model.get_submodule(path)
        module.register_forward_pre_hook(lambda m, args: notes.append((m is module, tuple(args[0].shape))))

    return change


def _module(path: str) -> Callable[[Any, list[Any]], None]:
    def change(model: Any, notes: list[Any]) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Noisy(model.get_submodule(path), notes))

    return change


def _forward(path: str) -> Callable[[Any, list[Any]], None]:
    def change(model: Any, notes: list[Any]) -> None:
        module = model.get_submodule(path)
        forward = module.forward

        def noting(rows: torch.Tensor) -> Any:
            notes.append(tuple(rows.shape))
            return forward(rows)

        module.forward = noting

    return change


@pytest.mark.parametrize("name", ["post-norm", "lm"])
@pytest.mark.parametrize("path", ["decoder.layers.1.fc1", "decoder.layers.0.self_attn.k_proj"])
@pytest.mark.parametrize("change", [_hook, _pre_hook, _module, _forward], ids=lambda change: change.__name__)
def test_parts_that_are_watched(change: Any, path: str, name: str) -> None:
    """Each is called as often and with as many rows as in stock, prompts and recordings or none."""
    notes: list[Any] = []
    model = models.changed(lambda m: change(path)(m, notes), name)
    run = functools.partial(models.prompted if name == "lm" else models.generate, model)
    sample = models.prompts() if name == "lm" else models.staggered(5)[0]
    compare_with_state(functools.partial(run, sample, beam_size=3, max_len_b=12), taken(notes), replay="always")


@pytest.mark.parametrize("change", [_hook, _module, _forward], ids=lambda change: change.__name__)
def test_projections_of_the_source_that_are_watched(change: Any) -> None:
    """Over the tree they are called with a row for each sentence, not for each hypothesis."""
    notes: list[Any] = []
    path = "decoder.layers.2.encoder_attn.v_proj"
    model = models.changed(lambda m: change(path)(m, notes))
    what = {_hook: "has hooks of yours", _module: "is Noisy with code of yours", _forward: "has a forward of yours"}
    run = functools.partial(models.generate, model, models.batch())
    compare_left_to_stock(run, taken(notes), f"{path} {what[change]}")


@pytest.mark.parametrize("change", [_hook, _forward], ids=lambda change: change.__name__)
@pytest.mark.parametrize("path", ["layers.1.self_attn", "layers.0.encoder_attn"])
def test_weights_of_attention_that_are_watched(path: str, change: Any) -> None:
    """Dropout is called on them, with training or without, and hooks there look at them."""
    notes: list[Any] = []
    path = f"decoder.{path}.dropout_module"
    model = models.changed(lambda m: change(path)(m, notes))
    what = {_hook: "has hooks of yours", _forward: "has a forward of yours"}
    run = functools.partial(models.generate, model, models.batch())
    compare_left_to_stock(run, taken(notes), f"{path} {what[change]}")


def test_layers_that_are_watched() -> None:
    """A hook sees the layer itself."""
    notes: list[Any] = []
    model = models.changed(lambda m: _hook("decoder.layers.1")(m, notes))
    run = functools.partial(models.generate, model, models.batch())
    compare_left_to_stock(run, taken(notes), "decoder.layers.1 has hooks of yours")


def test_a_global_hook() -> None:
    notes: list[Any] = []
    register = nn.modules.module.register_module_forward_hook
    handle = register(lambda module, args, output: notes.append(type(module).__name__))
    try:
        run = functools.partial(models.generate, "post-norm", models.batch())
        compare_left_to_stock(run, taken(notes), "a global hook of yours sees the calls of all modules")
    finally:
        handle.remove()
    judge.compare(run)


@pytest.mark.parametrize(
    ("owner", "name", "reason"),
    [
        (MultiheadAttention, "forward", "MultiheadAttention has its own forward"),
        (TransformerDecoder.__mro__[1], "extract_features_scriptable", "has its own extract_features_scriptable"),
        (TransformerDecoderLayerBase, "forward", "has its own forward"),
        (nn.Module, "__call__", "has its own __call__"),
        (utils, "softmax", "something of yours has replaced fairseq.utils.softmax"),
        (utils, "log_softmax", "something of yours has replaced fairseq.utils.log_softmax"),
        (torch, "bmm", "something of yours has replaced torch.bmm"),
        (nn.functional, "linear", "something of yours has replaced torch.nn.functional.linear"),
    ],
    ids=str,
)
def test_functions_that_are_replaced(owner: Any, name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what bears their names, and calls them."""
    notes: list[Any] = []
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def noting(*args: Any, **kwargs: Any) -> Any:
        notes.append(1)
        return inner(*args, **kwargs)

    run = functools.partial(models.generate, "post-norm", models.batch())
    judge.compare(run)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, noting)
        expected = judge.stock(run)
        of_stock = len(notes)
        result, (call,) = judge.ours(run, strict=False)
        assert call.tier == "stock" and reason in str(call.reason), call
        assert of_stock and len(notes) == 2 * of_stock
    judge.assert_same(expected, result, exactly=True)
    judge.compare(run)


class Counted(torch.Tensor):
    """A tensor that is called by another class."""


@pytest.mark.parametrize("path", ["decoder.layers.0.fc1", "encoder.layers.1.fc2", "decoder.embed_tokens"])
def test_weights_of_another_class(path: str) -> None:
    def change(model: Any) -> None:
        module = model.get_submodule(path)
        module.weight = nn.Parameter(module.weight.detach().as_subclass(Counted), requires_grad=False)

    reason = f"{path} has weights of the class Counted"
    judge.compare_fallback(lambda: models.generate(models.changed(change), models.batch()), reason)


@pytest.mark.parametrize("name", ["post-norm", "lm"])
def test_parts_that_are_traced(name: str) -> None:
    """With rows of their own number and no other, as tracing may bake in."""

    class Baked(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.inner(rows).reshape(rows.shape[0], rows.shape[1], -1)

    def change(model: Any) -> None:
        layer = model.decoder.layers[1]
        layer.fc1 = torch.jit.trace(Baked(layer.fc1), torch.zeros(1, 12, 32))

    model = models.changed(change, name)
    sample = models.prompts([6, 6, 6, 6]) if name == "lm" else models.batch()
    run = functools.partial(models.prompted if name == "lm" else models.generate, model, sample, beam_size=3)
    with judge.configured(replay="always"):
        judge.compare(functools.partial(run, min_len=9, max_len_b=9), is_fast=False)


def test_a_projection_of_the_source_that_is_traced() -> None:
    def change(model: Any) -> None:
        attention = model.decoder.layers[1].encoder_attn
        attention.k_proj = torch.jit.trace(attention.k_proj, torch.zeros(13, 16, 32))

    reason = "decoder.layers.1.encoder_attn.k_proj has been compiled"
    judge.compare_fallback(lambda: models.generate(models.changed(change), models.batch()), reason)


def test_weights_that_are_computed() -> None:
    """Once for each call of the layer."""
    notes: list[Any] = []

    class Halved(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            notes.append(1)
            return weight / 2

    def change(model: Any) -> None:
        layer = model.decoder.layers[0]
        nn.utils.parametrize.register_parametrization(layer.fc1, "weight", Halved())
        nn.utils.parametrize.register_parametrization(layer.self_attn.v_proj, "weight", Halved())
        nn.utils.parametrizations.weight_norm(layer.fc2)
        nn.utils.weight_norm(layer.encoder_attn.k_proj)

    model = models.changed(change)
    notes.clear()
    run = functools.partial(models.generate, model, models.batch(), **LONG)
    compare_with_state(run, taken(notes), replay="always")


@pytest.mark.parametrize(
    ("owner", "name", "reason"),
    [
        (MultiheadAttention, "forward", "MultiheadAttention has its own forward"),
        (TransformerDecoderLayerBase, "forward", "TransformerDecoderLayerBase has its own forward"),
        (nn.Linear, "forward", "decoder.layers.0.encoder_attn.k_proj is Linear with code of yours"),
    ],
    ids=str,
)
def test_functions_in_a_decorator_of_torchs(
    owner: Any, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of the wrapper is torch's, and what it wraps is the user's."""
    notes: list[Any] = []
    inner = getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        notes.append(1)
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, torch.no_grad()(noting))
    compare_left_to_stock(functools.partial(models.generate, "post-norm", models.batch()), taken(notes), reason)


def test_a_linear_layer_in_a_decorator_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model without a source the tree is used, and each layer is called as in stock."""
    notes: list[Any] = []
    inner = nn.Linear.forward

    def noting(self: Any, rows: torch.Tensor) -> Any:
        notes.append(tuple(rows.shape))
        return inner(self, rows)

    monkeypatch.setattr(nn.Linear, "forward", torch.no_grad()(noting))
    with judge.configured(packing="always"):
        run = functools.partial(models.prompted, "lm", models.prompts(), beam_size=3, max_len_b=12)
        compare_with_state(run, taken(notes), replay="always")


@pytest.mark.parametrize("name", ["post-norm", "lm"])
def test_a_function_that_a_layer_calls(name: str) -> None:
    """It is neither the layer's forward nor a hook, and yet the user's."""
    notes: list[Any] = []

    def noting(rows: torch.Tensor) -> torch.Tensor:
        notes.append(tuple(rows.shape))
        return rows.relu()

    model = models.changed(lambda m: setattr(m.decoder.layers[1], "activation_fn", noting), name)
    run = functools.partial(models.prompted if name == "lm" else models.generate, model)
    sample = models.prompts() if name == "lm" else models.staggered(5)[0]
    compare_with_state(functools.partial(run, sample, beam_size=3, max_len_b=12), taken(notes), replay="always")


def test_a_hook_on_a_fused_language_model() -> None:
    """On the model itself, which the loop calls."""
    notes: list[Any] = []

    def halved(module: Any, args: Any, output: Any) -> Any:
        notes.append((module is fused, tuple(args[0].shape)))
        return output[0] * 0.5, *output[1:]

    fused = models.changed(lambda m: m.register_forward_hook(halved), "lm")
    run = functools.partial(models.generate, "post-norm", models.batch(), lm_model=fused, lm_weight=0.7)
    compare_with_state(run, taken(notes))


@pytest.mark.parametrize("name", ["init_constraints", "prune_sentences", "update_constraints"])
def test_what_else_the_loop_tells_a_search(name: str) -> None:
    """fairseq's own beam search does nothing with it."""
    notes: list[Any] = []
    strategy = search.BeamSearch(models.dictionary())
    setattr(strategy, name, lambda *args: notes.append(len(args)))
    sample, prefix = models.staggered(5)
    run = functools.partial(models.generate, "post-norm", sample, prefix=prefix, beam_size=3)
    compare_with_state(lambda: run(strategy=lambda words: strategy), taken(notes))


# ---------------------------------------------------------------------------------------------- trials
@pytest.mark.parametrize("change", [_hook, _module, _forward], ids=lambda change: change.__name__)
@pytest.mark.parametrize("path", ["decoder.layers.1.fc1", "encoder.layers.0.fc2"])
def test_no_trial_where_it_would_show(change: Any, path: str) -> None:
    """Keys alone are stored once an output has been looked at, which reads it again."""
    notes: list[Any] = []
    model = models.changed(lambda m: change(path)(m, notes))
    run = functools.partial(models.generate, model, models.batch(), beam_size=3)
    compare_with_state(run, taken(notes), is_fast=path.startswith("encoder"), cache="k")
    with judge.configured(cache="k"):
        _, (call,) = judge.ours(run)
    assert f"no output is looked at: {path} " in str(call.plan) and call.cache == "kv"


def test_a_trial_of_fairseqs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing of the user's would see it, there is one."""
    looked: list[int] = []
    noted = accuracy.judge
    monkeypatch.setattr("fastgen.optimizer.fairseq.cache.slim.judge", lambda *args: looked.append(1) or noted(*args))
    model = models.changed(bool)
    with judge.configured(cache="k"):
        before = torch.get_rng_state()
        torch.manual_seed(judge.SEED)
        judge.ours(lambda: models.generate(model, models.batch(), beam_size=3))
        after = torch.get_rng_state()
    torch.set_rng_state(before)
    judge.stock(lambda: models.generate(model, models.batch(), beam_size=3))
    assert looked and torch.equal(after, torch.get_rng_state())


def test_fastgen_is_undisturbed() -> None:
    """The last test: a plain model is accelerated as ever."""
    judge.compare(lambda: models.generate("post-norm", models.batch()), is_fast=True)
    assert fastgen.status().calls[-1].tier == "fast"


@pytest.mark.parametrize("tier", ["auto", "fast"])
@pytest.mark.parametrize(
    "name", ["counting_functions", "counting_operators", "rounding_functions", "rounding_operators"]
)
def test_a_mode_of_the_users(name: str, tier: str) -> None:
    """It sees each operation of torch, and may change what comes out; packed products would pass it by."""

    def run() -> Any:
        with modes.MODES[name].entered():
            return models.generate("post-norm", models.batch())

    with judge.configured(tier=tier, packing="always"):
        judge.compare_fallback(run, "a mode of yours")


class _Halved(type(models.load("post-norm"))):  # type: ignore[misc]
    def get_normalized_probs(self, *args: Any, **options: Any) -> torch.Tensor:
        found: torch.Tensor = super().get_normalized_probs(*args, **options) * 0.5
        return found


def _with_own_softmax(model: Any) -> None:
    model.__class__ = _Halved


@pytest.mark.parametrize("replacement", ["adaptive", "own"])
def test_a_model_that_takes_the_place_of_another_in_the_ensemble(replacement: str) -> None:
    """The host decodes with the models, and asks others of the ensemble's attributes for the first of once."""
    other = models.load("adaptive") if replacement == "adaptive" else models.changed(_with_own_softmax)

    def run() -> Any:
        generator = SequenceGenerator([models.load("post-norm")], models.dictionary(), beam_size=4, max_len_b=20)
        generator.model.models[0] = other
        return generator.generate(None, models.batch())

    judge.assert_same(judge.stock(run), judge.ours(run, strict=False)[0])
    assert "exchanged" in str(judge.ours(run, strict=False)[1][-1].reason)


def test_a_model_that_joins_the_ensemble_later() -> None:
    generator = SequenceGenerator([models.load("post-norm")], models.dictionary(), beam_size=4)
    generator.model.models.append(models.load("pre-norm"))
    with pytest.raises(IndexError):  # as in stock
        generator.generate(None, models.batch())


@pytest.mark.parametrize("part", ["encoder", "language model"])
def test_a_scale_that_the_host_ignores(part: str) -> None:
    """Where attention keeps no keys of earlier steps the host's has a scale of its own."""

    def scaled(module: Any) -> None:
        for each in module.modules():
            if isinstance(each, MultiheadAttention):
                each.scaling *= 4

    if part == "encoder":
        model, options = models.changed(lambda model: scaled(model.encoder), "pre-norm"), {}
    else:
        model, options = models.load("pre-norm"), {"lm_model": models.changed(scaled, "lm"), "lm_weight": 0.5}
    judge.compare(lambda: models.generate(model, models.batch(), **options))
