"""Beam search of Hugging Face transformers and fairseq, faster and with the same output: `import fastgen`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastgen import config, installing, report
from fastgen.config import Config
from fastgen.memory.release import release
from fastgen.patching import hosts
from fastgen.patching.hosts import disabled, enable
from fastgen.pipeline.offline import generate, generate_samples
from fastgen.report import Call, FallbackError, HostStatus, Status
from fastgen.version import __version__

if TYPE_CHECKING:
    from fastgen.decoding.trie import Trie

__all__ = [
    "Call",
    "Config",
    "FallbackError",
    "HostStatus",
    "Status",
    "Trie",
    "configure",
    "configured",
    "disable",
    "disabled",
    "enable",
    "encode",
    "generate",
    "generate_samples",
    "inspect",
    "release",
    "status",
    "stream",
    "transcribe",
]


def __getattr__(name: str) -> Any:
    """`Trie`, once somebody asks for it: it needs torch, which `import fastgen` does not load."""
    if name == "Trie":
        from fastgen.decoding.trie import Trie

        return Trie
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def disable() -> None:
    """Put back every attribute of every host as it was, and free what is kept between calls."""
    hosts.disable()
    release()


def configure(**options: Any) -> Config:
    """Change settings.

    strict (bool), tier ("auto", "fast", "compat", "stock"), history (int), packing ("auto", "always", "off"),
    weights ("float32", "bf16", "int8"), speculate ("auto", "off", int), cache ("auto", "kv", "x", "h", "k", "v"),
    cache_threshold (float), replay ("auto", "always", "off"), cuda_graphs (bool), foreign_code ("stock", "trial"),
    prefix_cache (int), verify (int).
    """
    return config.configure(**options)


def configured(**options: Any) -> contextlib.AbstractContextManager[config.Config]:
    """Inside the block the settings are these for the calls of this thread, or asyncio task, alone: see `configure`."""
    return config.configured(**options)


def status() -> Status:
    """What is accelerated, and what the last beam searches did and why. Print it."""
    on, states = hosts.statuses()
    return Status(__version__, on, states, report.counters(), report.calls(), **report.provided())


def inspect(model: Any, inputs: Mapping[str, Any]) -> Any:
    """How exact each layer's attention would be with each kind of slim cache: a table, to be printed.

    Tried on what `model.generate(**inputs)` would read and write, for a few sentences; errors are against
    float64 and relative to the largest number of the attention's output. Raises ValueError, with the reason, for
    models that have no slim caches. In fairseq `model` is a `SequenceGenerator`, which has its models, and `inputs` a
    sample, with its `net_input`.
    """
    # Either brings its host with it.
    if isinstance(model, getattr(sys.modules.get("fairseq.sequence_generator"), "SequenceGenerator", ())):
        from fastgen.optimizer.fairseq.cache import inspection

        return inspection.inspect(model, inputs)
    if isinstance(model, getattr(sys.modules.get("fairseq.models"), "BaseFairseqModel", ())):
        raise ValueError("A model of fairseq is inspected by its SequenceGenerator: inspect(generator, sample).")
    from fastgen.optimizer.transformers.cache import inspection as transformers_inspecting

    return transformers_inspecting.inspect(model, inputs)


def encode(model: Any, **inputs: Any) -> Any:
    """`model(**inputs)` of a transformers encoder, with or without a head, that computes (almost) no padding.

    Texts of like length are read together, each group as long as its longest text, where that pays by an estimate.
    BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, ELECTRA, ALBERT and MPNet, alone or with a head for masked words,
    or for classes of texts, tokens or spans; others, and inputs that cannot be divided, are read as they are, with the
    reason in the log.

    Args:
        model: in evaluation mode; call under `torch.no_grad()`.
        inputs: `input_ids` int64 `[B, N]`, padded on the right, and `attention_mask` `[B, N]`; `token_type_ids` and
            `position_ids` `[B, N]`, if any.

    Returns: the model's own output. States and logits of padding are zeros (of spans the least numbers there are),
        where the model has numbers that mean nothing; all others are the same but for rounding.

    Raises:
        FallbackError: in strict mode, instead of reading a batch as it is.
    """
    if not hosts.is_on():
        return model(**inputs)
    from fastgen.optimizer.transformers.model import encoder  # brings its host with it

    return encoder.run(model, inputs)


def stream(model: Any, *args: Any, **inputs: Any) -> Generator[int, None, Any]:
    """The tokens that `model.generate(*args, **inputs)` generates for one input, one by one as they are decided.

    With beams a token is decided once every live beam, and every finished hypothesis that can still win, begins with
    it: no token is taken back, and all together are those of the best sequence. Greedy search and sampling in
    transformers yield each token as it is chosen.

    The call runs in a thread, as far as the next token at a time; closing the generator ends it.

    Args:
        model: a model of transformers, or a `SequenceGenerator` or hub interface of fairseq.
        args, inputs: what `generate` takes, for one input, without `streamer`.

    Yields: the tokens, without the prompt of transformers, and in fairseq with the prefix, if there is one.

    Returns: what `generate` returns, as the generator's value: `result = yield from fastgen.stream(...)`.

    Raises:
        ValueError: beams that fastgen does not search itself: in transformers the host's own error. In fairseq any
            search other than plain beam search. Other errors are those of `generate`, at the token that would be next.
    """
    from fastgen.optimizer import streams

    return streams.stream(model, args, inputs)


def transcribe(
    model: Any,
    recordings: Sequence[Any],
    *,
    batch_size: int = 8,
    batched: bool = False,
    vad_filter: bool = False,
    progress: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """What whisper, or a pipeline of transformers, returns for each recording; several are decoded at a time.

    That is what `whisper.transcribe(model, recording, **options)` returns, or `pipeline(recording, **options)`.
    Each recording is transcribed as if it were alone: windows follow one another by the host's rule, with what was said
    before as a prompt. Steps of the decoder are shared by all. What is drawn, at a temperature above 0, is what would
    be drawn if that recording were the first. With `weights` in fewer bits, results depend on what shares a step.
    For models of the package `whisper` it needs the extra `transcribe`.

    Args:
        model: of the package `whisper`; or transformers' `pipeline("automatic-speech-recognition", ...)`, whose
            recordings share steps if its model is Whisper and its class is the host's own.
        recordings: files of sound or video, or float32 `[samples]`, one channel, 16 kHz. A pipeline takes whatever it
            takes for one recording.
        batch_size: the most recordings, or parts of some, that are decoded at a time. A pipeline's own, the chunks of
            a recording, is what the pipeline was made with.
        batched: cut each recording at silences into parts of 30 seconds at most, which do not know what was said
            before. The text may then differ. Not for pipelines.
        vad_filter: leave out where nobody speaks for two seconds or more. The text may then differ. Not for pipelines.
        progress: show a progress line on standard error.
        options: options of `whisper.transcribe`: `language`, `beam_size`, `word_timestamps`, ...; or of a call of the
            pipeline: `generate_kwargs`, `return_timestamps`, `chunk_length_s`, ...

    Returns: for each recording, in order, a dictionary with `text`, `segments` and `language`, as whisper has it, or
        with `text` and `chunks`, as the pipeline has it.

    Raises:
        ValueError: a file is not there, or has no sound in it; options do not go together. Other errors are those of
            the host, for the first recording that fails. The command `fastgen-transcribe` goes on with all others.
    """
    from fastgen.pipeline.transcription import recordings as several

    return several.transcribe(
        model,
        recordings,
        options,
        batch_size=batch_size,
        batched=batched,
        vad_filter=vad_filter,
        progress=progress,
    )


if (_another := installing.another()) is not None:
    report.warn(_another)
if not config.flag("FASTGEN_DISABLE"):
    enable()
