"""Which phase a stack of frames belongs to, asked at every call that a generation makes, and the time that follows."""

from __future__ import annotations

import signal
import threading
import time
from types import CodeType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import bench_models
import torch
import transformers
from asking import asked_at_every_call, running, unreached
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

import fastgen
from fastgen.bench import data, phase_rules
from fastgen.bench.phases import Phases, shares
from fastgen.phases import PHASES

OWN = ["bart", "gpt2", "llama", "t5"]  # t5 on 4.57 stays with the host: both sides are the same then
IN_PASSES = {"encoder", "prefill", "rest of the decoder"}
# Where built-in functions may run. Linear layers are in no attention, and nothing attends elsewhere.
PLACES = {
    "linear": IN_PASSES,
    "addmm": IN_PASSES,
    "layer_norm": IN_PASSES,
    "embedding": IN_PASSES,
    "scaled_dot_product_attention": {"encoder", "prefill", "attention"},
    "bmm": {"encoder", "prefill", "attention"},
    "topk": {"next-token choice"},
    "log_softmax": {"next-token choice"},
}


def _table(model: Any) -> phase_rules.Table:
    encoders = [model.get_encoder()] if model.config.is_encoder_decoder else []
    return phase_rules.Table([type(model)], encoders)


@pytest.mark.parametrize("side", ["stock", "fast", "compat"])
@pytest.mark.parametrize("kind", OWN)
def test_what_a_generation_calls_is_where_it_belongs(kind: str, side: str) -> None:
    model = bench_models.load(kind)
    with running(side):
        bench_models.generate(model)
        with asked_at_every_call(_table(model)) as phases:
            bench_models.generate(model)
    for name, places in PLACES.items():
        assert set(phases[name]) <= places, (name, phases[name])
    seen = {phase for each in phases.values() for phase in each}
    absent = {"post-processing"} | (set() if model.config.is_encoder_decoder else {"encoder"})
    assert seen == set(PHASES) - absent
    assert phases["linear"]["encoder"] > 0 or not model.config.is_encoder_decoder


@pytest.mark.parametrize("kind", OWN)
def test_prefill_is_the_first_of_equal_passes(kind: str) -> None:
    """Counted in products: those of a pass, and for encoder-decoders also the keys and values of the source."""
    model, new = bench_models.load(kind), 8
    with running("stock"), asked_at_every_call(_table(model)) as phases:
        bench_models.generate(model, new=new)
    products = phases["linear"] + phases["addmm"]
    later = products["rest of the decoder"] / (new - 1)
    source = 2 * 2 if model.config.is_encoder_decoder else 0  # of two layers
    assert later == int(later)
    assert products["prefill"] == later + source


def test_storing_and_reordering_are_cache_upkeep() -> None:
    model = bench_models.load("gpt2")
    with running("stock"), asked_at_every_call(_table(model)) as phases:
        bench_models.generate(model)
    assert phases["index_select"]["cache upkeep"] > 0 and set(phases["index_select"]) == {"cache upkeep"}
    assert phases["cat"]["cache upkeep"] > 0
    with running("fast"), asked_at_every_call(_table(model)) as phases:
        bench_models.generate(model)
    assert phases["index_select"]["cache upkeep"] > 0


def test_every_rule_fits_something() -> None:
    """Of those for transformers on a CPU, and every mark."""
    seen: set[phase_rules.Rule] = set()
    codes: set[CodeType] = set()
    for kind in [*OWN, "eager"]:
        model = bench_models.load("bart", attn_implementation=kind) if kind == "eager" else bench_models.load(kind)
        for side in ("stock", "fast", "compat"):
            table = _table(model)
            with running(side), asked_at_every_call(table):
                bench_models.generate(model)
            seen |= {rule._replace(first=None) for rules in table._rules.values() for rule in rules}
            codes |= table._rules.keys()
    missing = {(rule.path, rule.fits) for rule in phase_rules._TRANSFORMERS if rule._replace(first=None) not in seen}
    expected = {
        ("transformers/.*", "cache upkeep"),  # models with a reordering of their own
        ("transformers/(tokenization_.*|models/.*/tokenization_.*)", "post-processing"),
    }
    if not hasattr(transformers.GenerationMixin, "_prefill"):
        expected.add(("transformers/generation/utils.py", "prefill"))
    assert missing <= expected
    # What other options, models or devices reach; `_prefill` of the host is inside of ours.
    elsewhere = {"cache/batch_tree.py", "cache/row_pool.py", "layers/attention_kernels.py", "cache/slim/latent.py"}
    elsewhere |= {"cache/wide_tree.py", "decoding/sparse_topk.py", "decoding/trie_rows.py"}
    elsewhere |= {f"decoding/{name}_beam_search.py" for name in ("fairseq", "diverse", "static", "device")}
    elsewhere |= {f"optimizer/transformers/{name}.py" for name in ("generate/diverse_beam_search", "model/streams")}
    elsewhere |= {f"optimizer/transformers/generate/{name}.py" for name in ("argmax_head", "asked_rows")}
    elsewhere |= {"optimizer/transformers/versions.py prefill"}
    elsewhere |= {f"optimizer/transformers/generate/speculation.py{name}" for name in ("", " run")}
    elsewhere |= {f"optimizer/transformers/model/decoder.py {name}" for name in ("select", "_widen_source")}
    elsewhere |= {f"optimizer/transformers/model/row_decoder.py {name}" for name in ("run", "reorder")}
    elsewhere |= {"optimizer/transformers/model/base.py selected", "optimizer/transformers/cache/gathered.py"}
    folders = "cache", "layers", "decoding", "optimizer/transformers"
    assert unreached(codes, *folders) <= elsewhere


def test_text_is_post_processing() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(50)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    )
    with asked_at_every_call(phase_rules.Table([])) as phases:
        texts = tokenizer.batch_decode([[1, 2, 3]])
    assert texts == ["w1 w2 w3"]
    assert phases["decode"] and set(phases["decode"]) == {"post-processing"}


def test_the_tasks_own_text_is_post_processing() -> None:
    texts = data.of({"model": "demo", "limit": 1}, {})
    with asked_at_every_call(phase_rules.Table([])) as phases:
        texts.text([20, 21])
    assert phases["decode"] and set(phases["decode"]) == set(phases["isinstance"]) == {"post-processing"}


class Slow(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return scores


@pytest.mark.parametrize("side", ["stock", "fast", "compat"])
def test_a_slow_processor_is_next_token_choice(side: str) -> None:
    model = bench_models.load("bart")
    with running(side):
        bench_models.generate(model)
        with Phases(model) as phases:
            bench_models.generate(model, logits_processor=LogitsProcessorList([Slow()]))
    assert phases.samples > 20
    assert phases.seconds["next-token choice"] >= 0.35 * phases.seconds["total"]
    assert phases.seconds["next-token choice"] > 0.35  # of 8 times 0.05


def _slow_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    if query.shape[2] == 1 or key.shape[2] > query.shape[2]:  # a decoder's later pass, whatever the side
        time.sleep(0.03)
    return sdpa_attention_forward(module, query, key, value, mask, **options)


@pytest.mark.parametrize("side", ["stock", "fast"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_slow_attention_is_attention(kind: str, side: str) -> None:
    AttentionInterface.register("slow", _slow_attention)
    model = bench_models.load(kind, attn_implementation="slow")
    with running(side):
        bench_models.generate(model)
        with Phases(model) as phases:
            bench_models.generate(model)
    assert phases.seconds["attention"] > 0.3  # of 7 passes of 2 layers
    assert phases.seconds["attention"] >= 0.35 * phases.seconds["total"]


@pytest.mark.parametrize("side", ["stock", "fast"])
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_a_large_encoder_is_the_encoder(kind: str, side: str) -> None:
    """T5's encoder and decoder are of one class."""
    deep = {"encoder_layers": 12} if kind == "bart" else {"num_layers": 12, "num_decoder_layers": 2}
    model = bench_models.load(kind, width=128, **deep)
    with running(side):
        bench_models.generate(model, length=400, new=2)
        with Phases(model) as phases:
            for _ in range(3):
                bench_models.generate(model, length=400, new=2)
    assert phases.seconds["encoder"] >= 0.5 * phases.seconds["total"]


def test_t5s_encoder_is_told_from_its_decoder_wherever_it_is_called() -> None:
    model = bench_models.load("t5")
    ids = torch.randint(3, 100, (2, 9))
    with torch.no_grad(), asked_at_every_call(_table(model)) as phases:
        model.get_encoder()(ids)
    assert set(phases["linear"]) == {"encoder"}
    with torch.no_grad(), asked_at_every_call(_table(model)) as phases:
        model.get_decoder()(ids)
    assert "encoder" not in phases["linear"]


@pytest.mark.parametrize("side", ["stock", "fast"])
def test_little_is_left_over(side: str) -> None:
    model = bench_models.load("bart", width=128, vocabulary=2000)
    call = {"batch": 4, "length": 128, "new": 32, "beams": 4}
    with running(side):
        bench_models.generate(model, **call)
        with Phases(model) as phases:
            for _ in range(2):
                bench_models.generate(model, **call)
    each = shares(phases.seconds)
    assert sum(each.values()) == pytest.approx(1)
    assert each.get("other", 0.0) < 0.1  # a fast machine may leave it without any sample


def test_nothing_stays_behind() -> None:
    model, before = bench_models.load("gpt2"), signal.getsignal(signal.SIGALRM)
    settings = fastgen.config.current()
    with pytest.raises(KeyError), Phases(model):
        assert fastgen.config.current().replay == "off"
        raise KeyError
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert fastgen.config.current() == settings


def test_another_thread_is_refused() -> None:
    def enter() -> None:
        with pytest.raises(RuntimeError, match="only a main thread"), Phases(None):
            pass
        refused.append(True)

    refused: list[bool] = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert refused


def test_an_unknown_host_is_an_error() -> None:
    with pytest.raises(ValueError, match="transformers or fairseq, not 'jax'"):
        Phases(None, host="jax")


def test_the_same_outputs_in_the_same_tier() -> None:
    model = bench_models.load("bart")
    with running("fast"):
        first = bench_models.generate(model)
        with Phases(model):
            second = bench_models.generate(model)
    calls = fastgen.status().calls[-2:]
    assert torch.equal(first, second)
    assert [(call.tier, call.cache) for call in calls] == [("fast", "kv")] * 2
