"""Cases, drawn by seed and number: plain data, which JSON can hold."""

from __future__ import annotations

import random
from typing import Any

from fastgen.bench.soak.edits import drawn_edit
from fastgen.bench.soak.models import FIRST_WORD, drawn_model
from fastgen.bench.soak.modes import MODES

# The first takes minutes for each call. The other two change what products return: to be drawn once fastgen leaves
# calls inside of such modes to the host.
_NOT_DRAWN = ("compiled_caller", "rounding_functions", "rounding_operators")


def drawn_case(seed: int, number: int, device: str = "cpu", dtype: str = "float32") -> dict[str, Any]:
    """Case `number` of `seed`, whatever others were drawn before, for a model in `dtype` on `device`."""
    draw = random.Random(f"soak-{seed}-{number}")
    model = drawn_model(draw)
    calls = [_call(draw, model["config"]["vocab_size"], is_first) for is_first in (True, False, False, False)]
    others = [name for name in MODES if name not in _NOT_DRAWN]
    return {
        "seed": seed,
        "number": number,
        "device": device,
        "dtype": dtype,
        "model": model,
        "mode": draw.choice(others) if draw.random() < 0.7 else "plain",
        "settings": {
            "tier": draw.choice(["auto", "auto", "fast", "compat"]),
            "replay": draw.choice(["auto", "always", "off"]),
            "packing": draw.choice(["auto", "always", "off"]),
            "cache": draw.choice(["auto", "kv", "x"]),  # "k", "v" and "h" invert weights: a choice of less accuracy
            # From a stream of its own: what else is drawn for a number stays.
            "speculate": random.Random(f"drafts-{seed}-{number}").choice(["off", "auto", 1, 3, 6]),
            "cuda_graphs": device != "cpu" and random.Random(f"graphs-{seed}-{number}").random() < 0.5,
        },
        "calls": calls[: draw.randint(1, 4)],
    }


def _call(draw: random.Random, vocab: int, is_first: bool) -> dict[str, Any]:
    longest = draw.choice([1, 2, 7, 12])
    lengths = [draw.randint(1, longest) for _ in range(draw.choice([1, 1, 2, 3, 4]))]
    lengths[draw.randrange(len(lengths))] = longest
    return {
        "edits": [] if is_first else [drawn_edit(draw) for _ in range(draw.choice([0, 1, 1, 2]))],
        "inputs": {
            "lengths": lengths,
            "padding": "left" if draw.random() < 0.8 else "right",
            "seed": draw.randrange(999),
        },
        "options": _options(draw, vocab),
        "seed": draw.randrange(10**6),
    }


def _options(draw: random.Random, vocab: int) -> dict[str, Any]:
    beams, samples = draw.choice([1, 1, 2, 3, 4, 5]), draw.random() < 0.4
    options: dict[str, Any] = {
        "num_beams": beams,
        "do_sample": samples,
        "max_new_tokens": draw.choice([1, 3, 6, 9, 14, 40]),
    }
    optional: dict[str, Any] = {
        "repetition_penalty": draw.choice([0.8, 1.2]),
        "no_repeat_ngram_size": draw.choice([1, 2, 3]),
        "min_new_tokens": draw.choice([2, 5]),
        "min_length": draw.choice([4, 12]),
        "eos_token_id": draw.sample(range(FIRST_WORD, vocab), draw.choice([1, 2, 4])),
        "bad_words_ids": [[draw.randrange(FIRST_WORD, vocab)]],
        "renormalize_logits": True,
    }
    if beams > 1:
        optional["num_return_sequences"] = draw.randint(1, beams)
        optional["early_stopping"] = draw.choice([True, False, "never"])
        optional["length_penalty"] = draw.choice([-1.0, 0.0, 2.0])
    if samples:
        sampling = {"top_k": draw.choice([0, 5, 20]), "top_p": 0.8, "temperature": draw.choice([0.6, 1.4])}
        optional |= sampling | ({"num_return_sequences": draw.randint(1, 3)} if beams == 1 else {})
    for name, value in optional.items():
        if draw.random() < 0.3:
            options[name] = value
    if draw.random() < 0.3:
        options |= {"return_dict_in_generate": True, "output_scores": draw.random() < 0.7}
    return options
