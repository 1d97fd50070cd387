"""The settings of a run over a corpus with a model of transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The settings of model, tokenizer and search."""

    model: str  # name or folder
    tokenizer: str | None = None  # the model's by default
    task_prefix: str = ""  # put before each input
    source_lang: str | None = None  # the tokenizer's name of it
    target_lang: str | None = None
    dtype: str = "auto"  # as the model was saved; or float32, float16, bfloat16
    device: str | None = None  # by default CUDA if there is a device
    truncate: bool = False  # cut inputs that are too long
    generation: dict[str, Any] = field(default_factory=dict)  # fields of GenerationConfig, over the model's own


@dataclass(frozen=True, kw_only=True)
class RunSettings(ModelSettings):
    """The settings of a run; `fastgen-generate-transformers --help` describes each field."""

    input: str  # with Ray a folder or a URI, too
    output: str
    input_format: str | None = None  # by the file's name
    output_format: str | None = None
    text_field: str = "text"  # of JSONL input
    batch_size: int | str = 32  # records, or "auto"
    max_tokens: int | str | None = None  # padded input tokens in a batch, in place of `batch_size`
    refill: str = "auto"
    allowed_outputs: str | None = None  # a file that lists them, one a line
    no_scores: bool = False
    seed: int = 1  # of sampling
    references: Path | None = None
    metrics: str = ""  # names, with commas between them
    workers: int | None = None  # processes that tokenise and detokenise
    on_error: str | None = None  # see failures.policy_of
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    ray: str | None = None  # the cluster's address; "" for RAY_ADDRESS, or this machine alone
    actors: str | None = None  # copies of the model, "N" or "LEAST:MOST"
    cpus_per_actor: float | None = None
    gpus_per_actor: float | None = None
    shards: bool = False  # leave the output a folder of parts
