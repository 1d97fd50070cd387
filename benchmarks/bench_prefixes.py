"""Requests that share a long beginning: the time to the first token with and without kept prefixes.

    python benchmarks/bench_prefixes.py                 # 200 requests that share 1,000 tokens
    python benchmarks/bench_prefixes.py --requests 20
    python benchmarks/bench_prefixes.py --sides fastgen kept  # without stock, which takes most of the time

Random weights in the shape of a small Llama. Each request is the shared beginning and tokens of its own, and asks for
one token. Three sides take turns on each request: stock, fastgen, and fastgen with the prefix cache, whose first
request reads all. The tokens have to be the same.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import transformers
from measuring import OtherProcesses, aligned, begin, environment, options, quieten, running, say_if_disturbed, write
from transformers import LlamaConfig, LlamaForCausalLM

import fastgen

SIDES = ("stock", "fastgen", "kept")


def build() -> Any:
    torch.manual_seed(0)
    sizes = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=9)
    config = LlamaConfig(**sizes, num_key_value_heads=3, vocab_size=32_000, max_position_embeddings=4096)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def first_token(model: Any, tokens: torch.Tensor, side: str, kept: int, beams: int) -> tuple[float, torch.Tensor]:
    mask = torch.ones_like(tokens)
    with torch.no_grad(), running(side), fastgen.config.configured(prefix_cache=kept if side == "kept" else 0):
        start = time.perf_counter()
        output = model.generate(
            tokens, attention_mask=mask, num_beams=beams, max_new_tokens=1, do_sample=False, pad_token_id=0
        )
        return time.perf_counter() - start, output


def main() -> None:
    parser = options(__doc__ or "")
    for name, default in (("requests", 200), ("shared", 1000), ("own", 20), ("beams", 4)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="default: all")
    parser.add_argument("--bytes", type=int, default=2**28, metavar="N", help="of the cache (default: %(default)s)")
    args = parser.parse_args()
    begin(args)
    quieten()
    fastgen.configure(prefix_cache=args.bytes)  # of the process, so that a block without it frees nothing
    model, others = build(), OtherProcesses()
    draw = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 32_000, (1, args.shared), generator=draw)
    times: dict[str, list[float]] = {side: [] for side in args.sides}
    same = 0
    for _ in range(args.requests):
        tokens = torch.cat([shared, torch.randint(3, 32_000, (1, args.own), generator=draw)], dim=1)
        outputs = []
        for side in args.sides:
            seconds, output = first_token(model, tokens, side, args.bytes, args.beams)
            times[side].append(seconds)
            outputs.append(output)
        same += all(output.equal(outputs[0]) for output in outputs)
    medians = {side: statistics.median(each) for side, each in times.items()}
    others_than_kept = [side for side in args.sides if side != "kept" and "kept" in medians]
    record = {
        "requests": args.requests,
        "shared_tokens": args.shared,
        "own_tokens": args.own,
        "beams": args.beams,
        "same": same,
        "first_request": {side: each[0] for side, each in times.items()},
        "median": medians,
        "total": {side: sum(each) for side, each in times.items()},
        **{f"ratio_to_{side}": medians[side] / medians["kept"] for side in others_than_kept},
        "kept": fastgen.status().prefixes,
        "cores_of_other_processes": (busy := others.cores()),
    }
    write(args.output, "prefixes", {**environment(transformers), **record})
    rows = [("", "median", "first", "all")]
    for side in args.sides:
        rows.append(
            (side, *(f"{value * 1e3:.0f} ms" for value in (medians[side], times[side][0])), f"{sum(times[side]):.1f} s")
        )
    print(aligned(rows))
    print(f"{same} of {args.requests} the same; {fastgen.status().prefixes}")
    say_if_disturbed(busy)


if __name__ == "__main__":
    main()
