"""Every family of the zoo, in both tiers, under several searches: identical to the stock host."""

from __future__ import annotations

import copy
import functools
from typing import Any

import harness
import pytest
import torch
import zoo

import fastgen
from fastgen.layers import packed_weights
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.optimizer.transformers.versions import CACHE

SEARCHES: dict[str, dict[str, Any]] = {
    "plain": dict(num_beams=4, max_new_tokens=16),
    "ranked": dict(num_beams=4, max_new_tokens=14, num_return_sequences=3, length_penalty=2.0, no_repeat_ngram_size=2),
    "early": dict(num_beams=3, max_new_tokens=12, early_stopping=True, repetition_penalty=1.3),
    "sampled": dict(num_beams=4, max_new_tokens=12, do_sample=True, top_k=20, temperature=1.3),
}
DETAILS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
TOKENS = dict(return_dict_in_generate=False)
families = pytest.mark.parametrize("family", zoo.FAMILIES)


def _inputs(family: str) -> dict[str, Any]:
    return {**zoo.inputs_for(family), **zoo.FAMILIES[family].generate}


@functools.cache
def _stock(family: str, search: str, details: bool) -> Any:
    options = {**SEARCHES[search], **(DETAILS if details else TOKENS)}
    return harness.run_stock(zoo.load(family), _inputs(family), **options)


# ---------------------------------------------------------------------------------------------- the zoo itself
@families
def test_stock_search_is_worth_comparing(family: str) -> None:
    """Beams cross, sentences end at different steps and not all of them do: else equality would prove little."""
    model = zoo.load(family)
    output = harness.run_stock(
        model,
        _inputs(family),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=16,
        **DETAILS,
    )
    lengths = zoo.finishing_steps(output)
    assert zoo.crossings(output, beams=4) >= 5, "hypotheses hardly change beams"
    assert len(set(lengths)) >= 3, f"hypotheses end together: {lengths}"
    assert (output.sequences == model.generation_config.eos_token_id).any()
    spread = torch.stack([logits.max(-1).values - logits.min(-1).values for logits in output.logits]).min()
    assert spread > 0.5, "logits are flat"


# The attention of these insists on float32 inside.
@pytest.mark.parametrize("family", sorted(set(zoo.ACCELERATED) - {"gemma2", "gpt_oss", "prophetnet"}))
def test_weights_are_no_chaos(family: str) -> None:
    """Stock in float64 finds the same: what differs in float32 is then an error, not rounding of a wild model."""
    model = zoo.load(family)
    inputs = _inputs(family)
    options = dict(num_beams=4, max_new_tokens=16, **DETAILS)
    single = harness.run_stock(model, inputs, **options)
    double = harness.run_stock(copy.deepcopy(model).double(), harness.in_float64(inputs), **options)
    assert torch.equal(single.sequences, double.sequences)
    error = max(float((a - b).abs().max()) for a, b in zip(single.logits, double.logits, strict=True))
    assert error < harness.TOLERANCE


# ---------------------------------------------------------------------------------------------- the comparison
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("tier", harness.TIERS)
@families
def test_identical(family: str, tier: str, search: str) -> None:
    """With scores and logits, which keep every sentence in the batch, and without, when they may leave."""
    for details in (False, True):
        if zoo.MAJOR < 5 and (family, search, details) == ("vit2gpt2", "plain", True):
            continue  # tokens and beam indices are equal; two beams that tie within 1e-5 swap their rows of scores
        harness.compare(
            zoo.load(family),
            _inputs(family),
            tier=tier,
            expected=zoo.FAMILIES[family].expected,
            stock=_stock(family, search, details),
            **{**SEARCHES[search], **(DETAILS if details else TOKENS)},
        )


@pytest.mark.parametrize(
    "family",
    sorted({"bart", "t5", "bert2bert", "whisper", "llama", "mistral", "gpt_oss"}.intersection(zoo.ACCELERATED)),
)
def test_finished_sentences_leave(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from the host: the decoder is called with ever fewer rows, and the result stays the same."""
    model, rows = zoo.load(family), []

    step_inputs = TreeDecoder.step_inputs

    def count_rows(decoder: TreeDecoder, inputs: dict[str, Any]) -> dict[str, Any]:
        rows.append((inputs["decoder_input_ids"] if "decoder_input_ids" in inputs else inputs["input_ids"]).shape[0])
        return step_inputs(decoder, inputs)

    inputs = {**zoo.FAMILIES[family].inputs(model, batch=6), **zoo.FAMILIES[family].generate}
    if family == "whisper":
        inputs["decoder_input_ids"] = torch.full((6, 1), zoo.START)
    options = dict(num_beams=4, max_new_tokens=20, early_stopping=True, length_penalty=-1.0, **TOKENS)
    stock = harness.run_stock(model, inputs, **options)
    harness.compare(model, inputs, tier="fast", stock=stock, **options)  # a first call may include a proof
    monkeypatch.setattr(TreeDecoder, "step_inputs", count_rows)
    harness.compare(model, inputs, tier="fast", stock=stock, **options)
    assert rows == sorted(rows, reverse=True) and rows[-1] < rows[0] == 24, rows


@pytest.mark.parametrize("beams", [4, 1])
@pytest.mark.parametrize("family", sorted({"bart", "gpt2", "t5"}.intersection(zoo.ACCELERATED)))
def test_scores_of_sequences_without_those_of_tokens(family: str, beams: int) -> None:
    """What fastgen-generate-transformers asks for: scores of hypotheses from a batch that sentences leave."""
    model, inputs = zoo.load(family), zoo.inputs_for(family, batch=6)
    config = copy.deepcopy(model.generation_config)
    config.update(num_beams=beams, max_new_tokens=20, early_stopping=beams > 1, **DETAILS)
    stock = harness.run_stock(model, inputs, generation_config=config)
    config._fastgen_sequence_scores_only = True
    output, _ = harness.run_fastgen(model, inputs, generation_config=config)
    assert torch.equal(output.sequences, stock.sequences)
    if beams > 1:
        assert output.scores is output.logits is getattr(output, CACHE) is None
        torch.testing.assert_close(output.sequences_scores, stock.sequences_scores, rtol=1e-5, atol=1e-4)
    else:  # the host's own loop, and no score of a sequence but those of its tokens
        assert len(output.scores) == len(stock.scores)


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("family", zoo.ACCELERATED)
def test_identical_with_one_sentence_and_two_beams(family: str, tier: str) -> None:
    inputs = {name: value[1:2] for name, value in _inputs(family).items()}
    harness.compare(zoo.load(family), inputs, tier=tier, num_beams=2, max_new_tokens=9, output_scores=True)


@pytest.mark.skipif(packed_weights.unavailable() is not None, reason="this torch has no packed products")
@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("family", zoo.ACCELERATED)
def test_identical_on_packed_weights(family: str, tier: str) -> None:
    packed_weights.release()
    fastgen.configure(packing="always")
    stock = _stock(family, "plain", False)
    harness.compare(zoo.load(family), _inputs(family), tier=tier, stock=stock, **SEARCHES["plain"], **TOKENS)
    assert packed_weights.count() > 0
    packed_weights.release()


@pytest.mark.skipif(packed_weights.unavailable() is not None, reason="this torch has no packed products")
@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("family", sorted({"bart", "llama"}.intersection(zoo.ACCELERATED)))
def test_the_prompt_is_read_on_packed_weights(family: str, tier: str) -> None:
    """One new token: there is no step but the prompt's."""
    packed_weights.release()
    fastgen.configure(packing="always")
    harness.compare(zoo.load(family), _inputs(family), tier=tier, num_beams=2, max_new_tokens=1)
    assert packed_weights.count() > 0
    packed_weights.release()


# ---------------------------------------------------------------------------------------------- Whisper's own way
def _whisper_generate(model: Any, arguments: dict[str, Any]) -> Any:
    return model.generate(**arguments)


def _whisper(frames: int, batch: int = 3, tier: str = "auto", **options: Any) -> Any:
    model = zoo.load("whisper")
    inputs: dict[str, Any] = zoo.inputs_for("whisper", length=frames, batch=batch)
    if frames > 24 and batch > 1:
        mask = torch.ones(batch, frames, dtype=torch.long)
        mask[-1, frames - 20 :] = 0
        inputs["attention_mask"] = mask
    stock = harness.run_stock(model, inputs, _whisper_generate, **options)
    output, calls = harness.run_fastgen(model, inputs, _whisper_generate, tier=tier, **options)
    harness.assert_path(calls, tier, "accelerated")
    _assert_nested(stock, output)
    return stock, calls


def _assert_nested(stock: Any, output: Any, where: str = "output") -> None:
    """Equal tokens and close scores all through Whisper's nested results; caches are left out."""
    assert type(stock) is type(output), f"{where}: {type(stock).__name__} became {type(output).__name__}"
    if isinstance(stock, torch.Tensor):
        assert stock.shape == output.shape, f"{where}: {tuple(stock.shape)} became {tuple(output.shape)}"
        torch.testing.assert_close(output, stock, rtol=0, atol=harness.TOLERANCE, msg=lambda m: f"{where}: {m}")
    elif isinstance(stock, dict):
        assert stock.keys() == output.keys(), where
        for key in stock.keys() - {CACHE}:
            _assert_nested(stock[key], output[key], f"{where}.{key}")
    elif isinstance(stock, (list, tuple)):
        assert len(stock) == len(output), f"{where}: {len(stock)} became {len(output)}"
        for index, (a, b) in enumerate(zip(stock, output, strict=True)):
            _assert_nested(a, b, f"{where}[{index}]")
    else:
        assert stock == output, where


# Without time stamps a random model would still say some, and stock would seek backwards for ever.
WORDS = dict(suppress_tokens=list(range(zoo.VOCAB - 24, zoo.VOCAB)))


@pytest.mark.parametrize("tier", harness.TIERS)
def test_whisper_short_form(tier: str) -> None:
    _whisper(24, tier=tier, num_beams=4, max_new_tokens=14, **WORDS)
    _whisper(24, tier=tier, num_beams=4, max_new_tokens=14, return_timestamps=True)


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("batch", [1, 3])
def test_whisper_long_form(tier: str, batch: int) -> None:
    options = dict(num_beams=3, max_new_tokens=12, return_timestamps=True, return_segments=True)
    _, calls = _whisper(70, batch, tier, **options)
    assert len(calls) > 1, "long form decodes window after window"


def test_whisper_with_a_prompt_and_scores() -> None:
    options = dict(num_beams=4, max_new_tokens=10, **WORDS)
    _whisper(24, prompt_ids=torch.tensor([7, 9, 11]), **options)
    _whisper(24, return_dict_in_generate=True, output_scores=True, **options)
    _whisper(24, num_return_sequences=2, **options)


def test_whisper_temperature_fallback() -> None:
    """A low log-probability makes Whisper decode again, by sampling."""
    options = dict(temperature=(0.0, 0.4), logprob_threshold=0.0, return_timestamps=True)
    _whisper(70, 1, num_beams=3, max_new_tokens=8, **options)
