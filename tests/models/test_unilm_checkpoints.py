"""UniLM's files: the host's, published ones laid out as unilm-v1 and s2s-ft write them, and a tokenizer's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import unilm_kit as kit
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BertTokenizer, GenerationConfig

from fastgen.models.unilm import UnilmConfig, UnilmForSeq2Seq

INPUTS = kit.padded(kit.sources(6, 3))
TIED = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
Weights = dict[str, Tensor]
# As `bert_config.json` of 2018 has it.
OF_2018 = """attention_probs_dropout_prob hidden_act hidden_dropout_prob hidden_size initializer_range intermediate_size
    max_position_embeddings num_attention_heads num_hidden_layers type_vocab_size vocab_size""".split()
OURS = {"mask_token_id": kit.MASK, "eos_token_id": kit.SEP, "bos_token_id": kit.CLS}


def published(model: UnilmForSeq2Seq) -> Weights:
    return {name: weight.clone() for name, weight in model.state_dict().items() if name not in TIED}


def v1(model: UnilmForSeq2Seq) -> Weights:
    """Old names, and all that v1's training saves besides."""
    size = model.config.hidden_size
    weights = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): weight
        for name, weight in published(model).items()
    }
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"]
    weights["crit_mask_lm_smoothed.one_hot"] = torch.zeros(1, kit.VOCABULARY)
    for name in ("bert.pooler.dense", "cls.seq_relationship", "cls2.predictions.transform.dense"):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.ones(size, size), torch.ones(size)
    return weights


def v1_file(folder: Path, weights: Weights, **fields: Any) -> Path:
    config = {**kit.config().to_dict(), "type_vocab_size": 2, **fields}
    (folder / "bert_config.json").write_text(json.dumps({name: config[name] for name in OF_2018}))
    torch.save(weights, folder / "cnndm_model.bin")
    return folder / "cnndm_model.bin"


def s2s_ft(model: UnilmForSeq2Seq) -> Weights:
    weights = published(model)
    return {**weights, "cls.predictions.decoder_weight": weights["bert.embeddings.word_embeddings.weight"]}


def s2s_ft_folder(folder: Path, weights: Weights, **fields: Any) -> Path:
    """With the defaults of the host of its time, some of which later hosts refuse in a model's configuration."""
    config = {name: kit.config().to_dict()[name] for name in (*OF_2018, "source_type_id", "target_type_id")}
    old = {"bos_token_id": None, "eos_token_ids": 0, "pad_token_id": 0, "num_beams": 1, "max_length": 20}
    old |= {"label_smoothing": 0.1, "layer_norm_eps": 1e-12, "model_type": "bert", "rel_pos_bins": 0, "max_rel_pos": 0}
    (folder / "config.json").write_text(json.dumps({**config, **old, **fields}))
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def assert_same_output(model: UnilmForSeq2Seq, expected: UnilmForSeq2Seq) -> None:
    assert not model.training
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    with torch.no_grad():
        assert torch.equal(model(**INPUTS).logits, expected(**INPUTS).logits)
    mine, theirs = (kit.generate(each, INPUTS, num_beams=3, max_new_tokens=6) for each in (model, expected))
    assert torch.equal(mine.sequences, theirs.sequences)


# -------------------------------------------------------------------------------------------------- the host's files
def test_round_trip(tmp_path: Path) -> None:
    model = kit.model(end=3.0)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=kit.SEP, forbid_ignore_ids=[9, 11])
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), UnilmConfig)
    for loaded in (UnilmForSeq2Seq.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(loaded) is UnilmForSeq2Seq
        mine, theirs = loaded.config.to_dict(), model.config.to_dict()
        assert all(mine[name] == theirs[name] for name in (*OF_2018, "source_type_id", "target_type_id", *OURS))
        assert loaded.generation_config.forbid_ignore_ids == [9, 11]
        assert_same_output(loaded, model)


def test_older_files_of_the_hosts_keep_all_of_their_configuration(tmp_path: Path) -> None:
    model = kit.model()
    model.config.save_pretrained(tmp_path)
    torch.save(published(model), tmp_path / "pytorch_model.bin")
    assert_same_output(UnilmForSeq2Seq.from_pretrained(tmp_path), model)


# ------------------------------------------------------------------------------------------------- published files
def test_v1(tmp_path: Path) -> None:
    model = kit.model()
    file = v1_file(tmp_path, v1(model))
    segments = {"type_vocab_size": 6, "source_type_id": 4, "target_type_id": 5}
    assert_same_output(UnilmForSeq2Seq.from_pretrained(file, **segments, **OURS), model)
    elsewhere = tmp_path / "bert-base-cased"
    elsewhere.mkdir()
    (tmp_path / "bert_config.json").rename(elsewhere / "bert_config.json")
    for config in (kit.config(), elsewhere / "bert_config.json"):
        loaded = UnilmForSeq2Seq.from_pretrained(str(file), config=config, **segments, **OURS)
        assert_same_output(loaded, model)


def test_v1_says_when_segments_are_cut(tmp_path: Path) -> None:
    file = v1_file(tmp_path, v1(kit.model()))
    with pytest.warns(UserWarning, match="type_vocab_size=6, source_type_id=4, target_type_id=5"):
        loaded = UnilmForSeq2Seq.from_pretrained(file, **OURS)
    assert (loaded.config.source_type_id, loaded.config.target_type_id) == (0, 1)
    assert loaded.bert.embeddings.token_type_embeddings.weight.shape[0] == 2


def test_what_is_loaded_can_be_saved(tmp_path: Path) -> None:
    model = kit.model()
    loaded = UnilmForSeq2Seq.from_pretrained(s2s_ft_folder(tmp_path, s2s_ft(model)), layer_norm_eps=1e-5, **OURS)
    loaded.save_pretrained(tmp_path / "ours")
    assert_same_output(AutoModelForCausalLM.from_pretrained(tmp_path / "ours"), model)


def test_s2s_ft(tmp_path: Path) -> None:
    model = kit.model(layer_norm_eps=1e-12)
    # [SEP] and [MASK] are the tokenizer's there, and BERT's English ones here.
    default = UnilmForSeq2Seq.from_pretrained(s2s_ft_folder(tmp_path, s2s_ft(model), vocab_size=kit.VOCABULARY))
    ids = default.generation_config.eos_token_id, default.generation_config.pad_token_id, default.config.mask_token_id
    assert ids == (102, 0, 103)
    assert_same_output(UnilmForSeq2Seq.from_pretrained(tmp_path, **OURS), model)


def test_a_configuration_that_names_the_mask(tmp_path: Path) -> None:
    file = v1_file(tmp_path, v1(kit.model()))
    config = kit.config(mask_token_id=7)
    config.save_pretrained(tmp_path)
    assert UnilmForSeq2Seq.from_pretrained(file, config=tmp_path / "config.json").config.mask_token_id == 7


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(dtype="float17"), ValueError, "dtype='float17'"),
        (dict(update=3), TypeError, "update"),
        (dict(tie_word_embeddings=False), ValueError, "tie_word_embeddings=False"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        UnilmForSeq2Seq.from_pretrained(v1_file(tmp_path, v1(kit.model())), **options)


def test_positions_that_are_cut(tmp_path: Path) -> None:
    file = v1_file(tmp_path, v1(kit.model(end=60.0)))
    with pytest.warns(UserWarning, match="40 positions, and max_position_embeddings is 20"):
        model = UnilmForSeq2Seq.from_pretrained(file, max_position_embeddings=20, **OURS)
    inputs = kit.padded(kit.sources(9))
    with pytest.warns(UserWarning, match="may have 24 tokens, and max_position_embeddings is 20"):
        model.generate(**inputs, max_new_tokens=15, eos_token_id=kit.SEP)


def test_auto_model_with_a_configuration(tmp_path: Path) -> None:
    model, config = kit.model(), kit.config()
    loaded = AutoModelForCausalLM.from_pretrained(s2s_ft_folder(tmp_path, s2s_ft(model)), config=config)
    assert_same_output(loaded, model)
    assert loaded.config is not config


def test_the_keys_bias_may_be_missing(tmp_path: Path) -> None:
    """The published decoder leaves it out, for the same probabilities."""
    model = kit.model(layer_norm_eps=1e-12)
    weights = {name: weight for name, weight in s2s_ft(model).items() if not name.endswith("key.bias")}
    loaded = UnilmForSeq2Seq.from_pretrained(s2s_ft_folder(tmp_path, weights), **OURS)
    torch.testing.assert_close(loaded(**INPUTS).logits, model(**INPUTS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("size", "sources"), [(2, [0, 1]), (3, [0, 1, 0]), (6, [0, 1, 0, 0, 0, 1]), (7, [0, 1, 0, 0, 0, 1, 1])]
)
def test_segments_of_bert_become_unilms(tmp_path: Path, size: int, sources: list[int]) -> None:
    name = "bert.embeddings.token_type_embeddings.weight"
    weights = v1(kit.model())
    weights[name] = weights[name][:2].clone()
    ids = {"type_vocab_size": size, "source_type_id": 0, "target_type_id": size - 1}
    loaded = UnilmForSeq2Seq.from_pretrained(v1_file(tmp_path, weights), **ids)
    assert torch.equal(loaded.bert.embeddings.token_type_embeddings.weight, weights[name][sources])


@pytest.mark.parametrize("length", [29, 40, 95])
def test_positions_are_cut_or_begin_anew(tmp_path: Path, length: int) -> None:
    weights = v1(kit.model())
    table = weights["bert.embeddings.position_embeddings.weight"]
    loaded = UnilmForSeq2Seq.from_pretrained(
        v1_file(tmp_path, weights), type_vocab_size=6, max_position_embeddings=length
    )
    assert torch.equal(loaded.bert.embeddings.position_embeddings.weight, torch.cat([table, table, table])[:length])


def test_weights_of_four_tasks(tmp_path: Path) -> None:
    """The fourth is sequence to sequence."""
    model = kit.model()
    weights = v1(model)
    for name in list(weights):
        if name.startswith("cls.predictions.transform."):
            weights[name] = torch.cat([torch.randn_like(weights[name]) for _ in range(3)] + [weights[name]])
    name = "bert.embeddings.position_embeddings.weight"
    weights[name] = torch.cat([torch.randn_like(weights[name]) for _ in range(3)] + [weights[name]], 1)
    segments = {"type_vocab_size": 6, "source_type_id": 4, "target_type_id": 5}
    assert_same_output(UnilmForSeq2Seq.from_pretrained(v1_file(tmp_path, weights), **segments, **OURS), model)


def test_dtype(tmp_path: Path) -> None:
    weights = {f"module.{name}": weight.half() for name, weight in v1(kit.model()).items()}
    file = v1_file(tmp_path, weights)
    for asked, expected in (
        ({}, "float32"),
        ({"dtype": "auto"}, "float16"),
        ({"torch_dtype": torch.bfloat16}, "bfloat16"),
    ):
        loaded = UnilmForSeq2Seq.from_pretrained(file, type_vocab_size=6, **asked)
        assert loaded.dtype == getattr(torch, expected)


def without(*parts: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: w for name, w in weights.items() if not any(part in name for part in parts)}


def plus(name: str, *shape: int) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, name: torch.zeros(shape)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layer.1.intermediate.dense.bias"), r"lacks bert\.encoder\.layer\.1\.intermediate\.dense\.bias\.$"),
        (without("layer.2."), "and 13 more"),
        (plus("classifier.weight", 2, 20), "no place for: classifier.weight"),
        (plus("bert.rel_pos_bias.weight", 4, 32), "relative positions"),
        (plus("bert.encoder.layer.0.attention.self.seg_emb.weight", 6, 20), "seg_emb"),
        (plus("bert.encoder.layer.0.ffn.wx0.weight", 20, 20), "ffn_type"),
        (plus("bert.encoder.layer.0.attention.self.query.weight", 40, 20), r"\(40, 20\) instead of \(20, 20\)"),
    ],
)
def test_refuses(tmp_path: Path, change: Callable[[Weights], Weights], message: str) -> None:
    folder = s2s_ft_folder(tmp_path, change(s2s_ft(kit.model())))
    with pytest.raises(ValueError, match=message):
        UnilmForSeq2Seq.from_pretrained(folder)


def test_needs_a_configuration(tmp_path: Path) -> None:
    torch.save(v1(kit.model()), tmp_path / "model.bin")
    with pytest.raises(FileNotFoundError, match=r"needs a configuration: there is no .*bert_config\.json"):
        UnilmForSeq2Seq.from_pretrained(tmp_path / "model.bin")
    with pytest.raises(TypeError, match="device_map"):
        UnilmForSeq2Seq.from_pretrained(tmp_path / "model.bin", config=kit.config(), device_map="auto")


# ---------------------------------------------------------------------------------------------------- a tokenizer
def test_tokenizer(tmp_path: Path) -> None:
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the a cat dog sat ran on mat ##s . , and red blue house".split()
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizer.from_pretrained(tmp_path, padding_side="left")
    model = kit.model(end=3.0, vocab_size=len(words), mask_token_id=tokenizer.mask_token_id)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for loaded in (tokenizer, AutoTokenizer.from_pretrained(tmp_path, padding_side="left")):
        inputs = dict(loaded(["the cats sat on the mat .", "a dog"], return_tensors="pt", padding=True))
        assert inputs["input_ids"].tolist()[1] == [0, 0, 0, 0, 0, 0, 2, 6, 8, 3]
        output = kit.generate(model, inputs, num_beams=3, max_new_tokens=8)  # token_type_ids and all
        judge = kit.generate_by_reference(
            model, {name: inputs[name] for name in ("input_ids", "attention_mask")}, num_beams=3, max_new_tokens=8
        )
        assert torch.equal(output.sequences, judge.sequences)
        for text in loaded.batch_decode(output.sequences[:, 10:], skip_special_tokens=True):
            assert isinstance(text, str)
