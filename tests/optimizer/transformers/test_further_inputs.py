"""Images, audio and whatever else a model takes beside texts: read once per sentence, or left to the host."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import harness
import pytest
import tiny_models
import torch
import transformers
import zoo
from tiny_models.shrinking import build

import fastgen
from fastgen.optimizer import verification
from fastgen.optimizer.transformers import expansion, versions
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.optimizer.transformers.request import Request

pytestmark = pytest.mark.skipif(
    not versions.PREFILLS or zoo.CACHE_LENGTH != "cache_length", reason="this version expands images otherwise"
)
BEAMS = dict(num_beams=3, max_new_tokens=8, do_sample=False)


@functools.cache
def _model(name: str) -> Any:
    model = build(name, layers=2)
    model.generation_config.eos_token_id = zoo.UNUSED
    return model


def _batches(name: str) -> dict[str, dict[str, Any]]:
    if not hasattr(transformers, name):
        pytest.skip(f"this version has no {name}")
    return dict(tiny_models.INPUTS[name](_model(name)))


def _reason() -> str:
    last = fastgen.status().calls[-1]
    assert last.tier == "stock" and last.reason, last
    return last.reason


@pytest.mark.parametrize("search", ["beams", "five beams", "samples", "greedy"])
@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"])
def test_every_arrangement_of_images(name: str, search: str) -> None:
    options: dict[str, Any] = {
        "beams": BEAMS,
        "five beams": dict(BEAMS, num_beams=5, num_return_sequences=2, early_stopping=True),
        "samples": dict(max_new_tokens=8, do_sample=True, num_return_sequences=3, top_k=0),
        "greedy": dict(max_new_tokens=8, do_sample=False),
    }[search]
    batches = _batches(name)
    assert len(batches) >= 4
    for inputs in batches.values():
        harness.compare(_model(name), inputs, **options)


def test_the_prompt_has_a_row_for_each_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen = "LlavaForConditionalGeneration", []
    inputs = next(iter(_batches(name).values()))
    harness.compare(_model(name), inputs, **BEAMS)  # it is tried in the first call
    prefill = versions.prefill

    def look(model: Any, input_ids: torch.Tensor, config: Any, kwargs: dict[str, Any]) -> Any:
        images = kwargs["mm_encoder_outputs"]["image"].pooler_output
        seen.append((len(input_ids), len(images)))
        return prefill(model, input_ids, config, kwargs)

    monkeypatch.setattr(versions, "prefill", look)
    harness.compare(_model(name), inputs, **BEAMS)
    assert seen == [(2, 2)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_arrangement_in_which_stock_mixes_images_up(order: tuple[int, int]) -> None:
    """Granite repeats each image where it should repeat those of a sentence together."""
    name = "Granite4VisionForConditionalGeneration"
    batches = list(_batches(name).items())
    plain = batches[0][1]
    several = next(inputs for what, inputs in batches if what.startswith("two images"))
    model = build(name, layers=2)
    model.generation_config.eos_token_id = zoo.UNUSED
    for which in order:
        if which == 0:
            harness.compare(model, plain, **BEAMS)
        else:
            harness.compare(model, several, expected="fallback", **BEAMS)
            assert "its logits differ" in _reason()


def test_inputs_that_are_no_data() -> None:
    """Kyutai's model gets caches of its own as inputs, and writes to them before it reads the prompt."""
    name = "KyutaiSpeechToTextForConditionalGeneration"
    for inputs in _batches(name).values():
        harness.compare(_model(name), inputs, expected="fallback", **BEAMS)
        assert "further inputs that may change" in _reason()


def test_a_search_that_was_not_begun_by_generate() -> None:
    """What was expanded is then unknown."""
    name = "LlavaForConditionalGeneration"
    model, inputs = _model(name), next(iter(_batches(name).values()))
    search, found = type(model)._beam_search, []

    def alone(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return search(self, input_ids.clone(), *args, **kwargs)  # not the tensor that was expanded

    stock = harness.run_stock(model, inputs, **BEAMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "_beam_search", alone, raising=False)
        output, _ = harness.run_fastgen(model, inputs, strict=False, **BEAMS)
        found.append(_reason())
    assert torch.equal(stock, output)
    assert "further inputs (mm_encoder_outputs" in found[0]


def test_no_sentence_leaves_a_batch_with_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the model knows which images are a sentence's."""
    name, rows = "LlavaForConditionalGeneration", []
    model = _model(name)
    inputs = next(inputs for inputs in _batches(name).values() if len(inputs["input_ids"]) == 3)
    stock = harness.run_stock(model, inputs, **BEAMS, return_dict_in_generate=True, output_scores=True)
    ends = stock.sequences[0, inputs["input_ids"].shape[1] + 1 :].unique().tolist()  # the first sentence ends early
    options = dict(BEAMS, eos_token_id=ends, early_stopping=True, max_new_tokens=12)
    run = TreeDecoder.run

    def count(self: Any, forward: Any, step: dict[str, Any]) -> Any:
        rows.append(len(step["input_ids"]))
        return run(self, forward, step)

    harness.compare(model, inputs, **options)
    monkeypatch.setattr(TreeDecoder, "run", count)
    harness.compare(model, inputs, **options)
    assert set(rows) == {9}
    rows.clear()  # they would leave, if a batch of one image each could be taken apart
    monkeypatch.setattr(Request, "may_evict", True)
    model.generate(**inputs, **options)
    assert min(rows) < 9


@pytest.mark.parametrize("first", [True, False])
def test_a_mask_that_another_call_has_not(first: bool) -> None:
    """A model is tried with the names that a call has: Seamless computes its decoder's mask from that of the audio."""
    name = "SeamlessM4TForSpeechToText"
    batches = sorted(_batches(name).values(), key=lambda inputs: ("attention_mask" in inputs) == first)
    assert {"attention_mask" in inputs for inputs in batches} == {True, False}
    model = build(name, layers=2)
    model.generation_config.eos_token_id = zoo.UNUSED
    for inputs in batches:
        harness.compare(model, inputs, **BEAMS)


# ---------------------------------------------------------------------------------------------- units
class _Config:
    def __init__(self) -> None:
        self.image_token_id, self.pad_token_id, self.audio_token_id = 90, 1, None


@pytest.mark.parametrize(
    ("tokens", "images", "same"),
    [
        ([[90, 5], [90, 6]], 2, True),
        ([[90, 90], [5, 6]], 2, False),  # both images in one sentence
        ([[90, 90], [90, 90]], 4, False),  # two images each
        ([[90, 5], [5, 6]], 1, False),
    ],
)
def test_arrangements(tokens: list[list[int]], images: int, same: bool) -> None:
    plain = expansion.arrangement(torch.tensor([[90, 7], [90, 8]]), {"image": [torch.zeros(4)] * 2}, _Config())
    found = expansion.arrangement(torch.tensor(tokens), {"image": [torch.zeros(4)] * images}, _Config())
    assert (found == plain) is same


def test_data() -> None:
    assert expansion.is_data({"image": [torch.zeros(1), None], "grid": (1, 2.5, "word")})
    assert not expansion.is_data([transformers.DynamicCache()])
    data = {"image": [torch.zeros(2)]}
    mine = expansion.copied(data)
    mine["image"][0] += 1
    assert not data["image"][0].any()


def test_placeholders_of_a_part() -> None:
    """Phi4 names the image's token in the configuration of its vision tower, and repeats each image by itself."""
    name = "Phi4MultimodalForCausalLM"
    batches = _batches(name)
    plain = next(iter(batches.values()))
    model = build(name, layers=2)
    model.generation_config.eos_token_id = zoo.UNUSED
    harness.compare(model, plain, **BEAMS)
    for what, inputs in batches.items():
        if what.startswith("two images"):
            harness.compare(model, inputs, expected="fallback", **BEAMS)


@pytest.mark.parametrize(
    "value", [{0: torch.zeros(1)}, transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.zeros(1))]
)
def test_containers_of_any_kind_are_copied(value: Any) -> None:
    if not isinstance(value, transformers.modeling_outputs.ModelOutput):
        assert expansion.containers_copied(value) == value
    copied = expansion.containers_copied({"inner": value})["inner"]
    assert type(copied) is type(value) and copied is not value
    for name in value:
        assert copied[name] is value[name]


def test_a_verified_call_with_encoded_images() -> None:
    """The host expands what the user has encoded in place: the second decoding needs it as it was."""
    name = "LlavaForConditionalGeneration"
    model, inputs = _model(name), dict(next(iter(_batches(name).values())))
    with torch.no_grad():
        encoded = model.model.get_image_features(inputs.pop("pixel_values"), return_dict=True)
    with fastgen.disabled():
        stock = model.generate(**inputs, mm_encoder_outputs={"image": copy.deepcopy(encoded)}, **BEAMS)
    verification.reset()
    with warnings.catch_warnings(), harness.configured(verify=1):
        warnings.simplefilter("error")
        output = model.generate(**inputs, mm_encoder_outputs={"image": copy.deepcopy(encoded)}, **BEAMS)
    assert torch.equal(stock, output)
    assert (
        fastgen.status().calls[-1].tier == "fast" and "1 the same, 0 near-ties, 0 different" in verification.summary()
    )
    verification.reset()
