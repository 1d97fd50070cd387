"""Writes a task's inputs and options for OpenVINO, in a process of its own: the engine runs without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastgen.bench import models
from fastgen.bench.runners import Refused
from fastgen.bench.runners.openvino import IDS, JOB, MASK, check

_SAME = {
    "max_new_tokens",
    "min_new_tokens",
    "num_beams",
    "no_repeat_ngram_size",
    "repetition_penalty",
    "length_penalty",
}
_NOTHING = {"do_sample", "pad_token_id"}  # these need not be said


class Runner:
    def __init__(self, order: dict[str, Any]) -> None:
        import numpy

        if (order["device"], order["dtype"]) != ("cpu", "float32"):
            raise Refused("this benchmark runs OpenVINO on a CPU alone, in float32 or with weights in 8 bits")
        check(order["folders"].get("openvino"))
        job = models.build(order["task"], order["folders"])
        folder, options = Path(order["folder"]), options_of(job)
        for number, batch in enumerate(job.batches):
            for name, key in ((IDS, "input_ids"), (MASK, "attention_mask")):
                numpy.save(folder / name.format(number), batch[key].numpy())
        document = {"batches": len(job.batches), "options": options, "ends": job.ends}
        (folder / JOB).write_text(json.dumps(document))

    def versions(self) -> dict[str, str]:
        return {}


def options_of(job: models.Job) -> dict[str, Any]:
    """Of openvino-genai's `GenerationConfig`; Refused where it has no such search."""
    if job.is_seq2seq:
        raise Refused("openvino-genai generates with decoder-only models alone; its Whisper returns text, not tokens")
    if job.options.get("do_sample"):
        raise Refused("openvino-genai draws samples of its own")
    if others := sorted(job.options.keys() - _SAME - _NOTHING):
        raise Refused(f"this benchmark does not hand {', '.join(others)} to OpenVINO")
    return {name: job.options[name] for name in sorted(_SAME & job.options.keys())}
