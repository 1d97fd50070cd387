"""fastgen-check: which of the installed hosts fastgen accelerates here, tried on tiny random models in seconds."""

from __future__ import annotations

import functools
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import fastgen
from fastgen import installing
from fastgen.cli.exits import Parser, exit_code
from fastgen.pipeline.errors import DIFFERENT, UNUSABLE, InputError, first_line

NAME = "fastgen-check"
_WORDS = 60  # of a tiny model's vocabulary
_SEED = 5
_POSITIONS = {"max_source_positions": 64, "max_target_positions": 64}  # of fairseq's


@dataclass(frozen=True)
class Search:
    """One way to decode with a tiny model; `run` returns its tokens."""

    name: str
    run: Callable[[], list[Any]]


@dataclass(frozen=True)
class Outcome:
    """What became of a search. `fault`: None if it was accelerated, and its tokens were the stock host's."""

    search: str
    tier: str
    fault: str | None


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 if each installed host is accelerated and exact, else 1."""
    return exit_code(NAME, lambda: _main(argv), input_error=UNUSABLE)


def _main(argv: Sequence[str] | None) -> int:
    parser = Parser(
        prog=NAME,
        description="Decode with a tiny random model of each installed host, by the stock host and by fastgen.",
        epilog=f"Exit code: 0 if all is well, {DIFFERENT} if an installed host is not accelerated or its tokens "
        f"differ, {UNUSABLE} if nothing could be tried.",
    )
    parser.add_argument("hosts", nargs="*", metavar="HOST", help=f"{', '.join(_SEARCHES)}; by default all of them")
    named = parser.parse_args(argv).hosts
    hosts = dict.fromkeys(named or _SEARCHES)
    if unknown := [host for host in hosts if host not in _SEARCHES]:
        raise InputError(f"There is no host {unknown[0]!r}: there are {', '.join(_SEARCHES)}.")
    if find_spec("torch") is None:
        raise InputError("PyTorch is not installed: pip install torch.")
    missing = [host for host in hosts if find_spec(host) is None]
    if missing and named:
        raise InputError(f"{missing[0]} is not installed: {installing.command(missing[0])}.")
    if len(missing) == len(hosts):
        raise InputError("None of the hosts is installed: pip install transformers, for one.")
    found = {host: _check(host) for host in hosts if host not in missing}
    print(_surroundings())
    for host in hosts:
        print("\n".join(_lines(host, found[host])) if host in found else f"{host}: not installed")
    return DIFFERENT if any(outcome.fault for outcomes in found.values() for outcome in outcomes) else 0


def _check(host: str) -> list[Outcome]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        try:
            searches = list(_SEARCHES[host]())
        except Exception as error:  # the host's own, of whatever kind
            return [Outcome("import", "stock", f"a model cannot be made ({type(error).__name__}: {first_line(error)})")]
        return [_tried(search) for search in searches]


def _tried(search: Search) -> Outcome:
    import torch

    def run() -> list[Any]:
        torch.manual_seed(_SEED)
        return search.run()

    try:
        with fastgen.disabled():
            expected = run()
        before = sum(fastgen.status().counters.values())
        with fastgen.configured(history=1, weights="float32"):
            found = run()
            calls = fastgen.status().calls
    except Exception as error:
        return Outcome(search.name, "stock", f"failed ({type(error).__name__}: {first_line(error)})")
    status = fastgen.status()
    if not status.enabled:
        return Outcome(search.name, "stock", "fastgen is disabled (FASTGEN_DISABLE)")
    if sum(status.counters.values()) == before:
        return Outcome(search.name, "stock", "the call did not reach fastgen")
    call = calls[-1]
    fault = call.reason if call.tier == "stock" else None if found == expected else "other tokens than the host's"
    return Outcome(search.name, call.tier, fault)


def _lines(host: str, outcomes: list[Outcome]) -> list[str]:
    """One line on a host, and one for each search that is not as it should be."""
    version = getattr(sys.modules.get(host), "__version__", "")
    tested = getattr(sys.modules.get(f"fastgen.optimizer.{host}"), "TESTED", "")
    faults = [outcome for outcome in outcomes if outcome.fault]
    tiers = {tier: sum(outcome.tier == tier for outcome in outcomes) for tier in ("fast", "compat", "stock")}
    counted = ", ".join(f"{count} {tier}" for tier, count in tiers.items() if count)
    if not faults:
        verdict = "accelerated, identical"
    elif all(outcome.tier == "stock" for outcome in outcomes):
        verdict = "NOT accelerated"
    else:
        verdict = "NOT all well"
    lines = [f"{host} {version} (newest tested: {tested}): {verdict}; {len(outcomes)} searches: {counted}"]
    return lines + [f"  {outcome.search}: {outcome.fault}" for outcome in faults]


def _surroundings() -> str:
    import torch

    from fastgen import ops

    device = torch.device("cpu")  # where the tiny models are
    is_native = ops.is_native(device)  # loads them, so that the status knows
    plain = sorted({text for text in fastgen.status().operators.values() if not text.startswith("native")})
    operators = "native" if is_native else "; ".join(plain)
    if is_native and not ops.has_runtime():
        operators += f", but multinomial, arenas and recorded steps ({'; '.join(plain)})"
    return (
        f"fastgen {fastgen.__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"CPU with {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}; operators: {operators}"
    )


# ---------------------------------------------------------------------------------------------- tiny models
def _of_transformers() -> Iterator[Search]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is to be asked of anybody
    import torch
    import transformers

    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    seq2seq = transformers.BartConfig(
        vocab_size=_WORDS, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, init_std=0.4,
        decoder_start_token_id=2, forced_eos_token_id=None, **special,
    )  # fmt: skip
    causal = transformers.LlamaConfig(
        vocab_size=_WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4, **special,
    )  # fmt: skip
    searches: dict[str, dict[str, Any]] = {
        "beam search": {"num_beams": 4, "num_return_sequences": 2},
        "greedy search": {"num_beams": 1},
        "sampling": {"do_sample": True, "num_return_sequences": 2},
    }
    for name, kind, config in (
        ("an encoder-decoder", transformers.BartForConditionalGeneration, seq2seq),
        ("a decoder", transformers.LlamaForCausalLM, causal),
    ):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model = kind(config).eval()
            tokens = torch.randint(5, _WORDS, (3, 7), device=None)
        mask = torch.ones_like(tokens)
        mask[1, :3] = 0
        tokens[1, :3] = 1
        if model.config.is_encoder_decoder:  # padded on the right
            tokens, mask = tokens.flip(1), mask.flip(1)

        inputs = {"input_ids": tokens, "attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
        for search, options in searches.items():
            run = functools.partial(model.generate, **{**inputs, **options})
            yield Search(f"{search} of {name}", lambda run=run: run().tolist())  # type: ignore[misc]


def _of_fairseq() -> Iterator[Search]:
    import torch
    from fairseq.sequence_generator import SequenceGenerator

    from fastgen.bench.fairseq_models import random_model

    sizes = {"embed_dim": 32, "ffn_embed_dim": 64, "attention_heads": 4}
    sizes = {f"{end}_{name}": size for end in ("encoder", "decoder") for name, size in sizes.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_SEED)
        model, words = random_model("transformer", _WORDS, 2, {**sizes, **_POSITIONS})
        model.eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.35)
        tokens = torch.randint(words.nspecial, len(words), (3, 7), device=None)
    tokens[:, -1] = words.eos()
    tokens[1, :3] = words.pad()
    lengths = tokens.ne(words.pad()).sum(1)
    for name, options in (("beam search", {"beam_size": 4}), ("greedy search", {"beam_size": 1})):
        generator = SequenceGenerator([model], words, max_len_b=16, **options)

        def run(generator: Any = generator) -> list[Any]:
            sample = {"net_input": {"src_tokens": tokens.clone(), "src_lengths": lengths.clone()}}
            with torch.no_grad():
                found = generator.generate([model], sample)
            return [hypothesis["tokens"].tolist() for sentence in found for hypothesis in sentence]

        yield Search(name, run)


def _of_whisper() -> Iterator[Search]:
    import torch
    import whisper
    from whisper.model import ModelDimensions, Whisper

    sizes = {f"n_{end}_{name}": size for end in ("audio", "text") for name, size in (("state", 32), ("head", 4))}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_SEED)
        model = Whisper(
            ModelDimensions(
                n_mels=80, n_audio_ctx=50, n_vocab=51865, n_text_ctx=64, n_audio_layer=1, n_text_layer=2, **sizes
            )
        ).eval()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.5)
        sound = torch.randn(1, 80, 100, device=None)  # one, as the host has it with several beams
    for name, options in (("beam search", {"beam_size": 4}), ("greedy search", {})):

        def run(options: dict[str, Any] = options) -> list[Any]:
            decoding = whisper.DecodingOptions(language="en", sample_len=16, fp16=False, **options)
            return [result.tokens for result in whisper.decode(model, sound, decoding)]

        yield Search(name, run)


_SEARCHES: dict[str, Callable[[], Iterator[Search]]] = {
    "transformers": _of_transformers,
    "fairseq": _of_fairseq,
    "whisper": _of_whisper,
}
