"""Code of the user's that runs between two steps: it is called as by stock, steps are recorded all the same, and what
it changes in the model is seen by the next step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import zoo
from emulated_graph import Graph
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.models.bart import modeling_bart

from fastgen.layers import linear, packed_weights
from fastgen.optimizer.transformers import versions
from fastgen.replay import replayer, statistics, store
from fastgen.replay.guarded import GuardedReplayer

pytestmark = [
    pytest.mark.skipif(not versions.COUNTS_IN_TENSORS, reason="steps of this version are never replayed"),
    pytest.mark.usefixtures("recording"),
]

STEPS, CHANGED_AT = 14, 8
LONG = dict(min_new_tokens=STEPS, max_new_tokens=STEPS, return_dict_in_generate=False)
Change = Callable[[Any, Any], None]


def inputs_of(family: str, seed: int = 0, batch: int = 2) -> dict[str, Any]:
    return {**zoo.inputs_for(family, seed=seed, batch=batch), **zoo.FAMILIES[family].generate}


class User:
    """Somebody whose code is called between steps: notes how, and may change the model once at a certain step."""

    def __init__(self, change: Callable[[], None] = lambda: None, at: int = CHANGED_AT) -> None:
        self.calls: list[Any] = []
        self._change, self._at, self._lengths = change, at, set[int]()

    def note(self, length: int, what: Any) -> None:
        self.calls.append(what)
        if length not in self._lengths:
            self._lengths.add(length)
            if len(self._lengths) == self._at:
                self._change()


class Writes(LogitsProcessor):
    """Writes to the tokens that it is shown."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        input_ids[:, -1] = self.token
        return scores


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_processor_that_writes_to_the_tokens(tokens: int) -> None:
    """The host shows its own rows from the second step on, and at the first a copy of the prompts."""
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", ragged=False)
    found = []
    for run in (harness.run_stock, harness.run_fastgen):
        own = {name: value.clone() for name, value in inputs.items()}
        processors = LogitsProcessorList([Writes(9)])
        result = run(model, own, num_beams=3, max_new_tokens=tokens, logits_processor=processors)
        found.append(result if run is harness.run_stock else result[0])
        assert torch.equal(own["input_ids"], inputs["input_ids"])
    assert torch.equal(*found)


class Replaces(StoppingCriteria):
    """Puts another token in place of the last one."""

    def __init__(self, token: int, other: int) -> None:
        self.token, self.other = token, other

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        last = input_ids[:, -1]
        last.masked_fill_(last == self.token, self.other)
        return input_ids[:, -1] == 7


@pytest.mark.parametrize("beams", [1, 3])
def test_a_criterion_that_replaces_the_last_token(beams: int) -> None:
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama", ragged=False)
    plain = harness.run_stock(model, inputs, num_beams=beams, max_new_tokens=6)
    found = []
    for run in (harness.run_stock, harness.run_fastgen):
        criteria = StoppingCriteriaList([Replaces(int(plain[0, -4]), 11)])
        result = run(model, inputs, num_beams=beams, max_new_tokens=6, stopping_criteria=criteria)
        found.append(result if run is harness.run_stock else result[0])
    assert torch.equal(*found) and not torch.equal(found[0], plain)


def as_function(user: User) -> dict[str, Any]:
    def allowed(sentence: int, tokens: Tensor) -> list[int]:
        user.note(len(tokens), (sentence, tokens.tolist()))
        return [word for word in range(4, zoo.VOCAB) if (word + int(tokens[-1])) % 3]

    return dict(prefix_allowed_tokens_fn=allowed, num_beams=4)


class _Processor(LogitsProcessor):
    def __init__(self, user: User) -> None:
        self._user = user

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._user.note(input_ids.shape[1], (input_ids.tolist(), scores.shape))
        return scores + 0.3 * (torch.arange(scores.shape[1]) % 2)


class _Criterion(StoppingCriteria):
    def __init__(self, user: User) -> None:
        self._user = user

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self._user.note(input_ids.shape[1], input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class _Streamer:
    def __init__(self, user: User) -> None:
        self._user, self._count = user, 0

    def __deepcopy__(self, memo: Any) -> _Streamer:
        return self  # each run gets one of its own

    def put(self, value: Tensor) -> None:
        self._count += 1
        self._user.note(self._count, value.tolist())

    def end(self) -> None:
        self._user.calls.append("end")


WAYS: dict[str, Callable[[User], dict[str, Any]]] = {
    "function": as_function,
    "function, greedy": lambda user: {**as_function(user), "num_beams": 1},
    "processor": lambda user: dict(num_beams=4, logits_processor=lambda: LogitsProcessorList([_Processor(user)])),
    "processor, greedy": lambda user: dict(logits_processor=lambda: LogitsProcessorList([_Processor(user)])),
    "criterion": lambda user: dict(num_beams=4, stopping_criteria=lambda: StoppingCriteriaList([_Criterion(user)])),
    "streamer": lambda user: dict(streamer=_Streamer(user)),
}


def options_of(way: str, user: User) -> dict[str, Any]:
    return {"num_beams": 1, **LONG, **WAYS[way](user)}


def run_both(
    way: str, model: Any, inputs: dict[str, Any], change: Callable[[Any], None] = lambda model: None
) -> tuple[Any, Any, Any]:
    """What stock returns, what fastgen returns, and fastgen's copy of the model, which `change` may have changed."""
    found, calls, ours = [], [], None
    for run in (harness.run_stock, lambda *args, **options: harness.run_fastgen(*args, **options)[0]):
        ours = copy.deepcopy(model)
        user = User(lambda model=ours: change(model))
        found.append(run(ours, inputs, **options_of(way, user)))
        calls.append(user.calls)
    assert calls[0] == calls[1], "the user's code was not called as by stock"
    return *found, ours


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["bart", "llama", "t5", "gpt2"])
def test_steps_are_recorded(family: str, way: str) -> None:
    """The user's code is called as often as by stock, in the same order and with the same arguments."""
    batch = 1 if way == "streamer" or "greedy" in way else 2
    stock, found, ours = run_both(way, zoo.load(family), inputs_of(family, batch=batch))
    assert torch.equal(stock, found)
    counts = statistics.counts(ours)
    assert counts.captures == 1 and counts.replays >= STEPS - 5


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_later_calls(family: str, tier: str, recording: type[replayer.GraphBackend]) -> None:
    """Each kind of call has a recording: one on copies of weights, the other on the weights themselves."""
    model, few = copy.deepcopy(zoo.load(family)), options_of("function", User())
    plain = {**LONG, "num_beams": 4}
    with harness.configured(packing="off" if recording is Graph else "always"):  # on a GPU no weights are packed
        for number, options in enumerate((few, few, plain, few, plain)):
            before = copy.copy(statistics.counts(model))
            harness.compare(model, inputs_of(family, number), tier=tier, **options)
            after = statistics.counts(model)
            captured, is_first = after.captures - before.captures, number in (0, 2)
            searches = int(options is plain and recording is Graph and tier == "fast")  # perhaps captured, too
            assert is_first <= captured <= is_first * (1 + searches)
            assert after.replays - before.replays >= STEPS - 5
    assert store.count(model) == 2


# ---------------------------------------------------------------------------------------------- changes
def _layers(model: Any) -> list[Any]:
    return list(model.get_decoder().layers)


def _in_place(model: Any, patch: Any) -> None:
    for layer in _layers(model):
        with torch.no_grad():
            layer.fc1.weight.mul_(-1)


def _data(model: Any, patch: Any) -> None:
    for layer in _layers(model):
        layer.self_attn.out_proj.weight.data.numpy()[...] *= -1
        layer.fc2.bias.data.add_(1)


def _other_storage(model: Any, patch: Any) -> None:
    for layer in _layers(model):
        layer.fc2.weight.data = -layer.fc2.weight.detach()


def _other_parameter(model: Any, patch: Any) -> None:
    for layer in _layers(model):
        layer.fc2.weight = torch.nn.Parameter(-layer.fc2.weight.detach())


def _other_module(model: Any, patch: Any) -> None:
    model.lm_head = copy.deepcopy(model.lm_head)
    model.lm_head.weight.data.mul_(-1)


def _buffer(model: Any, patch: Any) -> None:
    model.final_logits_bias = model.final_logits_bias.clone()
    model.final_logits_bias[0, ::2] += 2


def _activation(model: Any, patch: Any) -> None:
    for layer in _layers(model):
        layer.activation_fn = torch.nn.Tanh()


def _attribute(model: Any, patch: Any) -> None:
    for layer in _layers(model):
        layer.self_attn.scaling = layer.encoder_attn.scaling = -10.0


def _hook(model: Any, patch: Any) -> None:
    _layers(model)[0].fc1.register_forward_hook(lambda module, args, output: -output)


def _forward(model: Any, patch: Any) -> None:
    layer = _layers(model)[0].fc2
    layer.forward = lambda rows: -torch.nn.functional.linear(rows, layer.weight, layer.bias)


def _class(model: Any, patch: Any) -> None:
    forward = modeling_bart.BartDecoderLayer.forward

    def negated(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, -hidden_states, *args, **kwargs)

    patch.setattr(modeling_bart.BartDecoderLayer, "forward", negated)


def _torch(model: Any, patch: Any) -> None:
    norm = torch.nn.functional.layer_norm
    patch.setattr(torch.nn.functional, "layer_norm", lambda *args, **kwargs: norm(*args, **kwargs).flip(-1))


CHANGES: list[Change] = [
    _in_place, _data, _other_storage, _other_parameter, _other_module, _buffer, _activation, _attribute, _hook,
    _forward, _class, _torch,
]  # fmt: skip
# What operators that read memory would not notice.
_UNNOTICED = [_other_storage, _other_parameter, _other_module, _buffer, _activation, _attribute, _hook, _forward]


@pytest.mark.parametrize("rows", ["few", "many"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
@pytest.mark.parametrize("way", WAYS)
def test_a_change_in_the_middle(way: str, change: Change, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are multiplied by the weights as they are, many by packed copies that are compared with the weights."""
    if rows == "many":
        monkeypatch.setattr(linear, "_SKINNY_ROWS", 0)
    batch = 1 if way == "streamer" else 2
    model, inputs = zoo.load("bart"), inputs_of("bart", batch=batch)
    unchanged = run_both(way, model, inputs)[0]
    patches: list[pytest.MonkeyPatch] = []
    found, calls, replays = [], [], 0
    for run in (harness.run_stock, lambda *args, **options: harness.run_fastgen(*args, **options)[0]):
        with monkeypatch.context() as patch, harness.configured(packing="always"):
            patches.append(patch)
            ours = copy.deepcopy(model)
            user = User(lambda model=ours, patch=patch: change(model, patch))
            found.append(run(ours, inputs, **options_of(way, user)))
            calls.append(user.calls)
            replays = statistics.counts(ours).replays
            if rows == "many" and len(found) == 2 and packed_weights.is_native():
                assert packed_weights.count(), "no packed copy has been tried"
    assert torch.equal(*found) and calls[0] == calls[1]
    assert not torch.equal(found[0], unchanged), "the change changes nothing"
    assert replays > 2, "nothing was replayed before it"


@pytest.mark.parametrize("change", _UNNOTICED, ids=lambda change: change.__name__[1:])
def test_the_look_before_each_step_is_what_tells(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedReplayer, "is_current", lambda self: True)
    with pytest.raises(AssertionError, match=r"not called as|False|reads memory that nobody keeps"):
        stock, found, _ = run_both(
            "function", zoo.load("bart"), inputs_of("bart"), lambda model: change(model, monkeypatch)
        )
        assert torch.equal(stock, found)


@pytest.mark.parametrize("change", [_in_place, _other_storage, _other_module, _attribute])
def test_a_change_after_the_last_step(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recorded before it is not for later calls."""
    model, inputs = copy.deepcopy(zoo.load("bart")), inputs_of("bart")
    with harness.configured(packing="always"):
        user = User(lambda: change(model, monkeypatch), at=STEPS)
        harness.run_fastgen(model, inputs, **options_of("function", user))
        assert statistics.counts(model).replays > 2
        for way in ("function", "processor"):
            harness.compare(model, inputs_of("bart", 1), **options_of(way, User()))


@pytest.mark.parametrize("what", ["scaling", "weight"])
def test_a_change_that_is_undone_after_the_call(what: str) -> None:
    """Steps captured after the change are of another model than those that earlier calls have left."""
    model = copy.deepcopy(zoo.load("bart"))
    attentions = [part for layer in _layers(model) for part in (layer.self_attn, layer.encoder_attn)]
    kept = [layer.fc2.weight for layer in _layers(model)]

    def change() -> None:
        if what == "scaling":
            for attention in attentions:
                attention.scaling = -10.0
        else:
            _other_parameter(model, None)

    def undo() -> None:
        for attention in attentions:
            attention.scaling = attention.head_dim**-0.5
        for layer, weight in zip(_layers(model), kept, strict=True):
            layer.fc2.weight = weight

    with harness.configured(replay="always"):
        harness.compare(model, inputs_of("bart"), **options_of("processor", User()))
        assert store.count(model) == 1
        captures = statistics.counts(model).captures
        harness.run_fastgen(model, inputs_of("bart", 1), **options_of("processor", User(change)))
        assert statistics.counts(model).captures > captures, "the change was not seen"
        undo()
        harness.compare(model, inputs_of("bart", 2), **options_of("processor", User()))


def test_other_weights_at_each_step() -> None:
    """Nothing is ever captured: each step runs as the model then is."""

    class Restless(User):
        def note(self, length: int, what: Any) -> None:
            if length not in self._lengths:
                self._change()
            super().note(length, what)

    found = []
    for run in (harness.run_stock, lambda *args, **options: harness.run_fastgen(*args, **options)[0]):
        model = copy.deepcopy(zoo.load("bart"))
        user = Restless(lambda model=model: _other_storage(model, None), at=0)
        found.append(run(model, inputs_of("bart"), **options_of("function", user)))
        assert statistics.counts(model).replays == 0
    assert torch.equal(*found)


def test_a_model_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds what may change unseen: steps are not recorded while the user's code runs between them."""
    model = copy.deepcopy(zoo.load("bart"))
    _layers(model)[0].fc1.notes = object()
    harness.compare(model, inputs_of("bart"), **options_of("function", User()))
    assert statistics.counts(model).captures == 0
    harness.compare(model, inputs_of("bart"), **{**LONG, "num_beams": 4})
    assert statistics.counts(model).captures


class _Remembering(LogitsProcessor):
    """Finds out by the rows of the last step which of them each row continues, and bans a token by where it began."""

    def __init__(self) -> None:
        self._rows, self._state = torch.zeros(0, 0), torch.zeros(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if len(self._rows) != len(input_ids):
            self._state = torch.arange(len(input_ids))
        else:
            before = self._rows.tolist()
            parents = [before.index(row) for row in input_ids[:, :-1].tolist()]
            self._state = self._state[parents] * 3 + input_ids[:, -1]
        self._rows = input_ids
        banned = torch.zeros_like(scores, dtype=torch.bool)
        banned[torch.arange(len(scores))[:, None], (self._state[:, None] + torch.arange(9)) % zoo.VOCAB] = True
        return scores.masked_fill(banned, -5.0)


class _Editing(LogitsProcessor):
    """Writes to the hypotheses, which are the search's own in the host, too."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        input_ids[:, -1] += (input_ids[:, -1] % 5 == 4).long()
        return scores


@pytest.mark.parametrize("kind", [_Remembering, _Editing])
@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_rows_that_a_processor_keeps_or_writes_to(family: str, tier: str, kind: Any) -> None:
    processors = lambda: LogitsProcessorList([kind()])  # noqa: E731, built anew for each run
    options = dict(num_beams=4, max_new_tokens=STEPS, return_dict_in_generate=False)
    harness.compare(zoo.load(family), inputs_of(family), tier, logits_processor=processors, **options)
