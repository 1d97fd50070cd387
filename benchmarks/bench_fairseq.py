"""Generation by stock fairseq's SequenceGenerator and by fastgen: verified, then timed in turn (see README.md).

    python benchmarks/bench_fairseq.py                              # random models of well-known shapes
    python benchmarks/bench_fairseq.py --scenario bart-8x512 --rounds 3
    python benchmarks/bench_fairseq.py --shared DIR                 # the trained model too

Exit status: 0 if all hypotheses are identical, 1 if some differ.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import scenarios
import torch
from measuring import SIDES, OtherProcesses, environment, ratios, running
from scenarios import Scenario
from tqdm import tqdm

import fastgen
from fastgen import report

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import fairseq
    from fairseq import checkpoint_utils
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
    from fairseq.sequence_generator import SequenceGenerator

TOLERANCE = 1e-4  # of scores


@dataclass(frozen=True)
class Job:
    """Calls of `generate`: the model, the generator's options, the inputs of each batch."""

    model: Any
    words: Dictionary
    options: dict[str, Any]
    batches: list[dict[str, Any]]
    prefixes: list[torch.Tensor | None] = field(default_factory=list)


# The random models: fixed lengths, so that both sides do the same work whatever the weights.


def _model(architecture: str, vocabulary: int, **sizes: Any) -> tuple[Any, Dictionary]:
    words = Dictionary()
    for number in range(vocabulary - len(words)):
        words.add_symbol(str(number))
    args = Namespace(arch=architecture, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, **sizes)
    ARCH_CONFIG_REGISTRY[architecture](args)
    task = Namespace(source_dictionary=words, target_dictionary=words, dictionary=words)
    return ARCH_MODEL_REGISTRY[architecture].build_model(args, task).eval(), words


def _sources(words: Dictionary, batch: int, length: int) -> dict[str, Any]:
    tokens = torch.randint(words.nspecial, len(words), (batch, length))
    tokens[:, -1] = words.eos()
    return {"net_input": {"src_tokens": tokens, "src_lengths": torch.full((batch,), length)}}


def _fixed(new: int, beams: int, **more: Any) -> dict[str, Any]:
    return {"beam_size": beams, "min_len": new - 1, "max_len_b": new - 1, **more}


def _bart(batch: int, length: int, new: int, beams: int) -> Job:
    sizes = {"max_source_positions": 1024, "max_target_positions": 1024}
    model, words = _model("bart_base", 50264, **sizes)
    return Job(model, words, _fixed(new, beams), [_sources(words, batch, length)])


def _wide(batch: int, length: int, new: int, beams: int) -> Job:
    """A plain transformer as wide as BART-base: none of BART's sharing of the source's keys."""
    side = dict(embed_dim=768, ffn_embed_dim=3072, layers=6, attention_heads=12)
    sizes = {f"{end}_{name}": value for end in ("encoder", "decoder") for name, value in side.items()}
    sizes |= {"max_source_positions": 1024, "max_target_positions": 1024, "share_all_embeddings": True}
    model, words = _model("transformer", 50264, **sizes)
    return Job(model, words, _fixed(new, beams), [_sources(words, batch, length)])


def _base(batch: int, **options: Any) -> Job:
    sizes = {"max_source_positions": 512, "max_target_positions": 512, "share_all_embeddings": True}
    model, words = _model("transformer_wmt_en_de", 32000, **sizes)
    return Job(model, words, _fixed(30, 4, **options), [_sources(words, batch, 25)])


def _language_model() -> Job:
    sizes = {"decoder_layers": 12, "decoder_attention_heads": 12, "decoder_embed_dim": 768, "tokens_per_sample": 1024}
    sizes |= {"decoder_ffn_embed_dim": 3072, "decoder_output_dim": 768, "decoder_input_dim": 768}
    sizes |= {"max_target_positions": 1024, "share_decoder_input_output_embed": True}
    model, words = _model("transformer_lm_gpt", 50257, **sizes)
    prompts = torch.randint(words.nspecial, len(words), (4, 256))
    sample = {"net_input": {"src_tokens": prompts, "src_lengths": torch.full((4,), 256)}}
    return Job(model, words, _fixed(256 + 48, 4), [sample], [prompts])


def _translation(args: argparse.Namespace) -> Job:
    """The 1,000 test sentences, sorted by length, in batches of 64."""
    import sentencepiece

    data, folder = args.shared / "data/ddtp-en-de", args.shared / "models/ddtp-en-de"
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / "checkpoint.pt")], arg_overrides={"data": str(data / "data-bin")}
    )
    words = task.source_dictionary
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "spm.model"))
    lines = (data / "test.en").read_text("utf-8").splitlines()
    rows = [[words.index(p) for p in pieces.encode(line, out_type=str)] + [words.eos()] for line in lines]
    rows.sort(key=len)
    batches = []
    for start in range(0, len(rows), 64):
        some = rows[start : start + 64]
        width = max(map(len, some))
        tokens = torch.tensor([[words.pad()] * (width - len(row)) + row for row in some])
        batches.append({"net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(words.pad()).sum(1)}})
    return Job(models[0].eval(), task.target_dictionary, {"beam_size": 5, "max_len_b": 120}, batches)


SCENARIOS = {
    "ddtp": Scenario(
        "trained translation model (3+3 layers, 192 wide), 1,000 sentences, batches of 64, 5 beams",
        _translation,
        needs="shared",
    ),
    "wide-8x512": Scenario(
        "transformer as wide as BART-base, 8 x 512 -> 64, 4 beams", lambda _: _wide(8, 512, 64, 4), at_least=2.0
    ),
    "bart-8x512": Scenario("BART-base shape, 8 x 512 -> 64, 4 beams", lambda _: _bart(8, 512, 64, 4)),
    "base-32": Scenario("transformer-base shape, 32 x 25 -> 30, 4 beams", lambda _: _base(32), at_least=1.3),
    "base-32-ngrams": Scenario(
        "the same without repeated 3-grams: no slower than without the option by more than 2%",
        lambda _: _base(32, no_repeat_ngram_size=3),
    ),
    "base-1": Scenario("transformer-base shape, 1 x 25 -> 30, 4 beams", lambda _: _base(1), at_least=1.8),
    "lm-4x256": Scenario(
        "language model of GPT-2's shape, 4 prompts of 256 -> 48, 4 beams", lambda _: _language_model()
    ),
}


# Measuring.


def _generate(job: Job, side: str, options: dict[str, Any], bar: tqdm[Any]) -> tuple[float, list[Any]]:
    """Seconds, and the hypotheses of all batches in order."""
    bar.set_description(f"{side:>7}")
    found: list[Any] = []
    prefixes = job.prefixes or [None] * len(job.batches)
    with running(side):
        generator = SequenceGenerator([job.model], job.words, **options)
        started = time.perf_counter()
        for batch, prefix in zip(job.batches, prefixes, strict=True):
            found += generator.generate([job.model], batch, prefix_tokens=prefix)
            bar.update()
    return time.perf_counter() - started, found


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Without n-gram blocking: stock ignores it, so only these can be compared."""
    return {name: value for name, value in options.items() if name != "no_repeat_ngram_size"}


def verify(job: Job, bar: tqdm[Any]) -> dict[str, Any]:
    """Both sides once: the comparison, and the warm-up."""
    _, stock = _generate(job, "stock", _plain(job.options), bar)
    report.reset()
    _, ours = _generate(job, "fastgen", _plain(job.options), bar)
    different, off, count = [], 0.0, 0
    for sentence, (theirs, mine) in enumerate(zip(stock, ours, strict=True)):
        count += len(theirs)
        if [h["tokens"].tolist() for h in theirs] != [h["tokens"].tolist() for h in mine]:
            different.append(sentence)
        else:
            pairs = zip(theirs, mine, strict=True)
            off = max(off, max(abs(float(a["score"]) - float(b["score"])) for a, b in pairs))
    cache = max((call.cache_bytes or 0 for call in report.calls()), default=0)
    return {
        "sentences": len(stock),
        "hypotheses": count,
        "different": different,
        "largest_score_difference": off,
        "fastgen_cache_bytes": cache,
        "tiers": report.counters(),
    }


def time_rounds(job: Job, rounds: int, bar: tqdm[Any]) -> list[dict[str, Any]]:
    """The sides take turns, and take turns at being first; "plain" is fastgen without n-gram blocking."""
    sides = [*SIDES, "plain"] if "no_repeat_ngram_size" in job.options else list(SIDES)
    results = []
    for number in range(rounds):
        one: dict[str, Any] = {"total": {}, "other_processes": {}}
        for side in sides if number % 2 == 0 else sides[::-1]:
            others = OtherProcesses()
            options = _plain(job.options) if side == "plain" else job.options
            one["total"][side], _ = _generate(job, side, options, bar)
            one["other_processes"][side] = others.cores()
        results.append(one)
    return results


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    scenario = SCENARIOS[name]
    torch.manual_seed(0)
    job = scenario.build(args)
    with tqdm(total=(2 + 3 * args.rounds) * len(job.batches), unit="batch", leave=False) as bar:
        verified = verify(job, bar)
        wrong = verified["different"] or verified["largest_score_difference"] > TOLERANCE
        rounds = [] if wrong else time_rounds(job, args.rounds, bar)
    totals = [one["total"] for one in rounds]
    blocking = [one["fastgen"] / one["plain"] for one in totals if "plain" in one]
    return {
        "scenario": name,
        "what": scenario.what,
        **environment(fairseq, fastgen),
        "options": job.options,
        "verified": verified,
        "end_to_end": ratios(totals) if rounds else None,
        "with_blocking_over_without": statistics.median(blocking) if blocking else None,
        "aimed_at": scenario.at_least,
        "rounds": rounds,
    }


# Showing.


def line(result: dict[str, Any]) -> str:
    verified, total, aim = result["verified"], result["end_to_end"], result["aimed_at"]
    if total is None:
        wrong = f"{len(verified['different'])} of {verified['sentences']} sentences differ"
        return f"{result['scenario']:16} {wrong}, scores by up to {verified['largest_score_difference']:.1e}"
    text = f"{result['scenario']:16} {verified['hypotheses']:>6} same  stock {total['stock']:7.2f} s"
    text += f"  fastgen {total['fastgen']:7.2f} s  {total['ratio']:.2f}x ({total['min']:.2f} to {total['max']:.2f})"
    if aim is not None:
        text += f", aim {aim:.1f}x {'met' if total['ratio'] >= aim else 'MISSED'}"
    if result["with_blocking_over_without"] is not None:
        text += f", {result['with_blocking_over_without']:.3f} of the time without blocking"
    return text


def main() -> int:
    what = "Generation by stock fairseq and by fastgen: verified, then timed in turn."
    args = scenarios.parse(what, SCENARIOS, {"shared": "holds data/ and models/: for ddtp"})
    logging.disable(logging.INFO)
    return scenarios.run(args, SCENARIOS, measure, lambda results: "\n".join(map(line, results)), prefix="fairseq-")


if __name__ == "__main__":
    sys.exit(main())
