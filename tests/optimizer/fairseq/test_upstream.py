"""What fairseq gets wrong by itself and fastgen puts right."""

from __future__ import annotations

import argparse
import collections
import copy
import pathlib
import threading
from pathlib import Path
from typing import Any

import fairseq_models as models
import judge
import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator

import fastgen
from fastgen.optimizer.fairseq import checkpoints

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the host's CUDA extension bans by itself")


# --------------------------------------------------------------------------------------------- n-grams
class Sliced(torch.nn.Module):
    """The host's own fallback, shown the tokens so far instead of the whole buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.no_repeat_ngram_size = size
        self.inner = NGramRepeatBlock(size, use_extension=False)

    def forward(self, tokens: Any, lprobs: Any, bsz: int, beam_size: int, step: int) -> Any:
        if self.no_repeat_ngram_size == 1:  # the fallback compares whole hypotheses with nothing
            for row, scores in zip(tokens, lprobs, strict=True):
                scores[row[1 : step + 1]] = -torch.inf
            return lprobs
        return self.inner._no_repeat_ngram(tokens[:, : step + 1], lprobs, bsz, beam_size, step)


def blocked(name: str, size: int, sliced: bool, prefix: Any = None, **options: Any) -> Any:
    model = copy.deepcopy(models.load(name)).double()  # bans leave few choices, and in float32 some of those tie
    options = {"beam_size": 4, "max_len_b": 18, "no_repeat_ngram_size": size, **options}
    generator = SequenceGenerator([model], models.dictionary(), **options)
    if sliced:
        generator.repeat_ngram_blocker = Sliced(size)
    return generator.generate([model], models.batch([9, 5, 12, 7, 3]), prefix_tokens=prefix)


def ngrams(tokens: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["post-norm", "bart", "adaptive", "prophetnet", "lightconv"])
def test_ngrams_are_banned(name: str, size: int) -> None:
    expected = judge.stock(lambda: blocked(name, size, sliced=True))
    result, calls = judge.ours(lambda: blocked(name, size, sliced=False), strict=False)
    assert [call.tier for call in calls] == ["stock" if name == "lightconv" else "compat"]
    judge.assert_same(expected, result)
    for hypothesis in (hypothesis for hypotheses in result for hypothesis in hypotheses):
        found = ngrams([models.EOS, *hypothesis["tokens"].tolist()][: -1 if size == 1 else None], size)
        assert len(found) == len(set(found))


@CPU_ONLY
def test_stock_bans_nothing() -> None:
    """If this fails, upstream is mended and ours can go."""
    free, bound = (judge.stock(lambda size=size: blocked("bart", size, sliced=False)) for size in (0, 2))
    judge.assert_same(free, bound)
    result, _ = judge.ours(lambda: blocked("bart", 2, sliced=False))
    with pytest.raises(AssertionError, match="differ"):
        judge.assert_same(free, result)


def test_what_the_prefix_forces_is_not_banned() -> None:
    prefix = torch.tensor([[5, 6, 5, 6, 5, 6]] * 5)
    result, _ = judge.ours(lambda: blocked("post-norm", 2, sliced=False, prefix=prefix))
    for hypotheses in result:
        assert len(hypotheses) == 4
        for hypothesis in hypotheses:
            assert hypothesis["tokens"][:6].tolist() == [5, 6, 5, 6, 5, 6]
            assert torch.isfinite(hypothesis["positional_scores"]).all()
            assert hypothesis["tokens"][6] != 5 or len(hypothesis["tokens"]) == 7


def test_the_blocker_of_a_user_stays() -> None:
    """After a call the generator has the blocker it was given."""
    model = models.load("bart")
    generator = SequenceGenerator([model], models.dictionary(), no_repeat_ngram_size=2, max_len_b=5)
    blocker = generator.repeat_ngram_blocker
    generator.generate([model], models.batch([3]))
    assert generator.repeat_ngram_blocker is blocker and isinstance(blocker, NGramRepeatBlock)


# ----------------------------------------------------------------------------------------- beams of BART
def test_a_beam_size_does_not_stick() -> None:
    """A plain forward pass after a beam search, on a batch that the beam size divides."""
    model = models.load("bart", seed=7)
    tokens, lengths = models.batch([4] * 6)["net_input"]["src_tokens"], torch.full((6,), 5)
    with torch.no_grad():
        before = model(tokens, lengths, tokens)[0]
        models.generate(model, models.batch([4] * 6), beam_size=3)
        assert torch.equal(model(tokens, lengths, tokens)[0], before)
    assert {layer.encoder_attn.beam_size for layer in model.decoder.layers} == {1}


def test_generators_with_other_beams_live_side_by_side() -> None:
    model, sample = models.load("bart", seed=8), models.batch()
    generators = {
        beams: SequenceGenerator([model], models.dictionary(), beam_size=beams, max_len_b=14) for beams in (5, 2, 1)
    }
    for beams, generator in generators.items():
        alone = copy.deepcopy(model)  # stock needs a model that no other beam size has touched
        expected = judge.stock(lambda alone=alone, beams=beams: models.generate(alone, sample, beam_size=beams))
        result, calls = judge.ours(lambda generator=generator: generator.generate([model], sample))
        judge.assert_over_the_tree(calls)
        judge.assert_same(expected, result)


def test_a_beam_size_that_stock_left_behind_is_cleared() -> None:
    model, sample = models.load("bart", seed=9), models.batch([4, 6, 5])
    expected = judge.stock(lambda: models.generate(model, sample, beam_size=1))
    with fastgen.disabled():
        models.generate(model, sample, beam_size=3)
    assert {layer.encoder_attn.beam_size for layer in model.decoder.layers} == {3}
    result, _ = judge.ours(lambda: models.generate(model, sample, beam_size=1))
    judge.assert_same(expected, result)
    judge.assert_same(expected, judge.stock(lambda: models.generate(model, sample, beam_size=1)), exactly=True)


def test_an_encoder_that_a_user_has_changed_stays_so() -> None:
    """As in stock, where a generator with one beam leaves it alone."""
    model, calls = copy.deepcopy(models.load("bart", seed=11)), []
    reorder = model.encoder.reorder_encoder_out
    model.encoder.reorder_encoder_out = lambda *args: calls.append(1) or reorder(*args)

    def run() -> Any:
        generator = SequenceGenerator([model], models.dictionary(), beam_size=1, max_len_b=9)
        return generator.generate([model], models.batch())

    expected = judge.stock(run)
    of_stock = len(calls)
    found, (call,) = judge.ours(run, strict=False)
    assert call.tier == "stock" and of_stock and len(calls) == 2 * of_stock
    judge.assert_same(expected, found, exactly=True)


# --------------------------------------------------------------------------------------------- checkpoints
@pytest.fixture(scope="module")
def checkpoint(shared: Path) -> str:
    path = shared / "models" / "ddtp-en-de" / "checkpoint.pt"
    if not path.is_file():
        pytest.skip(f"there is no {path}")
    return str(path)


def test_checkpoints_load(checkpoint: str) -> None:
    before = set(torch.serialization.get_safe_globals())
    state = checkpoint_utils.load_checkpoint_to_cpu(checkpoint)
    assert isinstance(next(iter(state["model"].values())), torch.Tensor)
    assert set(torch.serialization.get_safe_globals()) == before, "the allow-list is as it was"
    with fastgen.disabled(), pytest.raises(Exception, match=r"[Ww]eights.only"):
        checkpoint_utils.load_checkpoint_to_cpu(checkpoint)


def test_what_users_allow_stays_allowed() -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        before = set(torch.serialization.get_safe_globals())
        with checkpoints.allowed(), checkpoints.allowed():
            assert set(torch.serialization.get_safe_globals()) > before
        assert set(torch.serialization.get_safe_globals()) == before


def test_checkpoints_load_in_threads(checkpoint: str) -> None:
    errors: list[BaseException] = []

    def load() -> None:
        try:
            for _ in range(4):
                checkpoint_utils.load_checkpoint_to_cpu(checkpoint)
        except BaseException as error:
            errors.append(error)

    before = set(torch.serialization.get_safe_globals())
    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert set(torch.serialization.get_safe_globals()) == before


class _Evil:
    def __reduce__(self) -> Any:
        return (pathlib.Path.touch, (pathlib.Path("written-by-a-checkpoint"),))


def test_weights_only_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that would run code is refused as before."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pt"
    torch.save({"args": argparse.Namespace(), "model": _Evil()}, path)
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert not Path("written-by-a-checkpoint").exists()


def test_what_checkpoints_hold(tmp_path: Path) -> None:
    """Options as namespaces and as omegaconf, meters, dictionaries of the task's state."""
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.logging.meters import AverageMeter, TimeMeter
    from omegaconf import OmegaConf

    config = OmegaConf.create({"model": {"_name": "bart", "sizes": [1, 2]}, "x": None, "pi": 3.14, "flag": True})
    state = {
        "args": argparse.Namespace(arch="bart", data="x"),
        "cfg": config,
        "typed": OmegaConf.to_container(OmegaConf.structured(FairseqConfig), enum_to_str=True),
        "extra_state": {"loss": AverageMeter(), "ups": TimeMeter()},
        "task_state": {"dictionary": models.dictionary()},
        "optimizer_history": collections.OrderedDict(a=collections.defaultdict(dict)),
        "model": {"weight": torch.ones(2)},
        "best": [np.float64(0.25), np.float32(0.5), np.int64(3)],
    }
    path = tmp_path / "checkpoint.pt"
    torch.save(state, path)
    with checkpoints.allowed():
        back = torch.load(path)
    assert back["best"] == state["best"]
    assert back["cfg"] == config and back["args"] == state["args"]
    assert back["task_state"]["dictionary"].symbols == models.dictionary().symbols
