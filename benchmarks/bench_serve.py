"""`fastgen-serve` on this machine: answers a second and their latency, with 1, 8 and 64 clients that never wait.

    python benchmarks/bench_serve.py --output benchmarks/results

Clients and the server share the cores. Each client asks for one of 200 texts, with 4 beams and at most 20, 40 or 80 new
tokens; the first answer to each question is compared with what stock `generate` gives it alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import clients
import ray
from serving_kit import stock


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[clients.Ask]:
    everybody = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=everybody, raise_for_status=True) as session:

        async def ask(text: str, length: int, way: int) -> Any:
            body = {"text": text, "num_beams": 4, "max_new_tokens": length}
            async with session.post(f"{url}/generate", json=body) as answer:
                return (await answer.json())["outputs"][0][0]["text"]

        yield ask


def expected(text: str, length: int, way: int) -> str:
    return stock(text, num_beams=4, max_new_tokens=length)[0][0]


def main() -> int:
    args = clients.options(__doc__, [1, 8, 64], 10.0).parse_args()
    asking = clients.Asking(client, aiohttp.ClientError, expected)
    return clients.run(args, asking, "serve", "the shipped model, 4 beams, at most 20, 40 or 80 new tokens", ray)


if __name__ == "__main__":
    sys.exit(main())
