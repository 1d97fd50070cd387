"""OpenAI's whisper package: token for token against itself, with random tiny models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastgen
from fastgen import report
from fastgen.cache.tree import BeamTree
from fastgen.optimizer import draws, verification

whisper = pytest.importorskip("whisper")
from torch import nn  # noqa: E402
from torch.ao import quantization  # noqa: E402
from torch.nn.utils import parametrizations, prune  # noqa: E402
from whisper.decoding import DecodingOptions, DecodingTask, PyTorchInference  # noqa: E402
from whisper.model import Whisper  # noqa: E402
from whisper_kit import SOUND, decode, tiny  # noqa: E402

from fastgen.optimizer.whisper import decoder  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_threads")


MODEL = tiny()


def compare(model: Any, sound: torch.Tensor, tier: str = "compat", **options: Any) -> list[Any]:
    with fastgen.disabled():
        expected = decode(model, sound, **options)
    report.reset()
    with fastgen.configured(strict=tier == "compat"):
        found = decode(model, sound, **options)
    assert [call.tier for call in report.calls()] == [tier], report.calls()
    for one, other in zip(expected, found, strict=True):
        assert one.tokens == other.tokens and one.text == other.text
        for name in ("avg_logprob", "no_speech_prob", "compression_ratio", "temperature"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-5), name
    return expected


OPTIONS: dict[str, dict[str, Any]] = {
    "five beams": dict(beam_size=5),
    "one beam": dict(beam_size=1),
    "patience": dict(beam_size=3, patience=2.0),
    "length penalty": dict(beam_size=4, length_penalty=0.6),
    "greedy": dict(),
    "samples": dict(temperature=0.7, best_of=4),
    "one sample": dict(temperature=1.0),
    "prompt": dict(beam_size=4, prompt=list(range(100, 120)), prefix=[300, 400]),
    "translation": dict(beam_size=3, task="translate", language="de"),
    "no timestamps": dict(beam_size=5, without_timestamps=True, suppress_tokens=""),
    "one token": dict(beam_size=5, sample_len=1),
    "up to the last position": dict(beam_size=3, sample_len=200),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decode(options: dict[str, Any]) -> None:
    lengths = set()
    for sound in SOUND:
        (result,) = compare(MODEL, sound, **options)
        lengths.add(len(result.tokens))
    assert options.get("sample_len") == 1 or max(lengths) > 3


def test_some_end_early() -> None:
    each = [(tiny(seed=seed, ending=4), sound) for seed in range(3) for sound in SOUND]
    lengths = {len(compare(model, sound, beam_size=4)[0].tokens) for model, sound in each}
    assert len(lengths) > 2, lengths


def test_several_segments() -> None:
    """Greedily, as the host does. With beams it fails, and says the same with us."""
    compare(MODEL, SOUND)
    errors = []
    for block in (fastgen.disabled(), fastgen.configured()):
        with pytest.raises((AssertionError, RuntimeError)) as caught, block:
            decode(MODEL, SOUND, beam_size=3)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]
    compare(MODEL, SOUND[0], beam_size=3)


def test_languages_are_detected() -> None:
    compare(MODEL, SOUND[0], beam_size=3, language=None)


def _transcribed(model: Any, sound: torch.Tensor, **options: Any) -> Any:
    torch.manual_seed(3)
    return whisper.transcribe(model, sound, language="en", fp16=False, sample_len=12, **options)


@pytest.mark.parametrize(
    "options",
    [
        dict(beam_size=3),
        dict(beam_size=3, best_of=2, temperature=(0.0, 0.6), logprob_threshold=0.0),  # no result is good enough
        dict(condition_on_previous_text=False, word_timestamps=True),
    ],
    ids=["beams", "temperatures", "words"],
)
def test_transcribe(options: dict[str, Any]) -> None:
    model = tiny(1500)
    sound = torch.randn(16000 * 40, generator=torch.Generator().manual_seed(2)) * 0.1
    with fastgen.disabled():
        expected = _transcribed(model, sound, **options)
    report.reset()
    with fastgen.configured(strict=True):
        found = _transcribed(model, sound, **options)
    calls = report.calls()
    assert len(calls) >= 2 and {call.tier for call in calls} == {"compat"}
    if "temperature" in options:
        assert {call.beams for call in calls} == {3, 2}, "beams, and then samples"
    assert [one["tokens"] for one in expected["segments"]] == [one["tokens"] for one in found["segments"]]
    assert expected["text"] == found["text"]


def test_weights_that_change() -> None:
    model = tiny(wide=64)
    before = compare(model, SOUND[0], beam_size=3)
    with torch.no_grad():
        model.decoder.token_embedding.weight.copy_(tiny(seed=5, wide=64).decoder.token_embedding.weight)
        model.decoder.blocks[0].mlp[0].weight.mul_(-1)
    assert compare(model, SOUND[0], beam_size=3)[0].tokens != before[0].tokens


LAYOUT = "the decoder is not put together as whisper puts it together"


def quantise(layers: Any) -> None:
    for place in (0, 2):
        plain = nn.Linear(layers[place].in_features, layers[place].out_features)
        plain.weight, plain.bias = layers[place].weight, layers[place].bias
        layers[place] = quantization.quantize_dynamic(nn.Sequential(plain), {nn.Linear}, dtype=torch.qint8)[0]


def more_parts(block: Any) -> None:
    block.mlp = nn.Sequential(*block.mlp, nn.Dropout(0.1)).eval()


@pytest.mark.parametrize("hook", [lambda layer: prune.l1_unstructured(layer, "weight", 0.4), nn.utils.weight_norm])
@pytest.mark.parametrize("part", ["attn.query", "mlp.0", "cross_attn.out"])
def test_weights_that_hooks_of_torchs_compute(part: str, hook: Any) -> None:
    """They are old after weights were loaded, until the layer is called."""
    model, other = tiny(), tiny(seed=5)
    for block in (*model.decoder.blocks, *other.decoder.blocks):
        hook(block.get_submodule(part))
    model.load_state_dict(other.state_dict())
    report.reset()
    (found,) = decode(model, SOUND[0], beam_size=3)
    assert report.calls()[-1].tier == "stock" and "hooks of torch.nn.utils" in str(report.calls()[-1].reason)
    with fastgen.disabled():
        assert found.tokens == decode(model, SOUND[0], beam_size=3)[0].tokens


class _Repeated(DecodingTask):
    """Several segments with beams: each row has audio features of its own."""

    def _get_audio_features(self, mel: torch.Tensor) -> torch.Tensor:
        return super()._get_audio_features(mel).repeat_interleave(self.n_group, dim=0)

    def _detect_language(self, audio_features: torch.Tensor, tokens: torch.Tensor) -> Any:
        return super()._detect_language(audio_features[:: self.n_group], tokens)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("options", [dict(beam_size=3), dict(), dict(beam_size=4, patience=2.0, length_penalty=0.6)])
def test_rows_with_audio_features_of_their_own(segments: int, options: dict[str, Any]) -> None:
    """As in whisper 20230314, and in subclasses that decode several segments with beams."""
    for seed in range(3):
        model, found = tiny(seed=seed), []
        for block in (fastgen.disabled(), fastgen.configured(strict=True)):
            with block:
                task = _Repeated(model, DecodingOptions(language="en", fp16=False, sample_len=12, **options))
                found.append([(one.tokens, one.avg_logprob) for one in task.run(SOUND[:segments])])
        assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]
        assert [each for _, each in found[0]] == pytest.approx([each for _, each in found[1]], abs=1e-5)


def _stepped(inference: Any, tokens: torch.Tensor, moves: list[tuple[list[int] | None, int]]) -> list[torch.Tensor]:
    """The logits of a decoding by hand: for each of `moves`, rows to continue (None: as they are) and new tokens."""
    found = []
    try:
        with torch.no_grad():
            audio = inference.model.encoder(SOUND[:1])
            found.append(inference.logits(tokens, audio).clone())
            for rows, new in moves:
                if rows is not None:
                    inference.rearrange_kv_cache(rows)
                    tokens = tokens[rows]
                added = torch.arange(len(tokens) * new).view(len(tokens), new) * 7 + 300 + tokens.shape[1]
                tokens = torch.cat([tokens, added], 1)
                found.append(inference.logits(tokens, audio).clone())
    finally:
        inference.cleanup_caching()
    return found


SOT = [50258, 50259, 50359, 50363]
MOVES: dict[str, list[tuple[list[int] | None, int]]] = {
    "beams": [(None, 1), ([0, 0, 2], 1), ([2, 1, 1], 1), (None, 1)],
    "rows leave": [(None, 1), ([2, 0], 1), (None, 1), ([1], 1), (None, 1)],
    "rows leave at once": [([2, 1], 1), (None, 1)],
    "rows come": [(None, 1), ([0, 0, 1, 2, 2], 1), ([4, 3, 2, 1, 0], 1)],
    "several tokens, of which the last is read": [(None, 1), (None, 2), ([1, 0, 0], 1)],
}


@pytest.mark.parametrize("moves", MOVES.values(), ids=MOVES)
def test_an_inference_called_by_hand(moves: list[tuple[list[int] | None, int]]) -> None:
    tokens = torch.tensor([SOT]).repeat(3, 1)
    with fastgen.disabled():
        expected = _stepped(PyTorchInference(MODEL, 4), tokens, moves)
    with fastgen.configured(strict=True):
        found = _stepped(PyTorchInference(MODEL, 4), tokens, moves)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)
    assert report.calls()[-1].tier == "compat" and not MODEL.decoder.blocks[0].attn.key._forward_hooks


@pytest.mark.parametrize(
    ("initial", "change", "tier"),
    [
        (4, lambda tokens: tokens[1, 1].add_(1), "stock"),
        (3, lambda tokens: None, "stock"),
        (6, lambda _: None, "compat"),
    ],
    ids=["other tokens in a row", "more than the initial tokens", "fewer than the initial tokens"],
)
def test_first_tokens(initial: int, change: Any, tier: str) -> None:
    tokens = torch.tensor([SOT]).repeat(3, 1)
    change(tokens)
    moves: list[tuple[list[int] | None, int]] = [(None, 1), (None, 1), ([0, 0, 1], 1)]
    with fastgen.disabled():
        expected = _stepped(PyTorchInference(MODEL, initial), tokens, moves)
    report.reset()
    found = _stepped(PyTorchInference(MODEL, initial), tokens, moves)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)
    assert report.calls()[-1].tier == tier


def _called(forward: Any) -> Any:
    return lambda *args, **kwargs: forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda model: model.decoder.blocks[0].attn.key.register_forward_hook(lambda *_: None),
            "attn.key has hooks of yours",
        ),
        (
            lambda model: setattr(model.decoder, "forward", _called(model.decoder.forward)),
            "decoder has a forward of its own",
        ),
        (lambda model: setattr(model, "__class__", type("Mine", (Whisper,), {})), "is not whisper's own"),
        (lambda model: more_parts(model.decoder.blocks[1]), LAYOUT),
        (lambda model: quantise(model.decoder.blocks[1].mlp), "the decoder is quantised, or observed, over all rows"),
        (lambda model: setattr(model.decoder.blocks[1], "mlp", nn.Identity()), LAYOUT),
        (lambda model: setattr(model.decoder.blocks[0], "cross_attn", None), LAYOUT),
        (lambda model: setattr(model.decoder, "mask", None), LAYOUT),
        (lambda model: model.decoder.mask.tril_(), LAYOUT),
        (lambda model: setattr(model.decoder.token_embedding, "max_norm", 50.0), LAYOUT),
        (lambda model: parametrizations.weight_norm(model.decoder.token_embedding), LAYOUT),
        (lambda model: prune.l1_unstructured(model.decoder.token_embedding, "weight", 0.2), "has hooks of torch.nn"),
    ],
)
def test_what_stays_with_the_host(change: Any, reason: str) -> None:
    model = tiny()
    change(model)
    compare(model, SOUND[0], tier="stock", beam_size=3)
    assert reason in report.calls()[-1].reason
    with fastgen.configured(strict=True), pytest.raises(fastgen.FallbackError, match=reason):
        decode(model, SOUND[0])
    with fastgen.configured(tier="stock"):
        decode(tiny(), SOUND[0], beam_size=2)
    assert report.calls()[-1].tier == "stock"


def test_the_report() -> None:
    compare(MODEL, SOUND[0], beam_size=5)
    (call,) = report.calls()
    assert (call.host, call.model, call.batch, call.beams) == ("whisper", "Whisper", 1, 5)
    assert call.steps and call.seconds and call.cache_bytes
    (host,) = [host for host in fastgen.status().hosts if host.name == "whisper"]
    assert host.state == "accelerated" and host.version == whisper.__version__


def test_disabled() -> None:
    def inference() -> Any:
        return whisper.decoding.DecodingTask(MODEL, DecodingOptions()).inference

    assert "logits" in vars(inference()) and isinstance(inference(), whisper.decoding.PyTorchInference)
    with fastgen.disabled():
        assert "logits" not in vars(inference())


def test_a_task_that_was_made_before() -> None:
    """It is the host's while fastgen is disabled, and accelerated afterwards."""
    expected = compare(MODEL, SOUND[0], beam_size=3)
    task = DecodingTask(MODEL, DecodingOptions(language="en", sample_len=24, fp16=False, beam_size=3))
    for block, calls in ((fastgen.disabled(), 0), (fastgen.configured(), 1)):
        report.reset()
        with block:
            assert task.run(SOUND[:1])[0].tokens == expected[0].tokens
        assert len(report.calls()) == calls
    assert report.calls()[-1].tier == "compat"


def test_a_decoding_that_has_begun_ends_as_it_began() -> None:
    expected = compare(MODEL, SOUND[0], beam_size=3)
    task = DecodingTask(MODEL, DecodingOptions(language="en", sample_len=24, fp16=False, beam_size=3))
    steps = []

    class Off(whisper.decoding.LogitFilter):
        def apply(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
            steps.append(1)
            fastgen.disable()

    task.logit_filters.append(Off())
    try:
        assert task.run(SOUND[:1])[0].tokens == expected[0].tokens
    finally:
        fastgen.enable()
    assert len(steps) > 5 and report.calls()[-1].tier == "compat" and report.calls()[-1].steps == len(steps)


def test_a_users_own_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(whisper.decoding.PyTorchInference):  # type: ignore[misc,name-defined]
        calls = 0

        def logits(self, *args: Any) -> Any:
            Mine.calls += 1
            return super().logits(*args)

    monkeypatch.setattr(whisper.decoding, "PyTorchInference", Mine)
    report.reset()
    decode(MODEL, SOUND[0], beam_size=3)
    assert Mine.calls > 3 and not report.calls()


@pytest.mark.parametrize("name", ["logits", "rearrange_kv_cache", "cleanup_caching"])
def test_a_method_of_the_hosts_that_a_user_has_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the class, after fastgen was imported: it is called."""
    seen: list[int] = []
    kind = whisper.decoding.PyTorchInference
    real, (expected,) = getattr(kind, name), compare(MODEL, SOUND[0], beam_size=3)
    with monkeypatch.context() as patched:
        patched.setattr(kind, name, lambda *args: (seen.append(1), real(*args))[1])
        (found,) = decode(MODEL, SOUND[0], beam_size=3)
    assert seen and found.tokens == expected.tokens
    call = report.calls()[-1]
    assert (call.tier, call.reason) == ("stock", f"PyTorchInference has another {name} than whisper's")
    compare(MODEL, SOUND[0], beam_size=3)


def test_half_precision() -> None:
    """The host casts the weights to the type of the sound; tokens may differ, their likelihood hardly."""
    with fastgen.disabled():
        (expected,) = decode(MODEL, SOUND[0], fp16=True, sample_len=6)
    with fastgen.configured(strict=True):
        (found,) = decode(MODEL, SOUND[0], fp16=True, sample_len=6)
    assert found.avg_logprob == pytest.approx(expected.avg_logprob, rel=0.02)


def test_an_error_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(BeamTree, "advance", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            decode(MODEL, SOUND[0], beam_size=3)
    compare(MODEL, SOUND[0], beam_size=3)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("reorder", lambda self, sources: None),
        ("_feed_forward", lambda self, block, x: torch.zeros_like(x)),
    ],
)
def test_negative_controls(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder.TreeDecoder, name, wrong)
    with pytest.raises(AssertionError):
        for seed in range(4):
            compare(tiny(seed=seed), SOUND[0], beam_size=5)


# ---------------------------------------------------------------------------------------------- verify=N
@pytest.fixture
def verified() -> Iterator[None]:
    verification.reset()
    with fastgen.configured(verify=1):
        yield
    verification.reset()


def sound_for(options: dict[str, Any]) -> torch.Tensor:
    """Of several segments with several rows each the host makes an error."""
    return SOUND[0] if len(options) else SOUND


@pytest.mark.parametrize(
    "options", [{}, dict(beam_size=3), dict(temperature=0.7, best_of=3), dict(language=None, beam_size=2)], ids=str
)
def test_verified(options: dict[str, Any], verified: None) -> None:
    """One answer, one record, and the random stream where it would be."""
    model = tiny()
    with fastgen.disabled():
        decode(model, sound_for(options), **options)
    stream = torch.get_rng_state()
    compare(model, sound_for(options), **options)
    assert torch.equal(torch.get_rng_state(), stream) and verification.counts() == {verification.SAME: 1}


@pytest.mark.parametrize("options", [{}, dict(beam_size=3), dict(temperature=0.7, best_of=3)], ids=str)
def test_verified_and_different(options: dict[str, Any], verified: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    with fastgen.disabled():
        expected = decode(model, sound_for(options), **options)
    monkeypatch.setattr(decoder.TreeDecoder, "_feed_forward", lambda self, block, x: torch.zeros_like(x))
    with pytest.warns(RuntimeWarning, match="no longer accelerated") as caught:
        found = decode(model, sound_for(options), **options)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert not any(str(one.tokens)[1:-1] in str(caught[0].message) for one in expected)
    again = decode(model, sound_for(options), **options)
    assert [one.tokens for one in again] == [one.tokens for one in expected]
    assert report.calls()[-1].tier == "stock" and "verified" in str(report.calls()[-1].reason)
    assert verification.counts() == {verification.DIFFERENT: 1}


@pytest.mark.parametrize("beams", [None, 2])
def test_verified_and_a_near_tie(beams: int | None, verified: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other word has a twin that is as good."""
    model = tiny()
    with torch.no_grad():
        words = model.decoder.token_embedding.weight
        words[1:50000:2] = words[:49999:2]
    logits = decoder.TreeDecoder._logits

    def nearly(self: Any, x: torch.Tensor) -> torch.Tensor:
        found = logits(self, x)
        found[..., 1:50000:2] += 4e-6
        return found

    monkeypatch.setattr(decoder.TreeDecoder, "_logits", nearly)
    decode(model, SOUND[0], beam_size=beams)
    assert verification.counts() == {verification.NEAR_TIE: 1}


@pytest.mark.parametrize(("gap", "kind"), [(0.0, verification.NEAR_TIE), (1.0, verification.DIFFERENT)])
@pytest.mark.parametrize("samples", [1, 3])
def test_draws(samples: int, gap: float, kind: str, verified: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other draws than the host's are a near-tie where the host's were one."""
    logits, gap_of_draw = decoder.TreeDecoder._logits, draws.gap_of_draw
    monkeypatch.setattr(decoder.TreeDecoder, "_logits", lambda self, x: logits(self, x).flip(-1))

    def known(weights: torch.Tensor, count: int) -> Any:
        gaps, drawn = gap_of_draw(weights, count)
        return torch.full_like(gaps, gap), drawn

    monkeypatch.setattr(draws, "gap_of_draw", known)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decode(tiny(), SOUND[0], temperature=0.8, best_of=samples)
    assert verification.counts() == {kind: 1}


def test_a_filter_of_the_users_runs_once(verified: None) -> None:
    calls: list[int] = []

    class Mine(whisper.decoding.LogitFilter):
        def apply(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
            calls.append(1)

    task = whisper.decoding.DecodingTask(MODEL, DecodingOptions(language="en", sample_len=9, fp16=False))
    task.logit_filters.append(Mine())
    task.run(SOUND[:1])
    assert 0 < len(calls) <= 9 and verification.counts() == {verification.UNVERIFIED: 1}


@pytest.mark.usefixtures("rounded_weights")
@pytest.mark.parametrize("weights", ["int8", "bf16"])
@pytest.mark.parametrize("beams", [None, 3])
def test_rounded_weights(beams: int | None, weights: str) -> None:
    """The user's choice: other scores, near the host's, and the host's once more when it is taken back."""
    options: dict[str, Any] = {"sample_len": 1, "beam_size": beams}
    with fastgen.disabled():
        (expected,) = decode(MODEL, SOUND[:1], **options)
    fastgen.release()
    with fastgen.configured(strict=True, weights=weights, packing="always"):
        (found,) = decode(MODEL, SOUND[:1], **options)
    assert fastgen.status().quantized and not fastgen.status().quantized.startswith("0 ")
    assert 1e-5 < abs(found.avg_logprob - expected.avg_logprob) < 0.5
    assert 1e-5 < abs(math.log(found.no_speech_prob) - math.log(expected.no_speech_prob)) < 2
    fastgen.release()
    compare(MODEL, SOUND[:1], **options)
    assert fastgen.status().quantized == ""


@pytest.mark.usefixtures("rounded_weights")
def test_the_encoder_with_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the user's choice alone, where the encoder is whisper's own, and sounds are not encoded yet."""
    from fastgen.optimizer.whisper import encoder, inference

    model, seen = tiny(), []
    monkeypatch.setattr(inference, "encode", lambda *args: (seen.append(1), encoder.encode(*args))[1])

    def encoded(**settings: Any) -> tuple[torch.Tensor, int]:
        seen.clear()
        with fastgen.configured(packing="always", **settings):
            (result,) = decode(model, SOUND[:1], sample_len=1)
        return result.audio_features, len(seen)

    with torch.no_grad():
        theirs = model.encoder(SOUND[:1])[0]
        torch.testing.assert_close(encoder.encode(model, SOUND[:1])[0], theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(encoded()[0], theirs) and not seen
    ours, count = encoded(weights="int8")
    assert count == 1 and 1e-4 < float((ours - theirs).norm() / theirs.norm()) < 0.5
    assert encoded(weights="int8", tier="stock")[1] == 0
    with torch.no_grad(), fastgen.configured(weights="int8"):
        (again,) = decode(model, ours[None], sample_len=1)  # which is encoded already
        assert torch.equal(again.audio_features, ours)
    hook = model.encoder.blocks[0].register_forward_hook(lambda *_: None)
    assert encoded(weights="int8")[1] == 0
    hook.remove()
    assert encoded(weights="int8")[1] == 1
