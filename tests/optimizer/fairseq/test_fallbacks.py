"""What the tree can't do stays with stock, for a reason in words."""

from __future__ import annotations

import functools
from typing import Any

import fairseq_models as models
import judge
import pytest
import torch
from fairseq import search
from fairseq.models.transformer import TransformerDecoder
from fairseq.modules import FairseqDropout, MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator

import fastgen

pytestmark = pytest.mark.always  # also where CI draws a part of the tests


def test_top_p() -> None:
    strategy = functools.partial(search.Sampling, sampling_topp=0.8)
    judge.compare_fallback(lambda: models.generate("post-norm", models.batch(), strategy=strategy), "top-p")


def test_an_unknown_strategy() -> None:
    class Mine(search.BeamSearch):
        pass

    judge.compare_fallback(lambda: models.generate("post-norm", models.batch(), strategy=Mine), "Mine")


def test_gradients() -> None:
    model = models.load("post-norm")
    generator = SequenceGenerator([model], models.dictionary(), beam_size=2, max_len_b=5)

    def run() -> Any:
        with torch.enable_grad():
            found = generator._generate(models.batch())
        for hypothesis in (hypothesis for sentence in found for hypothesis in sentence):
            assert hypothesis["score"].requires_grad
            for name in ("score", "positional_scores", "attention"):
                hypothesis[name] = hypothesis[name].detach()
        return found

    judge.compare_fallback(run, "gradients")


def test_training_mode() -> None:
    def run() -> Any:
        generator = SequenceGenerator([model], models.dictionary(), beam_size=2, max_len_b=5)
        model.train()
        return generator.generate([model], models.batch())

    model = models.changed(bool)
    judge.compare_fallback(run, "training mode")


def test_dropout_that_is_kept() -> None:
    def keep(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "apply_during_inference"):
                module.apply_during_inference, module.p = True, 0.2

    model = models.changed(keep)
    judge.compare_fallback(lambda: models.generate(model, models.batch()), "dropout")


def test_dropout_in_training_mode() -> None:
    """Of all modules none but those that drop: as for an estimate of uncertainty."""
    model = models.changed(bool)
    dropping = [module for module in model.modules() if isinstance(module, FairseqDropout)]

    def run() -> Any:
        generator = SequenceGenerator([model], models.dictionary(), beam_size=2, max_len_b=5)
        for module in dropping:
            module.train()
        return generator.generate([model], models.batch())

    judge.compare(run)
    for module in dropping:
        module.p = 0.2
    judge.compare_fallback(run, "dropout in the decoder is in training mode")


def test_a_decoder_of_ones_own() -> None:
    class Mine(TransformerDecoder):
        def extract_features(self, *args: Any, **kwargs: Any) -> Any:
            return super().extract_features(*args, **kwargs)

    model = models.changed(lambda model: setattr(model.decoder, "__class__", Mine))
    judge.compare_fallback(lambda: models.generate(model, models.batch()), "Mine has its own extract_features")


def test_a_layer_of_ones_own() -> None:
    class Mine(TransformerDecoderLayerBase):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = models.changed(lambda model: setattr(model.decoder.layers[1], "__class__", Mine))
    judge.compare_fallback(lambda: models.generate(model, models.batch()), "Mine has its own forward")


def test_attention_of_ones_own() -> None:
    class Mine(MultiheadAttention):
        pass

    model = models.changed(lambda model: setattr(model.decoder.layers[0].self_attn, "__class__", Mine))
    judge.compare_fallback(lambda: models.generate(model, models.batch()), "attention with Mine")


def test_hooks_on_attention() -> None:
    seen: list[Any] = []
    hook = lambda module, args, kwargs, output: seen.append(output)  # noqa: E731
    model = models.changed(lambda m: m.decoder.layers[0].encoder_attn.register_forward_hook(hook, with_kwargs=True))
    judge.compare_fallback(lambda: models.generate(model, models.batch()), "hooks")
    assert seen


def test_an_ensemble_of_ones_own() -> None:
    class Mine(EnsembleModel):
        pass

    def run() -> Any:
        model = models.load("post-norm")
        generator = SequenceGenerator(Mine([model]), models.dictionary(), beam_size=2, max_len_b=5)
        return generator.generate([model], models.batch())

    judge.compare_fallback(run, "Mine")


def test_a_first_token_that_is_padding() -> None:
    """Nobody may attend to it, so stock finds nothing and says so."""
    with pytest.raises(AssertionError, match="14 < 14"):
        models.generate("post-norm", models.batch(), bos=models.PAD)
    with pytest.raises(fastgen.FallbackError, match="padding"):
        judge.ours(lambda: models.generate("post-norm", models.batch(), bos=models.PAD))


def test_a_first_token_for_each_hypothesis() -> None:
    tokens = torch.arange(10, 26)
    judge.compare_fallback(lambda: models.generate("post-norm", models.batch(), bos=tokens), "first token of its own")
    judge.compare(lambda: models.generate("post-norm", models.batch(), bos=tokens[:1]))


@pytest.mark.parametrize("tier", ["auto", "fast"])
def test_an_encoder_runs_once(tier: str) -> None:
    """Also where its outputs leave the call to stock."""
    calls: list[int] = []

    def misshape(model: Any) -> None:
        forward = model.encoder.forward

        def doubled(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            output = forward(*args, **kwargs)
            return {**output, "encoder_out": output["encoder_out"] * 2}

        model.encoder.forward = doubled

    model = models.changed(misshape)
    expected = judge.stock(lambda: models.generate(model, models.batch()))
    with judge.configured(tier=tier):
        found, (call,) = judge.ours(lambda: models.generate(model, models.batch()), strict=False)
    assert call.tier == "stock" and len(calls) == 2
    judge.assert_same(expected, found)


def test_an_encoder_with_other_outputs() -> None:
    """Seen only when the encoder has run."""

    def change(model: Any) -> None:
        forward = model.encoder.forward

        def with_a_list(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            return {**output, "encoder_padding_mask": []} | {"encoder_out": output["encoder_out"]}

        model.encoder.forward = with_a_list

    model = models.changed(change)
    judge.compare(lambda: models.generate(model, models.batch([5, 5])))

    def misshape(model: Any) -> None:
        forward, reorder = model.encoder.forward, model.encoder.reorder_encoder_out

        def doubled(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            return {**output, "encoder_out": output["encoder_out"] * 2}

        def reordered(encoder_out: Any, new_order: Any) -> Any:
            return reorder({**encoder_out, "encoder_out": encoder_out["encoder_out"][:1]}, new_order)

        model.encoder.forward, model.encoder.reorder_encoder_out = doubled, reordered

    model = models.changed(misshape)
    judge.compare_fallback(lambda: models.generate(model, models.batch()), "encoder")


def test_fallbacks_leave_no_trace() -> None:
    """A fallback between two accelerated calls."""
    judge.compare(lambda: models.generate("bart", models.batch()))
    judge.compare_fallback(
        lambda: models.generate("bart", models.batch(), strategy=functools.partial(search.Sampling, sampling_topp=0.5)),
        "top-p",
        exactly=False,  # stock shares the source's keys of a BART model among its beams
    )
    judge.compare(lambda: models.generate("bart", models.batch(), beam_size=2))
