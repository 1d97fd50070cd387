"""Models of many languages: the language of the output is a token that is forced, or a prompt of the decoder."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
import zoo

import fastgen

FAMILIES = ["mbart", "m2m_100"]  # mBART and mBART-50; M2M-100 and NLLB, which is one
LANGUAGES = (6, 17, 42)


def _inputs(family: str, seed: int, language: int) -> dict[str, Any]:
    """The source's language is its first token."""
    inputs = zoo.inputs_for(family, seed=seed)
    inputs["input_ids"][:, 0] = language
    return inputs


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_language_tokens(family: str) -> None:
    model = zoo.load(family)
    for seed, language in enumerate(LANGUAGES):
        options = dict(forced_bos_token_id=language, num_beams=4, max_new_tokens=12)
        stock = harness.compare(model, _inputs(family, seed, LANGUAGES[-1 - seed]), **options)
        assert (stock.sequences[:, 1] == language).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_another_language_for_each_sentence(family: str) -> None:
    """As the decoder's prompt, where one call translates into several languages."""
    prompt = torch.tensor([[zoo.START, language] for language in LANGUAGES])
    inputs = {**_inputs(family, 3, 9), "decoder_input_ids": prompt}
    stock = harness.compare(zoo.load(family), inputs, num_beams=4, max_new_tokens=12)
    assert torch.equal(stock.sequences[:, :2], prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_recordings_know_no_language(family: str) -> None:
    """One recorded call after another, each into another language."""
    model = zoo.load(family)
    with harness.configured(replay="always"):
        for seed, language in enumerate((*LANGUAGES, *LANGUAGES)):
            options = dict(forced_bos_token_id=language, num_beams=3, max_new_tokens=12, return_dict_in_generate=False)
            harness.compare(model, _inputs(family, seed % 2, 9), **options)
    fastgen.release()


def test_a_wrong_language_shows() -> None:
    model, inputs = zoo.load("mbart"), _inputs("mbart", 0, 9)
    outputs = [
        harness.run_stock(model, inputs, forced_bos_token_id=language, num_beams=4, max_new_tokens=12)
        for language in LANGUAGES[:2]
    ]
    assert not torch.equal(outputs[0][:, 2:], outputs[1][:, 2:]), "what follows depends on the language"
