"""The operators of fastgen.ops against what they replace: verified, then timed in turn (see README.md).

    python benchmarks/bench_ops.py
    python benchmarks/bench_ops.py --rows 32 --vocabulary 32000 --k 8 --rounds 3
    python benchmarks/bench_ops.py --device cuda

fairseq's own n-gram blocking is timed if fairseq is installed. Exit status: 1 if a result is wrong, or if the
operators are not native.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from measuring import OtherProcesses, aligned, begin, cpu_model, options, say_if_disturbed, write
from torch import Tensor
from tqdm import tqdm
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

import fastgen
from fastgen import ops
from fastgen.ops.operator import OPERATORS

# FastSeq's table 3: rows, tokens so far, vocabulary, n.
NGRAMS = (128, 140, 50_264, 3)
Side = Callable[[], Any]


class Wrong(Exception):
    """An operator's result is not what the others compute."""


# What is compared: sides by name, ours first.


def ngram_sides(device: torch.device) -> dict[str, Side]:
    """Ours bans in place, as in the decode loop; transformers' processor returns a copy."""
    rows, length, vocabulary, n = NGRAMS
    tokens = torch.randint(0, 40, (rows, length), device=device)  # few enough for n-grams to repeat
    scores = torch.randn(rows, vocabulary, device=device)
    processor = NoRepeatNGramLogitsProcessor(n)
    expected = processor(tokens, scores)
    if not expected.isinf().any():
        raise Wrong("no n-gram repeats: nothing would be measured")
    ours = scores.clone()
    sides: dict[str, Side] = {
        "fastgen": lambda: ops.ban_repeated_ngrams_(tokens, ours, n, length),
        "transformers": lambda: processor(tokens, scores),
    }
    if importlib.util.find_spec("fairseq") is not None:
        from fairseq.ngram_repeat_block import NGramRepeatBlock

        block = NGramRepeatBlock(n, use_extension=False)
        theirs = scores.clone()
        sides["fairseq"] = lambda: block(tokens, theirs, rows, 1, length - 1)
        if not torch.equal(sides["fairseq"](), expected):
            raise Wrong("fairseq bans other tokens than transformers")
    sides["fastgen"]()
    if not torch.equal(ours, expected):
        raise Wrong("fastgen bans other tokens than transformers")
    return sides


def topk_sides(rows: int, vocabulary: int, k: int, device: torch.device) -> dict[str, Side]:
    """Per row, and the hosts' whole choice of k candidates for each sentence of k/2 beams."""
    logits = torch.randn(rows, vocabulary, device=device) * 3
    beams = max(1, k // 2)
    while rows % beams:
        beams -= 1
    scores = torch.randn(rows, 1, device=device)

    def per_row() -> tuple[Tensor, Tensor]:
        return torch.topk(logits.log_softmax(-1), k)

    def chain() -> tuple[Tensor, Tensor]:
        log_probs = logits.to(copy=True, dtype=torch.float32).log_softmax(-1)
        totals, chosen = torch.topk((log_probs + scores).view(-1, beams * vocabulary), k)
        return totals, chosen

    def our_chain() -> tuple[Tensor, Tensor]:
        log_probs, tokens, _ = ops.topk_log_softmax(logits, k)
        totals, place = torch.topk((log_probs + scores).view(-1, beams * k), k)
        chosen = tokens.view(-1, beams * k).gather(1, place) + place // k * vocabulary
        return totals, chosen

    def ours() -> tuple[Tensor, Tensor, Tensor]:
        return ops.topk_log_softmax(logits, k)

    log_probs, tokens, log_sum_exp = ours()
    if not torch.equal(tokens, OPERATORS["topk_log_softmax"].reference(logits, k)[1]):
        raise Wrong("fastgen chooses other tokens than the reference")
    # The float32 sums of torch's own log-softmax are off by up to 2e-5 at the largest vocabulary.
    torch.testing.assert_close(log_probs, per_row()[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(log_sum_exp, logits.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(our_chain()[0], chain()[0], rtol=1e-5, atol=1e-4)
    return {"fastgen": ours, "log_softmax+topk": per_row, "fastgen, whole": our_chain, "hosts' chain": chain}


# Measuring.


def seconds(call: Side, at_least: float, device: torch.device) -> float:
    """Of one call: the mean over as many as take about `at_least` seconds."""

    def run(times: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(times):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / times

    return run(max(2, int(at_least / max(run(1), 1e-6))))


def compare(sides: dict[str, Side], pairs: list[tuple[str, str]], args: argparse.Namespace) -> dict[str, Any]:
    """Each round times all sides, forwards or backwards; ratios are those of a round."""
    names = list(sides)
    for name in names:
        sides[name]()
    rounds: list[dict[str, float]] = []
    others = OtherProcesses()
    for number in range(args.rounds):
        order = names if number % 2 == 0 else names[::-1]
        rounds.append({name: seconds(sides[name], args.seconds, args.device) for name in order})
    ratios = {}
    for ours, theirs in pairs:
        if theirs not in sides:
            continue
        each = [one[theirs] / one[ours] for one in rounds]
        ratios[theirs] = {"ratio": statistics.median(each), "min": min(each), "max": max(each)}
    return {
        "seconds": {name: statistics.median(one[name] for one in rounds) for name in names},
        "ratios": ratios,
        "other_processes": others.cores(),
        "rounds": rounds,
    }


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy that no cache holds."""
    source = torch.randn(2**27, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source), 0.05, device) for _ in range(5)]
    return 2 * source.numel() * 4 / statistics.median(times)


# Showing.


def cell(result: dict[str, Any], name: str, aim: float | None) -> str:
    if name not in result["ratios"]:
        return "-"
    ratio = result["ratios"][name]
    text = f"{ratio['ratio']:.1f}x ({ratio['min']:.1f} to {ratio['max']:.1f})"
    if aim is None:
        return text
    return f"{text}, aim {aim:.0f}x {'met' if ratio['ratio'] >= aim else 'MISSED'}"


def share(result: dict[str, Any], copy_bandwidth: float) -> str:
    """What top-k reads a second, which is nearly all it moves, as a part of what a copy moves."""
    part = 1e9 * result["gigabytes_per_second"] / copy_bandwidth
    return f"{part:.0%}, aim 60% {'met' if part >= 0.6 else 'MISSED'}"


def show(document: dict[str, Any]) -> str:
    on_cpu = document["machine"]["device"] == "cpu"
    ngrams = document["ngrams"]
    rows = [
        (
            " x ".join(map(str, NGRAMS)),
            f"{1e6 * ngrams['seconds']['fastgen']:.0f}",
            cell(ngrams, "transformers", 200 if on_cpu else None),
            cell(ngrams, "fairseq", 75 if on_cpu else None),
        )
    ]
    text = aligned([("n-gram bans: rows x length x V x n", "us", "transformers'", "fairseq's"), *rows]) + "\n\n"
    rows = [
        (
            f"{result['rows']} x {result['vocabulary']}, {result['k']}",
            f"{1e6 * result['seconds']['fastgen'] / result['rows']:.1f}",
            f"{result['gigabytes_per_second']:.1f}",
            cell(result, "log_softmax+topk", 6 if on_cpu else None),
            cell(result, "hosts' chain", None),
        )
        for result in document["topk"]
    ]
    header = ("top-k: rows x V, k", "us/row", "GB/s", "log_softmax+topk", "hosts' whole chain")
    if copy := document["copy_bandwidth"]:
        header += ("of copy bandwidth",)
        rows = [(*row, share(result, copy)) for row, result in zip(rows, document["topk"], strict=True)]
    text += aligned([header, *rows]) + "\n"
    median = statistics.median(result["ratios"]["hosts' chain"]["ratio"] for result in document["topk"])
    aim = f", aim 15x {'met' if median >= 15 else 'MISSED'}" if on_cpu else ""
    text += f"hosts' whole chain, median of the shapes: {median:.1f}x{aim}"
    if copy:
        text += f"\ncopy bandwidth: {copy / 1e9:.0f} GB/s, read and written"
    return text


def parse() -> argparse.Namespace:
    parser = options(__doc__.splitlines()[0], rounds=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 50_264, 250_000])
    parser.add_argument("--k", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--seconds", type=float, default=0.1, help="a side and round (default: %(default)s)")
    return parser.parse_args()


@torch.inference_mode()
def main() -> int:
    args = parse()
    if not ops.is_native(args.device):
        how = fastgen.status().operators["topk_log_softmax"]
        print(f"The operators are not native on {args.device.type}, so nothing is timed: {how}.", file=sys.stderr)
        return 1
    begin(args)
    torch.manual_seed(0)
    shapes = [(rows, vocabulary, k) for rows in args.rows for vocabulary in args.vocabulary for k in args.k]
    topk = []
    try:
        ngrams = compare(ngram_sides(args.device), [("fastgen", "transformers"), ("fastgen", "fairseq")], args)
        for rows, vocabulary, k in tqdm(shapes, unit="shape", leave=False):
            sides = topk_sides(rows, vocabulary, k, args.device)
            pairs = [("fastgen", "log_softmax+topk"), ("fastgen, whole", "hosts' chain")]
            result = compare(sides, pairs, args)
            bandwidth = rows * vocabulary * 4 / result["seconds"]["fastgen"] / 1e9
            topk.append({"rows": rows, "vocabulary": vocabulary, "k": k, "gigabytes_per_second": bandwidth, **result})
    except (Wrong, AssertionError) as error:
        print(f"wrong result, nothing more is timed: {error}", file=sys.stderr)
        return 1
    on_cuda = args.device.type == "cuda"
    name = torch.cuda.get_device_name(args.device) if on_cuda else cpu_model()
    document = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {"device": args.device.type, "name": name, "threads": args.threads},
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "fastgen": fastgen.__version__,
        },
        "operators": fastgen.status().operators,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "copy_bandwidth": copy_bandwidth(args.device) if on_cuda else None,
        "ngrams": ngrams,
        "topk": topk,
    }
    kind = "cuda" if on_cuda else document["cpu_capability"].lower()
    write(args.output, f"ops-{kind}", document, indent=1)
    print(f"{name}, {args.threads} threads, {document['cpu_capability']}, torch {torch.__version__}, float32")
    print(show(document))
    say_if_disturbed(max(result["other_processes"] or 0.0 for result in (ngrams, *topk)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
