"""Converts a task's model for CTranslate2, in a process of its own: torch and the engine don't meet."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from fastgen.bench import data, models
from fastgen.bench.runners import Missing, Refused

MODEL, JOB, FEATURES = "model", "job.json", "features-{}.npy"  # in the folder that the order names
_LOADERS = {
    "bart": "BartLoader",
    "marian": "BartLoader",
    "gpt2": "GPT2Loader",
    "llama": "LlamaLoader",
    "t5": "T5Loader",
    "whisper": "WhisperLoader",
}


class Runner:
    def __init__(self, order: dict[str, Any]) -> None:
        try:
            import ctranslate2
            import numpy
            from ctranslate2.converters import transformers as converters
        except ImportError:
            raise Missing("CTranslate2 is not installed: pip install ctranslate2") from None
        self._ctranslate2 = ctranslate2
        job = models.build(order["task"], order["folders"])
        kind = job.model.config.model_type
        if kind not in _LOADERS:
            raise Refused(f"this benchmark does not convert models of type {kind} for CTranslate2")
        # Marian's own loader takes the last token for padding and removes it.
        tokenizer = data.tokenizer_of(order["folders"], "whisper") if kind == "whisper" else None
        spec = spec_of(job.model, getattr(converters, _LOADERS[kind])(), tokenizer)
        spec.validate()
        spec.optimize(quantization=None)
        folder = Path(order["folder"])
        (folder / MODEL).mkdir()
        spec.save(str(folder / MODEL))
        document = {
            "engine": "Whisper" if kind == "whisper" else "Translator" if job.is_seq2seq else "Generator",
            "batches": [names_of(batch) for batch in job.batches],
            "options": _speech_options(job) if kind == "whisper" else _options(job),
        }
        if kind == "whisper":
            for number, batch in enumerate(job.batches):
                numpy.save(folder / FEATURES.format(number), batch["input_features"].numpy())
        (folder / JOB).write_text(json.dumps(document))

    def versions(self) -> dict[str, str]:
        return {"ctranslate2": self._ctranslate2.__version__}


def spec_of(model: Any, loader: Any, tokenizer: Any = None) -> Any:
    """CTranslate2's form of the model, float32. A token's name is its id; with Whisper, its name in the `tokenizer`."""
    import torch

    kind, own = model.config.model_type, model.config
    model.config = copy.deepcopy(own)  # the loader reads options of old versions there, and this adds them
    model.config.normalize_before = False
    model.config.normalize_embedding = kind == "bart"
    try:
        with torch.no_grad():
            spec = loader.get_model_spec(model)
    finally:
        model.config = own
    if kind == "whisper":
        loader.set_config(spec.config, model, tokenizer)
        loader.set_vocabulary(spec, _names_of_speech(own.vocab_size, tokenizer))
        return spec
    if kind == "llama":
        spec.config.layer_norm_epsilon = own.rms_norm_eps
    loader.set_vocabulary(spec, [str(token) for token in range(own.vocab_size)])
    spec.config.eos_token = str(own.eos_token_id)
    spec.config.bos_token = str(own.eos_token_id if getattr(own, "bos_token_id", None) is None else own.bos_token_id)
    spec.config.unk_token = spec.config.bos_token  # any: no token is unknown
    if own.is_encoder_decoder:
        spec.config.decoder_start_token = str(own.decoder_start_token_id)
    return spec


def _names_of_speech(size: int, tokenizer: Any) -> list[str]:
    """Of Whisper's tokens: the tokenizer's, since CTranslate2 looks some up by name."""
    names = tokenizer.convert_ids_to_tokens(list(range(size)))
    return [f"<|{token}|>" if name is None else name for token, name in enumerate(names)]


def names_of(batch: dict[str, Any]) -> list[list[str]]:
    if "input_features" in batch:  # a prompt for each clip
        return [[str(token) for token in row] for row in batch["decoder_input_ids"].tolist()]
    return [[str(token) for token in row] for row in unpadded(batch)]


def unpadded(batch: dict[str, Any]) -> list[list[int]]:
    """The ids of each input of a batch of text, without padding."""
    rows = zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
    return [[token for token, kept in zip(ids, mask, strict=True) if kept] for ids, mask in rows]


_SAME = ("no_repeat_ngram_size", "repetition_penalty", "length_penalty")


def _speech_options(job: models.Job) -> dict[str, Any]:
    """Of `generate`, which takes half of `max_length` for the output, unless the prompt leaves less."""
    new, prompt = job.options["max_new_tokens"], job.batches[0]["decoder_input_ids"].shape[1]
    return {"beam_size": job.options["num_beams"], "max_length": max(2 * new, new + prompt)}


def _options(job: models.Job) -> dict[str, Any]:
    """Of `translate_batch`, or of `generate_batch` for prompts."""
    given = job.options
    new, least = given["max_new_tokens"], given.get("min_new_tokens")
    options = {"beam_size": given["num_beams"], **{name: given[name] for name in _SAME if name in given}}
    if given.get("do_sample"):
        options |= {"sampling_topk": given.get("top_k", 50), "sampling_topp": given.get("top_p", 1.0)}
    if job.is_seq2seq:
        return options | {"max_decoding_length": new, "min_decoding_length": least or 1, "max_input_length": 0}
    return options | {"max_length": new, "min_length": least or 0, "include_prompt_in_result": False}
