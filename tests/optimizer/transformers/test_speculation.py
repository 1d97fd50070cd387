"""Speculative decoding: whatever is drafted, the tokens are the host's, and so is all that happens between steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import harness
import pytest
import torch
import zoo
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

import fastgen
from fastgen.cache import path_tree
from fastgen.decoding.speculation import SpeculationPolicy
from fastgen.layers import packed_weights, quantized
from fastgen.ops import quantized as codes
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.generate import speculation
from fastgen.replay import statistics, store

DECODERS = ["llama", "gpt2", "qwen3", "phi3", "olmo", "gpt_neox", "gemma", "gemma2", "gpt_oss", "mistral", "opt"]
ENCODER_DECODERS = ["bart", "blenderbot", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "umt5", "whisper"]
NAMES = [*DECODERS, *ENCODER_DECODERS]


@pytest.fixture(autouse=True)
def _forced(rounded_weights: None) -> Iterator[None]:
    if not versions.COUNTS_IN_TENSORS:
        pytest.skip("steps of this version are never replayed, and those drafted would cost too much")
    with fastgen.configured(speculate=3, packing="always", replay="always"):
        yield


def policy_of(model: Any) -> SpeculationPolicy:
    (policy,) = speculation._policies[model].values()
    return policy


def kept(model: Any) -> list[Any]:
    return list(store._kept[model].recordings) if model in store._kept else []


def compare(name: str, model: Any = None, length: int = 7, seed: int = 0, **options: Any) -> SpeculationPolicy:
    model = zoo.load(name) if model is None else model
    shape = {} if name == "whisper" else {"length": length}
    inputs = zoo.inputs_for(name, batch=1, seed=seed, **shape)
    # A padding token ends what is drafted, and some of these models repeat it for ever.
    options = {"max_new_tokens": 20, "num_beams": 1, "suppress_tokens": [zoo.PAD], **options}
    harness.compare(model, inputs, **options)
    return policy_of(model)


@pytest.mark.always
@pytest.mark.parametrize("name", NAMES)
def test_greedy_search(name: str) -> None:
    policy = compare(name, min_new_tokens=20, output_scores=True, output_logits=True)
    assert policy.rounds and 0 < policy.accepted <= policy.drafted == 3 * policy.rounds
    assert "drafts of " in str(fastgen.status()) and f"{policy.accepted} of {policy.drafted} drafts accepted" in str(
        policy
    )


@pytest.mark.parametrize("name", sorted({*NAMES} - {"gemma2", "gpt_oss"}))
def test_the_outputs_are_those_without_drafts_to_the_last_digit(name: str) -> None:
    """With every product fastgen's own. The two left out multiply in attention as the host does."""
    model, inputs = zoo.load(name), zoo.inputs_for(name, batch=1)
    options = dict(num_beams=1, max_new_tokens=30, min_new_tokens=30, return_dict_in_generate=True, output_logits=True)
    found = []
    for speculate in ("off", 3):
        with fastgen.configured(speculate=speculate):
            found.append(torch.stack(harness.run_fastgen(model, inputs, **options)[0].logits))
    assert torch.equal(*found) and policy_of(model).rounds


OPTIONS: list[dict[str, Any]] = [
    dict(max_new_tokens=1),
    dict(max_new_tokens=4),
    dict(max_new_tokens=5),
    dict(repetition_penalty=1.7),
    dict(no_repeat_ngram_size=2),
    dict(bad_words_ids=[[9], [11]]),
    dict(eos_token_id=[7, 9, 23]),
    dict(do_sample=True),
    dict(do_sample=True, top_k=5, top_p=0.7, temperature=1.4),
    dict(return_dict_in_generate=False, min_new_tokens=20),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "t5"])
def test_options(name: str, options: dict[str, Any]) -> None:
    compare(name, **options)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "t5"])
def test_a_padded_prompt(name: str) -> None:
    inputs = zoo.inputs_for(name, batch=1, length=7)
    ids = torch.cat([torch.full((1, 3), zoo.PAD), inputs["input_ids"]], 1)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    padded = {**inputs, "input_ids": ids, "attention_mask": mask}
    options = dict(max_new_tokens=20, min_new_tokens=20, num_beams=1, suppress_tokens=[zoo.PAD])
    harness.compare(zoo.load(name), padded, **options)
    assert policy_of(zoo.load(name)).accepted


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "t5"])
def test_the_random_stream_is_the_hosts(name: str, mode: Any) -> None:
    model, inputs = zoo.load(name), zoo.inputs_for(name, batch=1)
    ends = []
    for block in (fastgen.disabled(), fastgen.configured(strict=True)):
        with block, mode():
            torch.manual_seed(4)
            tokens = zoo.generate(model, inputs, do_sample=True, max_new_tokens=24, num_beams=1)
            ends.append((tokens, torch.rand(3)))
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("noise", [0.0, 30.0, 300.0])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "t5"])
def test_wrong_drafts_change_nothing(name: str, noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 8-bit copies are corrupted: fewer drafts are accepted, and the tokens stay."""
    generator = torch.Generator().manual_seed(5)
    right = codes.quantize_weight

    def corrupted(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found, scales = right(weight)
        added = noise * torch.randn(found.shape, generator=generator)
        return (found + added).round().clamp(-127, 127).to(torch.int8), scales

    monkeypatch.setattr("fastgen.ops.quantize_weight", corrupted)
    monkeypatch.setattr(SpeculationPolicy, "_tries_looking_up", lambda policy: False)
    monkeypatch.setattr(quantized, "LARGEST_ERROR", float("inf"))
    policy = compare(name, min_new_tokens=40, max_new_tokens=40)
    part = policy.accepted / policy.drafted
    assert part > 0.5 if noise == 0 else part < 0.95, part
    assert noise < 300 or part < 0.5, part


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_texts_that_repeat_themselves_take_no_drafting_steps(name: str) -> None:
    model = copy.deepcopy(zoo.load(name))
    policy = compare(name, model, max_new_tokens=40, min_new_tokens=40)
    assert policy.looked_up and policy.rounds == len(policy.looked_up) + len(policy.recent)
    assert sum(policy.looked_up) + sum(policy.recent) == policy.accepted


def test_code_of_the_users_between_steps_sees_no_draft() -> None:
    """Such code may look at anything, so nothing is drafted; the host's own processors see each token once."""
    seen: list[Any] = []

    class Noting(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append((input_ids.tolist(), scores.shape))
            return scores

    model, inputs = copy.deepcopy(zoo.load("llama")), zoo.inputs_for("llama", batch=1)
    found = []
    for block in (fastgen.disabled(), fastgen.configured()):
        seen.clear()
        with block:
            zoo.generate(
                model, inputs, num_beams=1, max_new_tokens=20, logits_processor=LogitsProcessorList([Noting()])
            )
        found.append(list(seen))
    assert found[0] == found[1] and len(found[0]) > 4
    assert model not in speculation._policies


def test_status_and_call_count_what_ran() -> None:
    model, inputs = copy.deepcopy(zoo.load("llama")), zoo.inputs_for("llama", batch=1)
    for new in (5, 20, 21, 22, 23):
        _, calls = harness.run_fastgen(model, inputs, num_beams=1, max_new_tokens=new, min_new_tokens=new)
        assert calls[-1].steps == new
    policy = policy_of(model)
    assert policy.rounds and fastgen.status().quantized == "", "drafts change no output"
    assert str(policy) in " ".join(str(fastgen.status()).split())


def test_a_call_with_nan_leaves_none_for_the_next() -> None:
    """The next call takes up the buffers of the one before; and 0 times NaN is NaN."""
    model, inputs = copy.deepcopy(zoo.load("llama")), zoo.inputs_for("llama", batch=1, length=7)
    options = dict(num_beams=1, max_new_tokens=20, min_new_tokens=20)
    stock = harness.run_stock(model, inputs, **options)
    free = next(token for token in range(5, 40) if token not in inputs["input_ids"] and token not in stock)
    bad = {**inputs, "input_ids": inputs["input_ids"].clone()}
    bad["input_ids"][0, 3] = free
    with torch.no_grad():
        model.get_input_embeddings().weight[free] = torch.nan
    for _ in range(2):
        harness.run_fastgen(model, bad, **options)
        found, _ = harness.run_fastgen(model, inputs, **options)
        assert torch.equal(found, stock)


@pytest.mark.parametrize("search", [dict(), dict(do_sample=True, temperature=1.5, top_k=0)], ids=["greedy", "drawn"])
def test_drafts_that_are_no_numbers(search: dict[str, Any]) -> None:
    """NaN in the embeddings of all tokens that the text has not: no draft decides what is chosen before it."""
    rounds = 0
    for seed in range(4):
        model, inputs = copy.deepcopy(zoo.load("gpt2")), zoo.inputs_for("gpt2", batch=1, length=7, seed=seed)
        output = model.get_output_embeddings()
        output.weight = torch.nn.Parameter(output.weight.detach().clone())
        options = dict(num_beams=1, max_new_tokens=20, min_new_tokens=20, suppress_tokens=[zoo.PAD], **search)
        stock = harness.run_stock(model, inputs, **options)
        with torch.no_grad():
            unread = [token for token in range(zoo.VOCAB) if token not in stock[0]]
            model.get_input_embeddings().weight[unread] = torch.nan
        harness.compare(model, inputs, **options)
        rounds += policy_of(model).rounds
    assert rounds > 4


def test_an_error_in_the_middle_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(zoo.load("llama"))
    options: dict[str, Any] = dict(return_dict_in_generate=False, min_new_tokens=20)
    compare("llama", model, **options)
    stock, left = speculation.SpeculativeDecoder._step, [3]

    def failing(self: Any, *args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise MemoryError
        return stock(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(speculation.SpeculativeDecoder, "_step", failing)
        with pytest.raises(MemoryError):
            harness.run_fastgen(model, zoo.inputs_for("llama", batch=1), num_beams=1, max_new_tokens=20)
    for _ in range(2):
        compare("llama", model, **options)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "t5"])
def test_later_calls_take_up_what_was_captured(name: str) -> None:
    model = copy.deepcopy(zoo.load(name))
    for length in (7, 7, 4, 9, 7):
        compare(name, model, length=length, seed=length, return_dict_in_generate=False, min_new_tokens=20)
    assert 2 <= statistics.counts(model).captures <= 3, "more than one of each kind of step"
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1)
    compare(name, model, return_dict_in_generate=False, min_new_tokens=20)
    assert policy_of(model).accepted


def layers_of(cache: Any) -> list[Any]:
    halves = [getattr(cache, half, None) for half in ("self_attention_cache", "cross_attention_cache")]
    return [layer for half in filter(None, halves) for layer in half.layers] or list(cache.layers)


@pytest.mark.parametrize("new", [1, 2, 19, 20, 21, 22, 23])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "t5"])
def test_the_result_has_the_hosts_cache(name: str, new: int) -> None:
    """With no draft in it, however many of the last round were accepted; and it can be gone on with."""
    model, inputs = zoo.load(name), zoo.inputs_for(name, batch=1)
    tokens = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    options = dict(num_beams=1, max_new_tokens=new, min_new_tokens=new, return_dict_in_generate=True)
    stock = harness.run_stock(model, inputs, **options)
    found, _ = harness.run_fastgen(model, inputs, **options)
    theirs, mine = getattr(stock, versions.CACHE), getattr(found, versions.CACHE)
    assert mine.get_seq_length() == theirs.get_seq_length() == stock.sequences.shape[1] - 1
    for one, other in zip(*map(layers_of, (theirs, mine)), strict=True):
        torch.testing.assert_close(other.keys, one.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(other.values, one.values, rtol=1e-4, atol=1e-4)
    ends = []
    for block, result in ((fastgen.disabled(), stock), (fastgen.configured(), found)):
        with block:
            more = {**inputs, tokens: result.sequences, versions.CACHE: getattr(result, versions.CACHE)}
            if tokens == "input_ids":
                more["attention_mask"] = torch.ones_like(result.sequences)
            ends.append(zoo.generate(model, more, num_beams=1, max_new_tokens=5, min_new_tokens=5))
    assert torch.equal(*ends)


def test_a_call_that_outgrows_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has captured is kept all the same, and later calls have room at once."""
    monkeypatch.setattr(speculation, "AT_ONCE", 5)
    monkeypatch.setattr(path_tree, "_WIDTH_STEP", 4)
    model = copy.deepcopy(zoo.load("llama"))
    options: dict[str, Any] = dict(min_new_tokens=40, max_new_tokens=40, return_dict_in_generate=False)
    captures = []
    for length in (3, 6, 7, 7):
        policy = compare("llama", model, length=length, **options)
        captures.append(statistics.counts(model).captures)
    assert policy.accepted and policy.room == 39
    assert captures[0] > 2 and captures[-1] == captures[-2]


@pytest.mark.parametrize("padding", [7, None])
def test_a_padding_token_that_the_config_has_forgotten(padding: int | None) -> None:
    """M2M100 numbers positions by the one that the model was made with, and does not count it."""
    model = copy.deepcopy(zoo.load("m2m_100"))
    model.config.pad_token_id = padding
    for seed in range(8):
        torch.manual_seed(seed)
        compare(
            "m2m_100",
            model,
            seed=seed,
            do_sample=True,
            suppress_tokens=None,
            sequence_bias=[[[zoo.PAD], 4.0]],
            pad_token_id=zoo.PAD,
            min_new_tokens=20,
        )
    assert policy_of(model).rounds


@pytest.mark.parametrize("name", ["gpt2", "bart", "whisper"])
def test_a_text_that_ends_at_the_last_position_there_is(name: str) -> None:
    """The host never reads beyond: drafts must not either, though the longest length would have room."""
    model = copy.deepcopy(zoo.load(name))
    config = model.config
    positions = getattr(config, "max_target_positions", None) or config.max_position_embeddings
    inputs = zoo.inputs_for(name, batch=1)
    ids = "decoder_input_ids" if config.is_encoder_decoder else "input_ids"
    longest = positions if ids not in inputs else positions - inputs[ids].shape[1]
    stock = harness.run_stock(model, inputs, num_beams=1, max_new_tokens=longest - 1, min_new_tokens=longest - 1)
    options = dict(num_beams=1, max_new_tokens=2 * positions, min_new_tokens=longest - 1)
    stop = MaxLengthCriteria(max_length=stock.shape[1])
    harness.compare(model, inputs, **options, stopping_criteria=StoppingCriteriaList([stop]))
    assert policy_of(model).rounds


@pytest.mark.parametrize("longest", [8, 10**30], ids=["short", "without end"])
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_the_criteria_say_how_long_a_text_is(name: str, longest: int) -> None:
    """A criterion of the user's in place of the host's: the configuration may allow less, or any number."""
    model, inputs = copy.deepcopy(zoo.load(name)), zoo.inputs_for(name, batch=1)
    prompt = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    stop = MaxLengthCriteria(max_length=prompt + 40)
    options = dict(num_beams=1, max_length=prompt + longest, eos_token_id=zoo.VOCAB, suppress_tokens=[zoo.PAD])
    stock = harness.compare(model, inputs, **options, stopping_criteria=StoppingCriteriaList([stop]))
    assert stock.sequences.shape[1] == prompt + 40 and policy_of(model).rounds


def test_numbers_in_the_prompt_that_are_no_tokens() -> None:
    """Placeholders beside `inputs_embeds`: they may be looked up, and are never drafted."""
    model, inputs = copy.deepcopy(zoo.load("llama")), zoo.inputs_for("llama", batch=1, length=12)
    ids = inputs["input_ids"]
    embedded = model.get_input_embeddings()(ids).detach()
    chosen = harness.run_stock(model, inputs, num_beams=1, max_new_tokens=8)[0, ids.shape[1] :].tolist()
    placeholders = torch.tensor([[*chosen[:3], -100, -100, -100, *chosen[:3], 999, 999, 999]])
    given = {**inputs, "input_ids": placeholders, "inputs_embeds": embedded}
    harness.compare(model, given, num_beams=1, max_new_tokens=24, min_new_tokens=24)


@pytest.mark.parametrize("name", sorted({"led", "fsmt", "prophetnet", "trocr"} & {*zoo.ACCELERATED}))
def test_models_that_do_not_draft(name: str) -> None:
    """They number one token of each sentence in a step."""
    harness.compare(zoo.load(name), zoo.inputs_for(name, batch=1), num_beams=1, max_new_tokens=20)
    assert zoo.load(name) not in speculation._policies


@pytest.mark.parametrize("options", [dict(batch=2), dict(num_beams=3), dict(num_return_sequences=2, do_sample=True)])
def test_calls_that_do_not_draft(options: dict[str, Any]) -> None:
    batch = options.pop("batch", 1)
    harness.compare(zoo.load("llama"), zoo.inputs_for("llama", batch=batch), max_new_tokens=20, **options)
    assert zoo.load("llama") not in speculation._policies


def test_automatically_only_where_it_pays() -> None:
    model = copy.deepcopy(zoo.load("llama"))
    with fastgen.configured(speculate="auto"):
        for _ in range(3):
            compare("llama", model, max_new_tokens=48, min_new_tokens=48)
        policy = policy_of(model)
        assert policy.rounds >= 6, "it was not tried"
        for found in policy.seconds.values():
            found.extend([0.01] * 32)  # now drafts cost what the model's own steps do
        assert policy.is_hopeless
        rounds = policy.rounds
        compare("llama", model, max_new_tokens=48, min_new_tokens=48)
        assert policy.rounds == rounds and "they do not pay, and are off" in str(fastgen.status())
        assert not packed_weights.all_rounded() and not any(key[0] == "speculation" for key in kept(model))
    with fastgen.configured(speculate="off"):
        fastgen.release()
        harness.compare(model, zoo.inputs_for("llama", batch=1), num_beams=1, max_new_tokens=48)
        assert model not in speculation._policies
