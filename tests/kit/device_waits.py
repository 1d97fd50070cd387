"""How often a step waits for the device, by the fake one's notes."""

from __future__ import annotations

import collections
from collections.abc import Callable

import fake_cuda

FEW, MANY = 24, 32  # steps; the longer search has more of those in the middle
PLACES = ("in fastgen", "there, for an earlier step", "in the host")


def of_a_step(run: Callable[[int], None], title: str) -> tuple[float, ...]:
    """How often a step in the middle of a search waits, in each of `PLACES`; printed with the lines that do.

    `run(count)` decodes so many tokens. It runs three times: the first may capture steps.
    """
    found = []
    for count in (FEW, FEW, MANY):
        with fake_cuda.device() as device:
            run(count)
        found.append(collections.Counter(device.waits))
    more = found[2] - found[1]
    each = dict.fromkeys(PLACES, 0.0)
    for wait, count in more.items():
        place = PLACES[2] if not wait.is_ours else PLACES[1] if wait.kind == "late" else PLACES[0]
        each[place] += count / (MANY - FEW)
    print(f"\n{title} {each}")
    for wait, count in more.most_common():
        print(f"    {count / (MANY - FEW):.2f} {wait.kind:7} {wait.operator:32} {wait.where}")
    return tuple(each.values())
