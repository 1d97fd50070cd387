"""Texts that an earlier call has read: the encoder's output is taken from there, and tokens stay stock's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import harness
import pytest
import torch
import zoo
from torch import Tensor

from fastgen.cache import by_model
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.cache import encoded
from fastgen.optimizer.transformers.families import ENCODERS

NAMES = [
    name
    for name in ("bart", "mbart", "marian", "m2m_100", "pegasus", "t5", "mt5", "umt5")
    if name in zoo.FAMILIES and (versions.PREFILLS or name != "m2m_100")  # whose encoder draws random numbers in 4.57
]
OPTIONS = dict(num_beams=3, max_new_tokens=8, return_dict_in_generate=True, output_scores=True)
LENGTH = 20


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    with harness.keeping_prefixes():
        yield


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call has read."""
    seen: list[int] = []
    read = encoded._read

    def counted(model: Any, tokens: Tensor, mask: Tensor, encode: Any) -> Any:
        seen.append(len(tokens))
        return read(model, tokens, mask, encode)

    monkeypatch.setattr(encoded, "_read", counted)
    return seen


def some(inputs: Any, *rows: int, longer: int = 0) -> Any:
    """These rows, with more padding on the right."""
    ids, mask = (inputs[name][list(rows)] for name in ("input_ids", "attention_mask"))
    return dict(
        input_ids=torch.nn.functional.pad(ids, (0, longer), value=zoo.PAD),
        attention_mask=torch.nn.functional.pad(mask, (0, longer)),
    )


@pytest.mark.parametrize("name", NAMES)
def test_stocks_tokens(name: str, rows: list[int]) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name, batch=5, length=LENGTH)
    assert type(model.get_encoder()).__name__ in ENCODERS
    for tier in harness.TIERS:
        by_model.release()
        rows.clear()
        for given, read in [
            (some(inputs, 0, 1, 2), [3]),
            (some(inputs, 0, 1, 2), []),
            (some(inputs, 2, 0, longer=3), []),
            (some(inputs, 1, 3, 4, 2), [2]),
            (some(inputs, 4, 0), []),
        ]:
            rows.clear()
            harness.compare(model, given, tier, **OPTIONS)
            assert rows == read
    counts = by_model.counts()
    assert (counts["calls"], counts["hits"]) == (10, 8)


@pytest.mark.parametrize("search", ["greedy", "samples", "beam_samples"])
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_other_searches(name: str, search: str, rows: list[int]) -> None:
    """Random numbers, too, are as if the encoder had run."""
    options: dict[str, Any] = dict(max_new_tokens=8)
    options |= dict(do_sample=True, top_k=9) if search != "greedy" else {}
    options |= dict(num_beams=3) if search == "beam_samples" else {}
    model, inputs = zoo.load(name), zoo.inputs_for(name, length=LENGTH)
    for _ in range(2):
        harness.compare(model, inputs, **options)
    assert rows == [3]


def test_a_part_of_a_text_serves_nobody(rows: list[int]) -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", batch=1, length=LENGTH, ragged=False)
    harness.compare(model, inputs, **OPTIONS)
    shorter = {name: value[:, :-1] for name, value in inputs.items()}
    harness.compare(model, shorter, **OPTIONS)
    assert rows == [1, 1]


def _data(model: Any) -> None:
    model.get_encoder().layers[0].fc1.weight.data.add_(0.1)


def _embedding(model: Any) -> None:
    model.get_input_embeddings().weight.data[zoo.FIRST_WORD :] += 0.1


def _attribute(model: Any) -> None:
    model.get_encoder().embed_scale = 1.5
    for module in model.get_encoder().modules():
        if hasattr(module, "embed_scale"):
            module.embed_scale = 1.5


def _dtype(model: Any) -> None:
    model.to(torch.float64)


@pytest.mark.parametrize("edit", [_data, _embedding, _attribute, _dtype], ids=lambda edit: edit.__name__[1:])
def test_an_edit_never_hits(edit: Callable[[Any], None], rows: list[int]) -> None:
    model, inputs = zoo.fresh("bart"), zoo.inputs_for("bart", length=LENGTH)
    for _ in range(2):
        harness.compare(model, inputs, **OPTIONS)
    edit(model)
    for _ in range(2):
        harness.compare(model, inputs, **OPTIONS)
    assert rows == [3, 3]


def test_an_edit_that_goes_unseen_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what is kept is what the decoder attends to."""
    monkeypatch.setattr(encoded, "state_of", lambda *args: None)
    model, inputs = zoo.fresh("bart"), zoo.inputs_for("bart", length=LENGTH)
    harness.compare(model, inputs, **OPTIONS)
    _data(model)
    with pytest.raises(AssertionError):
        harness.compare(model, inputs, **OPTIONS)


def test_what_is_kept_is_a_copy(rows: list[int]) -> None:
    """Of real positions alone; nothing that a call does to its own output reaches it."""
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", length=LENGTH)
    harness.compare(model, inputs, **OPTIONS)
    kept = [node.tensors[0] for node in by_model.prefixes._nodes]
    before = [tensor.clone() for tensor in kept]
    assert sorted(map(len, kept)) == sorted(inputs["attention_mask"].sum(1).tolist())
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept)
    for _ in range(2):
        harness.compare(model, inputs, **OPTIONS)
    assert all(map(torch.equal, before, kept)) and rows == [3]


def test_padding_on_the_left_and_features_are_read(rows: list[int]) -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", length=LENGTH)
    left = {name: value.flip(1) for name, value in inputs.items()}
    for _ in range(2):
        harness.compare(model, left, **OPTIONS)
        harness.compare(
            zoo.load("whisper"), zoo.inputs_for("whisper"), decoder_input_ids=torch.full((3, 1), zoo.START), **OPTIONS
        )
    assert rows == [] and not by_model.prefixes.nbytes


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_autocast_neither_keeps_nor_takes(name: str, rows: list[int]) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name, length=LENGTH)
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(**inputs, **OPTIONS)
    assert rows == [] and not by_model.prefixes.nbytes
    harness.compare(model, inputs, **OPTIONS)
    assert rows == [3]
    before = by_model.counts()
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(**inputs, **OPTIONS)
    assert by_model.counts() == before


def test_a_mask_of_another_dtype(rows: list[int]) -> None:
    model, inputs = zoo.load("bart"), zoo.inputs_for("bart", length=LENGTH)
    for dtype in (torch.float32, torch.bool, torch.int32):
        harness.compare(model, {**inputs, "attention_mask": inputs["attention_mask"].to(dtype)}, **OPTIONS)
    assert rows == [3]
