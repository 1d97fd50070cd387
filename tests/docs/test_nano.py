"""docs/nano.py, the idea in one file: the library's tokens, by the same tree."""

from __future__ import annotations

import sys
from typing import Any

import pages
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import GPT2Config, GPT2LMHeadModel

import fastgen

sys.path.insert(0, str(pages.DOCS))

import nano

pytestmark = pytest.mark.always  # also where CI draws a part of the tests

EOS, PAD = 3, 1


def _host(seed: int) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=29, n_embd=32, n_layer=2, n_head=4, n_positions=96, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("batch", "beams", "new"), [(3, 4, 40), (1, 2, 1), (2, 5, 12)])
def test_the_librarys_tokens(seed: int, batch: int, beams: int, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host, pruned = _host(seed), []
    prune = nano.Tree.prune
    monkeypatch.setattr(nano.Tree, "prune", lambda self: (pruned.append(1), prune(self)))
    prompt = torch.randint(4, 29, (batch, 7))
    ours = nano.beam_search(nano.Model.of_host(host), prompt, beams, new, EOS)
    options: dict[str, Any] = dict(num_beams=beams, max_new_tokens=new, eos_token_id=EOS, pad_token_id=PAD)
    fastgen.status()
    with fastgen.configured(strict=True):
        theirs = host.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)
    assert fastgen.status().calls[-1].tier == "fast"
    width = theirs.shape[1]
    assert [row + [PAD] * (width - len(row)) for row in ours] == theirs.tolist()
    assert new < 40 or pruned, "this is to try a tree that is pruned"


def test_sentences_end_and_leave() -> None:
    """Some of the cases above end before the last token, others go on: or they would prove little."""
    lengths = set()
    for seed in range(6):
        prompt = torch.randint(4, 29, (3, 7), generator=torch.Generator().manual_seed(seed))
        lengths |= {len(row) for row in nano.beam_search(nano.Model.of_host(_host(seed)), prompt, 4, 40, EOS)}
    assert len(lengths) > 2 and max(lengths) == 47


def test_a_tree_that_is_wrong_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    host, prompt = _host(0), torch.randint(4, 29, (2, 7))
    right = nano.beam_search(nano.Model.of_host(host), prompt, 4, 20, EOS)
    monkeypatch.setattr(nano.Tree, "reorder", lambda self, parents: None)
    assert nano.beam_search(nano.Model.of_host(host), prompt, 4, 20, EOS) != right


def test_it_stays_small() -> None:
    assert len((pages.DOCS / "nano.py").read_text("utf-8").splitlines()) <= 300
    assert "fastgen" not in {name for name in vars(nano)}
