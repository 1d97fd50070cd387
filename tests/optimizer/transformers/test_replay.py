"""Decode steps captured once and replayed, as on CUDA, by a tape of operators: the output stays the host's."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from contextlib import nullcontext
from typing import Any

import harness
import numpy
import pytest
import torch
import transformers
import zoo
from emulated_graph import Graph

import fastgen
from fastgen.cache import tree
from fastgen.layers import attention_kernels
from fastgen.optimizer.transformers import interception, versions
from fastgen.optimizer.transformers.model import modules
from fastgen.optimizer.transformers.versions import CACHE_LENGTH
from fastgen.replay import replayer, statistics
from fastgen.replay.tape import Tape

pytestmark = [
    pytest.mark.skipif(not versions.COUNTS_IN_TENSORS, reason="steps of this version are never replayed"),
    pytest.mark.usefixtures("recording"),
]

TOKENS = dict(return_dict_in_generate=False)
DETAILS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)


def _inputs(family: str, **options: Any) -> dict[str, Any]:
    return {**zoo.FAMILIES[family].inputs(zoo.load(family), **options), **zoo.FAMILIES[family].generate}


def _counts(model: Any) -> tuple[int, int]:
    counts = statistics.counts(model)
    return counts.captures, counts.replays


@pytest.mark.parametrize("family", sorted({"m2m_100", "fsmt"}.intersection(zoo.ACCELERATED)))
def test_tables_of_positions_stay_as_they_are(family: str) -> None:
    """How many positions a text will need is not known: the host's table grows when they are there, and not before."""
    model, name = copy.deepcopy(zoo.load(family)), "weight" if family == "fsmt" else "weights"
    tables = [part for part in model.modules() if hasattr(part, "get_embedding")]
    for table in tables:
        short = table.get_embedding(14, table.embedding_dim, table.padding_idx).to(getattr(table, name))
        setattr(table, name, torch.nn.Parameter(short, requires_grad=False) if name == "weight" else short)
    inputs, ending = _inputs(family, length=6), [*range(20, 55)]
    for run in (harness.run_stock, harness.run_fastgen):
        run(model, inputs, num_beams=3, max_new_tokens=60, eos_token_id=ending, early_stopping=True)
        assert tables and {len(getattr(table, name)) for table in tables} == {14}
    for beams in (3, 1):
        harness.compare(copy.deepcopy(model), inputs, num_beams=beams, min_new_tokens=30, max_new_tokens=30)


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("family", sorted(zoo.ACCELERATED))
def test_identical(family: str, tier: str, recording: type[replayer.GraphBackend]) -> None:
    model = copy.deepcopy(zoo.load(family))
    # The model, and our search where nothing may wait for the device.
    parts = 2 if tier == "fast" and recording is Graph else 1
    for options in (DETAILS, TOKENS):
        captures, replays = _counts(model)
        harness.compare(model, _inputs(family), tier=tier, num_beams=4, max_new_tokens=16, **options)
        captures, replays = _counts(model)[0] - captures, _counts(model)[1] - replays
        how = fastgen.status().replayed[type(model).__name__]
        assert captures >= parts and replays >= 3 * parts
        assert re.match(r"{} captured in \d+\.\d\d s, {} steps replayed".format(*_counts(model)), how)
        assert how in " ".join(str(fastgen.status()).split())


@pytest.mark.parametrize("tier", harness.TIERS)
def test_a_model_that_waits_for_a_value(
    tier: str, recording: type[replayer.GraphBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "_NUMBERING_UNLESS_TOLD", {})
    model = copy.deepcopy(zoo.load("trocr"))
    parts = 2 if tier == "fast" and recording is Graph else 1  # the search between the steps is captured
    for options in (DETAILS, TOKENS):
        before = _counts(model)[0]
        harness.compare(model, _inputs("trocr"), tier=tier, num_beams=4, max_new_tokens=16, **options)
        assert _counts(model)[0] - before == (parts - 1 if options is DETAILS else 0), "it is tried once"
        assert "waits for a value" in fastgen.status().replayed[type(model).__name__]


@pytest.mark.parametrize("family", sorted({"bart", "t5", "llama", "mistral"}.intersection(zoo.ACCELERATED)))
def test_slots_are_pruned_and_grow(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "FIRST_STEPS", 3)
    monkeypatch.setattr(replayer, "_PATIENCE", 1)
    model = copy.deepcopy(zoo.load(family))
    harness.compare(model, _inputs(family, batch=5), num_beams=3, min_new_tokens=30, max_new_tokens=30)
    assert _counts(model)[0] > 1 and _counts(model)[1] > 5  # the first replay of each capture is its proof


SEARCHES = {
    "early": dict(num_beams=3, early_stopping=True, num_return_sequences=2),
    "never": dict(num_beams=4, early_stopping="never", length_penalty=2.0),
    "short": dict(num_beams=5, length_penalty=-1.0, repetition_penalty=1.3),
    "ngrams": dict(num_beams=4, no_repeat_ngram_size=2, min_new_tokens=6),
    "several ends": dict(num_beams=3, eos_token_id=[7, 11, 23, 40]),
    "greedy": dict(num_beams=1),
    "samples": dict(num_beams=1, do_sample=True, top_k=0, num_return_sequences=3),
    "sampled beams": dict(num_beams=3, do_sample=True, top_k=20),
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_searches(family: str, search: str) -> None:
    """Sentences leave as they finish, and the last ones end while the host does not know it yet."""
    model = copy.deepcopy(zoo.load(family))
    for batch in (1, 6):
        for options in (DETAILS, TOKENS):
            inputs = _inputs(family, batch=batch)
            harness.compare(model, inputs, max_new_tokens=24, **SEARCHES[search], **options)
    assert _counts(model)[1] > 10


def test_an_embedding_that_encoder_and_decoder_share() -> None:
    model, options = copy.deepcopy(zoo.load("bart")), dict(num_beams=3, min_new_tokens=10, max_new_tokens=10)
    model.resize_token_embeddings(zoo.VOCAB + 2)
    calls: list[int] = []
    model.get_decoder().embed_tokens.register_forward_hook(lambda *_: calls.append(1))
    harness.compare(model, _inputs("bart"), expected="fallback", **options)
    assert len(calls) == 2 * 11 and _counts(model) == (0, 0)
    model = copy.deepcopy(zoo.load("bart"))
    model.get_encoder().layers[0].register_forward_hook(lambda *_: None)  # no step calls it
    harness.compare(model, _inputs("bart"), **options)
    assert _counts(model)[1] > 5


class _Counting(transformers.LlamaForCausalLM):
    """A model of somebody's that counts its own calls and, after the third, computes something else."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        self.calls = 1 if outputs.logits.shape[1] > 1 else self.calls + 1
        outputs.logits = outputs.logits * (1.0 + 0.1 * self.calls)
        return outputs


def test_a_model_that_counts_its_calls() -> None:
    """Not one of its steps is recorded."""
    model = _Counting(copy.deepcopy(zoo.load("llama").config)).eval()
    model.load_state_dict(zoo.load("llama").state_dict())
    model.generation_config = copy.deepcopy(zoo.load("llama").generation_config)
    for tokens in (3, 14):
        options = dict(num_beams=3, min_new_tokens=tokens, max_new_tokens=tokens)
        harness.compare(model, _inputs("llama"), expected="fallback", **options)
        with harness.configured(foreign_code="trial"):
            harness.compare(model, _inputs("llama"), **options)
        assert _counts(model) == (0, 0)


def test_kernels_are_chosen_for_graphs(recording: type[replayer.GraphBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step is captured; a step that runs as it is pays for launching a kernel."""
    append, seen = tree.TreeLayer.append, []

    def noted(self: Any, *args: Any) -> Any:
        seen.append(attention_kernels._are_captured.get())
        return append(self, *args)

    monkeypatch.setattr(tree.TreeLayer, "append", noted)
    for setting in ("always", "off"):
        seen.clear()
        with harness.configured(replay=setting):
            harness.compare(copy.deepcopy(zoo.load("llama")), _inputs("llama"), num_beams=3, max_new_tokens=12)
        assert set(seen) == {setting == "always" and recording is Graph}
    assert not attention_kernels._are_captured.get()


@pytest.mark.parametrize("why", ["a wait for the device", "out of memory"])
def test_a_capture_that_fails_half_way(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the attempt is used: the step is computed from its beginning. Memory may be there at the next call."""
    model = copy.deepcopy(zoo.load("llama"))
    append, calls = tree.TreeLayer.append, []

    def failing(self: Any, *args: Any) -> Any:
        calls.append(self)
        if len(calls) == 2 * 2:  # the second layer, of the step that is captured
            raise RuntimeError(why)
        return append(self, *args)

    monkeypatch.setattr(tree.TreeLayer, "append", failing)
    harness.compare(model, _inputs("llama"), tier="compat", num_beams=3, max_new_tokens=12)
    may_pass = why == "out of memory"
    assert _counts(model) == (0, 0) and (why in fastgen.status().replayed["LlamaForCausalLM"]) != may_pass
    harness.compare(model, _inputs("llama"), tier="compat", num_beams=3, max_new_tokens=12)
    assert (_counts(model)[1] > 0) == may_pass
    fastgen.release()
    harness.compare(model, _inputs("llama"), tier="compat", num_beams=3, max_new_tokens=12)
    assert _counts(model)[1] > 0, "it may be tried again"


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_no_memory_to_prove_a_step(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies that a proof makes do not fit: the step's own result is used, and nothing is replayed unproven."""
    model, whole, made = copy.deepcopy(zoo.load("bart")), replayer._whole, []

    class Large(torch.Tensor):
        def clone(self) -> Any:
            made.append(1)
            if len(made) >= nth:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().clone()

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        patch.setattr(replayer, "_whole", lambda tensor: whole(tensor).as_subclass(Large))
        harness.compare(model, _inputs("bart"), num_beams=3, max_new_tokens=12)
    assert len(made) >= nth and _counts(model)[1] == 0
    harness.compare(model, _inputs("bart"), num_beams=3, max_new_tokens=12)
    assert _counts(model)[1] > 0


@pytest.mark.parametrize("search", ["early", "greedy", "samples"])
@pytest.mark.parametrize("family", sorted(zoo.ACCELERATED))
def test_inference_mode(family: str, search: str) -> None:
    """There torch shows a mode fewer operators: `to`, which copies the position as a float, looks like a view."""
    model, length = copy.deepcopy(zoo.load(family)), dict(min_new_tokens=12, max_new_tokens=15)
    options = {**SEARCHES[search], **TOKENS, **length}
    for batch in (1, 3):
        inputs = _inputs(family, batch=batch)
        if "decoder_input_ids" in inputs:
            inputs["decoder_input_ids"] = inputs["decoder_input_ids"][:batch]
        stock = harness.run_stock(model, inputs, **options)
        with torch.inference_mode():
            for _ in range(2):  # the second call goes on with what the first has kept
                output, _ = harness.run_fastgen(model, inputs, **options)
                harness.assert_same(stock, output)
    assert _counts(model)[1] > 1 and "captured" in fastgen.status().replayed[type(model).__name__]


class _Baking(replayer.Captured):
    """A captured step that always computes what it computed first, as if its position were baked in."""

    def replay(self, leaves: list[Any]) -> Any:
        return super().replay(self._inputs)


class _Scribbling(replayer.Captured):
    """A captured step that writes to other memory than the model's own."""

    def replay(self, leaves: list[Any]) -> Any:
        result = super().replay(leaves)
        for tensor in self.written:
            if tensor.is_floating_point():
                tensor.flatten()[-1].fill_(7.0)
        return result


@pytest.mark.parametrize("kind", [_Baking, _Scribbling])
def test_a_recording_proves_itself(kind: type[replayer.Captured], monkeypatch: pytest.MonkeyPatch) -> None:
    """What replays another step is dropped before its result is used, with a warning and a reason."""
    monkeypatch.setattr(replayer, "Captured", kind)
    model, inputs = copy.deepcopy(zoo.load("llama")), _inputs("llama", batch=2)
    for call in range(2):
        with pytest.warns(RuntimeWarning, match="differs from the model's own step") if not call else nullcontext():
            harness.compare(model, inputs, tier="compat", num_beams=3, min_new_tokens=12, max_new_tokens=12)
    assert _counts(model)[1] == 0, "not one replay was used"
    assert "differs from the model's own step" in fastgen.status().replayed["LlamaForCausalLM"]


def test_the_proof_draws_no_numbers_of_its_own() -> None:
    """The random stream after a call is the host's: the step and its replay draw the same numbers."""
    model = copy.deepcopy(zoo.load("llama"))
    states = []
    for run in (harness.run_stock, harness.run_fastgen):
        run(model, _inputs("llama"), num_beams=1, do_sample=True, top_k=0, max_new_tokens=20, **TOKENS)
        states.append(torch.get_rng_state())
    assert torch.equal(*states) and _counts(model)[1] > 5


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_what_watches_a_step_sees_it(family: str) -> None:
    """A model with hooks, or with a forward of somebody else's, is called at every step."""
    model, options = copy.deepcopy(zoo.load(family)), dict(num_beams=3, max_new_tokens=10)
    layer = [module for module in model.modules() if type(module) is torch.nn.Linear][-1]
    calls: list[int] = []
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    harness.compare(model, _inputs(family), expected="fallback", min_new_tokens=10, **options)
    assert len(calls) == 20 and _counts(model) == (0, 0)
    with harness.configured(foreign_code="trial"):
        harness.compare(model, _inputs(family), min_new_tokens=10, **options)  # and is tried with six steps, both ways
    handle.remove()
    assert len(calls) == 20 + 20 + 12 and _counts(model) == (0, 0)
    harness.compare(model, _inputs(family), min_new_tokens=10, **options)
    assert len(calls) == 52 and _counts(model)[1] > 5


def test_weights_that_change_between_calls() -> None:
    model = copy.deepcopy(zoo.load("bart"))
    for _ in range(2):
        harness.compare(model, _inputs("bart"), num_beams=3, max_new_tokens=12)
        for parameter in model.parameters():
            parameter.data.mul_(1.1)
    assert _counts(model)[1] > 10


def test_autocast_sees_the_model() -> None:
    model = copy.deepcopy(zoo.load("llama"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        harness.run_fastgen(model, _inputs("llama"), tier="compat", num_beams=3, max_new_tokens=12)
    assert _counts(model) == (0, 0)


class Autocast(transformers.LogitsProcessor):
    """Turns autocast on or off at the third step."""

    def __init__(self, on: bool) -> None:
        self.on, self.steps = on, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        torch.set_autocast_enabled("cpu", self.on if self.steps == 3 else torch.is_autocast_enabled("cpu"))
        return scores


@pytest.mark.parametrize("setting", ["always", "off"])
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_autocast_that_is_turned_on_or_off_between_steps(family: str, on: bool, beams: int, setting: str) -> None:
    """Logits of the same tokens are stock's within the precision's tolerance; captured steps end there."""
    model, inputs = copy.deepcopy(zoo.load(family)), _inputs(family)
    logits, options = [], dict(num_beams=beams, max_new_tokens=12, **DETAILS)
    for how in (fastgen.disabled(), fastgen.configured(replay=setting, strict=True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=not on), torch.no_grad(), how:
            processor = Autocast(on)
            found = model.generate(**inputs, logits_processor=[processor], **options)
            assert processor.steps > 5 and torch.is_autocast_enabled("cpu") == on
        logits.append(torch.stack(found.logits[:4]).float())  # of these steps alone the tokens are certainly the same
    if on or beams == 1:  # else rounding has decided the order of beams before
        assert torch.dist(*logits) < 0.03 * logits[0].norm()  # bfloat16 rounds by up to 0.004
    assert fastgen.status().calls[-1].tier in ("fast", "compat") and _counts(model)[1] <= 2


def test_settings() -> None:
    model = copy.deepcopy(zoo.load("gpt2"))
    one, few = _inputs("gpt2", batch=1), _inputs("gpt2", batch=3)
    for setting, inputs, beams, tokens, are_replayed in (
        ("off", one, 3, 14, False),
        ("auto", one, 3, 14, True),
        ("auto", one, 3, 8, False),
        ("auto", few, 3, 14, False),
        ("auto", few, 1, 14, True),  # in greedy search no sentence leaves
        ("always", few, 3, 8, True),
    ):
        before = _counts(model)
        fastgen.configure(replay=setting)
        harness.compare(model, inputs, num_beams=beams, min_new_tokens=tokens, max_new_tokens=tokens)
        assert (_counts(model) != before) == are_replayed, (setting, beams, tokens)


@pytest.mark.parametrize("family", ["bert2bert", "led", "trocr"])
def test_other_threads_see_the_hosts_modules(family: str) -> None:
    """What makes a step replayable is there for all threads, but only for replayable steps."""
    decoder = copy.deepcopy(zoo.load(family)).get_decoder()
    module = next(
        module for module in decoder.modules() if (type(module), "forward") in modules.replayable_inputs({type(module)})
    )
    ids = torch.randint(5, 20, (2, 3))
    before = {"input_ids_shape": ids.shape} if family == "led" else {"input_ids": ids}
    before[CACHE_LENGTH] = torch.tensor(4)  # as a static cache of the host's says it
    with torch.no_grad():
        expected = module(**before)
        with interception.redirected(modules.replayable_inputs({type(module) for module in decoder.modules()})):
            torch.testing.assert_close(module(**before), expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["bart", "gpt2", "t5"])
def test_the_default_device_does_not_matter(family: str) -> None:
    """All that a call makes is on the model's device, whatever torch's default is: here one that holds nothing."""
    model, inputs = copy.deepcopy(zoo.load(family)), _inputs(family)
    options = dict(num_beams=3, max_new_tokens=16, **DETAILS)
    expected, _ = harness.run_fastgen(model, inputs, **options)
    with torch.device("meta"):
        found, _ = harness.run_fastgen(model, inputs, **options)
    harness.assert_same(expected, found)
    assert _counts(model)[1] > 3


# ---------------------------------------------------------------------------------------------- the tape itself
def _taped(function: Any) -> Any:
    tape = Tape()
    with torch.no_grad():
        tape.capture(function, torch.device("cpu"))
        return tape.replay


def test_a_tape_computes_anew() -> None:
    rows, weight = torch.rand(3, 4), torch.nn.Parameter(torch.rand(4, 4))
    state = torch.zeros(3, 4)

    def step() -> dict[str, Any]:
        left, right = (rows @ weight.t()).split(2, dim=1)
        state.add_(rows)
        total = torch.cat([left.relu(), right], dim=1)
        total[:, 0] = 1
        return {"total": total, "views": [total.view(-1), state[1]], "what": "else"}

    replay = _taped(step)
    rows.copy_(torch.rand(3, 4))
    state.zero_()
    again, expected = replay(), step()
    assert torch.equal(again["total"], expected["total"]) and again["what"] == "else"
    assert torch.equal(again["views"][0], expected["views"][0])
    assert torch.equal(state, 2 * rows) and torch.equal(again["views"][1], state[1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0.5],
        lambda x: bool((x > 0).all()),
        lambda x: torch.unique(x),
        lambda x: torch.equal(x, x + 1),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: numpy.asarray(x),
        lambda x: torch.tensor([x[0], 1.0]),
        lambda x: torch.tensor_split(x, torch.tensor([1, 3])),
    ],
)
def test_a_tape_refuses_what_depends_on_values(function: Any) -> None:
    values = torch.rand(5)
    with pytest.raises(RuntimeError, match="waits for a value"):
        _taped(lambda: function(values))


def test_a_tape_makes_its_own_state_anew() -> None:
    """Tensors that a step makes of weights, or of numbers, and then writes to."""
    rows, weight = torch.rand(4), torch.nn.Parameter(torch.rand(4))

    def step() -> list[torch.Tensor]:
        zeros, number, noise = torch.zeros_like(weight), torch.tensor(0.0), torch.rand_like(weight)
        zeros.add_(rows)
        number += rows.sum()
        return [zeros, number, noise]

    replay = _taped(step)
    first, second = replay(), replay()
    assert torch.equal(first[0], rows) and torch.equal(second[0], rows)
    assert torch.equal(second[1], rows.sum()) and not torch.equal(first[2], second[2])


def test_a_tape_that_fails_has_drawn_nothing() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="waits"):
        _taped(lambda: torch.rand(3).sum().item())
    assert torch.equal(before, torch.get_rng_state())


def test_a_tape_frees_what_it_no_longer_needs() -> None:
    rows = torch.rand(256, 1024)
    replay = _taped(lambda: functools.reduce(lambda x, _: x + 1, range(50), rows).sum())
    with torch.profiler.profile(profile_memory=True) as profile:
        replay()
    sizes = [event.cpu_memory_usage for event in profile.events()]
    assert sum(size for size in sizes if size > 0) and sum(sizes) < 4 * rows.nbytes
