"""Clients of `fastgen-serve` that never wait: what the benchmarks of the service share."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import measuring
import transformers

from fastgen.demo import task

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kit"))
from serve_process import Server

TEXTS = [" ".join(next(task.sentences(seed, held_out=True))[0].split()[: 3 + 2 * seed % 19]) for seed in range(200)]
LENGTHS = (20, 40, 80)
Question = tuple[str, int, int]  # a text, the most new tokens, and the number of the way to ask
Ask = Callable[[str, int, int], Awaitable[Any]]
Rounds = list[dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Asking:
    """How a benchmark asks its questions."""

    client: Callable[[str], AbstractAsyncContextManager[Ask]]  # by the server's address
    failure: type[Exception]  # which `Ask` raises
    stock: Callable[[str, int, int], Any]  # the answer of stock transformers
    ways: int = 1


def options(description: str | None, clients: Sequence[int], seconds: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=clients)
    parser.add_argument("--seconds", type=float, default=seconds, help="of each measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    return parser


def run(args: argparse.Namespace, asking: Asking, name: str, what: str, module: ModuleType, *flags: str) -> int:
    """Start a server with these flags, measure, compare the answers with stock's, and write the result."""
    answers: dict[Question, Any] = {}
    rounds: Rounds = []
    with tempfile.TemporaryDirectory() as temporary:
        server = Server(Path(temporary) / "log", *flags)
        url = f"http://127.0.0.1:{server.port}/v1"
        try:
            asyncio.run(_measured(asking, url, 8, 3.0, answers))  # warm-up
            for turn in range(args.rounds):
                order = args.clients if turn % 2 == 0 else args.clients[::-1]
                rounds.append({str(n): asyncio.run(_measured(asking, url, n, args.seconds, answers)) for n in order})
        finally:
            server.stop()
    for question, answer in answers.items():
        if answer != (expected := asking.stock(*question)):
            raise SystemExit(f"{question}: {answer!r} instead of {expected!r}")
    found = {
        "summary": _summary(rounds, [str(n) for n in args.clients]),
        "verified": f"{len(answers)} different questions, answered as stock generate does",
    }
    print(json.dumps(found, indent=1))
    if args.output:
        result = {**measuring.environment(module, transformers), "flags": flags, "what": what, **found}
        measuring.write(args.output, name, {**result, "rounds": rounds})
    return 0


def _summary(rounds: Rounds, clients: Sequence[str]) -> dict[str, dict[str, float]]:
    """The medians of the rounds, and how many times the answers of the first number of clients."""
    return {
        n: {name: statistics.median(each[n][name] for each in rounds) for name in ("per_second", "p50", "p95")}
        | {"failed": sum(each[n]["failed"] for each in rounds)}
        | {"ratio": statistics.median(each[n]["per_second"] / each[clients[0]]["per_second"] for each in rounds)}
        for n in clients
    }


async def _measured(
    asking: Asking, url: str, clients: int, seconds: float, answers: dict[Question, Any]
) -> dict[str, float]:
    times: list[float] = []
    failed = 0
    end = time.perf_counter() + seconds

    async def client(number: int, ask: Ask) -> None:
        nonlocal failed
        chance = random.Random(number)
        while (started := time.perf_counter()) < end:
            question = chance.choice(TEXTS), chance.choice(LENGTHS), chance.randrange(asking.ways)
            try:
                found = await ask(*question)
                answers.setdefault(question, found)
            except asking.failure as error:
                print(error, file=sys.stderr)
                failed += 1
            times.append(time.perf_counter() - started)

    async with asking.client(url) as ask:
        began = time.perf_counter()
        await asyncio.gather(*(client(number, ask) for number in range(clients)))
        lasted = time.perf_counter() - began
    times.sort()
    p50, p95 = times[len(times) // 2], times[int(len(times) * 0.95)]
    return {"per_second": len(times) / lasted, "p50": p50, "p95": p95, "failed": failed, "answers": len(times)}
