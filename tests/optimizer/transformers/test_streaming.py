"""`generate(streamer=..., num_beams=...)`: what is streamed begins the best sequence, and in the end is all of it."""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import harness
import pytest
import torch
import zoo
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen.decoding import front
from fastgen.optimizer import beam_streaming
from fastgen.optimizer.transformers import versions

MODELS = ("bart", "t5", "marian", "gpt2", "llama")
REFUSED = r"`streamer` cannot be used with beam search \(yet!\)"


class Recorder(BaseStreamer):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.puts: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends, "given something after the end"
        assert value.device.type == "cpu" and value.dtype == torch.int64
        self.puts.append(value.clone())

    def end(self) -> None:
        self.ends += 1

    @property
    def prompt(self) -> torch.Tensor:
        return self.puts[0]

    def rows(self) -> torch.Tensor:
        """All tokens, int64 `[B, L]`."""
        batch = len(self.prompt)
        assert all(value.shape == (batch,) for value in self.puts[1:]), "not as greedy search puts them"
        assert self.ends == 1
        return torch.cat([self.prompt, *(value[:, None] for value in self.puts[1:])], dim=1)


@dataclasses.dataclass
class Lags:
    """How many tokens were told before the last step, of how many."""

    before: int = 0
    told: int = 0


@pytest.fixture
def lags(monkeypatch: pytest.MonkeyPatch) -> Lags:
    found = Lags()
    finish = beam_streaming.BeamStreaming.finish

    def noted(self: Any, best: torch.Tensor) -> None:
        found.before += sum(map(len, self._front._told))
        found.told += best.shape[1]
        finish(self, best)

    monkeypatch.setattr(beam_streaming.BeamStreaming, "finish", noted)
    return found


def streaming(streamers: list[tuple[Recorder, Any]]) -> Callable[..., Any]:
    """`generate` with a new Recorder where fastgen is on; each is noted with the output."""

    def generate(model: Any, inputs: dict[str, Any]) -> Any:
        if not fastgen.status().enabled:
            return zoo.generate(model, inputs)
        streamer = Recorder()
        output = zoo.generate(model, inputs, streamer=streamer)
        streamers.append((streamer, output))
        return output

    return generate


def check(model: Any, inputs: dict[str, Any], **options: Any) -> list[Recorder]:
    """The output equals stock's without a streamer, and what was streamed equals the output's best sequences."""
    runs: list[tuple[Recorder, Any]] = []
    details = dict(return_dict_in_generate=True, output_scores=True)
    harness.compare(model, inputs, tier="fast", generate=streaming(runs), **options, **details)
    assert runs
    for streamer, output in runs:
        count = options.get("num_return_sequences", 1)
        best, rows = output.sequences[::count], streamer.rows()
        assert torch.equal(rows, best[:, : rows.shape[1]])
        taken = (output.beam_indices[::count] >= 0).sum(1).max()
        assert rows.shape[1] == streamer.prompt.shape[1] + taken
    return [streamer for streamer, _ in runs]


# ---------------------------------------------------------------------------------------------- options
class BySevens(StoppingCriteria):
    """Ends a hypothesis whose last token is divisible by 7."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 0


class Nudge(LogitsProcessor):
    """Makes some log-probabilities larger than 0."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 3.0 * (torch.arange(scores.shape[-1]) % 2 == input_ids[:, -1:] % 2)


Draw = Callable[[random.Random], Any]
OPTIONS: dict[str, Draw] = {
    "length_penalty": lambda draw: draw.choice([-1.5, -0.4, 0.0, 0.6, 2.0]),
    "early_stopping": lambda draw: draw.choice([True, False, "never"]),
    "num_return_sequences": lambda draw: draw.choice([1, 2, 3]),
    "min_new_tokens": lambda draw: draw.choice([2, 5]),
    "min_length": lambda draw: draw.choice([4, 12]),
    "eos_token_id": lambda draw: draw.sample(range(zoo.FIRST_WORD, zoo.VOCAB - 1), draw.choice([1, 2, 8])),
    "repetition_penalty": lambda draw: draw.choice([0.8, 1.2, 2.0]),
    "no_repeat_ngram_size": lambda draw: draw.choice([2, 3]),
    "forced_eos_token_id": lambda draw: draw.randrange(zoo.FIRST_WORD, zoo.VOCAB - 1),
    "sequence_bias": lambda draw: {(draw.randrange(5, 60),): 4.0},
    "exponential_decay_length_penalty": lambda draw: (3, 1.3),
    "prefix_allowed_tokens_fn": lambda draw: lambda row, ids: [t for t in range(5, 60) if (t + int(ids[-1])) % 3],
    "logits_processor": lambda draw: lambda: LogitsProcessorList([Nudge()]),
    "stopping_criteria": lambda draw: lambda: StoppingCriteriaList([BySevens()]),
    "renormalize_logits": lambda draw: True,
}


def drawn(name: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and options, drawn from (name, seed); the first three seeds go through early stopping in three kinds."""
    draw = random.Random(f"{name}-{seed}")
    options: dict[str, Any] = dict(num_beams=draw.randint(2, 6), max_new_tokens=draw.choice([4, 12, 20]))
    for option in draw.sample(list(OPTIONS), draw.randint(0, 4)):
        options[option] = OPTIONS[option](draw)
    options["early_stopping"] = [True, False, "never"][seed % 3]
    options["num_return_sequences"] = min(options.get("num_return_sequences", 1), options["num_beams"])
    if draw.random() < 0.2:
        options["do_sample"] = True
    batch = draw.choice([1, 1, 1, 3])
    return dict(seed=draw.randrange(1000), batch=batch, length=draw.choice([2, 7, 12])), options


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", MODELS)
def test_drawn_options(name: str, seed: int) -> None:
    shape, options = drawn(name, seed)
    check(zoo.load(name), zoo.inputs_for(name, **shape), **options)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_come_before_the_end(name: str, lags: Lags) -> None:
    for seed in range(4):
        check(zoo.load(name), zoo.inputs_for(name, seed, batch=1), num_beams=3, max_new_tokens=30)
    if name == "marian" and not versions.PREFILLS:
        pytest.skip("the random weights of 4.57 are others, and decide late")
    assert lags.before > lags.told / 4, "next to nothing is told before the last step"


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 2.0])
def test_ends_at_once(early_stopping: bool | str, length_penalty: float) -> None:
    """Every token ends a hypothesis, so that the first step is the last but for the padding of the beam."""
    every = list(range(zoo.VOCAB))
    options = dict(num_beams=2, early_stopping=early_stopping, length_penalty=length_penalty, max_new_tokens=6)
    for ends in (every[:-1:2], every[5:]):
        check(zoo.load("gpt2"), zoo.inputs_for("gpt2", batch=1), eos_token_id=ends, pad_token_id=0, **options)


@pytest.mark.parametrize("name", ["bart", "llama"])
def test_never_ends(name: str) -> None:
    options = dict(num_beams=4, max_new_tokens=16, min_new_tokens=16, length_penalty=-1.0)
    check(zoo.load(name), zoo.inputs_for(name, batch=1), **options)


@pytest.mark.parametrize("name", ["bloom", "mvp"] if zoo.MAJOR >= 5 else [])
def test_a_model_that_is_not_on_the_tree(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.BY_ROWS[name].build().eval()
    inputs = zoo.BY_ROWS[name].inputs(model, batch=1)
    streamer = Recorder()
    output = model.generate(**inputs, num_beams=3, max_new_tokens=12, pad_token_id=zoo.PAD, streamer=streamer)
    assert torch.equal(streamer.rows(), output) and fastgen.status().calls[-1].cache == "rows"
    with fastgen.disabled():
        assert torch.equal(output, model.generate(**inputs, num_beams=3, max_new_tokens=12, pad_token_id=zoo.PAD))


def test_steps_that_are_captured() -> None:
    """Replayed steps, and the search that is captured with them."""
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1)
    with fastgen.configured(replay="always"):
        for _ in range(3):
            expected = harness.run_stock(model, inputs, num_beams=4, max_new_tokens=20)
            streamer = TextRecorder()
            output = model.generate(**inputs, num_beams=4, max_new_tokens=20, streamer=streamer)
            assert torch.equal(output, expected) and streamer.tokens == expected[0].tolist()


class Tokens:
    """A tokenizer whose text is the tokens' numbers, each with a space behind it."""

    def decode(self, tokens: Any, **options: Any) -> str:
        return "".join(f"{token} " for token in (tokens if isinstance(tokens, list) else [tokens]))


class TextRecorder(TextStreamer):
    def __init__(self) -> None:
        super().__init__(Tokens())
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text

    @property
    def tokens(self) -> list[int]:
        return [int(number) for number in self.text.split()]


def test_a_corrupted_front_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live beam is forgotten: then these tests fail."""
    true = front.of_beam_search

    def without_a_beam(search: Any, *args: Any) -> front.Contenders:
        found = true(search, *args)
        may_win = found.may_win.clone()
        may_win[:, search.beams - 1] = False
        return dataclasses.replace(found, may_win=may_win)

    monkeypatch.setattr(front, "of_beam_search", without_a_beam)
    with pytest.raises((ValueError, AssertionError)):
        for name in MODELS:
            for seed in range(12):
                check(zoo.load(name), zoo.inputs_for(name, seed, batch=1), num_beams=2, max_new_tokens=20)


# ---------------------------------------------------------------------------------------------- streamers
@pytest.mark.parametrize("name", ["bart", "gpt2"])
def test_puts_are_those_of_greedy_search(name: str) -> None:
    """The prompt first, of each sentence once, then a token of each sentence at a time."""
    model, inputs = zoo.load(name), zoo.inputs_for(name, batch=1)
    greedy, beams = Recorder(), Recorder()
    model.generate(**inputs, max_new_tokens=8, streamer=greedy)
    model.generate(**inputs, max_new_tokens=8, num_beams=4, streamer=beams)
    assert torch.equal(greedy.prompt, beams.prompt)
    assert greedy.puts[1].shape == beams.puts[1].shape and greedy.puts[1].dtype == beams.puts[1].dtype
    assert greedy.ends == beams.ends == 1


def test_texts() -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1)
    options = dict(num_beams=4, max_new_tokens=12)
    expected = harness.run_stock(model, inputs, **options)[0].tolist()
    streamer = TextRecorder()
    model.generate(**inputs, **options, streamer=streamer)
    assert streamer.tokens == expected
    parts = TextIteratorStreamer(Tokens(), skip_prompt=True)
    model.generate(**inputs, **options, streamer=parts)
    assert [int(number) for number in "".join(parts).split()] == expected[1:]


def test_as_a_positional_argument_and_by_configuration() -> None:
    model, inputs = zoo.load("gpt2"), zoo.inputs_for("gpt2", batch=1)
    expected = harness.run_stock(model, inputs, num_beams=3, max_new_tokens=6)
    config = GenerationConfig.from_dict({**model.generation_config.to_dict(), "num_beams": 3, "max_new_tokens": 6})
    streamer = Recorder()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    model.generate(ids, config, None, None, None, None, None, streamer, attention_mask=mask)
    assert torch.equal(streamer.rows(), expected)


def test_a_batch_is_refused_by_the_streamer_as_in_greedy_search() -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=2)
    for beams in (1, 3):
        with pytest.raises(ValueError, match="TextStreamer only supports batch size 1"):
            model.generate(**inputs, num_beams=beams, max_new_tokens=4, streamer=TextRecorder())


def test_what_a_streamer_raises_passes_and_leaves_the_model_as_it_was() -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1)

    class Full(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.puts) == 3:
                raise KeyError("full")

    with pytest.raises(KeyError, match="full"):
        model.generate(**inputs, num_beams=3, max_new_tokens=20, streamer=Full())
    check(model, inputs, num_beams=3, max_new_tokens=20)


def test_a_search_that_dies() -> None:
    """All tokens are banned after the fourth: stock returns the bare prompt, which is not what was streamed."""

    class Banning(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores if input_ids.shape[1] < 6 else torch.full_like(scores, -torch.inf)

    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1)
    streamer = Recorder()
    options = dict(num_beams=2, max_new_tokens=30, min_new_tokens=20, logits_processor=LogitsProcessorList([Banning()]))
    try:
        output = model.generate(**inputs, **options, streamer=streamer)
    except ValueError as error:
        assert "every next token was forbidden" in str(error) and len(streamer.puts) > 1
    else:
        assert torch.equal(streamer.rows(), output)


# ---------------------------------------------------------------------------------------------- refused as in stock
@pytest.fixture
def refused() -> Iterator[Recorder]:
    """A streamer that stock refuses, and that gets nothing."""
    streamer = Recorder()
    yield streamer
    assert not streamer.puts and not streamer.ends


@pytest.mark.skipif(not versions.PREFILLS, reason="stock 4.57 gives the streamer to the model, which raises")
def test_beam_sampling_is_left_to_stock_as_it_is() -> None:
    """Stock does not refuse it: the prompt comes once for each beam, and nothing after it."""
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1)
    found = []
    for run in (fastgen.disabled(), fastgen.configured(tier="stock")):
        streamer = Recorder()
        with run:
            torch.manual_seed(0)
            output = model.generate(**inputs, num_beams=3, do_sample=True, max_new_tokens=8, streamer=streamer)
        found.append((output.tolist(), [value.tolist() for value in streamer.puts], streamer.ends))
    assert found[0] == found[1] and len(streamer.prompt) == 3


def test_stock_refuses(refused: Recorder) -> None:
    with fastgen.disabled(), pytest.raises(ValueError, match=REFUSED):
        zoo.load("bart").generate(**zoo.inputs_for("bart", batch=1), num_beams=3, streamer=refused)


@pytest.mark.parametrize("tier", ["stock", "compat"])
def test_other_tiers_refuse_as_stock_does(tier: str, refused: Recorder) -> None:
    with fastgen.configured(tier=tier), pytest.raises(ValueError, match=REFUSED):
        zoo.load("bart").generate(**zoo.inputs_for("bart", batch=1), num_beams=3, streamer=refused)
    call = fastgen.status().calls[-1]
    assert call.tier == "stock" and call.reason and tier in call.reason


def test_calls_that_are_not_accelerated_are_refused_as_in_stock(refused: Recorder) -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1)
    options = dict(num_beams=3, max_new_tokens=5, streamer=refused)
    with pytest.raises(ValueError, match=REFUSED):
        model.generate(**inputs, **options, cache_implementation="static")
    with pytest.raises(ValueError, match=REFUSED):
        model.generate(**inputs, **options, use_cache=False)
    with fastgen.configured(strict=True), pytest.raises(fastgen.FallbackError):
        model.generate(**inputs, **options, use_cache=False)


def test_a_search_of_the_users_own_is_refused_as_in_stock(refused: Recorder) -> None:
    model = zoo.fresh("gpt2")

    class Own(type(model)):  # type: ignore[misc]
        def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
            return super()._beam_search(*args, **kwargs)

    model.__class__ = Own
    with pytest.raises(ValueError, match=REFUSED):
        model.generate(**zoo.inputs_for("gpt2", batch=1), num_beams=3, streamer=refused)


def test_a_generate_of_the_models_own_is_refused_as_in_stock(refused: Recorder) -> None:
    """Whisper's, for example, decodes a part of a recording several times."""
    model = zoo.fresh("gpt2")

    class Own(type(model)):  # type: ignore[misc]
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs)

    model.__class__ = Own
    with pytest.raises(ValueError, match=REFUSED):
        model.generate(**zoo.inputs_for("gpt2", batch=1), num_beams=3, streamer=refused)


def test_other_errors_of_stock_come_first(refused: Recorder) -> None:
    """What is wrong with the call itself is said in stock's words, whatever the streamer."""
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1)
    with pytest.raises(ValueError, match="nonsense"):
        model.generate(**inputs, num_beams=3, nonsense=1, streamer=refused)


def test_greedy_search_and_samples_are_streamed_by_the_host() -> None:
    """The streamer is the user's own, also where the model's configuration has beams."""
    model, inputs = zoo.fresh("gpt2"), zoo.inputs_for("gpt2", batch=1)
    model.generation_config.num_beams = 3
    streamer = Recorder()
    output = model.generate(**inputs, num_beams=1, max_new_tokens=6, streamer=streamer)
    assert torch.equal(streamer.rows(), output)


def test_one_at_a_time_in_threads() -> None:
    """Two threads stream from one model."""
    model = zoo.load("bart")
    inputs = [zoo.inputs_for("bart", seed, batch=1) for seed in range(2)]
    expected = [harness.run_stock(model, each, num_beams=3, max_new_tokens=16) for each in inputs]
    streamers = [Recorder(), Recorder()]

    def run(number: int) -> None:
        model.generate(**inputs[number], num_beams=3, max_new_tokens=16, streamer=streamers[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for streamer, tokens in zip(streamers, expected, strict=True):
        assert torch.equal(streamer.rows(), tokens)


def test_a_model_dies_with_the_call() -> None:
    """Without the garbage collector: no cycle holds the model, or on a GPU its memory."""
    model, inputs = zoo.fresh("llama"), zoo.inputs_for("llama", batch=1)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        model.generate(**inputs, num_beams=3, max_new_tokens=5, streamer=Recorder())
        with pytest.raises(ValueError, match="streamer"), fastgen.configured(tier="stock"):
            model.generate(**inputs, num_beams=3, max_new_tokens=5, streamer=Recorder())
        del model
        assert gone() is None
    finally:
        gc.enable()
