"""fastgen's forms of whisper's rules, to the last digit, against whisper's own, on logits of all kinds."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fastgen

whisper = pytest.importorskip("whisper")
from whisper import decoding  # noqa: E402
from whisper.tokenizer import get_tokenizer  # noqa: E402
from whisper_kit import SOUND, tiny  # noqa: E402
from whisper_kit import decode as decode_by_host  # noqa: E402

from fastgen.optimizer.whisper import TESTED, search  # noqa: E402

pytestmark = pytest.mark.skipif(whisper.__version__ != TESTED, reason="other versions keep their own rules")
TOKENIZER = get_tokenizer(True, language="en", task="transcribe")
PROMPT = [50258, 50259, 50359]
VOCABULARY = 51865


class Inference:
    def __init__(self) -> None:
        self.sources: list[list[int]] = []

    def rearrange_kv_cache(self, sources: list[int]) -> None:
        self.sources.append(list(sources))


def drawn(chance: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[rows, V]` and tokens `[rows, length]`, with times, ends and ties among them."""
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    rows, length = chance.choice([1, 3, 5]), chance.choice([0, 1, 2, 5, 9])
    logits = torch.randn(rows, VOCABULARY, generator=generator) * chance.choice([1, 3, 8])
    if chance.random() < 0.3:
        logits = logits.round()
    if chance.random() < 0.2:
        logits[:, : TOKENIZER.timestamp_begin] -= 30
    begin = TOKENIZER.timestamp_begin

    def token() -> int:
        return chance.choice([chance.randrange(50000), begin + chance.randrange(1500), TOKENIZER.eot])

    tokens = torch.tensor([[*PROMPT, *(token() for _ in range(length))] for _ in range(rows)])
    if chance.random() < 0.3:  # beams that are the same
        logits[:], tokens[:] = logits[0].clone(), tokens[0].clone()
    return logits, tokens


def test_times() -> None:
    chance, apply = random.Random(0), decoding.ApplyTimestampRules.apply
    stock, changed = getattr(apply, "__wrapped__", apply), 0
    for _ in range(300):
        logits, tokens = drawn(chance)
        rule = decoding.ApplyTimestampRules(TOKENIZER, len(PROMPT), chance.choice([None, 50]))
        theirs, ours = logits.clone(), logits.clone()
        stock(rule, theirs, tokens)
        search.apply(rule, ours, tokens)
        assert torch.equal(theirs, ours)
        changed += not torch.equal(logits[:, TOKENIZER.timestamp_begin :], theirs[:, TOKENIZER.timestamp_begin :])
    assert changed > 200


def test_beams() -> None:
    chance, finished = random.Random(1), 0
    update = decoding.BeamSearchDecoder.update
    for case in range(300):
        logits, tokens = drawn(chance)
        sums = torch.randn(len(tokens), generator=torch.Generator().manual_seed(case)).sort(descending=True).values
        if case % 3 == 0:
            logits[:, TOKENIZER.eot] = logits.max() + 1
        patience, before = chance.choice([None, 2.0]), chance.choice([None, {(1, 2): -1.0}])
        found: list[Any] = []
        for rule in (getattr(update, "__wrapped__", update), search.update):
            decoder = decoding.BeamSearchDecoder(len(tokens), TOKENIZER.eot, Inference(), patience)
            decoder.finished_sequences = None if before is None else [dict(before)]
            own = sums.clone()
            rows, is_complete = rule(decoder, tokens, logits.clone(), own)
            ended = [list(each.items()) for each in decoder.finished_sequences]
            found.append((rows.tolist(), bool(is_complete), own.tolist(), ended, decoder.inference.sources))
            finished += sum(map(len, ended))
        assert found[0] == found[1]
    assert finished > 200
    decoder = decoding.BeamSearchDecoder(2, TOKENIZER.eot, Inference())
    with pytest.raises(ValueError, match=r"torch.Size\(\[3, 3\]\)\[0\] % 2 != 0"):
        search.update(decoder, torch.zeros(3, 3, dtype=torch.int64), torch.zeros(3, 9), torch.zeros(3))


def test_whose_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours on the tree; the host's for a user's subclass, in the host's decodings, and when fastgen is off."""
    seen: list[str] = []
    for name in ("update", "apply"):
        ours = getattr(search, name)
        monkeypatch.setattr(search, name, lambda *args, _name=name, _ours=ours: (seen.append(_name), _ours(*args))[1])
    model = tiny()

    def decode(**options: Any) -> set[str]:
        seen.clear()
        decode_by_host(model, SOUND[0], **options)
        return set(seen)

    assert decode(beam_size=2) == {"update", "apply"} and decode() == {"apply"}
    with fastgen.configured(tier="stock"):
        assert not decode(beam_size=2)
    with fastgen.disabled():
        assert not decode(beam_size=2)

    class Own(decoding.ApplyTimestampRules):
        pass

    monkeypatch.setattr(decoding, "ApplyTimestampRules", Own)
    assert decode(beam_size=2) == {"update"}


@contextlib.contextmanager
def replaced_before_fastgen(kind: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the block this rule is `replacement` of the host's, as if from before fastgen was imported."""
    with fastgen.disabled():
        real = vars(kind)[name]
        setattr(kind, name, replacement(real))
    try:
        yield
    finally:
        with fastgen.disabled():
            setattr(kind, name, real)


@pytest.mark.parametrize("wraps", [functools.wraps, lambda _: lambda own: own], ids=["with its names", "without"])
@pytest.mark.parametrize(
    ("kind", "name"), [(decoding.BeamSearchDecoder, "update"), (decoding.ApplyTimestampRules, "apply")]
)
def test_a_rule_that_was_replaced_before_fastgen(kind: Any, name: str, wraps: Any) -> None:
    """The user's is called."""
    seen: list[int] = []

    def noting(real: Any) -> Any:
        @wraps(real)
        def own(*args: Any) -> Any:
            seen.append(1)
            return real(*args)

        return own

    model = tiny()
    (expected,) = decode_by_host(model, SOUND[0], beam_size=3)
    with replaced_before_fastgen(kind, name, noting):
        (found,) = decode_by_host(model, SOUND[0], beam_size=3)
    assert seen and found.tokens == expected.tokens
    seen.clear()
    assert decode_by_host(model, SOUND[0], beam_size=3)[0].tokens == expected.tokens and not seen


def test_logits_that_a_user_has_replaced() -> None:
    """The function is called as before, and with a loop of the user's all logits of the prompt are there."""
    options = whisper.DecodingOptions(language="en", sample_len=3, fp16=False)
    task, seen = whisper.decoding.DecodingTask(tiny(), options), []
    ours = task.inference.logits
    task.inference.logits = lambda *args: (seen.append(1), ours(*args))[1]
    assert task.run(SOUND[:1]) and len(seen) == 3

    class Own(whisper.decoding.DecodingTask):
        def _main_loop(self, features: Any, tokens: Any) -> Any:
            seen.append(self.inference.logits(tokens, features))
            self.inference.cleanup_caching()
            return super()._main_loop(features, tokens)

    Own(tiny(), options).run(SOUND[:1])
    assert bool(seen[-1].any(-1).all()) and seen[-1].shape[1] == 3
