"""`fastgen-serve --local` on this machine, asked by 1 and by 64 of OpenAI's clients that never wait.

    python benchmarks/bench_openai.py --output benchmarks/results

Clients and the server share the cores. Each client asks for one of 200 texts in one of six ways: greedy search, 3 or 4
beams, samples, and streams of each kind; at most 20, 40 or 80 new tokens. The first answer to each question is compared
with what stock `generate` gives it alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import clients
import openai
from serving_kit import stock

from fastgen.demo.job import SHIPPED_MODEL

# What a client asks for, and what `generate` is to be asked for.
WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {}),
    ({"temperature": 0, "best_of": 4}, {"num_beams": 4}),
    ({"extra_body": {"num_beams": 3}, "n": 2}, {"num_beams": 3, "num_return_sequences": 2}),
    ({"seed": 7, "temperature": 0.8}, {"do_sample": True, "top_k": 0, "temperature": 0.8}),
    ({"temperature": 0, "best_of": 4, "stream": True}, {"num_beams": 4}),
    ({"seed": 7, "stream": True}, {"do_sample": True, "top_k": 0}),
]


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[clients.Ask]:
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=120) as api:

        async def ask(text: str, length: int, way: int) -> list[str]:
            options = WAYS[way][0]
            found: Any = await api.completions.create(
                model=SHIPPED_MODEL.name, prompt=text, max_tokens=length, **options
            )
            if not options.get("stream"):
                return [choice.text for choice in found.choices]
            return ["".join([chunk.choices[0].text async for chunk in found])]

        yield ask


def expected(text: str, length: int, way: int) -> list[str]:
    return stock(text, seed=7, max_new_tokens=length, **WAYS[way][1])[0]


def main() -> int:
    parser = clients.options(__doc__, [1, 64], 15.0)
    parser.add_argument("--threads", help="of the server (default: its cores)")
    args = parser.parse_args()
    flags = ["--local", *([] if args.threads is None else ["--threads", args.threads])]
    asking = clients.Asking(client, openai.OpenAIError, expected, len(WAYS))
    what = "the shipped model, greedy search, beams, samples and streams, at most 20, 40 or 80 new tokens"
    return clients.run(args, asking, "openai", what, openai, *flags)


if __name__ == "__main__":
    sys.exit(main())
