"""Prompts that begin as an earlier call's: keys and values are taken from there, and tokens stay stock's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import harness
import pytest
import torch
import zoo
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

import fastgen
from fastgen.cache import by_model
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.cache import prefixes
from fastgen.optimizer.transformers.generate import chunked_prefill
from fastgen.optimizer.transformers.model import facts, modules

pytestmark = pytest.mark.skipif(not versions.PREFILLS, reason="4.57 reads prompts otherwise")
NAMES = [name for name in zoo.DECODERS if name in zoo.ACCELERATED]
SEARCHES: dict[str, dict[str, Any]] = {
    "beams": dict(num_beams=4, num_return_sequences=2),
    "greedy": dict(),
    "samples": dict(do_sample=True, top_k=12, num_return_sequences=3),
    "beam_samples": dict(num_beams=3, do_sample=True),
}
DETAILS = dict(max_new_tokens=8, return_dict_in_generate=True, output_scores=True, output_logits=True)
COMMON, LENGTH = 24, 32
SAVED = 24 + 21 + 19  # of three prompts of 32, 29 and 27 tokens: the columns up to where the longest one goes on


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    with harness.keeping_prefixes():
        yield


def prompts(seed: int, lengths: tuple[int, ...] = (LENGTH, LENGTH - 3, LENGTH - 5), common: int = COMMON) -> Any:
    """Prompts of these lengths that begin alike, padded on the left."""
    beginning = torch.randint(zoo.FIRST_WORD, zoo.VOCAB - 1, (common,), generator=torch.Generator().manual_seed(99))
    generator, longest = torch.Generator().manual_seed(seed), max(lengths)
    ids = torch.full((len(lengths), longest), zoo.PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        end = torch.randint(zoo.FIRST_WORD, zoo.VOCAB - 1, (length - common,), generator=generator)
        ids[row, longest - length :] = torch.cat([beginning, end])
        mask[row, longest - length :] = 1
    return dict(input_ids=ids, attention_mask=mask)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens of a prompt calls have not read."""
    saved: list[int] = []
    note = by_model.note

    def noted(count: int) -> None:
        saved.append(count)
        note(count)

    monkeypatch.setattr(by_model, "note", noted)
    return saved


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", NAMES)
def test_stocks_tokens(name: str, search: str, read: list[int]) -> None:
    model, options = zoo.load(name), {**SEARCHES[search], **DETAILS}
    for tier in harness.TIERS if "num_beams" in options else ("auto",):
        by_model.release()
        read.clear()
        for seed in range(4):
            harness.compare(model, prompts(seed), tier, **options)
        # Rows are of three lengths: all columns that no row has to read are left out.
        assert read == [0, *[SAVED] * 3]
        harness.compare(model, prompts(3), tier, **options)  # all of it is known, and the last token is read
        assert read[-1] == LENGTH - 1 + LENGTH - 4 + LENGTH - 6


@pytest.mark.parametrize("search", SEARCHES)
def test_a_single_sentence_and_other_batches(search: str, read: list[int]) -> None:
    """What one call kept serves calls of other sizes, paddings and beams."""
    model, options = zoo.load("llama"), {**SEARCHES[search], **DETAILS}
    harness.compare(model, prompts(0, (30,)), **options)
    harness.compare(model, prompts(1, (36,)), **options)
    harness.compare(model, prompts(5, (27, 36, 25, 31)), **options)
    assert read == [0, COMMON, 15 + 24 + 13 + 19]


def test_a_row_without_a_beginning_is_read(read: list[int]) -> None:
    """Columns are left out only where no row has a token to read."""
    model = zoo.load("llama")
    harness.compare(model, prompts(0), num_beams=3, **DETAILS)
    mixed = prompts(1, (40, 28))
    mixed["input_ids"][1, 12:] = torch.randint(zoo.FIRST_WORD, zoo.VOCAB - 1, (28,))
    harness.compare(model, mixed, num_beams=3, **DETAILS)
    assert read == [0, 0]
    short = prompts(2, (40, 18), common=3)
    short["input_ids"][0, :COMMON] = prompts(0)["input_ids"][0, :COMMON]
    harness.compare(model, short, num_beams=3, **DETAILS)
    assert read[-1] == 24 + 2


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_wrong_keys_would_show(name: str, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what is kept is what the call reads."""
    model = zoo.load(name)
    fill = prefixes._joined
    monkeypatch.setattr(prefixes, "_joined", lambda *args: fill(*args) + 0.5)
    harness.compare(model, prompts(0, (COMMON + 2,)), num_beams=3, **DETAILS)
    with pytest.raises(AssertionError):
        harness.compare(model, prompts(1, (COMMON + 2,)), num_beams=3, **DETAILS)
    assert read[:2] == [0, COMMON]


def test_windows_shorter_than_the_prefix(read: list[int]) -> None:
    model = zoo.load("mistral")
    assert model.config.sliding_window < COMMON
    harness.compare(model, prompts(0), num_beams=3, **DETAILS)
    harness.compare(model, prompts(1), num_beams=3, **DETAILS)
    assert read == [0, SAVED]


@pytest.mark.parametrize("replay, batch", [("always", 3), ("always", 1), ("off", 1)])
def test_recorded_steps_and_drafts(replay: str, batch: int, read: list[int]) -> None:
    model = zoo.load("llama")
    with harness.configured(replay=replay):
        for options in (dict(num_beams=3), dict()):
            for seed in range(4):
                lengths = (LENGTH, LENGTH - 3, LENGTH - 5)[:batch]
                harness.compare(
                    model, prompts(seed, lengths), max_new_tokens=14, return_dict_in_generate=False, **options
                )
    assert read == [0, *[SAVED if batch == 3 else COMMON] * 3, *[sum(lengths) - batch] * 4]


def test_chunks(read: list[int]) -> None:
    model = zoo.load("llama")
    for seed in range(2):
        harness.compare(model, prompts(seed), num_beams=3, prefill_chunk_size=5, **DETAILS)
    assert read == ([0, SAVED] if versions.chunks_the_rest() else [])


def test_chunks_where_memory_is_short(read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_prefill, "_SHORTEST", 4)
    monkeypatch.setattr(chunked_prefill, "_free_memory", lambda device: 1)
    model = zoo.load("llama")
    for seed in range(2):
        harness.compare(model, prompts(seed), num_beams=3, **DETAILS)
    assert read == [0, SAVED]


def test_inference_mode_and_none(read: list[int]) -> None:
    """What was computed in inference mode serves a call without, and the other way round."""
    model = zoo.load("llama")
    for seed, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode)):
        with mode():
            harness.compare(model, prompts(seed), num_beams=3, **DETAILS)
    assert read == [0, SAVED, SAVED]


# ---------------------------------------------------------------------------------------------- what never hits
def _data(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.weight.data.add_(0.1)


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.2)


def _embedding(model: Any) -> None:
    model.model.embed_tokens.weight.data[zoo.FIRST_WORD :] += 0.1


def _numpy(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data.numpy()[0, 0] += 1.0


def _loaded(model: Any) -> None:
    model.load_state_dict({name: tensor * 1.1 for name, tensor in model.state_dict().items()})


def _assigned(model: Any) -> None:
    model.load_state_dict({name: tensor * 1.1 for name, tensor in model.state_dict().items()}, assign=True)


def _dtype(model: Any) -> None:
    model.to(torch.float64)


def _rotation(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def _scaling(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.1


def _epsilon(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.1


def _eager(model: Any) -> None:
    model.set_attn_implementation("eager")


EDITS: list[Callable[[Any], None]] = [
    _data,
    _in_place,
    _embedding,
    _numpy,
    _loaded,
    _assigned,
    _dtype,
    _rotation,
    _scaling,
    _epsilon,
    _eager,
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__[1:])
def test_an_edit_never_hits(edit: Callable[[Any], None], read: list[int]) -> None:
    model = zoo.fresh("llama")
    for seed in range(2):
        harness.compare(model, prompts(seed), num_beams=3, **DETAILS)
    edit(model)
    for seed in range(2, 4):
        harness.compare(model, prompts(seed), num_beams=3, **DETAILS)
    assert read == [0, SAVED, 0, SAVED]


def test_an_edit_that_goes_unseen_would_show(read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the one above."""
    monkeypatch.setattr(prefixes, "state_of", lambda *args: None)
    model = zoo.fresh("llama")
    harness.compare(model, prompts(0), num_beams=3, **DETAILS)
    _loaded(model)
    with pytest.raises(AssertionError):
        harness.compare(model, prompts(1), num_beams=3, **DETAILS)


def test_settings_never_hit(read: list[int]) -> None:
    model = zoo.load("llama")
    harness.compare(model, prompts(0), num_beams=3, **DETAILS)
    with harness.configured(weights="int8"):
        model.generate(**prompts(1), num_beams=3, max_new_tokens=4)
    assert read == [0, 0]


def test_other_positions_never_hit(read: list[int]) -> None:
    model = zoo.load("llama")
    harness.compare(model, prompts(0, (LENGTH,)), num_beams=3, **DETAILS)
    moved = dict(prompts(1, (LENGTH,)), position_ids=torch.arange(5, 5 + LENGTH)[None])
    harness.compare(model, moved, num_beams=3, **DETAILS)
    assert read == [0]
    assert "positions" in by_model.unused()["LlamaForCausalLM"]
    told = dict(prompts(2, (LENGTH,)), position_ids=torch.arange(LENGTH)[None])
    harness.compare(model, told, num_beams=3, **DETAILS)
    assert read == [0, COMMON]


@pytest.mark.parametrize("where", ["right", "middle"])
def test_other_padding_never_hits(where: str, read: list[int]) -> None:
    model, inputs = zoo.load("llama"), prompts(0)
    harness.compare(model, inputs, num_beams=3, **DETAILS)
    other = prompts(1)
    other["attention_mask"][0, -2 if where == "right" else 9] = 0
    harness.compare(model, other, num_beams=3, **DETAILS)
    assert read == [0]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_by_length_never_hit(kind: str, read: list[int]) -> None:
    model = zoo.fresh("llama")
    known = dict(model.config.rope_parameters, rope_type=kind, factor=2.0)
    model.config.rope_parameters = known
    model.generate(**prompts(0), num_beams=3, max_new_tokens=4)
    assert read == [] and "depend on the length" in by_model.unused()["LlamaForCausalLM"]


def _both_ways() -> Any:
    return zoo._model(
        "GemmaForCausalLM", "GemmaConfig", zoo.MULTI_HEAD, head_dim=16, use_bidirectional_attention=True
    )()


def _told_both_ways() -> Any:
    model = zoo.fresh("llama")
    model.config.is_causal = False
    return model


@pytest.mark.parametrize("make", [_both_ways, _told_both_ways])
def test_prompts_that_attend_to_later_tokens_never_hit(make: Callable[[], Any], read: list[int]) -> None:
    """A beginning with another end is another beginning there; the negative control shows that it matters."""
    model = make().eval()
    for seed in range(2):
        harness.compare(model, prompts(seed, (LENGTH,)), num_beams=3, **DETAILS)
    assert read == [] and "later ones" in by_model.unused()[type(model).__name__]
    assert chunked_prefill.FAMILIES[model.config.model_type].chunks_prompts
    with harness.configured(strict=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "is_causal", lambda model: True)
        facts.release()
        with pytest.raises(AssertionError):
            for seed in range(2):
                harness.compare(model, prompts(seed, (LENGTH,)), num_beams=3, **DETAILS)
        facts.release()
    assert read[:2] == [0, COMMON]


def test_other_products_never_hit(read: list[int]) -> None:
    """Whichever way torch is told how float32 products are rounded; asking it the old way is an error after the new."""
    model, known = zoo.load("llama"), torch.get_float32_matmul_precision()
    mkldnn = getattr(torch.backends.mkldnn, "matmul", None)
    model.generate(**prompts(0), num_beams=3, max_new_tokens=4)
    torch.set_float32_matmul_precision("medium" if known != "medium" else "highest")
    try:
        model.generate(**prompts(1), num_beams=3, max_new_tokens=4)
    finally:
        torch.set_float32_matmul_precision(known)
    assert read == [0, 0]
    if mkldnn is None:
        pytest.skip("this version of torch has no settings by library")
    before = mkldnn.fp32_precision
    mkldnn.fp32_precision = "bf16"
    try:
        model.generate(**prompts(2), num_beams=3, max_new_tokens=4)
    finally:
        mkldnn.fp32_precision = before
    assert read[2] in (0, SAVED), "as the same precision was set the old way"
    model.generate(**prompts(3), num_beams=3, max_new_tokens=4)
    assert read[3] == SAVED


def test_hooks_and_other_inputs_never_hit(read: list[int]) -> None:
    model, inputs = zoo.fresh("llama"), prompts(0)
    embedded = dict(inputs, inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]))
    harness.compare(model, embedded, num_beams=3, **DETAILS)
    with harness.configured(foreign_code="trial"):
        handle = model.model.layers[0].register_forward_hook(lambda *args: None)
        model.generate(**inputs, num_beams=3, max_new_tokens=8)
        handle.remove()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.generate(**inputs, num_beams=3, max_new_tokens=4)
    assert read == [] and not by_model.prefixes.nbytes
    harness.compare(model, dict(inputs), num_beams=3, **DETAILS)
    assert read == [0]


class _Editor(LogitsProcessor):
    def __init__(self, model: Any) -> None:
        self._model, self._calls = model, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._calls += 1
        if self._calls == 3:
            _loaded(self._model)
        return scores


def test_an_edit_within_a_call(read: list[int]) -> None:
    """The prompt was read with the weights before: the next call, with the new ones, takes nothing of it."""
    found = []
    original = zoo.fresh("llama")
    for run in (harness.run_stock, lambda *args, **options: harness.run_fastgen(*args, **options)[0]):
        model = copy.deepcopy(original)
        for seed in range(2):
            processors = LogitsProcessorList([] if seed else [_Editor(model)])
            options = dict(num_beams=3, logits_processor=lambda given=processors: given, max_new_tokens=8)
            found.append(run(model, prompts(seed), **options))
    assert found[0].equal(found[2]) and found[1].equal(found[3])
    assert read == [0, 0]


# ---------------------------------------------------------------------------------------------- memory
def test_off_by_default(read: list[int]) -> None:
    with harness.configured(prefix_cache=0):
        for seed in range(2):
            harness.compare(zoo.load("llama"), prompts(seed), num_beams=3, **DETAILS)
    assert read == [] and not by_model.prefixes.nbytes and fastgen.status().prefixes == {}


def test_bytes_are_bounded(read: list[int]) -> None:
    model = zoo.load("llama")
    with harness.configured(prefix_cache=60_000):
        for seed in range(12):
            harness.compare(model, prompts(seed, common=0), num_beams=2, max_new_tokens=2)
            assert 0 < by_model.prefixes.nbytes <= 60_000


def test_one_copy_for_all_beams() -> None:
    model = zoo.load("llama")
    for beams in (2, 8):
        by_model.release()
        harness.compare(model, prompts(0, (LENGTH,)), num_beams=beams, **DETAILS)
        config = model.config
        numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * LENGTH
        assert 4 * numbers < by_model.prefixes.nbytes < 4 * numbers + 4000


def test_it_dies_with_the_model() -> None:
    model = zoo.fresh("llama")
    model.generate(**prompts(0), num_beams=3, max_new_tokens=4)
    assert by_model.prefixes.nbytes
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None and not by_model.prefixes.nbytes


def test_status() -> None:
    model = zoo.load("llama")
    for seed in range(3):
        model.generate(**prompts(seed), num_beams=3, max_new_tokens=4)
    status = fastgen.status()
    assert status.prefixes == dict(calls=3, hits=2, tokens=2 * SAVED, bytes=by_model.prefixes.nbytes)
    assert "2 of 3 calls began with one, 128 tokens were not read again" in str(status)


def test_a_search_that_is_called_directly(read: list[int]) -> None:
    """Without a mask the host does not know that its cache has a part of the prompt."""
    from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

    model, ids = zoo.fresh("llama"), prompts(0, (LENGTH,))["input_ids"]
    config = model._prepare_generation_config(None, max_length=LENGTH + 6, num_beams=3)
    config = config[0] if isinstance(config, tuple) else config
    model._prepare_special_tokens(config, False, device=ids.device)

    def search() -> Tensor:
        criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=LENGTH + 6)])
        rows, cache = ids.repeat_interleave(3, 0), DynamicCache(config=model.config)
        kwargs = {versions.CACHE: cache, "use_cache": True}
        with torch.no_grad():
            return model._beam_search(rows, LogitsProcessorList(), criteria, config, **kwargs)

    model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=3, max_new_tokens=4)
    with fastgen.disabled():
        stock = search()
    assert torch.equal(search(), stock)
    assert read == [0]
