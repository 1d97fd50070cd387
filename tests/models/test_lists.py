"""`fastgen.generate` with our own models, and with any whose padding is token 0: each source as it is alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import unilm_kit as kit
import zoo

import fastgen
from fastgen.models.vae import Gpt2VaeConfig, Gpt2VaeLMHeadModel

OPTIONS: dict[str, Any] = dict(num_beams=3, max_new_tokens=7)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("beams", [1, 3])
def test_unilm(batch_size: int, beams: int) -> None:
    model, options = kit.model(), {**OPTIONS, "num_beams": beams, "eos_token_id": [kit.SEP, *range(10, 31)]}
    sources = kit.sources(5, 9, 3, 7, 2, 12, 8, 4)
    alone = [model.generate(torch.tensor([source]), **options)[0] for source in sources]
    found = fastgen.generate(model, sources, batch_size=batch_size, **options)
    assert beams == 1 or len({len(row) - len(source) for row, source in zip(alone, sources, strict=True)}) > 1
    assert [output[0].tolist() for output in found] == [row.tolist() for row in alone]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_latents_go_with_their_sources(batch_size: int) -> None:
    torch.manual_seed(3)
    model = Gpt2VaeLMHeadModel(Gpt2VaeConfig(**zoo.GPT2, latent_size=5)).eval()
    latents = model.sample_latents(4)
    sources = [[8, 9], [5, 6, 7], [11], [5, 6, 7]]
    alone = [
        model.generate(torch.tensor([source]), latents=latents[row : row + 1], **OPTIONS)[0].tolist()
        for row, source in enumerate(sources)
    ]
    found = fastgen.generate(model, sources, latents=latents, batch_size=batch_size, **OPTIONS)
    assert [output[0].tolist() for output in found] == alone and alone[1] != alone[3]
    with pytest.raises(ValueError, match="latents has 4 rows for 3 sources"):
        fastgen.generate(model, sources[:3], latents=latents, **OPTIONS)
    with pytest.raises(ValueError, match=r"token_type_ids has rows, and fastgen\.generate sorts the sources"):
        fastgen.generate(model, sources, latents=latents, token_type_ids=torch.zeros(4, 3, dtype=torch.int64))


SOURCES = [[8, 9, 10], list(range(9, 18)), [30, 31, 32, 33, 34], [12], list(range(40, 47)), list(range(21, 30))]
END = zoo.UNUSED


class Allowed:
    """A function of allowed tokens that goes by the number of the source, and notes what it is told.

    The outputs of a source begin with tokens of its own, 1 to 3 of them.
    """

    def __init__(self, choices: int, prompts: list[int]) -> None:
        self.choices, self.prompts, self.told = choices, prompts, list[tuple[int, ...]]()

    def __call__(self, number: int, tokens: torch.Tensor) -> list[int]:
        self.told.append((number, *tokens.tolist()))
        own = [7 + number + 13 * choice for choice in range(self.choices)]
        return own if len(tokens) - self.prompts[number] <= number % 3 else [END]


def told_alone(model: Any, number: int, allowed: Allowed, **options: Any) -> Any:
    ids = torch.tensor([SOURCES[number]])
    with fastgen.disabled():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            prefix_allowed_tokens_fn=lambda _, tokens: allowed(number, tokens),
            **options,
        )


@pytest.mark.parametrize("refill", [True, False])
@pytest.mark.parametrize("batch_size", [4, 64])
@pytest.mark.parametrize(
    "options",
    [dict(num_beams=3), dict(num_beams=4, num_return_sequences=3), {}, dict(do_sample=True, num_return_sequences=2)],
    ids=["beams", "several hypotheses", "greedy", "samples"],
)
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_a_users_function_is_told_the_source_and_its_tokens(
    name: str, options: dict[str, Any], batch_size: int, refill: bool
) -> None:
    """The number of the source in the list, and no padding; as often as stock calls it for the same batches."""
    model = zoo.load(name)
    choices = 1 if options.get("do_sample") else 4  # drawn numbers depend on the batch
    prompts = [1 if model.config.is_encoder_decoder else len(source) for source in SOURCES]
    options = {**options, "max_new_tokens": 6, "eos_token_id": END}
    allowed, by_stock = Allowed(choices, prompts), Allowed(choices, prompts)
    run = dict(batch_size=batch_size, refill=refill, **options)
    found = fastgen.generate(model, SOURCES, prefix_allowed_tokens_fn=allowed, **run)
    if options.get("num_beams"):
        assert {call.tier for call in fastgen.status().calls} == {"fast"}
    with fastgen.disabled():
        stock = fastgen.generate(model, SOURCES, prefix_allowed_tokens_fn=by_stock, **run)
    assert [each.tolist() for each in found] == [each.tolist() for each in stock]
    assert allowed.told == by_stock.told
    for number in range(len(SOURCES)):
        alone = Allowed(choices, prompts)
        assert found[number].tolist() == told_alone(model, number, alone, **options).tolist()
        assert set(alone.told) <= set(allowed.told)


def test_samples_among_the_outputs_of_each_source() -> None:
    """Older versions of transformers number the samples, not the sources."""
    trie = fastgen.Trie.per_sentence([[[7 + number]] for number in range(len(SOURCES))], eos_token_id=END)
    options: dict[str, Any] = dict(do_sample=True, num_return_sequences=2, max_new_tokens=4, eos_token_id=END)
    found = fastgen.generate(zoo.load("bart"), SOURCES, batch_size=4, prefix_allowed_tokens_fn=trie, **options)
    for number, rows in enumerate(found):
        assert rows[:, 1:].tolist() == [[7 + number, END]] * 2


def test_a_users_function_and_latents() -> None:
    """The slot of the latents stands before the padding."""
    torch.manual_seed(3)
    model = Gpt2VaeLMHeadModel(Gpt2VaeConfig(**zoo.GPT2, latent_size=5)).eval()
    latents, prompts = model.sample_latents(len(SOURCES)), list(map(len, SOURCES))
    options: dict[str, Any] = dict(num_beams=3, max_new_tokens=6, eos_token_id=END)
    allowed, alone = Allowed(4, prompts), Allowed(4, prompts)
    found = fastgen.generate(model, SOURCES, latents=latents, prefix_allowed_tokens_fn=allowed, **options)
    for number in range(len(SOURCES)):
        own = {**options, "latents": latents[number : number + 1]}
        assert found[number].tolist() == told_alone(model, number, alone, **own).tolist()
    assert set(alone.told) <= set(allowed.told)


@pytest.mark.parametrize("beams", [1, 3])
def test_t5_pads_with_0(beams: int) -> None:
    """Which the host's beam search takes for no padding, and fills up with the end token."""
    model = copy.deepcopy(zoo.load("t5"))
    model.generation_config.pad_token_id = model.config.pad_token_id = 0
    inputs = zoo.inputs_for("t5", batch=5)
    sources = [
        ids[: int(n)].tolist() for ids, n in zip(inputs["input_ids"], inputs["attention_mask"].sum(1), strict=True)
    ]
    options = dict(num_beams=beams, max_new_tokens=12, eos_token_id=list(range(5, 30)))
    alone = [model.generate(torch.tensor([source]), **options)[0].tolist() for source in sources]
    assert len(set(map(len, alone))) > 1
    assert [output[0].tolist() for output in fastgen.generate(model, sources, **options)] == alone


@pytest.mark.parametrize("refill", [True, False])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bart"])
@pytest.mark.parametrize("where", ["model", "configuration", "option"])
def test_a_padding_token_below_zero_is_none(where: str, family: str, beams: int, refill: bool) -> None:
    """Old configurations say -1, which no embedding has: stock cannot decode two sources of two lengths with it."""
    model = copy.deepcopy(zoo.load(family))
    options: dict[str, Any] = dict(num_beams=beams, max_new_tokens=7, eos_token_id=[-1, *range(12, 22), *range(45, 60)])
    if where == "model":
        model.config.pad_token_id = model.generation_config.pad_token_id = -1
    elif where == "option":
        options["pad_token_id"] = -1
    else:
        options["generation_config"] = copy.deepcopy(model.generation_config)
        options["generation_config"].pad_token_id = -1
    alone = []
    for source in SOURCES:
        ids = torch.tensor([source])
        with fastgen.disabled():
            alone.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist())
    found = fastgen.generate(model, SOURCES, batch_size=3, refill=refill, **options)
    assert len({len(row) for row in alone}) > 1
    assert [output[0].tolist() for output in found] == alone


@pytest.mark.parametrize("refill", [True, False])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_padding_of_an_encoder_whose_ngrams_are_banned(family: str, size: int, refill: bool) -> None:
    """It is no word of the shorter source, which alone may be answered with the padding token, or begins with it."""
    model, options = zoo.load(family), dict(num_beams=2, max_new_tokens=6, encoder_no_repeat_ngram_size=size)
    alone = []
    for source in SOURCES:
        with fastgen.disabled():
            alone.append(model.generate(torch.tensor([source]), **options)[0].tolist())
    found = fastgen.generate(model, SOURCES, batch_size=8, refill=refill, **options)
    assert [_shortened(output[0].tolist()) for output in found] == [_shortened(row) for row in alone]


def _shortened(row: list[int]) -> list[int]:
    """Without what follows the last token that is no padding."""
    while row and row[-1] == zoo.PAD:
        row = row[:-1]
    return row
