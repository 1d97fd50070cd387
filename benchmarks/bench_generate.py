"""Beam search by stock transformers and by fastgen: verified, then timed in turn (see README.md).

    python benchmarks/bench_generate.py                                  # random models of well-known shapes
    python benchmarks/bench_generate.py --scenario bart-8x1022 --rounds 3
    python benchmarks/bench_generate.py --shared DIR --whisper DIR --smollm DIR      # trained models too

Exit status: 0 if all outputs are identical, 1 if some differ.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import scenarios
import torch
import transformers
from measuring import SIDES, OtherProcesses, aligned, environment, ratios, running
from scenarios import Scenario
from tqdm import tqdm
from transformers.utils import logging

import fastgen
from fastgen import report
from fastgen.optimizer.transformers.versions import CACHE


@dataclass(frozen=True)
class Job:
    """Calls of `model.generate`: the options, and the inputs of each batch."""

    model: Any
    options: dict[str, Any]
    batches: list[dict[str, Any]]
    stocks: dict[str, Any] = field(default_factory=dict)  # options of stock's side alone


# The random models: fixed lengths, so that both sides do the same work whatever the weights.


def _random_job(model: Any, batch: int, length: int, new: int, beams: int) -> Job:
    ids = torch.randint(10, model.config.vocab_size - 10, (batch, length))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"num_beams": beams, "min_new_tokens": new, "max_new_tokens": new, "do_sample": False}
    return Job(model.eval(), options, [inputs])


def _bart(batch: int, length: int, new: int, beams: int) -> Job:
    config = transformers.BartConfig(
        vocab_size=50265,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        max_position_embeddings=1024,
        forced_eos_token_id=None,
    )
    return _random_job(transformers.BartForConditionalGeneration(config), batch, length, new, beams)


def _prophetnet(batch: int, length: int, new: int, beams: int) -> Job:
    """As many layers as ProphetNet-large, half as wide."""
    config = transformers.ProphetNetConfig(
        vocab_size=30522,
        hidden_size=512,
        num_encoder_layers=12,
        num_decoder_layers=12,
        num_encoder_attention_heads=8,
        num_decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        max_position_embeddings=512,
    )
    return _random_job(transformers.ProphetNetForConditionalGeneration(config), batch, length, new, beams)


def _unilm(batch: int, length: int, new: int, beams: int) -> Job:
    """UniLM-base; stock's side is the same model over the host's cache."""
    from fastgen.models.unilm import UnilmConfig, UnilmForSeq2Seq

    config = UnilmConfig(vocab_size=28996, max_position_embeddings=768, mask_token_id=103)
    return _random_job(UnilmForSeq2Seq(config), batch, length, new, beams)


def _transformer_base(batch: int, beams: int = 4) -> Job:
    config = transformers.MarianConfig(
        vocab_size=32000,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    return _random_job(transformers.MarianMTModel(config), batch, length=25, new=30, beams=beams)


def _gpt2(length: int, new: int) -> Job:
    config = transformers.GPT2Config(
        n_layer=12, n_embd=768, n_head=12, vocab_size=50257, n_positions=1024, pad_token_id=50256
    )
    return _random_job(transformers.GPT2LMHeadModel(config), batch=4, length=length, new=new, beams=4)


def _diverse() -> Job:
    """Stock's side has our loop for beams in groups, the host having none, over the host's own cache."""
    from fastgen.optimizer.transformers.generate.diverse_beam_search import group_beam_search

    job = _bart(8, 512, 64, beams=8)
    groups = {"num_beam_groups": 4, "diversity_penalty": 0.5}
    return Job(job.model, {**job.options, **groups}, job.batches, {"custom_generate": group_beam_search})


# The trained models.


def _translation(args: argparse.Namespace) -> Job:
    """The 1,000 test sentences, sorted by length, in batches of 64."""
    import sentencepiece

    data, folder = args.shared / "data/ddtp-en-de", args.shared / "models/ddtp-en-de"
    model = transformers.BartForConditionalGeneration.from_pretrained(folder / "hf", dtype=torch.float32)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "spm.model"))
    ids = {token: i for i, token in enumerate(json.loads((folder / "vocab.json").read_text("utf-8")))}
    config = model.config
    lines = (data / "test.en").read_text("utf-8").splitlines()
    sources = [
        [ids.get(piece, ids["<unk>"]) for piece in pieces.encode(line, out_type=str)] + [config.eos_token_id]
        for line in lines
    ]
    sources.sort(key=len)
    batches = []
    for start in range(0, len(sources), 64):
        rows = [torch.tensor(source) for source in sources[start : start + 64]]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=config.pad_token_id)
        batches.append({"input_ids": padded, "attention_mask": (padded != config.pad_token_id).long()})
    return Job(model.eval(), {"num_beams": 5, "max_new_tokens": 120}, batches)


def _whisper(args: argparse.Namespace, clips: int) -> Job:
    """So many times the same 11 seconds of speech, by Whisper's own `generate`."""
    import numpy as np

    model = transformers.WhisperForConditionalGeneration.from_pretrained(args.whisper, dtype=torch.float32)
    extract = transformers.WhisperFeatureExtractor.from_pretrained(args.whisper)
    speech = np.load(args.shared / "data/audio/jfk.npy")
    features = extract([speech] * clips, sampling_rate=16000, return_tensors="pt").input_features
    prompt = torch.tensor([[50258, 50259, 50359, 50363]] * clips)  # English, transcribe, no timestamps
    options = {"num_beams": 5, "max_new_tokens": 120}
    return Job(model.eval(), options, [{"input_features": features, "decoder_input_ids": prompt}])


def _smollm(args: argparse.Namespace) -> Job:
    """Three prompts of 512 tokens and one of 300, padded on the left."""
    model = transformers.AutoModelForCausalLM.from_pretrained(args.smollm, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.smollm)
    documents = (args.shared / "data/docs.txt").read_text("utf-8").splitlines()
    prompts = (tokenizer(text).input_ids[:512] for text in documents)
    full = [prompt for prompt, _ in zip((p for p in prompts if len(p) == 512), range(4), strict=False)]
    ids, mask = torch.tensor(full), torch.ones(4, 512, dtype=torch.long)
    mask[3, :212] = 0
    ids[3] = ids[3].roll(212)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = ids.masked_fill(mask == 0, pad)
    options = {"num_beams": 4, "max_new_tokens": 48, "do_sample": False, "pad_token_id": pad}
    return Job(model.eval(), options, [{"input_ids": ids, "attention_mask": mask}])


SCENARIOS = {
    "ddtp": Scenario(
        "trained translation model (BART, 3+3 layers, 192 wide), 1,000 sentences, batches of 64, 5 beams",
        _translation,
        needs="shared",
        at_least=3.0,
    ),
    "bart-8x1022": Scenario(
        "BART-base shape, 8 x 1022 -> 32, 5 beams",
        lambda _: _bart(8, 1022, 32, beams=5),
        at_least=3.0,
        decode_at_least=6.0,
    ),
    "bart-8x512": Scenario(
        "BART-base shape, 8 x 512 -> 64, 4 beams", lambda _: _bart(8, 512, 64, beams=4), at_least=4.0
    ),
    "prophetnet-8x512": Scenario(
        "ProphetNet-large's layers, 512 wide, 8 x 512 -> 64, 5 beams",
        lambda _: _prophetnet(8, 512, 64, beams=5),
        at_least=2.5,
    ),
    "unilm-8x512": Scenario(
        "UniLM-base shape, 8 x 512 -> 64, 5 beams", lambda _: _unilm(8, 512, 64, beams=5), at_least=3.0
    ),
    "transformer-base-32": Scenario(
        "transformer-base shape, 32 x 25 -> 30, 4 beams", lambda _: _transformer_base(32), at_least=1.8
    ),
    "transformer-base-1": Scenario(
        "transformer-base shape, 1 x 25 -> 30, 4 beams", lambda _: _transformer_base(1), at_least=3.0
    ),
    "transformer-base-greedy": Scenario(
        "transformer-base shape, 1 x 25 -> 30, greedy", lambda _: _transformer_base(1, beams=1), at_least=2.5
    ),
    "gpt2-4x512": Scenario("GPT-2 shape, 4 prompts of 512 -> 64, 4 beams", lambda _: _gpt2(512, 64), at_least=3.0),
    "gpt2-4x128": Scenario("GPT-2 shape, 4 prompts of 128 -> 512, 4 beams", lambda _: _gpt2(128, 512), at_least=4.0),
    "diverse-8x512": Scenario(
        "BART-base shape, 8 x 512 -> 64, diverse: 4 groups of 2 beams", lambda _: _diverse(), at_least=2.5
    ),
    "whisper": Scenario(
        "Whisper-base, trained, 4 x 11 s of speech, 5 beams",
        lambda args: _whisper(args, 4),
        needs="whisper",
        at_least=4.0,
    ),
    "whisper-1": Scenario(
        "Whisper-base, trained, 11 s of speech, 5 beams", lambda args: _whisper(args, 1), needs="whisper"
    ),
    "smollm": Scenario(
        "SmolLM2-135M, trained, prompts of 512, 512, 512 and 300 -> 48, 4 beams",
        _smollm,
        needs="smollm",
        at_least=3.5,
    ),
}


# Measuring.


class FirstCall:
    """Seconds of a module's first call since `reset`: the encoder's, or the prompt's of a decoder."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.reset()
        owner: Any = type(module)
        forward = owner.forward

        @functools.wraps(forward)
        def timed(this: Any, *args: Any, **kwargs: Any) -> Any:
            if this is not module or self.seconds is not None:
                return forward(this, *args, **kwargs)
            started = time.perf_counter()
            outputs = forward(this, *args, **kwargs)
            if self.seconds is None:
                self.seconds = time.perf_counter() - started
            return outputs

        owner.forward = timed  # not a hook: a model that has any is never replayed

    def reset(self) -> None:
        self.seconds: float | None = None


class StockCache:
    """The most bytes of keys and values in the cache that any forward pass of stock's returned."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.bytes = 0
        self._handle = model.register_forward_hook(self._look)

    def _look(self, module: Any, inputs: Any, outputs: Any) -> None:
        cache = getattr(outputs, CACHE)
        parts = (cache.self_attention_cache, cache.cross_attention_cache) if _is_pair(cache) else (cache,)
        tensors = [x for part in parts for layer in part.layers for x in (layer.keys, layer.values)]
        self.bytes = max(self.bytes, sum(x.numel() * x.element_size() for x in tensors))

    def remove(self) -> None:
        self._handle.remove()


def _is_pair(cache: Any) -> bool:
    return isinstance(cache, transformers.EncoderDecoderCache)


def _generate(job: Job, side: str, bar: tqdm[Any]) -> list[list[int]]:
    """All outputs of a side, in order."""
    rows: list[list[int]] = []
    bar.set_description(f"{side:>7}")
    with running(side):
        for batch in job.batches:
            rows += job.model.generate(**batch, **job.options, **_besides(job, side)).tolist()
            bar.update()
    return rows


def _besides(job: Job, side: str) -> dict[str, Any]:
    return job.stocks if side == "stock" else {}


@dataclass
class Verified:
    outputs: int
    different: list[int]
    stock_cache_bytes: int
    fastgen_cache_bytes: int
    tiers: dict[str, int]


def verify(job: Job, bar: tqdm[Any], outputs: list[list[int]] | None = None) -> Verified:
    """Both sides once: the comparison, the caches, and the warm-up. Stock's rows are added to `outputs`."""
    cache = StockCache(job.model)
    stock = _generate(job, "stock", bar)
    if outputs is not None:
        outputs += stock
    cache.remove()
    report.reset()
    ours = _generate(job, "fastgen", bar)
    different = [i for i, (a, b) in enumerate(zip(stock, ours, strict=True)) if a != b]
    for i in different[:5]:
        tqdm.write(f"output {i} differs:\n  stock   {stock[i]}\n  fastgen {ours[i]}")
    ours_bytes = max((call.cache_bytes or 0 for call in report.calls()), default=0)
    return Verified(len(stock), different, cache.bytes, ours_bytes, report.counters())


@dataclass
class Round:
    """Seconds of each side: all of it, and without the encoder or the prompt's forward pass."""

    total: dict[str, float] = field(default_factory=dict)
    decode: dict[str, float] = field(default_factory=dict)
    other_processes: dict[str, float | None] = field(default_factory=dict)  # cores they kept busy meanwhile


def time_rounds(job: Job, rounds: int, bar: tqdm[Any]) -> list[Round]:
    """The sides take turns, and take turns at being first."""
    seq2seq = job.model.config.is_encoder_decoder
    first = FirstCall(job.model.get_encoder() if seq2seq else job.model)
    results = []
    for number in range(rounds):
        one = Round()
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            bar.set_description(f"{side:>7}")
            total = decode = 0.0
            others = OtherProcesses()
            with running(side):
                for batch in job.batches:
                    first.reset()
                    started = time.perf_counter()
                    job.model.generate(**batch, **job.options, **_besides(job, side))
                    seconds = time.perf_counter() - started
                    total += seconds
                    decode += seconds - (first.seconds or 0.0)
                    bar.update()
            one.total[side], one.decode[side], one.other_processes[side] = total, decode, others.cores()
        results.append(one)
    return results


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    scenario = SCENARIOS[name]
    torch.manual_seed(0)
    job = scenario.build(args)
    with tqdm(total=2 * (1 + args.rounds) * len(job.batches), unit="batch", leave=False) as bar:
        verified = verify(job, bar)
        rounds = [] if verified.different else time_rounds(job, args.rounds, bar)
    return {
        "scenario": name,
        "what": scenario.what,
        **environment(transformers, fastgen),
        "options": job.options,
        "dtype": str(job.model.dtype),
        "verified": asdict(verified),
        "end_to_end": ratios([one.total for one in rounds]) if rounds else None,
        "decode_alone": ratios([one.decode for one in rounds]) if rounds else None,
        "aimed_at": {"end_to_end": scenario.at_least, "decode_alone": scenario.decode_at_least},
        "rounds": [asdict(one) for one in rounds],
    }


# Showing.


def table(results: list[dict[str, Any]]) -> str:
    header = ("scenario", "outputs", "stock s", "fastgen s", "end to end", "decode alone", "caches MiB")
    return aligned([header, *(_cells(result) for result in results)])


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    verified = result["verified"]
    if result["end_to_end"] is None:
        wrong = f"{len(verified['different'])} of {verified['outputs']} differ"
        return (result["scenario"], wrong, *[""] * 5)
    total = result["end_to_end"]
    stock, ours = verified["stock_cache_bytes"] / 2**20, verified["fastgen_cache_bytes"] / 2**20
    return (
        result["scenario"],
        f"{verified['outputs']} same",
        f"{total['stock']:.2f}",
        f"{total['fastgen']:.2f}",
        _ratio(total, result["aimed_at"]["end_to_end"]),
        _ratio(result["decode_alone"], result["aimed_at"]["decode_alone"]),
        f"{stock:.1f} / {ours:.1f} = {stock / ours:.2f}x",
    )


def _ratio(values: dict[str, float], aim: float | None) -> str:
    text = f"{values['ratio']:.2f}x ({values['min']:.2f} to {values['max']:.2f})"
    if aim is None:
        return text
    return f"{text}, aim {aim:.1f}x {'met' if values['ratio'] >= aim else 'MISSED'}"


FOLDERS = {
    "shared": "holds data/ and models/: ddtp, whisper, smollm",
    "whisper": "Whisper-base as transformers saves it",
    "smollm": "SmolLM2-135M as transformers saves it",
}


def quieten() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def main() -> int:
    what = "Beam search by stock transformers and by fastgen: verified, then timed in turn."
    args = scenarios.parse(what, SCENARIOS, FOLDERS)
    quieten()
    return scenarios.run(args, SCENARIOS, measure, table)


if __name__ == "__main__":
    sys.exit(main())
