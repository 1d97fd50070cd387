"""Decoders and encoders put together otherwise, and code between steps that a part of the loop did not expect."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq.models.transformer import TransformerDecoder, TransformerEncoder
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.sequence_generator import SequenceGenerator
from torch import nn
from torch.ao import quantization

import fastgen
from fastgen import ops
from fastgen.optimizer.fairseq.generate import continuous_batch
from fastgen.pipeline.fairseq import lines


# ---------------------------------------------------------------------------------------------- left to stock
def quantise(model: Any) -> None:
    model.decoder = quantization.quantize_dynamic(model.decoder, {nn.Linear}, dtype=torch.qint8)


def observe(model: Any) -> None:
    model.decoder.qconfig = quantization.default_qconfig
    quantization.prepare(model.decoder, inplace=True)


def repeat(model: Any) -> None:
    layers = model.decoder.layers
    model.decoder.layers = nn.ModuleList([layers[0], layers[0], layers[1]])


def stack(model: Any) -> None:
    model.decoder.layers[1] = copy.deepcopy(model.decoder.layers[0])


class Shallow(TransformerDecoder):
    """A decoder whose depth can be set for inference."""

    @property
    def layers(self) -> Any:
        return self._modules["layers"][:1]


class OtherLayer(TransformerDecoderLayerBase):
    @property
    def self_attn(self) -> Any:
        return self._modules["self_attn"]


def shallow(model: Any) -> None:
    model.decoder.__class__ = Shallow


def other_layers(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.__class__ = OtherLayer


COPIED = "two of its attentions keep their keys in the same place, as copies of a layer do"
QUANTISED = "{} is quantised, or observed, over all rows of a product at once"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (quantise, QUANTISED.format("decoder.layers.0.self_attn.k_proj")),
        (observe, QUANTISED.format("decoder.embed_tokens")),
        (repeat, COPIED),
        (stack, COPIED),
        (shallow, "Shallow has its own layers"),
        (other_layers, "OtherLayer has its own self_attn"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@pytest.mark.parametrize("settings", [{}, {"tier": "fast"}, {"replay": "always"}], ids=str)
def test_left_to_stock(change: Callable[[Any], None], reason: str, settings: dict[str, Any]) -> None:
    model = models.changed(change)
    with judge.configured(**settings):
        judge.compare_fallback(lambda: models.generate(model, models.batch()), reason)


# ---------------------------------------------------------------------------------------------- the encoder
class ShallowEncoder(TransformerEncoder):
    @property
    def layers(self) -> Any:
        return self._modules["layers"][:1]


def listed(model: Any) -> None:
    layers = list(model.encoder.layers)
    del model.encoder.layers
    model.encoder.layers = layers


def in_a_row(model: Any) -> None:
    model.encoder.layers = nn.Sequential(*model.encoder.layers)


def with_a_shallow_encoder(model: Any) -> None:
    model.encoder.__class__ = ShallowEncoder


@pytest.mark.parametrize("change", [listed, in_a_row, with_a_shallow_encoder], ids=lambda each: each.__name__)
def test_layers_of_an_encoder_in_another_container(change: Callable[[Any], None]) -> None:
    judge.compare(lambda: models.generate(models.changed(change), models.batch()))


def test_a_source_of_the_encoders_own_padding() -> None:
    """The encoder masks by a token of its own: where that is all there is, stock has the call, and only there."""

    def change(model: Any) -> None:
        model.encoder.padding_idx = model.encoder.embed_tokens.padding_idx = 5

    sample = models.batch((5, 5))
    words = sample["net_input"]["src_tokens"]
    words[0].clamp_(min=6)
    model = models.changed(change)
    words[1] = models.PAD
    judge.compare(lambda: models.generate(model, sample))
    words[1] = 5
    for block in (fastgen.disabled(), fastgen.configured()):
        with block, pytest.raises(AssertionError):
            models.generate(model, sample)


# ---------------------------------------------------------------------------------------------- code between steps
class Wishing(SequenceGenerator):
    """Makes the tokens of a prefix likelier, and no more."""

    def _prefix_tokens(
        self, step: int, lprobs: Any, scores: Any, tokens: Any, prefix_tokens: Any, beam_size: int
    ) -> tuple[Any, Any, Any]:
        wanted = prefix_tokens[:, step].repeat_interleave(beam_size)[:, None]
        return lprobs.scatter_add(1, wanted, torch.full_like(wanted, 2, dtype=lprobs.dtype)), tokens, scores


def test_a_prefix_that_is_a_wish() -> None:
    """The prompt of a language model is read ahead only where it is what the hypotheses begin with."""
    model, sample = models.load("lm"), models.prompts()

    def run() -> Any:
        generator = Wishing([model], models.dictionary(), beam_size=3, max_len_b=12)
        return generator.generate([model], sample, prefix_tokens=sample["net_input"]["src_tokens"])

    judge.compare(run, is_fast=False)


class Acts(nn.Module):
    """In place of the n-gram blocker: does something at one step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.step, self.act = step, act

    def forward(self, tokens: Any, lprobs: Any, bsz: int, beam_size: int, step: int) -> Any:
        if step == self.step:
            self.act()
        return lprobs


@pytest.mark.parametrize("what", ["prompt", "language model"])
def test_weights_edited_between_steps(what: str) -> None:
    """Stock reads the rest of a prompt, and all tokens for a language model, with the weights as they are then."""
    sample = models.prompts() if what == "prompt" else models.batch()
    prefix = sample["net_input"]["src_tokens"] if what == "prompt" else None

    def run() -> Any:
        name = "lm" if what == "prompt" else "post-norm"
        model, fused = copy.deepcopy(models.load(name)), copy.deepcopy(models.load("lm", 5))
        edited = (model if what == "prompt" else fused).decoder.layers[0].self_attn.v_proj.weight
        options = {} if what == "prompt" else {"lm_model": fused, "lm_weight": 0.5}
        generator = SequenceGenerator([model], models.dictionary(), beam_size=3, max_len_b=12, **options)
        generator.repeat_ngram_blocker = Acts(3, lambda: edited.data.mul_(-1.0))
        return generator.generate([model], sample, prefix_tokens=prefix)

    judge.compare(run, is_fast=False)


class Pads(nn.Module):
    """In place of the n-gram blocker: gives padding a score."""

    def forward(self, tokens: Any, lprobs: Any, bsz: int, beam_size: int, step: int) -> Any:
        if step < 6:
            lprobs[:, models.PAD] = -1.5
        return lprobs


@pytest.mark.skipif(not ops.is_native(torch.device("cpu")), reason="wide trees need the native operators")
@pytest.mark.parametrize("beams", [31, 32, 36])
def test_padding_that_is_written(beams: int) -> None:
    """Its keys are hidden, however many beams there are."""
    model = models.load("post-norm")

    def run() -> Any:
        generator = SequenceGenerator([model], models.dictionary(), beam_size=beams, max_len_b=9)
        generator.repeat_ngram_blocker = Pads()
        return generator.generate([model], models.batch())

    judge.compare(run, is_fast=False)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_prefix_longer_than_the_hypotheses_may_be(beams: int) -> None:
    """`match_source_len` counts the words of a source, neither its end nor its padding."""
    model, sample = models.load("lm"), models.prompts((5, 5))
    inputs = sample["net_input"]
    inputs["src_tokens"] = torch.cat([inputs["src_tokens"], torch.full((2, 1), models.EOS)], 1)
    del inputs["src_lengths"]
    prefix = torch.randint(4, 40, (2, 8), generator=torch.Generator().manual_seed(2))
    judge.compare(lambda: models.generate(model, sample, prefix, beam_size=beams, match_source_len=True))


# ---------------------------------------------------------------------------------------------- refill
class Centred(TransformerEncoder):
    """Sees all sentences of a batch."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found["encoder_out"][0] -= found["encoder_out"][0].mean(1, keepdim=True)
        return found


def test_an_encoder_that_sees_the_batch_is_not_refilled() -> None:
    def change(model: Any) -> None:
        model.encoder.__class__ = Centred

    model = models.changed(change)
    generator = SequenceGenerator([model], models.dictionary(), beam_size=3, max_len_b=9)
    assert continuous_batch.unrefillable(generator) == "encoder is Centred with code of yours"
    sample = models.batch((9, 5, 12, 7, 3, 2))
    with fastgen.disabled():
        expected = generator.generate([model], sample)
    judge.assert_same(expected, fastgen.generate_samples(generator, [sample], refill=True)[0])


@pytest.mark.parametrize("own", [["a", "b", "c", "d"], torch.arange(4.0)], ids=["list", "vector"])
def test_a_sample_with_inputs_of_the_users_stays_whole(own: Any) -> None:
    sample = models.batch()
    sample["net_input"]["own"] = own
    assert continuous_batch.in_parts(sample, 1) == [sample]
    assert len(continuous_batch.in_parts(models.batch(), 1)) == 4


# ---------------------------------------------------------------------------------------------- alignments
@pytest.mark.parametrize("alignment", [[2, 0, 1], [(2, 0), (0, 1), (1, 2)]], ids=["places", "pairs"])
def test_unknown_words_by_either_kind_of_alignment(alignment: list[Any]) -> None:
    found = lines._replace_unknown("<unk> ein <unk>", "one two three", alignment, {"two": "zwei"}, "<unk>")
    assert found == "three ein zwei"
    assert lines._replace_unknown("<unk>", "", [5], {}, "<unk>") == "<unk>"
