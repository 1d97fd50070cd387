"""`fastgen-serve --local` on this machine, asked by 1 and by 64 of OpenAI's clients that never wait.

    python benchmarks/bench_openai.py --output benchmarks/results

Clients and the server share the cores. Each client asks for one of 200 texts in one of six ways: greedy search, 3 or 4
beams, samples, and streams of each kind; at most 20, 40 or 80 new tokens. The first answer to each question is compared
with what stock `generate` gives it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measuring
import openai
import transformers

from fastgen.demo import task
from fastgen.demo.job import SHIPPED_MODEL

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kit"))
from serve_process import Server
from serving_kit import stock

TEXTS = [" ".join(next(task.sentences(seed, held_out=True))[0].split()[: 3 + 2 * seed % 19]) for seed in range(200)]
LENGTHS = (20, 40, 80)
# What a client asks for, and what `generate` is to be asked for.
WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {}),
    ({"temperature": 0, "best_of": 4}, {"num_beams": 4}),
    ({"extra_body": {"num_beams": 3}, "n": 2}, {"num_beams": 3, "num_return_sequences": 2}),
    ({"seed": 7, "temperature": 0.8}, {"do_sample": True, "top_k": 0, "temperature": 0.8}),
    ({"temperature": 0, "best_of": 4, "stream": True}, {"num_beams": 4}),
    ({"seed": 7, "stream": True}, {"do_sample": True, "top_k": 0}),
]
Answers = dict[tuple[str, int, int], list[str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", help="of the server (default: its cores)")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    args = parser.parse_args()
    answers: Answers = {}
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        threads = [] if args.threads is None else ["--threads", args.threads]
        server = Server(Path(temporary) / "log", "--local", *threads)
        try:
            asyncio.run(_measured(server, 8, 3.0, answers))  # warm-up
            for turn in range(args.rounds):
                order = args.clients if turn % 2 == 0 else args.clients[::-1]
                rounds.append({str(n): asyncio.run(_measured(server, n, args.seconds, answers)) for n in order})
        finally:
            server.stop()
    for (text, length, way), answer in answers.items():
        options = WAYS[way][1]
        expected = stock(text, seed=7, max_new_tokens=length, **options)[0]
        if answer != expected:
            raise SystemExit(f"{text!r}, {options}: {answer!r} instead of {expected!r}")
    summary = _summary(rounds, [str(n) for n in args.clients])
    result = {
        **measuring.environment(openai, transformers),
        "threads": args.threads,
        "what": "the shipped model, greedy search, beams, samples and streams, at most 20, 40 or 80 new tokens",
        "verified": f"{len(answers)} different questions, answered as stock generate does",
        "summary": summary,
        "rounds": rounds,
    }
    print(json.dumps({"summary": summary, "verified": result["verified"]}, indent=1))
    if args.output:
        measuring.write(args.output, "openai", result)
    return 0


def _summary(rounds: Sequence[dict[str, dict[str, float]]], clients: Sequence[str]) -> dict[str, dict[str, float]]:
    """The medians of the rounds, and how many times the answers of the first number of clients."""
    return {
        n: {name: statistics.median(each[n][name] for each in rounds) for name in ("per_second", "p50", "p95")}
        | {"failed": sum(each[n]["failed"] for each in rounds)}
        | {"ratio": statistics.median(each[n]["per_second"] / each[clients[0]]["per_second"] for each in rounds)}
        for n in clients
    }


async def _measured(server: Server, clients: int, seconds: float, answers: Answers) -> dict[str, float]:
    times: list[float] = []
    failed = 0
    end = time.perf_counter() + seconds

    async def client(number: int, api: Any) -> None:
        nonlocal failed
        chance = random.Random(number)
        while (started := time.perf_counter()) < end:
            text, length, way = chance.choice(TEXTS), chance.choice(LENGTHS), chance.randrange(len(WAYS))
            try:
                found = await _asked(api, text, length, WAYS[way][0])
                answers.setdefault((text, length, way), found)
            except openai.OpenAIError as error:
                print(error, file=sys.stderr)
                failed += 1
            times.append(time.perf_counter() - started)

    url = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=120) as api:
        began = time.perf_counter()
        await asyncio.gather(*(client(number, api) for number in range(clients)))
        lasted = time.perf_counter() - began
    times.sort()
    p50, p95 = times[len(times) // 2], times[int(len(times) * 0.95)]
    return {"per_second": len(times) / lasted, "p50": p50, "p95": p95, "failed": failed, "answers": len(times)}


async def _asked(api: Any, text: str, length: int, options: dict[str, Any]) -> list[str]:
    """The texts of an answer."""
    found = await api.completions.create(model=SHIPPED_MODEL.name, prompt=text, max_tokens=length, **options)
    if not options.get("stream"):
        return [choice.text for choice in found.choices]
    return ["".join([chunk.choices[0].text async for chunk in found])]


if __name__ == "__main__":
    sys.exit(main())
