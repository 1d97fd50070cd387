"""The encoder without padding: the same tokens, the same states, and the host left alone wherever padding matters."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import harness
import pytest
import torch
import zoo
from disguise import disguised

import fastgen
from fastgen import report
from fastgen.layers import packed_weights
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.model import encoder
from fastgen.patching import replaced_code

NAMES = """bart bart_eager bart_distilled mbart marian m2m_100 pegasus blenderbot t5 mt5 umt5 bert2bert bert2gpt2
    bert_generation""".split()
FAMILIES = [name for name in NAMES if name in zoo.ACCELERATED]
LENGTHS = (9, 2, 17, 3, 16, 1, 9)
SEARCH = dict(num_beams=3, max_new_tokens=9)


@pytest.fixture(autouse=True)
def _every_saving_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny models are quicker padded: count tokens alone."""
    monkeypatch.setattr(encoder, "_WEIGHTS_TOKENS", 2)
    monkeypatch.setattr(encoder, "_CALLS_WEIGHTS", {"cpu": 0})
    yield


def mixed(name: str, lengths: tuple[int, ...] = LENGTHS, width: int = 17) -> dict[str, torch.Tensor]:
    inputs = zoo.inputs_for(name, batch=len(lengths), length=width, ragged=False)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    pad = zoo.load(name).generation_config.pad_token_id
    return dict(input_ids=inputs["input_ids"].masked_fill(mask == 0, pad), attention_mask=mask)


@pytest.mark.skipif(not versions.PREFILLS, reason="4.57 takes no function of the user's")
def test_a_function_of_the_users_that_decodes() -> None:
    """It sees what the encoder has made of the padding, too."""
    model, inputs = zoo.load("bart"), mixed("bart")

    def pooled(model: Any, input_ids: Any, encoder_outputs: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = encoder_outputs.last_hidden_state.mean(1)
        return found

    with fastgen.disabled():
        expected = model.generate(**inputs, custom_generate=pooled)
    report.reset()
    assert torch.equal(model.generate(**inputs, custom_generate=pooled), expected) and not grouped()
    harness.run_fastgen(model, inputs, **SEARCH)
    assert grouped(), "other calls of the model have theirs in groups"


def grouped() -> int:
    """Batches that encoders have read in groups since the last `run_fastgen`."""
    return fastgen.status().encoders.get("batches", 0)


def encoder_states(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """What `generate` hands to the decoder."""
    prepare = next(getattr(model, name) for name in _seams() if hasattr(model, name))
    kwargs = {name: value for name, value in inputs.items() if name != "input_ids"}
    with torch.no_grad():
        return prepare(inputs["input_ids"], kwargs, "input_ids", copy.deepcopy(model.generation_config))


def _seams() -> tuple[str, ...]:
    from fastgen.optimizer.transformers import _ENCODES

    return _ENCODES


# ---------------------------------------------------------------------------------------------- the same
@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens(name: str, tier: str) -> None:
    model, inputs = zoo.load(name), mixed(name)
    for options in (
        dict(num_beams=4, num_return_sequences=3),
        dict(num_beams=3, num_return_sequences=3, length_penalty=-1.0, early_stopping=True, output_logits=True),
    ):
        harness.compare(model, inputs, tier, max_new_tokens=14, output_scores=True, **options)
        assert grouped() == 1
    if tier == "compat":
        for options in (dict(), dict(do_sample=True, num_return_sequences=2)):
            harness.compare(model, inputs, max_new_tokens=14, output_scores=True, **options)
            assert grouped() == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_states(name: str) -> None:
    """Real positions within rounding, zeros elsewhere, all else of the output as it is."""
    model, inputs = zoo.load(name), mixed(name)
    with fastgen.disabled():
        stock = encoder_states(model, inputs)["encoder_outputs"]
    report.reset()
    kwargs = encoder_states(model, inputs)
    states = kwargs["encoder_outputs"]
    assert torch.equal(kwargs["attention_mask"], inputs["attention_mask"])
    assert grouped() == 1
    assert type(states) is type(stock) and list(states) == list(stock)
    real = inputs["attention_mask"].bool()
    assert states.last_hidden_state.shape == stock.last_hidden_state.shape
    torch.testing.assert_close(states.last_hidden_state[real], stock.last_hidden_state[real], rtol=1e-5, atol=1e-5)
    assert not states.last_hidden_state[5, 3:].any(), "the shortest row's group is short"
    for part in states:
        if part != "last_hidden_state":
            torch.testing.assert_close(states[part], stock[part], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(packed_weights.unavailable() is not None, reason="this torch has no packed products")
@pytest.mark.parametrize("is_mixed", [True, False])
def test_on_packed_weights(is_mixed: bool) -> None:
    """Whether or not there is padding to leave out; the encoder's layers alone are packed."""
    model = copy.deepcopy(zoo.load("bart"))
    inputs = mixed("bart") if is_mixed else zoo.inputs_for("bart", ragged=False)
    with fastgen.disabled():
        stock = encoder_states(model, inputs)["encoder_outputs"].last_hidden_state
    packed_weights.release()
    fastgen.configure(packing="always")
    states = encoder_states(model, inputs)["encoder_outputs"].last_hidden_state
    assert packed_weights.count() == 6 * len(model.get_encoder().layers)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(states[real], stock[real], rtol=1e-5, atol=1e-5)
    packed_weights.release()


def test_what_the_encoder_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row once, in groups as long as their longest row."""
    model, inputs, shapes = copy.deepcopy(zoo.load("bart")), mixed("bart"), []
    embed = type(model.get_encoder().embed_positions).forward

    def forward(self: Any, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(tokens.shape))
        return embed(self, tokens, *args, **kwargs)

    class Spied(type(model.get_encoder().embed_positions)):  # type: ignore[misc]
        pass

    Spied.__module__ = "transformers.models.bart.modeling_bart"  # or it would be a stranger, and left alone
    Spied.forward = disguised(forward, Spied)
    model.get_encoder().embed_positions.__class__ = Spied
    monkeypatch.setattr(replaced_code, "is_watched", lambda modules: False)  # by this test
    harness.compare(model, inputs, **SEARCH)
    assert shapes == [(7, 17), (2, 17), (2, 9), (3, 3)]  # stock's, then ours
    counted = fastgen.status().encoders
    assert counted == dict(batches=1, read=2 * 17 + 2 * 9 + 3 * 3, positions=7 * 17)
    assert f"1 batches grouped by length, {1 - 61 / 119:.0%} shorter" in str(fastgen.status())


def test_other_threads_draw_what_they_draw_in_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random stream is everybody's: put back, it would give another thread the same numbers again."""
    drawn: list[float] = []
    norm = torch.nn.LayerNorm.forward

    def forward(self: Any, rows: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: drawn.append(float(torch.rand(()))))
        thread.start()
        thread.join()
        return norm(self, rows)

    monkeypatch.setattr(torch.nn.LayerNorm, "forward", disguised(forward, torch.nn.LayerNorm))
    model, inputs = copy.deepcopy(zoo.load("bart")), mixed("bart")
    for _ in range(2):
        report.reset()
        drawn.clear()
        torch.manual_seed(0)
        encoder_states(model, inputs)
        torch.manual_seed(0)
        assert drawn == [float(torch.rand(())) for _ in drawn] and len(drawn) > 9 and grouped() == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_encoders_that_draw_numbers(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of some versions do, one for each layer: afterwards the stream is where it is in stock."""
    norm = torch.nn.LayerNorm.forward

    def forward(self: Any, rows: torch.Tensor) -> torch.Tensor:
        torch.rand([])
        return norm(self, rows)

    monkeypatch.setattr(torch.nn.LayerNorm, "forward", disguised(forward, torch.nn.LayerNorm))
    model, inputs, states = copy.deepcopy(zoo.load("bart")), mixed("bart"), []
    for run in range(3):
        report.reset()
        torch.manual_seed(0)
        with fastgen.disabled() if not run else contextlib.nullcontext(), mode():
            encoder_states(model, inputs)
        states.append(torch.get_rng_state())
        assert torch.equal(states[0], states[-1]) and grouped() == (1 if run else 0)


def test_padding_of_all_rows_is_cut_off() -> None:
    inputs = mixed("bart", (9, 9, 9), 30)
    harness.compare(zoo.load("bart"), inputs, **SEARCH)
    assert fastgen.status().encoders == dict(batches=1, read=27, positions=90)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_other_types(dtype: torch.dtype) -> None:
    inputs = mixed("bart")
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    harness.compare(zoo.load("bart"), inputs, **SEARCH)
    assert grouped() == 1


def test_inference_mode_and_decoder_prompts() -> None:
    model, inputs = zoo.load("bart"), mixed("bart")
    prompt = torch.tensor([[zoo.START, 7, 9]]).expand(len(LENGTHS), -1)
    with torch.inference_mode():
        harness.compare(model, {**inputs, "decoder_input_ids": prompt}, **SEARCH)
    assert grouped() == 1


def test_a_list() -> None:
    """`fastgen.generate` reads its sources through the same seam, refilled or not."""
    model, inputs = zoo.load("bart"), mixed("bart")
    sources = [ids[: int(n)] for ids, n in zip(inputs["input_ids"], inputs["attention_mask"].sum(1), strict=True)]
    alone = [model.generate(input_ids=source[None], **SEARCH)[0] for source in sources]
    for refill in (False, True):
        report.reset()
        outputs = fastgen.generate(model, sources, batch_size=28, refill=refill, **SEARCH)
        for output, expected in zip(outputs, alone, strict=True):
            assert torch.equal(output[0], expected[: len(output[0])])
        assert grouped() >= 1


# ---------------------------------------------------------------------------------------------- the host left alone
def assert_left_alone(model: Any, inputs: dict[str, Any], **options: Any) -> None:
    harness.compare(model, inputs, **{**SEARCH, **options})
    assert not grouped()


def test_padding_on_the_left() -> None:
    inputs = {name: value.flip(1) for name, value in mixed("bart").items()}
    assert_left_alone(zoo.load("bart"), inputs)


def test_a_hole_in_the_mask() -> None:
    inputs = mixed("bart")
    inputs["attention_mask"][2, 5] = 0
    assert_left_alone(zoo.load("bart"), inputs)


def test_a_mask_of_weights() -> None:
    inputs = mixed("bart")
    inputs["attention_mask"][2, 0] = 2
    assert_left_alone(zoo.load("bart"), inputs)


def test_an_empty_source() -> None:
    inputs = mixed("bart")
    inputs["attention_mask"][2] = 0
    assert_left_alone(zoo.load("bart"), inputs, expected="accelerated" if versions.PREFILLS else "fallback")
    assert not versions.PREFILLS or fastgen.status().calls[-1].cache == "rows"


def test_no_mask() -> None:
    assert_left_alone(zoo.load("t5" if zoo.MAJOR >= 5 else "bart"), {"input_ids": mixed("bart", (17, 17))["input_ids"]})


@pytest.mark.skipif(zoo.MAJOR < 5, reason="4.57 makes a mask from the padding")
def test_no_mask_but_padding() -> None:
    assert_left_alone(zoo.load("bart"), {"input_ids": mixed("bart")["input_ids"]})


@pytest.mark.skipif(zoo.MAJOR < 5, reason="BERT falls back on this version of transformers")
def test_a_length_that_the_host_divides() -> None:
    """The feed-forward part reads so many positions at a time, and raises an error for other lengths."""
    chunked = zoo._model("BertModel", "BertConfig", zoo.CAUSAL, chunk_size_feed_forward=17)
    decoder = zoo._model("BertLMHeadModel", "BertConfig", zoo.CAUSAL, **zoo.AS_DECODER)
    model = zoo._pair("EncoderDecoderModel", chunked, decoder)().eval()
    harness.compare(model, mixed("bert2bert"), **SEARCH)
    assert not grouped()


def test_embeddings() -> None:
    model, inputs = zoo.load("bart"), mixed("bart")
    embeddings = model.get_encoder().get_input_embeddings()(inputs["input_ids"])
    assert_left_alone(model, {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]})


def test_states_of_the_user() -> None:
    model, inputs = zoo.load("bart"), mixed("bart")
    states = model.get_encoder()(**inputs)
    given = {"attention_mask": inputs["attention_mask"], "encoder_outputs": lambda: copy.deepcopy(states)}
    assert_left_alone(model, given)


def test_hardly_any_padding() -> None:
    assert_left_alone(zoo.load("bart"), mixed("bart", (17, 16, 16, 17)))


def test_a_family_that_is_not_listed() -> None:
    for name in ("led", "speech_to_text"):
        if name in zoo.ACCELERATED:
            assert_left_alone(zoo.load(name), zoo.inputs_for(name, length=32))


@pytest.mark.skipif(zoo.MAJOR < 5, reason="eager attention is left to stock")
@pytest.mark.parametrize("option", ["output_attentions", "output_hidden_states"])
def test_inner_tensors(option: str) -> None:
    model = copy.deepcopy(zoo.load("bart"))
    model.set_attn_implementation("eager")
    inputs, options = mixed("bart"), {**SEARCH, option: True, "return_dict_in_generate": True}
    stock = harness.run_stock(model, inputs, **options)
    output, _ = harness.run_fastgen(model, inputs, strict=False, **options)
    assert not grouped()
    name = option.replace("output_", "encoder_")
    assert all(torch.equal(a, b) for a, b in zip(stock[name], output[name], strict=True))
    if option == "output_hidden_states":  # the host's own hooks stay behind: they see nothing of this call
        harness.compare(model, inputs, **SEARCH)
        assert grouped() == 1


@pytest.mark.parametrize(
    "options",
    [dict(use_cache=False), dict(cache_implementation="static"), dict(prompt_lookup_num_tokens=2, num_beams=1)],
    ids=lambda options: next(iter(options)),
)
def test_calls_that_fall_back(options: dict[str, Any]) -> None:
    inputs = mixed("bart", (5,)) if "num_beams" in options else mixed("bart")
    stock = harness.run_stock(zoo.load("bart"), inputs, **{**SEARCH, **options})
    output, _ = harness.run_fastgen(zoo.load("bart"), inputs, strict=False, **{**SEARCH, **options})
    assert torch.equal(stock, output) and not grouped()


def test_stock_and_disabled() -> None:
    model, inputs = zoo.load("bart"), mixed("bart")
    harness.run_fastgen(model, inputs, tier="stock", strict=False, **SEARCH)
    assert not grouped()
    with fastgen.disabled():
        model.generate(**inputs, **SEARCH)
        assert not any(hasattr(getattr(model, name, None), "__wrapped__") for name in _seams())
    assert any(hasattr(getattr(model, name, None), "__wrapped__") for name in _seams())
    assert not grouped()


def test_dropout() -> None:
    model = copy.deepcopy(zoo.load("bart")).train()
    inputs = mixed("bart")
    stock = harness.run_stock(model, inputs, **SEARCH)
    output, _ = harness.run_fastgen(model, inputs, strict=False, **SEARCH)
    assert torch.equal(stock, output) and not grouped()


@pytest.mark.parametrize("where", ["encoder", "layer", "before", "global", "forward", "compiled"])
def test_somebody_watches(where: str) -> None:
    """Hooks see the host's own call: one, of the padded batch."""
    model, inputs, seen = copy.deepcopy(zoo.load("bart")), mixed("bart"), []
    own, layer = model.get_encoder(), model.get_encoder().layers[1]

    def hook(module: Any, args: Any, *_: Any) -> None:
        if module is own or module is layer:
            seen.append(module)

    handle: Any = None
    if where == "encoder":
        handle = own.register_forward_hook(hook)
    elif where == "layer":
        handle = layer.register_forward_hook(hook)
    elif where == "before":
        handle = own.register_forward_pre_hook(hook)
    elif where == "global":
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
    elif where == "forward":
        forward = own.forward

        def replaced(*args: Any, **kwargs: Any) -> Any:
            seen.append(own)
            return forward(*args, **kwargs)

        own.forward = replaced
    else:
        own.compile(backend=lambda graph, _: graph.forward)
    try:
        harness.run_fastgen(model, inputs, strict=where != "global", **SEARCH)  # the decoder is hooked, too
        assert not grouped()
        assert len(seen) == {"global": 2, "compiled": 0}.get(where, 1)
    finally:
        if handle is not None:
            handle.remove()


def test_a_subclass() -> None:
    model = copy.deepcopy(zoo.load("bart"))

    class Stranger(torch.nn.LayerNorm):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows)

    model.get_encoder().layernorm_embedding.__class__ = Stranger
    harness.compare(model, mixed("bart"), **SEARCH)
    assert not grouped()


# ---------------------------------------------------------------------------------------------- the split
def test_the_best_split() -> None:
    """Against all splits of the sorted rows into neighbours."""
    draw = random.Random(1)
    for _ in range(60):
        lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 7))]
        width, fixed = max(lengths) + draw.choice([0, 0, 5]), draw.choice([0.5, 4, 20])
        rows = sorted(lengths)
        costs = []
        for cuts in itertools.product([False, True], repeat=len(rows) - 1):
            ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [len(rows)]
            begins = [0, *ends[:-1]]
            costs.append(sum((e - b) * rows[e - 1] + fixed for b, e in zip(begins, ends, strict=True)))
        groups = encoder.split(lengths, width, fixed)
        if groups is None:
            assert min(costs) > 0.9 * (len(lengths) * width + fixed)
            continue
        assert sorted(row for rows, _ in groups for row in rows) == list(range(len(lengths)))
        assert all(max(lengths[row] for row in rows) == length for rows, length in groups)
        cost = sum(len(rows) * length + fixed for rows, length in groups)
        assert cost == pytest.approx(min(costs)) and cost <= 0.9 * (len(lengths) * width + fixed)


def test_no_sentences() -> None:
    """The host's error."""
    model, inputs = zoo.load("bart"), {name: value[:0] for name, value in mixed("bart").items()}
    errors = []
    for beams in (1, 3):
        for run in (harness.run_stock, harness.run_fastgen):
            with pytest.raises(Exception) as caught:  # whichever the host raises
                run(model, inputs, num_beams=beams, max_new_tokens=4)
            errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1] and errors[2] == errors[3]
