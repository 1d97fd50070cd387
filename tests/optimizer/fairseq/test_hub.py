"""Hub interfaces as users call them: `bart.sample`, with its prefix of a start token."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import fairseq_models as models
import judge
import pytest
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models.bart.hub_interface import BARTHubInterface
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf

LINES = ["w1 w2 w3", "w5 w6 w7 w8 w9 w10", "w4"]


@pytest.fixture
def bart() -> Any:
    words = models.dictionary()
    task = TranslationTask(OmegaConf.structured(TranslationConfig), words, words)
    hub = BARTHubInterface(OmegaConf.structured(FairseqConfig), task, copy.deepcopy(models.load("bart"))).eval()
    hub.bpe = SimpleNamespace(encode=str, decode=str)
    return hub


@pytest.mark.parametrize("options", [dict(lenpen=2.0, min_len=4), dict(no_repeat_ngram_size=0, sampling=True)], ids=str)
def test_hypotheses(bart: Any, options: dict[str, Any]) -> None:
    tokens = [bart.encode(line) for line in LINES]
    for beam in (4, 2):
        models.forget_beams([bart.model])  # stock needs a model that no other beam size has touched
        expected = judge.compare(lambda beam=beam: bart.generate(tokens, beam=beam, max_len_b=12, **options))
        assert all(len(hypotheses) == beam and hypotheses[0]["tokens"][0] == 0 for hypotheses in expected)


def test_text(bart: Any) -> None:
    expected = judge.stock(lambda: bart.sample(LINES, beam=3, max_len_b=9))
    result, calls = judge.ours(lambda: bart.sample(LINES, beam=3, max_len_b=9))
    judge.assert_over_the_tree(calls)
    assert result == expected
