"""The sides: each a host or engine as its users would have it at its best, in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

_OFF = {"FASTGEN_DISABLE": "1"}
_ON = {"FASTGEN_STRICT": "1"}  # a fallback must not be timed as if it were ours

_STOCK = "fastgen is not enabled in its process"
_GENERATE = "model.generate, the model in evaluation mode, sdpa attention (eager where the model has no other)"
_FUNCTION = "prefix_allowed_tokens_fn is a function over nested Python dictionaries, in place of a fastgen.Trie"
_FAIRSEQ = ["SequenceGenerator.generate on one generator, incremental decoding, model.eval()"]
_LLAMA_CPP = [
    "llama-cpp-python on a GGUF file written beforehand from the same weights; writing is not timed",
    "as many threads as the others, greedy sampling on ids, nothing kept from one call to the next",
    "no torch in its process",
]
_OPENVINO = [
    "openvino-genai's LLMPipeline on a model that optimum-intel exported beforehand from the same weights",
    "as many threads as the others, its default backend (paged attention), nothing kept from one call to the next",
    "no torch in its process",
]
_CTRANSLATE2 = [
    "the model converted beforehand from the same weights; converting is not timed",
    "one translator with as many threads as the others, batches as given (max_batch_size 0)",
    "its own choice of matrix library and instruction set; no torch in its process",
]


@dataclass(frozen=True)
class Side:
    label: str
    runner: str  # of fastgen.bench.runners
    settings: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of the runner
    equals: str = ""  # the side whose every token it must have
    lossy: bool = False
    converter: str = ""  # the runner that converts the model, once for all sides that have it

    @property
    def is_ours(self) -> bool:
        return bool(self.equals)


def _ours(label: str, *settings: str, runner: str = "transformers", **environment: str) -> Side:
    equals = "fairseq" if runner == "fairseq" else "transformers"
    variables = {f"FASTGEN_{name.upper()}": value for name, value in environment.items()}
    said = ["import fastgen, then the call of the stock side, word for word"] if runner != "lists" else []
    said += [*settings, "FASTGEN_STRICT=1: a fallback would be an error"]
    return Side(label, runner, said, _ON | variables, equals=equals)


def _rounded(weights: str, how: str) -> Side:
    said = f"weights='{weights}': linear layers {how}: other numbers, so other outputs"
    return replace(_ours(f"fastgen, {weights}", said, weights=weights), equals="", lossy=True)


SIDES: dict[str, Side] = {
    "transformers": Side("transformers", "transformers", [_GENERATE, "its default, dynamic cache", _STOCK], _OFF),
    "transformers-static": Side(
        "transformers, static cache, compiled",
        "transformers",
        [
            _GENERATE,
            "cache_implementation='static', decoding compiled by torch.compile; compiling is not timed",
            "compiling for a CPU takes a private option: by itself the host compiles on accelerators alone",
            _STOCK,
        ],
        _OFF,
        {"generate": {"cache_implementation": "static"}, "compiled": True},
    ),
    "transformers-function": Side(
        "transformers, a Python function",
        "transformers",
        [_GENERATE, "its default, dynamic cache", _FUNCTION, _STOCK],
        _OFF,
        {"function": True},
    ),
    "fairseq": Side("fairseq", "fairseq", [*_FAIRSEQ, _STOCK], _OFF),
    "ctranslate2": Side("CTranslate2", "ctranslate2", _CTRANSLATE2, _OFF, converter="convert"),
    "ctranslate2-int8": Side(
        "CTranslate2, int8",
        "ctranslate2",
        [*_CTRANSLATE2, "weights quantised to 8 bits: other numbers, so other outputs"],
        _OFF,
        {"int8": True},
        lossy=True,
        converter="convert",
    ),
    "llamacpp": Side("llama.cpp", "llamacpp", [*_LLAMA_CPP, "float32, keys and values too"], _OFF, converter="gguf"),
    "llamacpp-int8": Side(
        "llama.cpp, q8_0",
        "llamacpp",
        [*_LLAMA_CPP, "weights quantised to 8 bits in blocks of 32, keys and values in float16: other outputs"],
        _OFF,
        {"int8": True},
        lossy=True,
        converter="gguf",
    ),
    "openvino": Side(
        "OpenVINO",
        "openvino",
        [*_OPENVINO, "float32, keys and values too; activations are not quantised"],
        _OFF,
        converter="openvino_inputs",
    ),
    "openvino-int8": Side(
        "OpenVINO, int8",
        "openvino",
        [
            *_OPENVINO,
            "weights quantised to 8 bits as they were exported, its own defaults for the rest: activations, keys and "
            "values in 8 bits, bfloat16 where the processor has it: other outputs",
        ],
        _OFF,
        {"int8": True},
        lossy=True,
        converter="openvino_inputs",
    ),
    "fastgen": _ours("fastgen", "default options"),
    "fastgen-function": replace(
        _ours("fastgen, a Python function", "default options", _FUNCTION),
        options={"function": True},
        equals="transformers-function",
    ),
    "fastgen-int8": _rounded("int8", "quantised to 8 bits"),
    "fastgen-bf16": _rounded("bf16", "rounded to bfloat16"),
    "fastgen-fairseq": _ours("fastgen on fairseq", "default options", runner="fairseq"),
    "fastgen-compat": _ours(
        "fastgen, the host's loop", "tier='compat': the host's own search over the tree", tier="compat"
    ),
    "fastgen-undrafted": _ours(
        "fastgen without drafts", "speculate='off': no step reads more than one token", speculate="off"
    ),
    "fastgen-tree": _ours(
        "fastgen, without products or recordings",
        "packing='off', replay='off': the host's products, and no recorded steps",
        packing="off",
        replay="off",
    ),
    "fastgen-kv": _ours("fastgen, keys and values", "cache='kv': no slim cache, whatever the plan says", cache="kv"),
    "fastgen-slim": _ours("fastgen, slim caches", "cache='x': exact slim caches", cache="x"),
    "fastgen-lists": _ours(
        "fastgen.generate",
        "fastgen.generate on the list of all inputs, batches of the task's size grouped by length",
        runner="lists",
    ),
    "fastgen-refill": replace(
        _ours("fastgen.generate, refilled", "the batch kept full: refill=True", runner="lists"),
        options={"refill": True},
    ),
}


# The parts of fastgen, alone and stacked, on lines of text (see fastgen.bench.runners.lines).
_TREE = {"FASTGEN_PACKING": "off", "FASTGEN_REPLAY": "off"}
_PARTS = {
    "pipeline": "tokenising and detokenising in worker processes, overlapped with generation",
    "ngrams": "fastgen's operator for bans of repeated n-grams",
    "cache": "fastgen's tree of beams and search, with stock's products (packing='off', replay='off')",
    "larger batch": "four times as many lines in a batch",
    "products": "fastgen's packed products and recorded steps: all of fastgen",
}


def _lines(label: str, *parts: str) -> Side:
    environment = _OFF if "cache" not in parts else _ON if "products" in parts else _ON | _TREE
    options = {
        "parts": [part for part in parts if part in ("pipeline", "ngrams")],
        "times": 4 if "larger batch" in parts else 1,
    }
    settings = [_PARTS[part] for part in parts] or ["a loop over batches: tokenise, model.generate, detokenise, write"]
    return Side(label, "lines", settings, environment, options, equals="lines" if parts else "")


SIDES |= {
    "lines": _lines("transformers"),
    "lines-pipeline": _lines("pipeline alone", "pipeline"),
    "lines-ngrams": _lines("n-gram bans alone", "ngrams"),
    "lines-cache": _lines("cache alone", "cache"),
    "lines-batch": _lines("larger batch alone", "larger batch"),
    "lines-2": _lines("pipeline, n-gram bans", "pipeline", "ngrams"),
    "lines-3": _lines("pipeline, n-gram bans, cache", "pipeline", "ngrams", "cache"),
    "lines-4": _lines("pipeline, n-gram bans, cache, larger batch", "pipeline", "ngrams", "cache", "larger batch"),
    "lines-5": _lines("all of fastgen", *_PARTS),
    "ngrams-transformers": Side(
        "transformers", "ngrams", ["NoRepeatNGramLogitsProcessor"], _OFF, {"which": "transformers"}
    ),
    "ngrams-fairseq": Side(
        "fairseq", "ngrams", ["NGramRepeatBlock, on a GPU with its extension"], _OFF, {"which": "fairseq"}
    ),
    "ngrams-fastgen": Side(
        "fastgen",
        "ngrams",
        ["fastgen.ops.ban_repeated_ngrams_"],
        _ON,
        {"which": "fastgen"},
        equals="ngrams-transformers",
    ),
}
