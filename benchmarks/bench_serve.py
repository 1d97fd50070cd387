"""`fastgen-serve` on this machine: answers a second and their latency, with 1, 8 and 64 clients that never wait.

    python benchmarks/bench_serve.py --output benchmarks/results

Clients and the server share the cores. Each client asks for one of 200 texts, with 4 beams and at most 20, 40 or 80 new
tokens; the first answer to each question is compared with what stock `generate` gives it alone.
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
from pathlib import Path
from typing import Any

import aiohttp
import measuring
import ray
import transformers

from fastgen.demo import task

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kit"))
from serve_process import Server
from serving_kit import stock

TEXTS = [" ".join(next(task.sentences(seed, held_out=True))[0].split()[: 3 + 2 * seed % 19]) for seed in range(200)]
LENGTHS = (20, 40, 80)
Answers = dict[tuple[str, int], str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    args = parser.parse_args()
    answers: Answers = {}
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        server = Server(Path(temporary) / "log")
        try:
            asyncio.run(_measured(server, 8, 3.0, answers))  # warm-up
            for turn in range(args.rounds):
                order = args.clients if turn % 2 == 0 else args.clients[::-1]
                rounds.append({str(n): asyncio.run(_measured(server, n, args.seconds, answers)) for n in order})
        finally:
            server.stop()
    for (text, length), answer in answers.items():
        expected = stock(text, num_beams=4, max_new_tokens=length)[0][0]
        if answer != expected:
            raise SystemExit(f"{text!r}: {answer!r} instead of {expected!r}")
    one = str(args.clients[0])
    summary = {
        str(n): {
            name: statistics.median(each[str(n)][name] for each in rounds)
            for name in ("per_second", "p50", "p95", "failed")
        }
        | {"ratio": statistics.median(each[str(n)]["per_second"] / each[one]["per_second"] for each in rounds)}
        for n in args.clients
    }
    result = {
        **measuring.environment(ray, transformers),
        "what": "the shipped model, 4 beams, at most 20, 40 or 80 new tokens",
        "verified": f"{len(answers)} different questions, answered as stock generate does",
        "summary": summary,
        "rounds": rounds,
    }
    print(json.dumps({"summary": summary, "verified": result["verified"]}, indent=1))
    if args.output:
        measuring.write(args.output, "serve", result)
    return 0


async def _measured(server: Server, clients: int, seconds: float, answers: Answers) -> dict[str, float]:
    times: list[float] = []
    failed = 0
    end = time.perf_counter() + seconds

    async def client(number: int, session: Any) -> None:
        nonlocal failed
        chance = random.Random(number)
        while (started := time.perf_counter()) < end:
            text, length = chance.choice(TEXTS), chance.choice(LENGTHS)
            body = {"text": text, "num_beams": 4, "max_new_tokens": length}
            async with session.post(f"http://127.0.0.1:{server.port}/v1/generate", json=body) as answer:
                found = await answer.json()
                failed += answer.status != 200
            times.append(time.perf_counter() - started)
            answers.setdefault((text, length), found["outputs"][0][0]["text"])

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(client(number, session) for number in range(clients)))
        lasted = time.perf_counter() - began
    times.sort()
    p50, p95 = times[len(times) // 2], times[int(len(times) * 0.95)]
    return {"per_second": len(times) / lasted, "p50": p50, "p95": p95, "failed": failed, "answers": len(times)}


if __name__ == "__main__":
    sys.exit(main())
