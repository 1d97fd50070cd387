"""The paths of CUDA without a GPU: no operator gets tensors of two devices, tokens are stock's, and waits are counted.

Tensors say that they are on `cuda:0` and are on the CPU: see kit/fake_cuda.py. Graphs are emulated.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import device_waits
import fake_cuda
import harness
import pytest
import torch
import zoo
from fake_cuda import CudaTensor, MixedDevices, to_cuda
from joined_calls import calls_of, stock_results
from transformers import DynamicCache, EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen import ops, report
from fastgen.cache import by_model
from fastgen.decoding import static_beam_search
from fastgen.decoding.beam_search import BeamSearch
from fastgen.decoding.device_beam_search import DeviceBeamSearch
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.generate import continuous_batch
from fastgen.replay import statistics


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Nothing on the device is kept for later tests."""
    yield
    fastgen.release()


pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_cuda.py runs there"),
    pytest.mark.skipif(not versions.COUNTS_IN_TENSORS, reason="steps of this version are never captured"),
]

FAMILIES = [*zoo.ACCELERATED, *zoo.BY_ROWS, *zoo.HYBRIDS]
BEAMS = dict(num_beams=4, max_new_tokens=12)
BANS = dict(
    no_repeat_ngram_size=2,
    repetition_penalty=1.2,
    length_penalty=2.0,
    num_return_sequences=3,
    min_length=8,
    bad_words_ids=[[7], [9, 11]],
)
OPTIONS: dict[str, dict[str, Any]] = {
    "details": dict(BEAMS, output_scores=True, output_logits=True),
    "bans": dict(BEAMS, **BANS),
    "ends": dict(num_beams=3, max_new_tokens=20, eos_token_id=list(range(5, 25, 2)), early_stopping=True),
    "forced": dict(
        num_beams=2,
        max_new_tokens=9,
        forced_bos_token_id=8,
        forced_eos_token_id=9,
        suppress_tokens=[11, 12],
        min_new_tokens=3,
        renormalize_logits=True,
    ),
    "greedy": dict(max_new_tokens=10),
    "samples": dict(do_sample=True, num_return_sequences=3, max_new_tokens=10, temperature=0.8, top_p=0.9),
    "beams of samples": dict(BEAMS, do_sample=True, top_k=12),
}
graphs = pytest.mark.parametrize("graphs", [False, True], ids=["steps", "graphs"])


def _model(name: str) -> Any:
    return fake_cuda.move(copy.deepcopy(zoo.load(name)))


def _inputs(name: str) -> dict[str, Any]:
    return {**zoo.inputs_for(name), **({**zoo.FAMILIES, **zoo.VARIANTS}[name]).generate}


def _run(
    model: Any, inputs: dict[str, Any], options: dict[str, Any], generate: Any = zoo.generate, **settings: Any
) -> tuple[Any, report.Call]:
    """The output on the device, and how the call ran."""
    report.reset()
    with harness.configured(history=64, **settings):
        torch.manual_seed(harness.SEED)
        output = generate(model, harness.request(to_cuda(inputs), options))
    return output, report.calls()[-1]


def _check(
    name: str, options: dict[str, Any], graphs: bool, times: int = 1, model: Any = None, **settings: Any
) -> fake_cuda.Device:
    """Stock's output on the CPU is fastgen's on the device, in a tier of fastgen's."""
    options = {**options, "return_dict_in_generate": True}
    stock = harness.run_stock(zoo.load(name), _inputs(name), **options)
    model = _model(name) if model is None else model
    with fake_cuda.device() as device:
        for _ in range(times):
            output, call = _run(model, _inputs(name), options, cuda_graphs=graphs, **settings)
            assert not device.mixed, device.mixed
            assert not device.refused, device.refused
            assert isinstance(output.sequences, CudaTensor)
            harness.assert_same(stock, fake_cuda.to_cpu_output(output))
            # Greedy search without graphs gains nothing, and is stock's.
            assert call.tier in harness.TIERS or not (graphs or options.get("num_beams", 1) > 1), call.reason
    return device


# ---------------------------------------------------------------------------------------------- the kit itself
def test_mixed_devices_are_refused() -> None:
    with fake_cuda.device():
        ours, theirs = torch.ones(3, device="cuda"), torch.ones(3)
        assert ours.device == fake_cuda.DEVICE and ours.is_cuda and theirs.device.type == "cpu"
        for mixing in (lambda: ours + theirs, lambda: torch.cat([ours, theirs]), lambda: theirs.add_(ours)):
            with pytest.raises(MixedDevices):
                mixing()
        assert (ours + torch.tensor(2.0)).tolist() == [3.0] * 3  # a number may be anywhere
        with pytest.raises(MixedDevices):
            torch.cat([ours, torch.tensor([2.0])])


def test_waits_are_noted() -> None:
    with fake_cuda.device() as device:
        x = torch.arange(4, device="cuda")
        assert not device.waits
        for waiting, kind in (
            (lambda: x[1].item(), "read"),
            (lambda: bool(x.any()), "read"),
            (lambda: x.tolist(), "read"),
            (lambda: x.cpu(), "read"),
            (lambda: x[x > 1], "read"),
            (lambda: x.nonzero(), "read"),
            (lambda: torch.equal(x, x), "read"),
            (lambda: torch.tensor([1, 2], device="cuda"), "upload"),
            (lambda: torch.ones(2).to("cuda"), "upload"),
            (lambda: x[torch.tensor([0, 1])], "upload"),
        ):
            device.waits.clear()
            waiting()
            assert [wait.kind for wait in device.waits] == [kind], waiting
        device.waits.clear()
        assert torch.where(x > 1, x, 0).sum().device == x.device and not device.waits


def test_copies_arrive_with_their_event() -> None:
    with fake_cuda.device() as device:
        x = torch.arange(4, device="cuda")
        first, second = (torch.empty(4, dtype=torch.int64, pin_memory=True) for _ in range(2))
        events = [torch.cuda.Event() for _ in range(2)]
        for copy, event in zip((first, second), events, strict=True):
            copy.copy_(x, non_blocking=True)
            event.record()
            x += 1
        assert not device.waits and first.tolist() != [0, 1, 2, 3]
        events[0].synchronize()
        assert first.tolist() == [0, 1, 2, 3] and second.tolist() != [1, 2, 3, 4]
        events[1].synchronize()
        assert second.tolist() == [1, 2, 3, 4]
        assert [wait.kind for wait in device.waits] == ["late", "event"]


def test_an_event_that_is_not_waited_for_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cuda.Event, "synchronize", lambda self: None)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        _check("bart", OPTIONS["ends"], True, times=2)


def test_a_tensor_on_the_wrong_device_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = BeamSearch._number_rows

    def astray(self: Any) -> None:
        begin(self)
        self._first_row = self._first_row.cpu()

    monkeypatch.setattr(BeamSearch, "_number_rows", astray)
    with fake_cuda.device(), pytest.raises(MixedDevices, match="fastgen/decoding/device_beam_search"):
        _run(_model("bart"), _inputs("bart"), BEAMS, cuda_graphs=False)


def test_a_wait_in_a_captured_step_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    divided = static_beam_search.divided

    def waiting(scores: torch.Tensor, divisor: torch.Tensor) -> Any:
        return divided(scores, divisor) if bool((divisor > 0).all()) else None

    monkeypatch.setattr(static_beam_search, "divided", waiting)
    model = _model("bart")
    with pytest.raises(AssertionError, match="waits for a value"):
        _check("bart", BEAMS, True, times=2, model=model)
    status = statistics.replayed()["BartForConditionalGeneration"]
    assert "but not the search's: its steps cannot be captured" in status


# ---------------------------------------------------------------------------------------------- families, options
@graphs
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, graphs: bool) -> None:
    model = _model(family)
    _check(family, OPTIONS["bans"], graphs, times=1 + graphs, model=model)
    _check(family, OPTIONS["samples"], graphs, model=model)
    if graphs and family not in zoo.BY_ROWS:
        assert statistics.counts(model).replays, statistics.replayed()


@graphs
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
def test_options(family: str, options: str, graphs: bool) -> None:
    _check(family, OPTIONS[options], graphs, times=1 + graphs)


@pytest.mark.parametrize("family", ["bart", "llama"])
@pytest.mark.parametrize("kind", ["ends", "length"])
@graphs
def test_criteria_in_place_of_the_hosts(family: str, kind: str, graphs: bool) -> None:
    """A search in captured steps knows those of the configuration, and the user's may say something else."""
    prompt = 1 if zoo.load(family).config.is_encoder_decoder else _inputs(family)["input_ids"].shape[1]
    ends, length = EosTokenCriteria(list(range(5, zoo.VOCAB, 3))), MaxLengthCriteria(max_length=prompt + 7)
    criteria = StoppingCriteriaList([ends if kind == "ends" else length])
    _check(family, dict(BEAMS, stopping_criteria=criteria), graphs)


@pytest.mark.parametrize("options", [BEAMS, dict(num_beams=1, max_new_tokens=20)], ids=["beams", "greedy"])
@graphs
def test_inputs_on_the_cpu(options: dict[str, Any], graphs: bool) -> None:
    """The host moves them to the model's device before each step."""
    model, inputs = _model("llama"), zoo.inputs_for("llama", batch=1)
    stock = harness.run_stock(zoo.load("llama"), inputs, **options)
    with fake_cuda.device() as device, harness.configured(cuda_graphs=graphs, speculate=3):
        output = zoo.generate(model, harness.request(inputs, options))
        assert not device.mixed, device.mixed
    assert type(output) is torch.Tensor and torch.equal(stock, output)


@pytest.mark.parametrize("family", ["bart", "gpt2"])
@graphs
def test_diverse(family: str, graphs: bool) -> None:
    """Stock has none: the same on the CPU."""
    options = dict(num_beams=6, num_beam_groups=3, diversity_penalty=0.7, max_new_tokens=9, num_return_sequences=4)
    expected, _ = harness.run_fastgen(zoo.load(family), _inputs(family), strict=False, **options)
    with fake_cuda.device():
        output, call = _run(_model(family), _inputs(family), options, cuda_graphs=graphs)
        assert torch.equal(expected, output.inner) and call.tier in harness.TIERS


@graphs
@pytest.mark.parametrize("family", ["bart", "t5", "llama"])
def test_tries(family: str, graphs: bool) -> None:
    model = zoo.load(family)
    prompt = 1 if model.config.is_encoder_decoder else _inputs(family)["input_ids"].shape[1]
    end = model.generation_config.eos_token_id
    draws = torch.randint(5, 60, (200, 5), generator=torch.Generator().manual_seed(1)).tolist()
    trie = fastgen.Trie([[token for token in row if token != end] for row in draws], eos_token_id=end).after(prompt)
    for options in (BEAMS, dict(num_beams=1, max_new_tokens=8)):
        _check(family, dict(options, prefix_allowed_tokens_fn=trie), graphs, times=1 + graphs)


class _Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        assert type(value) is torch.Tensor, "on the device"
        self.puts.append(value.clone())

    def end(self) -> None:
        pass


@graphs
@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_streamers_of_beams(family: str, graphs: bool) -> None:
    stock = harness.run_stock(zoo.load(family), _inputs(family), **BEAMS)
    streamer = _Recorder()
    with fake_cuda.device():
        generate = functools.partial(zoo.generate, streamer=streamer)
        output, call = _run(_model(family), _inputs(family), BEAMS, generate, cuda_graphs=graphs)
        assert torch.equal(stock, output.inner) and call.tier == "fast"
    prompt, *columns = streamer.puts
    assert torch.equal(torch.cat([prompt, *(column[:, None] for column in columns)], 1), stock)


@pytest.mark.parametrize("beams", [1, 3])
def test_streams(beams: int) -> None:
    inputs = zoo.inputs_for("gpt2", batch=1)
    options = dict(num_beams=beams, max_new_tokens=9)
    stock = harness.run_stock(zoo.load("gpt2"), inputs, **options)
    with fake_cuda.device():
        tokens = list(fastgen.stream(_model("gpt2"), **to_cuda(inputs), **options))
    assert tokens == stock[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "llama"])
def test_batches_that_are_kept_full(family: str) -> None:
    calls = calls_of(family, num_beams=3, no_repeat_ngram_size=2)
    stock = stock_results(zoo.load(family), calls)
    results = {}
    model = _model(family)
    with fake_cuda.device(), harness.configured(strict=True, cuda_graphs=False):
        for number, result in continuous_batch.run(model, [to_cuda(call) for call in calls], 8):
            results[number] = result.inner
    for number, expected in enumerate(stock):
        assert torch.equal(expected, results[number]), number


@graphs
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_kept_prefixes(family: str, graphs: bool) -> None:
    common = torch.randint(5, 60, (2, 20), generator=torch.Generator().manual_seed(9))[:1].expand(2, -1)
    by_model.release()
    model, saved = _model(family), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_model, "note", saved.append)
        for seed in range(3):
            own = torch.randint(5, 60, (2, 6), generator=torch.Generator().manual_seed(seed))
            inputs = dict(input_ids=torch.cat([common, own], 1), attention_mask=torch.ones(2, 26, dtype=torch.long))
            stock = harness.run_stock(zoo.load(family), inputs, **BEAMS)
            with fake_cuda.device():  # what is kept outlives it
                output, call = _run(model, inputs, BEAMS, cuda_graphs=graphs, prefix_cache=2**24)
                assert torch.equal(stock, output.inner) and call.tier == "fast"
    by_model.release()
    assert saved[-1] == 2 * 20


@graphs
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_caches_of_the_user(family: str, graphs: bool) -> None:
    inputs, options = _inputs(family), dict(num_beams=4, max_new_tokens=8)
    read = dict(input_ids=inputs["input_ids"][:, :5], attention_mask=inputs["attention_mask"][:, :5])
    positions = (read["attention_mask"].cumsum(1) - 1).clamp(min=0)

    def cache_of(model: Any, to: Callable[[Any], Any]) -> Any:
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), fastgen.disabled():
            model(**to(read), position_ids=to(positions), **{versions.CACHE: cache})
        cache.batch_repeat_interleave(4)
        return cache

    model = zoo.load(family)
    stock = harness.run_stock(model, inputs, **{versions.CACHE: cache_of(model, lambda x: x)}, **options)
    with fake_cuda.device():
        moved = _model(family)
        cache = cache_of(moved, to_cuda)
        generate = functools.partial(zoo.generate, **{versions.CACHE: cache})
        output, call = _run(moved, inputs, options, generate, cuda_graphs=graphs)
        assert torch.equal(stock, output.inner) and call.tier in harness.TIERS, call.reason


@graphs
@pytest.mark.parametrize("family", ["bart", "t5", "whisper", "gpt2"])
def test_slim_caches(family: str, graphs: bool) -> None:
    _check(family, OPTIONS["bans"], graphs, times=1 + graphs, cache="x")
    assert report.calls()[-1].cache.startswith("x")


@graphs
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_wide_beams(family: str, graphs: bool) -> None:
    _check(family, dict(num_beams=40, max_new_tokens=6, num_return_sequences=7), graphs)


@pytest.mark.parametrize("speculate", [3])
def test_drafts(speculate: int) -> None:
    _check("llama", dict(num_beams=1, max_new_tokens=12), graphs=True, speculate=speculate)


# ---------------------------------------------------------------------------------------------- waits
# How often a step in the middle waits for the device: in fastgen's code, there for an earlier step, and in the host's.
# Without graphs it is once, for all that the CPU has to know of the step. With graphs the wait is for the step before:
# the device has the next one by then.
WAITS = {"steps": (1, 0, 0), "native": (1, 0, 0), "graphs": (0, 1, 0)}


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("family", ["bart", "t5", "marian", "whisper", "gpt2", "llama", "mistral", "bert2bert"])
def test_waits_of_a_step(family: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed with `-s`. "native": the operators for the device have been compiled, and find candidates row by row."""
    model = _model(family)
    if how == "native":
        monkeypatch.setattr(ops, "is_native", lambda device: True)

    def run(count: int) -> None:
        options = dict(num_beams=4, max_new_tokens=count, eos_token_id=None)
        _run(model, _inputs(family), options, cuda_graphs=how == "graphs")

    waits = device_waits.of_a_step(run, f"{family:12} {how:7}")
    assert all(map(operator.le, waits, WAITS[how]))


@pytest.mark.parametrize("family", ["bart", "gpt2"])
@pytest.mark.parametrize("options", ["beams", "ends", "details", "bans"])
def test_candidates_by_row(family: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the operators for the device have been compiled, tokens are those of the CPU, too."""
    by_row, found = DeviceBeamSearch._candidates_by_row, []

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        found.append(by_row(self, *arguments, **options) or ())
        return found[-1] or None

    monkeypatch.setattr(ops, "is_native", lambda device: True)
    monkeypatch.setattr(DeviceBeamSearch, "_candidates_by_row", noted)
    _check(family, OPTIONS.get(options, BEAMS), graphs=False)
    assert any(found) and all(isinstance(each, CudaTensor) for each in sum(found, ()))


def test_a_wait_more_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = DeviceBeamSearch._finish

    def waiting(self: Any, scores: torch.Tensor, *rest: Any) -> None:
        bool(scores.isnan().any())
        finish(self, scores, *rest)

    monkeypatch.setattr(DeviceBeamSearch, "_finish", waiting)
    model = _model("bart")

    def run(count: int) -> None:
        options = dict(num_beams=4, max_new_tokens=count, eos_token_id=None)
        _run(model, _inputs("bart"), options, cuda_graphs=False)

    assert sum(device_waits.of_a_step(run, "one more")) == 2
