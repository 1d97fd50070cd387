"""The comparisons can fail: break one thing inside the adapter, and they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch

from fastgen.cache.tree import BeamTree
from fastgen.cache.tree_layer import TreeLayer
from fastgen.optimizer.fairseq.model import streams
from fastgen.optimizer.fairseq.model.decoder import Prompt
from fastgen.optimizer.fairseq.model.session import Session, Source
from fastgen.optimizer.fairseq.model.streams import TreeStreamAttention

pytestmark = pytest.mark.always  # also where CI draws a part of the tests

Patch = pytest.MonkeyPatch


def freeze_ancestry(patch: Patch) -> None:
    patch.setattr(BeamTree, "reorder", lambda self, parents: None)


def overwrite_a_slot(patch: Patch) -> None:
    append = TreeLayer.append
    patch.setattr(TreeLayer, "append", lambda self, keys, values: append(self, keys.roll(1, 2), values.roll(1, 2)))


def see_everything(patch: Patch) -> None:
    patch.setattr(BeamTree, "ancestry", lambda self: torch.ones_like(self._ancestry[:, :, : self.used]))


def forget_source_padding(patch: Patch) -> None:
    init = Source.__init__
    patch.setattr(Source, "__init__", lambda self, stored, bias, slim=None: init(self, stored, None, slim))


def keep_the_wrong_sentences(patch: Patch) -> None:
    held = Session._of_sources
    patch.setattr(Session, "_of_sources", lambda self: {name: tensor.flip(0) for name, tensor in held(self).items()})


def shift_the_prompt(patch: Patch) -> None:
    log_probs = Prompt.log_probs
    patch.setattr(Prompt, "log_probs", lambda self, position, t: log_probs(self, max(position - 1, 0), t))


def skip_a_session_step(patch: Patch) -> None:
    reorder = Session.reorder
    patch.setattr(
        Session, "reorder", lambda self, rows: reorder(self, rows.view(-1, self.tree.beams).flip(1).flatten())
    )


def shift_the_distances(patch: Patch) -> None:
    buckets = TreeStreamAttention._buckets
    patch.setattr(TreeStreamAttention, "_buckets", lambda self: buckets(self).roll(1, 1))


def forget_the_clock(patch: Patch) -> None:
    patch.setattr(BeamTree, "position", property(lambda self: 3))


def hide_own_keys(patch: Patch) -> None:
    attention = streams.stream_attention

    def without(*args: Any) -> torch.Tensor:
        return attention(*args[:6], torch.full_like(args[6], -torch.inf), args[7])

    patch.setattr(streams, "stream_attention", without)


def forget_own_biases(patch: Patch) -> None:
    attention = streams.stream_attention
    patch.setattr(streams, "stream_attention", lambda *args: attention(*args[:6], args[6] * 0, args[7]))


TRANSLATORS = ("post-norm", "bart", "prophetnet")
CONTROLS: dict[Callable[[Patch], None], tuple[str, ...]] = {
    freeze_ancestry: (*TRANSLATORS, "lm"),
    overwrite_a_slot: (*TRANSLATORS, "lm"),
    see_everything: (*TRANSLATORS, "lm"),
    skip_a_session_step: (*TRANSLATORS, "lm"),
    forget_source_padding: TRANSLATORS,
    keep_the_wrong_sentences: ("pre-norm",),
    shift_the_prompt: ("lm",),
    shift_the_distances: ("prophetnet",),
    forget_the_clock: ("prophetnet",),
    hide_own_keys: ("prophetnet",),
    forget_own_biases: ("prophetnet",),
}


@pytest.mark.parametrize(
    ("damage", "name"),
    [(damage, name) for damage, names in CONTROLS.items() for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_damage_is_seen(damage: Callable[[Patch], None], name: str) -> None:
    sample, prefix = models.staggered(12)

    def run() -> judge.Hypotheses:
        if name == "lm":
            return models.prompted(name, max_len_b=20)
        return models.generate(name, sample, prefix=prefix, max_len_b=20)

    judge.compare(run)
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        with pytest.raises(AssertionError, match=r"differ|beyond the tolerance"):
            judge.compare(run)


def test_a_fallback_is_seen() -> None:
    with pytest.raises(AssertionError):
        judge.compare_fallback(lambda: models.generate("bart", models.batch()), "")
    _, calls = judge.ours(lambda: models.generate("lightconv", models.batch()), strict=False)
    with pytest.raises(AssertionError):
        judge.assert_over_the_tree(calls)


def test_the_judge_refuses_other_hypotheses() -> None:
    stock = judge.stock(lambda: models.generate("align", models.batch(), align=False))
    for name, change in {
        "tokens": lambda x: x.flip(0),
        "score": lambda x: x + 2e-4,
        "positional_scores": lambda x: x * 1.01,
        "attention": lambda x: x[:, :-1],
    }.items():
        other = [[{**hypothesis, name: change(hypothesis[name])} for hypothesis in sentence] for sentence in stock]
        with pytest.raises(AssertionError, match=name):
            judge.assert_same(stock, other)
    with pytest.raises(AssertionError, match="tokens differ"):
        judge.assert_same(stock, [sentence[::-1] for sentence in stock])
    judge.assert_same(stock, stock, exactly=True)
