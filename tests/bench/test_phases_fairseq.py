"""The same as in test_phases.py, of fairseq."""

from __future__ import annotations

import time
from types import CodeType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fairseq", reason="fairseq is not installed", exc_type=ImportError)


import fairseq_models as models
import torch
from asking import asked_at_every_call, running, unreached

import fastgen
from fastgen.bench import phase_rules
from fastgen.bench.counts import counted
from fastgen.bench.phases import Phases, shares
from fastgen.phases import PHASES

SIDES = ["stock", "compat", "fast"]
IN_PASSES = {"encoder", "prefill", "rest of the decoder"}
# An encoder's attention multiplies in one call with all else.
PLACES = {
    "linear": IN_PASSES,
    "layer_norm": IN_PASSES,
    "scaled_dot_product_attention": {"encoder", "prefill", "attention"},
    "multi_head_attention_forward": {"encoder"},
    "bmm": {"encoder", "prefill", "attention"},
    "topk": {"next-token choice"},
    "log_softmax": {"next-token choice"},
}


def _table(model: Any) -> phase_rules.Table:
    return phase_rules.Table([], [model.encoder] if hasattr(model, "encoder") else [])


def _generate(name: str) -> Any:
    return models.prompted(name) if name.startswith("lm") else models.generate(name, models.batch(), max_len_b=14)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["post-norm", "bart", "prophetnet", "lm"])
def test_what_a_generation_calls_is_where_it_belongs(name: str, side: str) -> None:
    with running(side):
        _generate(name)
        with asked_at_every_call(_table(models.load(name))) as phases:
            _generate(name)
    for function, places in PLACES.items():
        assert set(phases[function]) <= places, (function, phases[function])
    seen = {phase for each in phases.values() for phase in each}
    absent = {"post-processing"} if name != "lm" else {"post-processing", "encoder"}
    assert seen - {"encoder"} == set(PHASES) - absent - {"encoder"}
    assert ("encoder" in phases["linear"] or "encoder" in phases["multi_head_attention_forward"]) == (name != "lm")


def test_prefill_is_the_first_of_equal_passes() -> None:
    with running("stock"), asked_at_every_call(_table(models.load("post-norm"))) as phases:
        _generate("post-norm")
    products, layers = phases["linear"], 3
    step = 6 * layers + 2 * layers + 1  # four projections and two more of either attention's, two more layers, the head
    assert products["prefill"] == step + 2 * layers
    assert products["rest of the decoder"] % step == 0


def test_a_forced_prefix_is_prefill() -> None:
    """Which stock reads token by token, and fastgen at once."""
    for side in SIDES:
        with running(side):
            _generate("lm")
            with asked_at_every_call(_table(models.load("lm"))) as phases:
                _generate("lm")
        products = phases["linear"]
        prompt = models.prompts()["net_input"]["src_tokens"].shape[1]
        if side == "stock":
            assert products["prefill"] / (prompt + 1) == products["rest of the decoder"] / (14 - prompt)
        else:
            assert 0 < products["prefill"] < products["rest of the decoder"]


def test_every_rule_fits_something() -> None:
    seen: set[Any] = set()
    codes: set[CodeType] = set()
    for name in ("post-norm", "align", "lm", "shared"):
        for side in SIDES:
            table = _table(models.load(name))
            with running(side), asked_at_every_call(table):
                _generate(name)
                models.dictionary().string([5, 6])
            seen |= {rule for rules in table._rules.values() for rule in rules}
            codes |= table._rules.keys()
    assert not {(rule.path, rule.fits) for rule in phase_rules._FAIRSEQ if rule not in seen}
    elsewhere = {f"optimizer/fairseq/{name}.py" for name in ("generate/shortlist", "model/streams")}
    elsewhere.add("optimizer/fairseq/model/decoder.py forward_encoder")  # one of the two is inside of the other
    assert unreached(codes, "optimizer/fairseq", "decoding/fairseq") <= elsewhere


def test_text_is_post_processing() -> None:
    words = models.dictionary()
    with asked_at_every_call(phase_rules.Table([])) as phases:
        assert words.string(torch.tensor([5, 6])) == "w1 w2"
    assert set(phases["join"]) == {"post-processing"}


class _Slow(torch.nn.Module):
    """Bans no n-gram, slowly."""

    no_repeat_ngram_size = 0

    def __call__(self, tokens: Any, lprobs: Any, bsz: int, beam_size: int, step: int) -> Any:
        time.sleep(0.05)
        return lprobs


def test_a_slow_choice_is_next_token_choice() -> None:
    model = models.load("post-norm")
    generator = models.SequenceGenerator([model], models.dictionary(), beam_size=4, max_len_b=10, min_len=9)
    generator.repeat_ngram_blocker = _Slow()
    with running("stock"), Phases(model, host="fairseq") as phases:
        generator.generate([model], models.batch())
    assert phases.seconds["next-token choice"] >= 0.35 * phases.seconds["total"]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["post-norm", "lm"])
def test_counts_are_the_same_again_and_of_the_call_as_it_runs(name: str, side: str) -> None:
    outputs: list[Any] = []
    with running(side):
        each = [counted(lambda: outputs.append(_generate(name))).as_dict() for _ in range(2)]
        outputs.append(_generate(name))
    assert each[0] == each[1] and each[0]["operators"] > each[0]["allocations"] > 0
    tokens = [[h["tokens"].tolist() for h in sentence] for output in outputs for sentence in output]
    assert tokens == tokens[: len(outputs[0])] * len(outputs)
    if side != "stock":
        assert {(call.tier, call.cache) for call in fastgen.status().calls} == {(side, "kv")}


@pytest.mark.parametrize("side", SIDES)
def test_little_is_left_over(side: str) -> None:
    model = models.load("wmt")
    with running(side):
        models.generate("wmt", models.batch([30] * 16), max_len_b=60, min_len=50)
        with Phases(model, host="fairseq") as phases:
            for _ in range(2):
                models.generate("wmt", models.batch([30] * 16), max_len_b=60, min_len=50)
    assert shares(phases.seconds)["other"] < 0.1
