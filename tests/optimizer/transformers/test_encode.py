"""`fastgen.encode`: encoders alone, without padding; what they return is the host's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
import zoo

import fastgen
from fastgen import report
from fastgen.optimizer.transformers.model import encoder

LENGTHS = (9, 2, 17, 3, 16, 1, 9)
BASES = dict(
    Bert=dict(),
    Roberta=dict(),
    XLMRoberta=dict(),
    Camembert=dict(),
    DistilBert=dict(dim=32, hidden_dim=48, n_layers=2, n_heads=4),
    Electra=dict(embedding_size=16),
    Albert=dict(embedding_size=16),
    MPNet=dict(),
)
HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM")


@pytest.fixture(autouse=True)
def _every_saving_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny models are quicker padded: count tokens alone."""
    monkeypatch.setattr(encoder, "_WEIGHTS_TOKENS", 2)
    monkeypatch.setattr(encoder, "_CALLS_WEIGHTS", {"cpu": 0})
    report.reset()
    with torch.no_grad(), fastgen.configured(strict=True):
        yield


def _built(base: str, head: str = "Model", **options: Any) -> Any:
    config = {**zoo.CAUSAL, **BASES[base], "num_labels": LENGTHS[0], **options}
    torch.manual_seed(0)
    model = getattr(transformers, base + head)(getattr(transformers, base + "Config")(**config)).eval()
    zoo._roughen(model)
    return model


def _inputs(lengths: tuple[int, ...] = LENGTHS, width: int = 17) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(zoo.FIRST_WORD, zoo.VOCAB, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return dict(input_ids=ids.masked_fill(mask == 0, zoo.PAD), attention_mask=mask)


def _assert_same(stock: Any, output: Any, mask: torch.Tensor) -> None:
    assert type(stock) is type(output) and list(stock) == list(output)
    for name, value in stock.items():
        ours = output[name]
        assert ours.shape == value.shape and ours.dtype == value.dtype
        if value.shape[:2] == mask.shape:
            nothing = torch.finfo(value.dtype).min if name in ("start_logits", "end_logits") else 0.0
            assert (ours[5, 3:] == nothing).all(), "the shortest text's group is short"
            ours, value = ours[mask.bool()], value[mask.bool()]
        torch.testing.assert_close(ours, value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("base", BASES)
def test_outputs(base: str, head: str) -> None:
    """There are as many labels as the longest text of a group has tokens: shapes alone would not tell them apart."""
    options = dict(num_labels=2) if head == "ForQuestionAnswering" else {}
    model, inputs = _built(base, head, **options), _inputs()
    output = fastgen.encode(model, **inputs)
    assert fastgen.status().encoders == dict(batches=1, read=61, positions=7 * 17)
    _assert_same(model(**inputs), output, inputs["attention_mask"])


def test_segments_and_positions() -> None:
    model, inputs = _built("Bert"), _inputs()
    inputs["token_type_ids"] = (torch.arange(17) > 4).long().expand(len(LENGTHS), -1)
    inputs["position_ids"] = (torch.arange(17) + 3).expand(len(LENGTHS), -1)
    output = fastgen.encode(model, **inputs)
    assert fastgen.status().encoders["batches"] == 1
    _assert_same(model(**inputs), output, inputs["attention_mask"])


@pytest.mark.parametrize("lengths", [(17, 17, 17), (4,) * 9, (1,)])
def test_equal_lengths(lengths: tuple[int, ...]) -> None:
    model, inputs = _built("Bert"), _inputs(lengths)
    real = inputs["attention_mask"].bool()
    ours, stock = (read.last_hidden_state[real] for read in (fastgen.encode(model, **inputs), model(**inputs)))
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)
    assert bool(fastgen.status().encoders) is (lengths[0] < 17), "padding of all texts is cut off"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, inputs = _built("Bert"), _inputs()
    exact, real = model(**inputs).last_hidden_state, inputs["attention_mask"].bool()
    half = copy.deepcopy(model).to(dtype)
    errors = [
        (states.last_hidden_state.float() - exact)[real].abs().max()
        for states in (fastgen.encode(half, **inputs), half(**inputs))
    ]
    assert errors[0] <= 2 * errors[1]


def _left(inputs: dict[str, Any]) -> None:
    inputs.update({name: value.flip(1) for name, value in inputs.items()})


def _with_a_hole(inputs: dict[str, Any]) -> None:
    inputs["attention_mask"][2, 5] = 0


def _empty(inputs: dict[str, Any]) -> None:
    inputs["attention_mask"][2] = 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model, inputs: model.train(), "training mode"),
        (lambda model, inputs: inputs.update(labels=inputs["input_ids"]), "labels"),
        (lambda model, inputs: inputs.update(output_attentions=True), "output_attentions"),
        (lambda model, inputs: inputs.pop("attention_mask"), "attention_mask"),
        (lambda model, inputs: inputs.update(position_ids=torch.arange(17)[None]), "shape"),
        (lambda model, inputs: setattr(model.config, "output_hidden_states", True), "output_hidden_states"),
        (lambda model, inputs: model.register_forward_hook(lambda *_: None), "hooks"),
        (lambda model, inputs: torch.set_grad_enabled(True), "no_grad"),
        (lambda model, inputs: setattr(model.config, "return_dict", False), "tuples"),
        (lambda model, inputs: setattr(model.config, "chunk_size_feed_forward", 1), "chunk_size"),
        (lambda model, inputs: setattr(model.config, "_attn_implementation", "mine"), "mine"),
        (lambda model, inputs: _left(inputs), "on the right"),
        (lambda model, inputs: _with_a_hole(inputs), "on the right"),
        (lambda model, inputs: _empty(inputs), "empty"),
    ],
)
def test_reasons(change: Any, reason: str) -> None:
    model, inputs = _built("Bert", "ForMaskedLM"), _inputs()
    change(model, inputs)
    with pytest.raises(fastgen.FallbackError, match=reason):
        fastgen.encode(model, **inputs)
    with fastgen.configured(strict=False):
        torch.manual_seed(0)
        if model.config._attn_implementation == "mine":
            return  # which nobody has registered
        output = fastgen.encode(model, **inputs)
        torch.manual_seed(0)
        expected = model(**inputs)
        ours, stock = (x.logits if model.config.return_dict else x[0] for x in (output, expected))
        assert torch.equal(ours, stock)
    assert not fastgen.status().encoders


def test_three_dimensions_and_none() -> None:
    model, inputs = _built("Bert", "ForMaskedLM"), _inputs()
    with pytest.raises(fastgen.FallbackError, match="one row for each text"):
        fastgen.encode(model, **{name: value[None] for name, value in inputs.items()})
    with pytest.raises(Exception) as stock:
        model(**{name: value[:0] for name, value in inputs.items()})
    with pytest.raises(type(stock.value)):
        fastgen.encode(model, **{name: value[:0] for name, value in inputs.items()})


@pytest.mark.parametrize("head", ["ForMultipleChoice", "ForPreTraining"])
def test_heads_that_were_not_compared(head: str) -> None:
    with pytest.raises(fastgen.FallbackError, match=f"Electra{head} is none"):
        fastgen.encode(_built("Electra", head), **_inputs())


def test_a_class_of_the_users() -> None:
    class BertModel(transformers.BertModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = _built("Bert")
    model.__class__ = BertModel
    with pytest.raises(fastgen.FallbackError, match="BertModel is none"):
        fastgen.encode(model, **_inputs())


def test_dynamically_quantised_layers() -> None:
    quantize = torch.ao.quantization.quantize_dynamic
    with pytest.raises(fastgen.FallbackError, match="quantised"):
        fastgen.encode(quantize(_built("Bert"), {torch.nn.Linear}), **_inputs())


def test_random_numbers_of_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting the process's stream back would have other threads draw the same numbers twice."""
    fork, forked = torch.random.fork_rng, []

    def noting(devices: Any = None, enabled: bool = True) -> Any:
        forked.append(enabled)
        return fork(devices, enabled)

    monkeypatch.setattr(torch.random, "fork_rng", noting)
    fastgen.encode(_built("Bert"), **_inputs())
    assert fastgen.status().encoders["batches"] == 1 and not any(forked)


def test_models_that_were_not_compared() -> None:
    with pytest.raises(fastgen.FallbackError, match="GPT2Model"):
        fastgen.encode(zoo.load("gpt2").base_model, **_inputs())
    with pytest.raises(fastgen.FallbackError, match="decoder"):
        fastgen.encode(_built("Bert", "Model", is_decoder=True), **_inputs())


def test_disabled() -> None:
    model, inputs = _built("Bert"), _inputs()
    with fastgen.disabled():
        output = fastgen.encode(model, **inputs)
    assert torch.equal(output.last_hidden_state, model(**inputs).last_hidden_state)
    assert not fastgen.status().encoders
