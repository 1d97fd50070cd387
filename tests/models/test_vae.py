"""GPT-2 that decodes latents: equal to a plain forward pass, token for token on the stock host, and on fastgen."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from both_hosts import run_together
from disguise import disguised
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

import fastgen
from fastgen import report
from fastgen.models.vae import Gpt2VaeConfig, Gpt2VaeLMHeadModel
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.versions import CACHE, OLD_CACHE
from fastgen.replay import statistics

SIZE = 5  # of a latent
WAYS = {
    "both": dict(latent_as_memory=True, latent_as_embedding=True),
    "memory": dict(latent_as_memory=True, latent_as_embedding=False),
    "embedding": dict(latent_as_memory=False, latent_as_embedding=True),
}
OPTIONS = {**zoo.GPT2, "latent_size": SIZE}
DETAILS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
ways = pytest.mark.parametrize("way", WAYS)


def build(**options: Any) -> Any:
    return Gpt2VaeLMHeadModel(Gpt2VaeConfig(**{**OPTIONS, **options}))


def inputs_of(model: Any, seed: int = 0, batch: int = 3, **shape: Any) -> dict[str, Tensor]:
    """Prompts of different lengths, padded on the left, and a latent for each."""
    generator = torch.Generator().manual_seed(seed + 70)
    return {**zoo.text(model, seed, batch, **shape), "latents": model.sample_latents(batch, generator)}


@functools.cache
def load(way: str, seed: int = 0) -> Any:
    """A model whose beams cross and whose texts end at different steps; tests leave it as it is."""
    with torch.random.fork_rng(devices=[]), fastgen.disabled():
        for attempt in range(seed, 20):
            torch.manual_seed(attempt)
            model = build(**WAYS[way]).eval().requires_grad_(False)
            zoo._roughen(model)
            if zoo._choose_eos(zoo.Family("gpt2_vae", build, inputs_of), model):
                return model
    raise AssertionError("no seed gives a model whose beams cross")


# ---------------------------------------------------------------------------------------------- a plain forward pass
def plain_logits(model: Any, tokens: Tensor, latent: Tensor) -> Tensor:
    """Of one text, int64 `[P]`, and one latent, `[latent_size]`: `[P, V]`, from the weights alone, without a cache."""
    config, gpt2 = model.config, model.transformer
    first = int(config.latent_as_memory)
    states = gpt2.wte.weight[tokens] + gpt2.wpe.weight[first : first + len(tokens)]
    if config.latent_as_embedding:
        states = states + gpt2.linear_emb.weight @ latent
    memory = (gpt2.linear.weight @ latent).split(config.n_embd) if first else [None] * config.n_layer
    seen = torch.ones(len(tokens), first + len(tokens), dtype=torch.bool).tril(first)
    for layer, vector in zip(gpt2.h, memory, strict=True):
        fused = layer.ln_1(states) @ layer.attn.c_attn.weight + layer.attn.c_attn.bias
        query, key, value = fused.split(config.n_embd, dim=1)
        if vector is not None:
            key, value = torch.cat([vector[None], key]), torch.cat([vector[None], value])
        query, key, value = (x.unflatten(1, (config.n_head, -1)).transpose(0, 1) for x in (query, key, value))
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        states = states + attended @ layer.attn.c_proj.weight + layer.attn.c_proj.bias
        states = states + layer.mlp(layer.ln_2(states))
    return gpt2.ln_f(states) @ gpt2.wte.weight.T


def plain_search(model: Any, prompt: Tensor, latent: Tensor, beams: int, steps: int) -> Tensor:
    """The likeliest text that beam search finds, all read anew at every step; nothing ends it: int64 `[P + steps]`."""
    found = [(0.0, prompt)]
    for _ in range(steps):
        candidates = []
        for score, text in found:
            scores, tokens = plain_logits(model, text, latent)[-1].log_softmax(-1).topk(beams)
            candidates += [
                (score + float(s), torch.cat([text, token[None]])) for s, token in zip(scores, tokens, strict=True)
            ]
        found = sorted(candidates, key=lambda candidate: -candidate[0])[:beams]
    return found[0][1]


def texts_of(inputs: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each prompt without its padding, and its latent."""
    rows = zip(inputs["input_ids"], inputs["attention_mask"], inputs["latents"], strict=True)
    return [(tokens[mask.bool()], latent) for tokens, mask, latent in rows]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@ways
def test_logits(way: str, attention: str) -> None:
    model = copy.deepcopy(load(way))
    model.config._attn_implementation = attention
    for rows, tolerance in ((inputs_of(model), 1e-5), (inputs_of(model, batch=1), 1e-5)):
        for text, latent in texts_of(rows):
            logits = model(**model.with_slot(text[None]), latents=latent[None]).logits[0, -len(text) :]
            torch.testing.assert_close(logits, plain_logits(model, text, latent), rtol=tolerance, atol=tolerance)
    double, latent = model.double(), latent.double()
    logits = double(**double.with_slot(text[None]), latents=latent[None]).logits[0, -len(text) :]
    torch.testing.assert_close(logits, plain_logits(double, text, latent), rtol=1e-10, atol=1e-10)


@ways
@pytest.mark.parametrize("name", sorted({CACHE, OLD_CACHE}))
def test_steps_over_a_cache(way: str, name: str) -> None:
    model, inputs = load(way), inputs_of(load(way), batch=1, length=6)
    (text, latent), cache, logits = texts_of(inputs)[0], None, []
    for token in model.with_slot(text[None])["input_ids"][0]:
        outputs = model(token[None, None], latents=latent[None], **{name: cache}, use_cache=True)
        cache = getattr(outputs, CACHE)
        logits.append(outputs.logits[0, -1])
    torch.testing.assert_close(torch.stack(logits)[-len(text) :], plain_logits(model, text, latent), rtol=0, atol=2e-5)


@ways
def test_stock_search(way: str) -> None:
    """Left padding, in one batch: each text is what it is alone."""
    model = load(way)
    inputs = inputs_of(model)
    for beams in (1, 3):
        options = dict(num_beams=beams, max_new_tokens=8, eos_token_id=None)
        found = harness.run_stock(model, inputs, **options)
        for row, (text, latent) in zip(found, texts_of(inputs), strict=True):
            expected = plain_search(model, text, latent, beams, 8)
            assert torch.equal(row[-len(expected) :], expected)
        assert torch.equal(found[:, :-8], inputs["input_ids"])


def test_loss() -> None:
    """Of the tokens from the second on, for the slot says nothing about the first; and the latent's weights learn."""
    model = copy.deepcopy(load("both")).requires_grad_(True)
    text, latent = texts_of(inputs_of(model))[0]
    labels = text[None].clone()
    labels[0, 4] = -100
    outputs = model(**model.with_slot(text[None], torch.ones_like(text[None]), labels), latents=latent[None])
    logits = plain_logits(model, text, latent)[:-1]
    torch.testing.assert_close(outputs.loss, F.cross_entropy(logits, labels[0, 1:]))
    outputs.loss.backward()
    assert all(
        float(each.weight.grad.abs().sum()) > 0 for each in (model.transformer.linear, model.transformer.linear_emb)
    )
    as_tuple = model(**model.with_slot(text[None]), latents=latent[None], return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], outputs.logits)


def test_loss_of_several_batches() -> None:
    """Trainers that add up gradients say of how many tokens the loss is to be the mean."""
    model, inputs = load("both"), inputs_of(load("both"), ragged=False)
    rows = model.with_slot(inputs["input_ids"], labels=inputs["input_ids"])
    mean, of_100 = (
        model(**rows, latents=inputs["latents"], **options).loss for options in ({}, {"num_items_in_batch": 100})
    )
    torch.testing.assert_close(of_100 * 100, mean * inputs["input_ids"][:, 1:].numel())


@ways
def test_gradient_checkpointing(way: str) -> None:
    found = []
    for is_checkpointed in (False, True):
        model = copy.deepcopy(load(way)).requires_grad_(True).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        inputs = inputs_of(model, ragged=False)
        latents = inputs["latents"].requires_grad_()
        rows = model.with_slot(inputs["input_ids"], labels=inputs["input_ids"])
        model(**rows, latents=latents * 2.0, use_cache=False).loss.backward()
        found.append([latents.grad, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="use_reentrant=True"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


@ways
def test_padded_texts_are_scored_as_alone(way: str) -> None:
    model = load(way)
    inputs = inputs_of(model)
    rows = model.with_slot(inputs["input_ids"], inputs["attention_mask"])
    logits = model(**rows, latents=inputs["latents"]).logits[:, -1]
    for row, (text, latent) in enumerate(texts_of(inputs)):
        torch.testing.assert_close(logits[row], plain_logits(model, text, latent)[-1], rtol=1e-5, atol=1e-5)


def test_processors_see_no_slot() -> None:
    """A bigram ban of the prompt's first token, a forced first token, and a prefix function."""
    model = load("memory")
    text, latent = torch.tensor([[7]]), inputs_of(model)["latents"][:1]
    logits = plain_logits(model, text[0], latent[0])[-1]
    seen: list[list[int]] = []

    def allowed(row: int, tokens: Tensor) -> list[int]:
        seen.append(tokens.tolist())
        return list(range(5, zoo.VOCAB))

    def scores(**options: Any) -> Tensor:
        given = {"input_ids": text, "latents": latent}
        return harness.run_stock(model, given, max_new_tokens=2, eos_token_id=None, **options, **DETAILS).scores[0][0]

    assert torch.isfinite(scores(no_repeat_ngram_size=2)).all()
    assert int(scores(forced_bos_token_id=33).argmax()) == 33
    assert torch.isfinite(scores(bad_words_ids=[[7, 7, 9], [7, 8]])[9])
    scores(prefix_allowed_tokens_fn=allowed)
    assert seen[0] == [7] and len(seen[1]) == 2
    torch.testing.assert_close(scores(no_repeat_ngram_size=2), logits, rtol=1e-5, atol=2e-5)
    for options in (dict(no_repeat_ngram_size=2), dict(forced_bos_token_id=33), dict(prefix_allowed_tokens_fn=allowed)):
        inputs = {"input_ids": text, "latents": latent}
        harness.compare(model, inputs, num_beams=3, max_new_tokens=8, **options)


def test_the_slot_is_in_no_sequence() -> None:
    model = load("memory")
    inputs = inputs_of(model)
    for options in (dict(), dict(return_dict_in_generate=True)):
        output = harness.run_stock(model, inputs, num_beams=2, max_new_tokens=4, eos_token_id=None, **options)
        sequences = getattr(output, "sequences", output)
        assert torch.equal(sequences[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
        assert sequences.shape[1] == inputs["input_ids"].shape[1] + 4


# ---------------------------------------------------------------------------------------------- on fastgen
SEARCHES: dict[str, dict[str, Any]] = {
    "plain": dict(num_beams=4, num_return_sequences=4, max_new_tokens=16),
    "ranked": dict(num_beams=3, max_new_tokens=12, early_stopping=True, length_penalty=2.0, no_repeat_ngram_size=2),
    "penalised": dict(num_beams=4, max_new_tokens=12, repetition_penalty=1.3, eos_token_id=[7, 11, 23]),
    "sampled beams": dict(num_beams=3, max_new_tokens=10, do_sample=True, top_k=20),
}
SAMPLES: dict[str, dict[str, Any]] = {
    "greedy": dict(max_new_tokens=12),
    "one": dict(max_new_tokens=12, do_sample=True, top_k=0),
    "many": dict(max_new_tokens=12, do_sample=True, top_k=0, num_return_sequences=5),
    "warped": dict(max_new_tokens=10, do_sample=True, num_return_sequences=2, temperature=0.8, top_k=20, top_p=0.9),
}


@pytest.mark.parametrize("tier", harness.TIERS)
@pytest.mark.parametrize("search", SEARCHES)
@ways
def test_beam_search(way: str, search: str, tier: str) -> None:
    model = load(way)
    for details in ({}, DETAILS):
        harness.compare(model, inputs_of(model), tier, **SEARCHES[search], **details)
    harness.compare(model, inputs_of(model, batch=1), tier, **SEARCHES[search])


@pytest.mark.parametrize("sample", SAMPLES)
@ways
def test_samples(way: str, sample: str) -> None:
    model = load(way)
    for inputs in (inputs_of(model), inputs_of(model, batch=1), {"latents": inputs_of(model)["latents"]}):
        details = {} if sample == "warped" else DETAILS
        harness.compare(model, inputs, num_beams=1, **SAMPLES[sample], **details)


def test_texts_leave_with_their_latents() -> None:
    """The decoder is called with ever fewer rows, tokens and latents alike."""
    model, rows = load("both"), []
    inputs = inputs_of(model, batch=6)
    options = dict(num_beams=4, max_new_tokens=20, early_stopping=True, length_penalty=-1.0)
    harness.compare(model, inputs, "fast", return_dict_in_generate=False, **options)

    forward = type(model).forward

    @functools.wraps(forward)
    def counting(self: Any, *args: Any, **given: Any) -> Any:
        rows.append((given["input_ids"].shape[0], given["latents"].shape[0]))
        return forward(self, *args, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", disguised(counting, type(model)))
        harness.run_fastgen(model, inputs, tier="fast", **options)
    assert all(tokens == latents for tokens, latents in rows)
    assert rows[0][0] == 6 and rows[1][0] == 24 > rows[-1][0], rows


@pytest.mark.parametrize("search", [dict(num_beams=6), dict(num_beams=1, do_sample=True, num_return_sequences=6)])
def test_a_latent_and_its_prompt_are_stored_once(search: dict[str, Any]) -> None:
    """However many texts are sampled, a longer prompt costs a position's keys and values of each latent, not text."""

    def cache_bytes(way: str, length: int) -> int:
        model = load(way)
        inputs = inputs_of(model, batch=2, length=length, ragged=False)
        _, (call,) = harness.run_fastgen(model, inputs, max_new_tokens=6, min_new_tokens=6, **search)
        assert call.cache_bytes is not None
        return call.cache_bytes

    position = 2 * OPTIONS["n_layer"] * 2 * OPTIONS["n_embd"] * 4  # of two latents
    assert cache_bytes("both", 29) - cache_bytes("both", 9) == 20 * position
    assert cache_bytes("both", 9) - cache_bytes("embedding", 9) == position  # the slot


@pytest.mark.parametrize("size", [1, 2, 50])
def test_a_prompt_in_chunks(size: int) -> None:
    """Equal to a prompt read at once; 4.57 has chunks for some searches only, and counts padding as positions."""
    model, is_padded = load("both"), versions.PREFILLS
    inputs = inputs_of(model, ragged=is_padded)
    for search in (SEARCHES["plain"], {"num_beams": 1, **SAMPLES["many"]}):
        search = {**search, "return_dict_in_generate": False}
        whole = harness.run_stock(model, inputs, **search)
        harness.compare(model, inputs, prefill_chunk_size=size, stock=whole, **search)


@pytest.mark.parametrize(
    "options",
    [
        dict(use_cache=False),
        dict(cache_implementation="static"),
        dict(cache_implementation="static", prefill_chunk_size=1),  # it doesn't say whether the slot is filled
    ],
)
def test_other_caches_stay_with_the_host(options: dict[str, Any]) -> None:
    model, search = load("both"), dict(num_beams=1, max_new_tokens=8)
    inputs = inputs_of(model, ragged=versions.PREFILLS)
    stock = harness.run_stock(model, inputs, **search)
    output, calls = harness.run_fastgen(model, inputs, strict=False, **search, **options)
    harness.assert_path(calls, "auto", "fallback")
    assert torch.equal(output, stock)


def test_slim_caches_are_refused() -> None:
    """The slot's key and value follow from no input of the layer."""
    model, inputs = load("both"), inputs_of(load("both"))
    stock = harness.run_stock(model, inputs, **SEARCHES["plain"])
    with harness.configured(cache="x"):
        output, (call,) = harness.run_fastgen(model, inputs, **SEARCHES["plain"])
    assert torch.equal(stock, output) and call.cache == "kv" and call.plan


@pytest.mark.skipif(not versions.COUNTS_IN_TENSORS, reason="steps of this version are never replayed")
@pytest.mark.parametrize("search", [SEARCHES["plain"], {"num_beams": 1, **SAMPLES["many"]}])
def test_replayed_steps(search: dict[str, Any], recording: Any) -> None:
    model = copy.deepcopy(load("both"))
    for seed in (0, 1):  # another call, of other latents
        harness.compare(model, inputs_of(model, seed), **search)
    assert statistics.counts(model).captures > 0 and statistics.counts(model).replays > 10


def test_one_model_many_threads() -> None:
    def generating(seed: int) -> Callable[[], None]:
        inputs = inputs_of(model, seed, batch=2 + seed)
        stock = harness.run_stock(model, inputs, num_beams=2 + seed, max_new_tokens=8)

        @torch.no_grad()
        def job() -> None:
            assert torch.equal(model.generate(**inputs, num_beams=2 + seed, max_new_tokens=8), stock)

        return job

    model = load("both")
    run_together([generating(seed) for seed in range(3)], rounds=3)


def test_latents_that_are_not_of_the_rows_stay_with_the_host() -> None:
    class Shared(GPT2LMHeadModel):
        """All texts have the same, which are no input of a row's."""

        def forward(self, *args: Any, attention_mask: Any = None, latents: Any = None, **kwargs: Any) -> Any:
            assert latents.shape == (1, 4)
            return super().forward(*args, attention_mask=attention_mask, **kwargs)

        def _expand_inputs_for_generation(self, *args: Any, latents: Any = None, **kwargs: Any) -> Any:
            input_ids, kwargs = super()._expand_inputs_for_generation(*args, **kwargs)
            return input_ids, {**kwargs, "latents": latents}

    torch.manual_seed(0)
    model = Shared(GPT2Config(**zoo.GPT2)).eval()
    given = {**zoo.text(model), "latents": torch.ones(1, 4)}
    output, calls = harness.run_fastgen(model, given, strict=False, num_beams=3, max_new_tokens=4)
    assert torch.equal(output, harness.run_stock(model, given, num_beams=3, max_new_tokens=4))
    assert [call.reason for call in calls] == ["latents of shape (1, 4) does not begin with the rows of the batch"]


# ---------------------------------------------------------------------------------------------- what it depends on
@ways
def test_another_latent_another_text(way: str) -> None:
    model, inputs = load(way), inputs_of(load(way))
    options = dict(num_beams=3, max_new_tokens=10, eos_token_id=None, **DETAILS)
    others = {**inputs, "latents": inputs["latents"].roll(1, 0)}
    for run in (harness.run_stock, lambda *args, **options: harness.run_fastgen(*args, **options)[0]):
        first, second = run(model, inputs, **options), run(model, others, **options)
        assert ((first.logits[0] - second.logits[0]).abs().amax(1) > 0.1).all()
        assert (first.sequences != second.sequences).any(1).sum() >= 2


def test_tokens_attend_to_the_slot() -> None:
    model = load("memory")
    text, latent = texts_of(inputs_of(model))[0]
    inputs = model.with_slot(text[None], torch.ones_like(text[None]))
    seen = model(**inputs, latents=latent[None]).logits
    inputs["attention_mask"][0, 0] = 0
    hidden = model(**inputs, latents=latent[None]).logits
    assert float((seen - hidden)[0, 1:].abs().amax(-1).min()) > 1e-3, "in every token's logits"
    inputs["attention_mask"][0, 0] = 1
    inputs["input_ids"][0, 0] = 9  # which token stands in the slot is nothing to the others
    torch.testing.assert_close(model(**inputs, latents=latent[None]).logits[:, 1:], seen[:, 1:], rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------- prompts and lengths
@ways
def test_texts_begin_with_bos(way: str) -> None:
    model = load(way)
    latents = inputs_of(model)["latents"]
    prompts = torch.full((3, 1), model.config.bos_token_id)
    for search in (dict(num_beams=3), dict(num_beams=1)):
        output = model.generate(latents=latents, max_new_tokens=6, **search)
        assert torch.equal(output, model.generate(prompts, latents=latents, max_new_tokens=6, **search))
        assert (output[:, 0] == 0).all() and output.shape == (3, 7)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@ways
def test_lengths_are_the_hosts(way: str) -> None:
    """The slot counts for nothing, however lengths are given."""
    model, plain = copy.deepcopy(load(way)), GPT2LMHeadModel(GPT2Config(**zoo.GPT2)).eval()
    inputs = inputs_of(model)
    latents = inputs.pop("latents")
    given: list[dict[str, Any]] = [
        {},
        dict(max_length=14),
        dict(max_new_tokens=4),
        dict(generation_config=GenerationConfig(max_length=15, eos_token_id=None, pad_token_id=1)),
        dict(generation_config=GenerationConfig(max_length=15, eos_token_id=None, pad_token_id=1), max_length=13),
        dict(max_length=18, max_new_tokens=5),
    ]
    for options in given:
        options = {"eos_token_id": None, "num_beams": 1, **options}
        length = plain.generate(**inputs, **options).shape
        assert model.generate(**inputs, latents=latents, **options).shape == length, options
    ends = dict(eos_token_id=[token for token in range(zoo.VOCAB) if token != 6], pad_token_id=1, num_beams=1)
    for options in (dict(min_length=12, max_length=18), dict(min_new_tokens=3, max_new_tokens=9)):
        new = model.generate(**inputs, latents=latents, **ends, **options)[:, 9:]
        assert (new[:, :3] == 6).all() and (new[:, 3] != 6).any(), options  # until then nothing else is allowed
    model.generation_config.max_length, model.generation_config.eos_token_id = 17, None
    assert model.generate(**inputs, latents=latents, num_beams=1).shape[1] == 17
    assert model.generation_config.max_length == 17


@pytest.mark.parametrize("pad", [1, 0])
def test_padding_is_found_without_a_mask(pad: int) -> None:
    """Even where BOS pads, which is in the slot too."""
    model = load("both")
    inputs = inputs_of(model)
    tokens = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, pad)
    options = dict(latents=inputs["latents"], num_beams=3, max_new_tokens=6, pad_token_id=pad)
    masked = model.generate(tokens, attention_mask=inputs["attention_mask"], **options)
    assert torch.equal(model.generate(tokens, **options), masked)
    unmasked = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert not torch.equal(unmasked, masked)
    # Padding that may end a text may be one of its words: it is seen.
    ends, mask = {**options, "eos_token_id": [4, pad]}, inputs["attention_mask"]
    seen = model.generate(tokens, **ends)
    assert torch.equal(seen, model.generate(tokens, attention_mask=torch.ones_like(mask), **ends))
    assert not torch.equal(seen, model.generate(tokens, attention_mask=mask, **ends))


def test_penalties_see_no_token_but_the_prompts() -> None:
    """The slot repeats a token of the prompt: BOS, which ends GPT-2's texts too, is no likelier and no less so."""
    model = load("memory")
    text, latent = texts_of(inputs_of(model))[0]
    output = harness.run_stock(
        model,
        {"input_ids": text[None], "latents": latent[None]},
        num_beams=1,
        max_new_tokens=1,
        repetition_penalty=1.7,
        **DETAILS,
    )
    logits = plain_logits(model, text, latent)[-1]
    said = torch.zeros_like(logits, dtype=torch.bool).index_fill(0, text, True)
    expected = torch.where(said, torch.where(logits < 0, logits * 1.7, logits / 1.7), logits)
    torch.testing.assert_close(output.scores[0][0], expected, rtol=0, atol=2e-5)


def test_latents_of_the_prior() -> None:
    model = load("both")
    draw = functools.partial(torch.Generator().manual_seed, 3)
    latents = model.sample_latents(4000, draw())
    assert latents.shape == (4000, SIZE) and latents.dtype == torch.float32
    assert float(latents.mean(0).abs().max()) < 0.1 and float((latents.std(0) - 1).abs().max()) < 0.1
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert torch.equal(half.sample_latents(4000, draw()), latents.bfloat16())
    assert half.generate(latents=latents[:2], num_beams=1, max_new_tokens=4).shape == (2, 5)  # of another type


# ---------------------------------------------------------------------------------------------- checkpoints
@ways
def test_saved_and_loaded(way: str, tmp_path: Path) -> None:
    model = load(way)
    model.save_pretrained(tmp_path)
    loaded, info = Gpt2VaeLMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert isinstance(loaded.config, Gpt2VaeConfig)
    assert {name: getattr(loaded.config, name) for name in WAYS[way]} == WAYS[way] and loaded.config.latent_size == SIZE
    inputs = inputs_of(model)
    options = dict(num_beams=3, max_new_tokens=8)
    assert torch.equal(loaded.generate(**inputs, **options), model.generate(**inputs, **options))
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "gpt2_vae" and saved["latent_size"] == SIZE


def test_from_a_checkpoint_of_gpt2(tmp_path: Path) -> None:
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(**zoo.GPT2)).eval()
    gpt2.save_pretrained(tmp_path)
    model, info = Gpt2VaeLMHeadModel.from_pretrained(tmp_path, latent_size=SIZE, output_loading_info=True)
    assert set(info["missing_keys"]) == {"transformer.linear.weight", "transformer.linear_emb.weight"}
    assert not info["unexpected_keys"] and 0.2 < float(model.transformer.linear.weight.detach().std()) < 0.6
    tokens = torch.tensor([[5, 9, 23, 40]])
    only = Gpt2VaeLMHeadModel.from_pretrained(tmp_path, latent_size=SIZE, latent_as_memory=False)
    logits = only(tokens, latents=torch.zeros(1, SIZE)).logits  # nothing is added
    torch.testing.assert_close(logits, gpt2(tokens).logits, rtol=0, atol=1e-5)


def test_from_a_checkpoint_of_optimus(tmp_path: Path) -> None:
    """Names and shapes of its decoder's file, with the masks that it keeps among the weights."""
    model = load("both")
    options = {**zoo.GPT2, "n_ctx": 64, "latent_size": SIZE}
    weights = dict(model.state_dict())
    layers, width = OPTIONS["n_layer"], OPTIONS["n_embd"]
    assert weights["transformer.linear.weight"].shape == (layers * width, SIZE)
    assert weights["transformer.linear_emb.weight"].shape == (width, SIZE)
    weights = {name: value for name, value in weights.items() if not name.endswith(".attn.bias")}
    weights |= {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(layers)}
    torch.save({name: value.clone() for name, value in weights.items()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(options))
    loaded, info = Gpt2VaeLMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    text, latent = texts_of(inputs_of(model))[0]
    logits = loaded(**loaded.with_slot(text[None]), latents=latent[None]).logits[0, 1:]
    torch.testing.assert_close(logits, plain_logits(model, text, latent), rtol=1e-5, atol=1e-5)


def test_auto_classes(tmp_path: Path) -> None:
    model = load("both")
    model.save_pretrained(tmp_path)
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)) is Gpt2VaeLMHeadModel


def test_a_short_first_call_decides_nothing() -> None:
    """A model that is tried first has not been tried when nothing comes behind the prompt."""
    model = copy.deepcopy(load("both"))
    inputs = inputs_of(model)
    harness.compare(model, inputs, num_beams=3, max_new_tokens=1, expected="fallback")
    harness.compare(model, inputs, num_beams=3, max_new_tokens=8)


# ---------------------------------------------------------------------------------------------- errors
def test_latents_that_do_not_fit() -> None:
    model = load("both")
    prompt = torch.full((3, 2), 7)
    for latents, message in [
        (None, "latents are missing: one row of latent_size=5 numbers"),
        ([[0.0] * SIZE] * 3, "latents are a list, and not a tensor"),
        (torch.zeros(3, 4), r"latents of shape \(3, 4\) are not rows of latent_size=5 numbers"),
        (torch.zeros(SIZE), r"latents of shape \(5,\) are not rows"),
        (torch.zeros(2, SIZE), "latents has 2 rows for input_ids of 3"),
    ]:
        for call in (model, model.generate):
            with pytest.raises(ValueError, match=message):
                call(input_ids=prompt, latents=latents)
    with pytest.raises(ValueError, match="latents are missing"):
        model.generate()
    with pytest.raises(ValueError, match="input_ids are given twice"):
        model.generate(prompt, input_ids=prompt, latents=torch.zeros(3, SIZE))
    with pytest.raises(ValueError, match="position_ids cannot be given together with latents"):
        model.generate(prompt, latents=torch.zeros(3, SIZE), position_ids=prompt)
    headless = copy.deepcopy(model)
    headless.generation_config.bos_token_id = headless.config.bos_token_id = None
    with pytest.raises(ValueError, match="bos_token_id is not set, and input_ids are missing"):
        headless.generate(latents=torch.zeros(3, SIZE))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(latent_size=0), "latent_size=0"),
        (dict(latent_as_memory=False, latent_as_embedding=False), "latent_as_memory and latent_as_embedding"),
        (dict(add_cross_attention=True), "add_cross_attention=True"),
        (dict(reorder_and_upcast_attn=True), "reorder_and_upcast_attn=True"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_importing_fastgen_imports_no_model() -> None:
    code = "import sys, fastgen; assert not {'torch', 'transformers', 'fastgen.models'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_calls_are_reported_under_its_name() -> None:
    model = load("both")
    report.reset()
    model.generate(**inputs_of(model), num_beams=2, max_new_tokens=4)
    assert [(call.model, call.tier, call.batch, call.beams) for call in report.calls()] == [
        ("Gpt2VaeLMHeadModel", "fast", 3, 2)
    ]
