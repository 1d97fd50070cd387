"""ProphetNet in fairseq: against its definition, a brute-force search, and transformers with the same weights."""

from __future__ import annotations

import copy
import functools
import math
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import fairseq_models as models
import judge
import prophetnet_kit as kit
import pytest
import torch
from fairseq import checkpoint_utils, tasks
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.sequence_generator import SequenceGenerator
from fairseq_weights import weights_of
from omegaconf import OmegaConf
from torch import Tensor

import fastgen
from fastgen.cache import tree
from fastgen.models.prophetnet.attention import NgramMultiheadAttention
from fastgen.models.prophetnet.dictionary import BertDictionary
from fastgen.models.prophetnet.relative import bucket_table
from fastgen.optimizer.fairseq.request import Request, unsupported_reason
from fastgen.optimizer.transformers.versions import CACHE

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> BertDictionary:
    return kit.vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def model(words: BertDictionary) -> Any:
    return kit.build(words)


def logits_of(model: Any, sample: dict[str, Any], read: Tensor) -> list[Tensor]:
    """Those of each predicting stream, `[B, T, V]`."""
    with torch.no_grad():
        logits, extra = model(**{**sample["net_input"], "prev_output_tokens": read})
        return [logits, *map(model.decoder.output_layer, extra["ngram_features"])]


# ----------------------------------------------------------------------------------------- the definition
def test_buckets() -> None:
    table = bucket_table(32, 128).tolist()
    assert table[:17] == list(range(17)) and table[128] == 31 and len(table) == 129
    for distance in range(16, 128):
        assert table[distance] == 16 + int(math.log(distance / 16) / math.log(8) * 16)
    with pytest.raises(ValueError, match="logarithm"):
        bucket_table(32, 16)


def naive_attention(module: Any, x: Tensor) -> Tensor:
    """Of `x`, `[S, T, B, C]`: one query after the other, over the keys that it may see."""
    streams, length, batch, _ = x.shape
    output = torch.zeros_like(x)
    table = module.bucket_of.tolist()
    q, k, v = (projection(x).unflatten(3, (module.num_heads, -1)) for projection in _projections(module))
    relative = module.relative_linear(x).unflatten(3, (module.buckets, module.num_heads))
    for row in range(batch):
        for stream in range(streams):
            for position in range(length):
                last = position - max(stream - 1, 0)  # the latest token that the stream has seen
                seen = [(0, each) for each in range(max(last, 0) + 1)]
                distances = [position - each + (stream > 0) for _, each in seen]
                if stream:
                    seen.append((stream, position))
                    distances.append(0)
                heads = []
                for head in range(module.num_heads):
                    query = q[stream, position, row, head] * module.scaling
                    scores = torch.stack([query @ k[of, at, row, head] for of, at in seen])
                    bias = [relative[stream, position, row, table[min(each, 20)], head] for each in distances]
                    weights = (scores + torch.stack(bias)).softmax(0)
                    heads.append(sum(w * v[of, at, row, head] for w, (of, at) in zip(weights, seen, strict=True)))
                output[stream, position, row] = torch.cat(heads)
    return module.out_proj(output)


def _projections(module: Any) -> tuple[Any, Any, Any]:
    return module.q_proj, module.k_proj, module.v_proj


@torch.no_grad()
def test_attention_is_as_defined() -> None:
    torch.manual_seed(0)
    module = NgramMultiheadAttention(12, 3, ngram=3, buckets=8, max_distance=20).eval()
    for parameter in module.parameters():
        parameter.normal_(0, 0.5)
    x = torch.randn(4, 25, 2, 12)
    found, weights = module(x.flatten(0, 1))
    assert weights is None
    torch.testing.assert_close(found.unflatten(0, (4, 25)), naive_attention(module, x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_steps_are_the_whole_target(model: Any) -> None:
    """With beams that change places in between; nothing of the further streams is needed."""
    sample = kit.sources((7, 3))
    source = model.encoder(sample["net_input"]["src_tokens"], sample["net_input"]["src_lengths"])
    source = model.encoder.reorder_encoder_out(source, torch.tensor([0, 0, 1, 1]))
    read, state = kit.targets(4, length=30), {}
    for length in range(1, 31):
        logits, extra = model.decoder(read[:, :length], source, incremental_state=state)
        whole, its = model.decoder(read[:, :length], source)
        torch.testing.assert_close(logits[:, 0], whole[:, -1], atol=TOLERANCE, rtol=1e-5)
        torch.testing.assert_close(extra["attn"][0][:, 0], its["attn"][0][:, -1], atol=TOLERANCE, rtol=1e-5)
        order = torch.tensor([[0, 0, 3, 2], [1, 0, 2, 2], [0, 1, 2, 3]][length % 3])  # of two beams a sentence
        read = read[order]
        model.decoder.reorder_incremental_state_scripting(state, order)
    assert logits.shape == (4, 1, kit.WORDS) and extra["ngram_features"] == []


@torch.no_grad()
def test_streams_do_not_see_one_another(words: BertDictionary) -> None:
    """A model that predicts one token has the same logits, and the nth stream has not seen the latest n - 1."""
    sample, read = kit.sources(), kit.targets(4)
    model = kit.build(words)
    alone = kit.build(words, ngram=1)
    weights = {**model.state_dict()}
    weights["decoder.ngram_input_embed.weight"] = weights["decoder.ngram_input_embed.weight"][-1:]
    alone.load_state_dict(weights)
    each = logits_of(model, sample, read)
    (only,) = logits_of(alone, sample, read)
    torch.testing.assert_close(each[0], only, atol=TOLERANCE, rtol=1e-5)
    other = read.clone()
    other[:, 8] = 30 + (read[:, 8] - 25) % 16
    for number, (a, b) in enumerate(zip(each, logits_of(model, sample, other), strict=True)):
        is_equal = (a - b).abs().amax((0, 2)) < 1e-6
        assert is_equal.tolist() == [position < 8 + number for position in range(11)]


def test_what_cannot_be_is_refused(words: BertDictionary, model: Any) -> None:
    with pytest.raises(NotImplementedError, match="must not see"):
        model.decoder(kit.targets(1), full_context_alignment=True)
    with pytest.raises(ValueError, match="embed-dim"):
        kit.build(words, decoder_embed_dim=16)
    other = copy.deepcopy(words)
    other.add_symbol("new")
    task = Namespace(source_dictionary=words, target_dictionary=other)
    with pytest.raises(ValueError, match="one dictionary"):
        ARCH_MODEL_REGISTRY[kit.ARCHITECTURE].build_model(kit.arguments(), task)


# ----------------------------------------------------------------------------------------- transformers
@pytest.fixture(scope="module")
def twin(model: Any) -> Any:
    """transformers' ProphetNet, with the weights that the published checkpoint of ours has."""
    transformers = pytest.importorskip("transformers", reason="the reference is transformers' ProphetNet")
    config = transformers.ProphetNetConfig(
        vocab_size=kit.WORDS, hidden_size=32, encoder_ffn_dim=48, decoder_ffn_dim=40, num_encoder_layers=3,
        num_decoder_layers=3, num_encoder_attention_heads=4, num_decoder_attention_heads=2, ngram=3, num_buckets=8,
        relative_max_distance=20, max_position_embeddings=41, activation_function="gelu",
        pad_token_id=0, bos_token_id=kit.SEP, eos_token_id=kit.SEP, decoder_start_token_id=kit.SEP,
    )  # fmt: skip
    made = transformers.ProphetNetForConditionalGeneration(config).eval()
    weights = kit.published(model.state_dict())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(_published_as(name, weights)[: len(parameter)])
    for layer in made.prophetnet.decoder.layers:
        layer.self_attn.get_predict_relative_pos_embeddings = functools.partial(_in_order, layer.self_attn)
    return made


def _in_order(module: Any, states: Tensor, weights: Tensor, positions: Tensor, buckets: Tensor | None) -> Tensor:
    """Biases of the predicting streams' scores, `[B, n, H, T, K]`, from their states, `[B, T, n, C]`.

    Of whole targets, transformers' own mixes up streams, heads and positions; its steps agree with this.
    """
    if buckets is None:
        back = positions - torch.arange(weights.shape[-1])
        buckets = bucket_table(module.num_buckets, module.relative_max_distance)[back.clamp(0, 20)][None]
    values = module.relative_pos_embeddings(states).unflatten(3, (module.num_buckets, -1)).permute(0, 2, 4, 1, 3)
    return values.gather(4, buckets[:, None, None].long().expand(*weights.shape))


def _published_as(name: str, weights: dict[str, Tensor]) -> Tensor:
    """A weight of transformers' in the published checkpoint."""
    if name == "prophetnet.word_embeddings.weight":
        return weights["encoder.embed_tokens.weight"]
    side = name.split(".")[1]
    name = name.removeprefix("prophetnet.")
    if side == "decoder":
        name = name.replace(".self_attn.", ".ngram_self_attn.")
    for theirs, its in {
        "cross_attn": "encoder_attn", "feed_forward_layer_norm": "final_layer_norm", "feed_forward.intermediate": "fc1",
        "feed_forward.output": "fc2", "key_proj": "k_proj", "query_proj": "q_proj", "value_proj": "v_proj",
        "word_embeddings": "embed_tokens", "embeddings_layer_norm": "emb_layer_norm",
        "relative_pos_embeddings": "relative_linear", "ngram_embeddings": "ngram_input_embed",
        "position_embeddings": "embed_positions",
    }.items():  # fmt: skip
        name = name.replace(theirs, its)
    for place, projection in enumerate(("q_proj.", "k_proj.", "v_proj.")):
        if "ngram_self_attn." + projection in name:
            return weights[name.replace(projection, "in_proj_")].chunk(3)[place]
    return weights[name]


def _asked(sample: dict[str, Any]) -> dict[str, Tensor]:
    tokens = sample["net_input"]["src_tokens"]
    return {"input_ids": tokens, "attention_mask": tokens.ne(0).long()}


@torch.no_grad()
def test_the_whole_target_is_transformers(model: Any, twin: Any) -> None:
    """Of all streams; transformers counts positions of a source from its left edge, so it is padded on the right."""
    sample, read = kit.sources(left=False), kit.targets(4, length=30)
    theirs = twin(**_asked(sample), decoder_input_ids=read)
    first, *further = logits_of(model, sample, read)
    torch.testing.assert_close(first, theirs.logits, atol=TOLERANCE, rtol=1e-5)
    torch.testing.assert_close(torch.cat(further, 1), theirs.logits_ngram.flatten(1, 2), atol=TOLERANCE, rtol=1e-5)


@torch.no_grad()
def test_steps_are_transformers(model: Any, twin: Any) -> None:
    sample, read, state, cache = kit.sources(left=False), kit.targets(4, length=30), {}, None
    source = model.encoder(sample["net_input"]["src_tokens"], sample["net_input"]["src_lengths"])
    encoded = twin.prophetnet.encoder(**_asked(sample))
    for length in range(1, 31):
        theirs = twin(
            attention_mask=_asked(sample)["attention_mask"], encoder_outputs=encoded, **{CACHE: cache},
            decoder_input_ids=read[:, length - 1 : length], use_cache=True,
        )  # fmt: skip
        cache = getattr(theirs, CACHE)
        logits, _ = model.decoder(read[:, :length], source, incremental_state=state)
        torch.testing.assert_close(logits, theirs.logits, atol=TOLERANCE, rtol=1e-5)


def test_the_search_finds_what_transformers_finds(words: BertDictionary, model: Any, twin: Any) -> None:
    """Greedy, where both search alike."""
    sample = kit.sources(left=False)
    with fastgen.disabled():
        theirs = twin.generate(**_asked(sample), max_new_tokens=20, num_beams=1, do_sample=False)
        found = SequenceGenerator([model], words, beam_size=1, max_len_b=20).generate([model], sample)
    for row, hypotheses in zip(theirs[:, 1:].tolist(), found, strict=True):
        row = row[: row.index(kit.SEP)] if kit.SEP in row else row
        tokens = hypotheses[0]["tokens"].tolist()[:-1]
        assert tokens == row[: len(tokens)] and len(row) - len(tokens) in (0, 1)


# ----------------------------------------------------------------------------------------- the search
def naive_search(model: Any, sample: dict[str, Any], beams: int, longest: int) -> list[list[tuple[list[int], float]]]:
    """fairseq's beam search, every hypothesis read from its beginning at every step."""
    found = []
    for row in range(sample["nsentences"]):
        tokens = sample["net_input"]["src_tokens"][row : row + 1]
        one = {"net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(0).sum(1)}}
        live, ended = [([kit.SEP], 0.0)], []
        while len(ended) < beams:
            candidates = []
            for read, score in live:
                scores = logits_of(model, one, torch.tensor([read]))[0][0, -1].log_softmax(0)
                scores[0] = -math.inf
                scores[kit.SEP] += -math.inf if len(read) == 1 else 0.0  # min_len
                if len(read) > longest:
                    scores[torch.arange(kit.WORDS) != kit.SEP] = -math.inf
                candidates += [([*read, word], score + float(each)) for word, each in enumerate(scores)]
            best = sorted(candidates, key=lambda each: -each[1])[: 2 * beams]
            for read, score in best[:beams]:
                if read[-1] == kit.SEP and score > -math.inf and len(ended) < beams:
                    ended.append((read[1:], score / (len(read) - 1)))
            live = [each for each in best if each[0][-1] != kit.SEP][:beams]
        found.append(sorted(ended, key=lambda each: -each[1]))
    return found


def test_the_hosts_search_runs_it(words: BertDictionary, model: Any) -> None:
    sample = kit.sources()
    with fastgen.disabled():
        found = SequenceGenerator([model], words, beam_size=3, max_len_b=9).generate([model], sample)
    expected = naive_search(model, sample, beams=3, longest=9)
    for hypotheses, reference in zip(found, expected, strict=True):
        assert [each["tokens"].tolist() for each in hypotheses] == [tokens for tokens, _ in reference]
        for each, (_, score) in zip(hypotheses, reference, strict=True):
            assert abs(float(each["score"]) - score) < 1e-4
    assert len({len(each["tokens"]) for hypotheses in found for each in hypotheses}) > 2


# ----------------------------------------------------------------------------------------- over the tree
# More of it, with fairseq's own dictionary, is in the tests of all architectures.
def _generated(model: Any, words: Any, sample: Any = None, **options: Any) -> Any:
    sample = kit.sources() if sample is None else sample
    prefix = options.pop("prefix", None)
    generator = SequenceGenerator([model], words, **{"beam_size": 4, "max_len_b": 18, **options})
    return generator.generate([model], sample, prefix_tokens=prefix)


@pytest.mark.parametrize("beams", [1, 2, 5, 8])
def test_the_tree_finds_what_the_host_finds(words: BertDictionary, model: Any, beams: int) -> None:
    for sample in (kit.sources(), kit.sources(left=False), kit.sources((6,)), kit.sources((1, 20), seed=3)):
        for options in ({}, {"len_penalty": 1.5}, {"len_penalty": 0.3, "min_len": 6}, {"temperature": 1.4}):
            run = functools.partial(_generated, model, words, sample, beam_size=beams, **options)
            judge.compare(run, is_fast=True)


def test_far_distances_and_slots_that_were_pruned(
    words: BertDictionary, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far back as the last bucket, whose keys lie anywhere among the slots by then, up to the last position."""
    monkeypatch.setattr(tree, "FIRST_STEPS", 3)
    pruned: list[int] = []
    prune = tree.BeamTree._prune

    def noting(self: Any, slots: Tensor) -> None:
        pruned.append(slots.shape[1])
        prune(self, slots)

    monkeypatch.setattr(tree.BeamTree, "_prune", noting)
    expected = judge.compare(lambda: _generated(model, words, max_len_b=100, min_len=45), is_fast=True)
    assert pruned and max(len(each["tokens"]) for found in expected for each in found) > 45


def test_sentences_leave(words: BertDictionary, model: Any) -> None:
    prefix = torch.zeros(4, 9, dtype=torch.long)
    for row, end in enumerate((1, 8, 4)):
        prefix[row, :end] = torch.arange(30, 30 + end)
        prefix[row, end] = kit.SEP
    expected = judge.compare(lambda: _generated(model, words, prefix=prefix, min_len=0), is_fast=True)
    assert len({len(found[0]["tokens"]) for found in expected}) == 4


def test_ensembles(words: BertDictionary, model: Any) -> None:
    """Of other buckets and streams, whose distances are the same."""
    pair = [model, kit.build(words, seed=1, ngram=1, num_buckets=6, relative_max_distance=9)]
    judge.compare(lambda: SequenceGenerator(pair, words, beam_size=3, max_len_b=14).generate(pair, kit.sources()))


def test_one_copy_of_each_source(words: BertDictionary, model: Any) -> None:
    """Keys and values of four sentences, however many beams, and of what the main stream has written."""
    sizes = []
    for beams in (2, 4):
        _, (call,) = judge.ours(lambda beams=beams: _generated(model, words, beam_size=beams, min_len=9, max_len_b=9))
        assert (call.tier, call.steps) == ("compat", 10)
        sizes.append(call.cache_bytes)
    layers, positions, numbers = 3, 10, 2 * 32 * 4
    of_sources = layers * 4 * positions * numbers + 4 * positions * 4  # and which are padding
    of_tree = layers * 4 * numbers * 10  # for each beam: a slot a step
    assert sizes == [of_sources + beams * of_tree for beams in (2, 4)]


def _own_features(model: Any) -> str:
    class Mine(type(model.decoder)):  # type: ignore[misc]
        def extract_features(self, *args: Any, **kwargs: Any) -> Any:
            return super().extract_features(*args, **kwargs)

    model.decoder.__class__ = Mine
    return "Mine has its own extract_features"


def _own_attention(model: Any) -> str:
    class Mine(NgramMultiheadAttention):
        pass

    model.decoder.layers[1].self_attn.__class__ = Mine
    return "attention with Mine"


def _own_layer(model: Any) -> str:
    class Mine(type(model.decoder.layers[1])):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model.decoder.layers[1].__class__ = Mine
    return "Mine has its own forward"


@pytest.mark.parametrize("change", [_own_features, _own_attention, _own_layer])
def test_what_is_changed_stays_with_the_host(words: BertDictionary, model: Any, change: Any) -> None:
    model = copy.deepcopy(model)
    reason = change(model)
    judge.compare_fallback(lambda: _generated(model, words), reason)


@torch.no_grad()
def test_such_attention_elsewhere_stays_with_the_host() -> None:
    """Another decoder feeds it one stream."""
    other = copy.deepcopy(models.load("post-norm"))
    other.decoder.layers[0].self_attn = NgramMultiheadAttention(32, 4, ngram=1, buckets=8, max_distance=20).eval()
    generator = SequenceGenerator([other], models.dictionary(), beam_size=2)
    reason = unsupported_reason(Request(generator, models.batch(), None, None, None))
    assert reason is not None and "attention with NgramMultiheadAttention" in reason


# ----------------------------------------------------------------------------------------- checkpoints
def _saved(path: Path, weights: dict[str, Tensor], **settings: Any) -> str:
    history = {"criterion_name": "x", "optimizer_name": "x", "lr_scheduler_state": {}, "num_updates": 0, "best_loss": 0}
    torch.save({"model": weights, "optimizer_history": [history], "extra_state": {}, **settings}, path)
    return str(path)


def _data(folder: Path) -> str:
    for side in ("src", "tgt"):
        kit.write_vocabulary(folder / f"dict.{side}.txt")
    return str(folder)


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "apart"])
def test_published_checkpoints_load(tmp_path: Path, words: BertDictionary, is_shared: bool) -> None:
    options = dict(share_all_embeddings=is_shared, share_decoder_input_output_embed=is_shared)
    model = kit.build(words, **options)
    weights = kit.published(model.state_dict())
    assert {name.split(".")[-1] for name in weights if "layers.0.ngram_self_attn" in name} == {
        "in_proj_weight", "in_proj_bias", "weight", "bias"
    }  # fmt: skip
    assert ("decoder.embed_out" in weights) != is_shared and "decoder.emb_layer_norm.weight" in weights
    path = _saved(tmp_path / "checkpoint.pt", weights, args=kit.arguments(data=_data(tmp_path), **options))
    (loaded,), _, task = checkpoint_utils.load_model_ensemble_and_task([path])
    assert isinstance(task, tasks.TASK_REGISTRY["translation_prophetnet"])
    assert task.target_dictionary.eos() == kit.SEP and task.target_dictionary == words
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    sample, read = kit.sources(), kit.targets(4)
    for a, b in zip(logits_of(model, sample, read), logits_of(loaded.eval(), sample, read), strict=True):
        assert torch.equal(a, b)


def test_what_fairseq_saves_now_loads(tmp_path: Path, model: Any) -> None:
    cfg = convert_namespace_to_omegaconf(kit.arguments(data=_data(tmp_path)))
    settings = {"args": None, "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)}
    path = _saved(tmp_path / "checkpoint.pt", model.state_dict(), **settings)
    (loaded,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path])
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("is_bare", [True, False])
def test_training_begins_with_a_pretrained_one(
    tmp_path: Path, words: BertDictionary, model: Any, is_bare: bool
) -> None:
    weights = kit.published(model.state_dict())
    path = tmp_path / "pretrained.pt"
    torch.save(weights if is_bare else {"model": weights, "args": kit.arguments()}, path)
    args = kit.arguments(load_from_pretrained_model=str(path))
    task = Namespace(source_dictionary=words, target_dictionary=words)
    begun = ARCH_MODEL_REGISTRY[args.arch].build_model(args, task)
    assert args.load_from_pretrained_model is None
    assert all(map(torch.equal, begun.state_dict().values(), model.state_dict().values()))


def test_pretrained_checkpoints_hold_meters_too(tmp_path: Path, words: BertDictionary, model: Any) -> None:
    """As fairseq of 2019 saved them."""
    import fairseq.logging.meters as meters

    path = tmp_path / "pretrained.pt"
    meter = meters.AverageMeter()
    meter.update(3.0)
    extra = {"train_meters": OrderedDict(train_loss=meter), "val_loss": 2.5}
    torch.save({"model": kit.published(model.state_dict()), "args": kit.arguments(), "extra_state": extra}, path)
    begun = _begun(words, path)
    assert all(map(torch.equal, begun.state_dict().values(), model.state_dict().values()))


def _begun(words: BertDictionary, path: Path, **options: Any) -> Any:
    args = kit.arguments(load_from_pretrained_model=str(path), **options)
    task = Namespace(source_dictionary=words, target_dictionary=words)
    return ARCH_MODEL_REGISTRY[args.arch].build_model(args, task)


def test_a_pretrained_ones_positions_are_cut(tmp_path: Path, words: BertDictionary, model: Any) -> None:
    path = tmp_path / "pretrained.pt"
    torch.save(kit.published(model.state_dict()), path)
    begun = _begun(words, path, max_source_positions=30, max_target_positions=20)
    for ours, theirs in ((begun.encoder, model.encoder), (begun.decoder, model.decoder)):
        weight = ours.embed_positions.weight
        assert len(weight) < len(theirs.embed_positions.weight)
        assert torch.equal(weight, theirs.embed_positions.weight[: len(weight)])
    for side in ("source", "target"):
        with pytest.raises(ValueError, match=f"--max-{side}-positions asks for"):
            _begun(words, path, **{f"max_{side}_positions": 64})


def test_no_stream_at_all_is_refused(words: BertDictionary) -> None:
    with pytest.raises(ValueError, match="--ngram 0"):
        kit.build(words, ngram=0)


def test_the_separators_embedding_is_doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr("fastgen.models.prophetnet.checkpoints._SEP", kit.SEP)
    from fastgen.models.prophetnet.checkpoints import load_pretrained

    torch.save(model.state_dict(), tmp_path / "pretrained.pt")
    other = copy.deepcopy(model)
    load_pretrained(other, str(tmp_path / "pretrained.pt"), True)
    weight, before = other.encoder.embed_tokens.weight, model.encoder.embed_tokens.weight
    assert torch.equal(weight[2], before[kit.SEP]) and not torch.equal(weight[2], before[2])
    assert torch.equal(weight[3:], before[3:])


def test_architectures() -> None:
    sizes = {
        name: (args.encoder_embed_dim, args.decoder_ffn_embed_dim, args.decoder_attention_heads, args.encoder_layers)
        for name in ("base", "middle", "large")
        for args in [_default_arguments(f"ngram_transformer_prophet_{name}")]
    }
    assert sizes == {"base": (768, 3072, 12, 6), "middle": (1024, 4096, 16, 6), "large": (1024, 4096, 16, 12)}
    args = _default_arguments("ngram_transformer_prophet_large")
    assert (args.ngram, args.num_buckets, args.relative_max_distance, args.activation_fn) == (2, 32, 128, "gelu")


def _default_arguments(architecture: str) -> Namespace:
    from fairseq.models import ARCH_CONFIG_REGISTRY

    args = Namespace()
    ARCH_CONFIG_REGISTRY[architecture](args)
    return args


# ----------------------------------------------------------------------------------------- the dictionary
def test_special_tokens_are_words(tmp_path: Path, words: BertDictionary) -> None:
    assert {name: getattr(words, name)() for name in kit.SPECIAL} == kit.SPECIAL and len(words) == kit.WORDS
    assert words.string(torch.tensor([26, kit.SEP, 3])) == "##v0 w0"
    assert words.encode_line("w0 ##v0 nowhere", add_if_not_exist=False).tolist() == [3, 26, 22, kit.SEP]
    words.save(str(tmp_path / "again.txt"))
    again = BertDictionary.load(str(tmp_path / "again.txt"))
    assert again == words and again.count == words.count and again.eos() == kit.SEP


def test_special_tokens_that_are_missing_come_last(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a 1\nb 1\n[SEP] 0\na 2\n")
    made = BertDictionary.load(str(tmp_path / "vocab.txt"))
    assert made.symbols == ["a", "b", "[SEP]", "[CLS]", "[PAD]", "[UNK]"] and made.count[0] == 3
    (tmp_path / "vocab.txt").write_text("a 1\nb\n")
    with pytest.raises(ValueError, match=r"line 2: 'b' is not"):
        BertDictionary.load(str(tmp_path / "vocab.txt"))


# ----------------------------------------------------------------------------------------- the loss
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("disabled", "streams"), [(False, 3), (True, 1)])
def test_loss(words: BertDictionary, model: Any, smoothing: float, disabled: bool, streams: int) -> None:
    kind = CRITERION_REGISTRY["ngram_language_loss"]
    criterion = kind(Namespace(target_dictionary=words), smoothing, disabled)
    read = kit.targets(4)
    target = torch.cat([read[:, 1:], torch.full((4, 1), kit.SEP)], dim=1)
    target[1, 6:] = 0
    sample = {**kit.sources(), "target": target, "ntokens": 39}
    sample["net_input"]["prev_output_tokens"] = read
    wanted, expected = target.ne(0), 0.0
    for logits in logits_of(model, sample, read)[:streams]:
        one_hot = torch.nn.functional.one_hot(target, kit.WORDS)
        shares = one_hot * (1 - smoothing) + smoothing / kit.WORDS
        expected -= float((logits.log_softmax(-1) * shares)[wanted].sum())
    loss, count, logged = criterion(model, sample)
    assert count == 39 * streams == logged["sample_size"] and abs(float(loss) - expected) < 1e-3
    # In a span, a token so early that a stream has nothing before it is not predicted by it.
    _, count, _ = criterion(model, {**sample, "target_idx": torch.arange(11).expand(4, -1)})
    assert count == sum(int(wanted[:, number:].sum()) for number in range(streams))
    loss.backward()
    gradients = [parameter.grad for _, parameter in weights_of(model)]
    model.zero_grad()
    assert all(each is not None for each in gradients)
