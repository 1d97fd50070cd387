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
