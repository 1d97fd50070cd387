"""The resident memory of `fastgen-serve --local` while it answers 100,000 requests, a look every 1,000.

    python benchmarks/bench_memory.py --output benchmarks/results

The model is a tiny random one with a chat template. Requests of all kinds come in turn, with texts and options that are
drawn for each: beams, samples, streams, stops and log-probabilities of all three endpoints, streams and answers that
the client leaves, and bodies that are refused. A line is fitted to the looks after the warm-up: its slope, with twice
the standard error, says whether the memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import measuring
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kit"))
from openai_kit import folder_of
from serve_process import Server

EVERY = 1000
PREFIXES = 4 * 2**20  # bytes of the prefix cache, so few that it is full before the fit
GENERATE, TEXT, CHAT = "/v1/generate", "/v1/completions", "/v1/chat/completions"
WORDS = "the cat sat on mat and dogs did not see it they were asleep 天 地 宇宙".split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--warm-up", type=int, default=20_000, help="requests before the fit (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = folder_of("gpt2", Path(temporary))
        server = Server(
            Path(temporary) / "log", "--local", "--threads", "1", "--prefix-cache", str(PREFIXES), model=model
        )
        try:
            looks, answers, seconds = asyncio.run(_asked(server, args.requests, args.clients))
        finally:
            server.stop()
    measured = [(one["requests"], one["resident_kib"]) for one in looks if one["requests"] >= args.warm_up]
    summary = {"per_second": args.requests / seconds, "answers": answers, **_fitted(measured)}
    print(json.dumps(summary, indent=1))
    if args.output:
        environment = measuring.environment(aiohttp, transformers)
        result = {**environment, **vars(args), "output": None, "summary": summary, "looks": looks}
        measuring.write(args.output, "memory", result)
    return 0


def _fitted(looks: list[tuple[int, int]]) -> dict[str, float]:
    """The line through the looks, in KiB for 1,000 requests, twice its standard error, and the least and the most."""
    x, y = [requests / EVERY for requests, _ in looks], [kib for _, kib in looks]
    slope, start = statistics.linear_regression(x, y)
    rest = sum((b - start - slope * a) ** 2 for a, b in zip(x, y, strict=True)) / (len(x) - 2)
    error = (rest / (statistics.pvariance(x) * len(x))) ** 0.5
    return {"kib_per_1000": slope, "two_errors": 2 * error, "least_kib": min(y), "most_kib": max(y)}


async def _asked(server: Server, requests: int, clients: int) -> tuple[list[dict[str, int]], dict[str, int], float]:
    """The memory at each look, how often each kind of answer came, and the seconds."""
    numbers, looks, answers = itertools.count(1), [_look(server, 0)], Counter[str]()

    async def client(session: aiohttp.ClientSession) -> None:
        while (number := next(numbers)) <= requests:
            answers[await _ask(session, number)] += 1
            if answers.total() % EVERY == 0:
                looks.append(_look(server, answers.total()))
                print(looks[-1], file=sys.stderr)

    began = time.perf_counter()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return looks, dict(sorted(answers.items())), time.perf_counter() - began


def _look(server: Server, requests: int) -> dict[str, int]:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return {"requests": requests, "resident_kib": int(line.split()[1])}


async def _ask(session: aiohttp.ClientSession, number: int) -> str:
    """Send the request of a number; what came of it, in a word."""
    chance = random.Random(number)
    path, body = _question(chance, number)
    leaves = number % 20 == 0
    if leaves:
        body |= {"min_new_tokens" if path == GENERATE else "min_tokens": 40}
    try:
        seconds = 0.01 if leaves and not body["stream"] else 120  # while it is searched for
        return await asyncio.wait_for(_read(session, path, body, leaves), seconds)
    except asyncio.TimeoutError:
        return "left"


async def _read(session: aiohttp.ClientSession, path: str, body: dict[str, Any], leaves: bool) -> str:
    async with session.post(path, json=body) as answer:
        if leaves and answer.status == 200:
            await answer.content.readany()
            answer.close()
            return "left its stream"
        await answer.read()
        return str(answer.status)


def _question(chance: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    """A path and a body: one in nine is refused."""
    path = chance.choice((GENERATE, TEXT, CHAT))
    text = " ".join(chance.choices(WORDS, k=chance.randrange(1, 12)))
    beams, length = chance.choice((1, 1, 1, 4)), chance.choice((4, 8))
    body: dict[str, Any]
    if path == GENERATE:
        body = {"text": [text, text[::-1]] if number % 4 == 0 else text, "num_beams": beams, "max_new_tokens": length}
    else:
        asked = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
        body = {**asked, "max_tokens": length, "temperature": 0, "num_beams": beams}
        if number % 13 == 0:
            body["stop"] = chance.choice(WORDS)
        if number % 7 == 0 and beams == 1:
            body |= {"logprobs": 3} if path == TEXT else {"logprobs": True, "top_logprobs": 3}
    if beams == 1 and chance.random() < 0.5:
        body |= {"temperature": 0.7 if number % 25 else chance.uniform(0.5, 2), "seed": number}
        body |= {"do_sample": True} if path == GENERATE else {}
    body["stream"] = number % 3 == 0
    if number % 9 == 0:
        name = "text" if path == GENERATE else "prompt" if path == TEXT else "messages"
        long = "the cat " * 200
        bad = ({f"x{number}": 1}, {name: number}, {name: ""}, {"num_beams": number}, {"model": f"m{number}"})
        body |= chance.choice((*bad, {} if path == CHAT else {name: long}))
    return path, body


if __name__ == "__main__":
    sys.exit(main())
