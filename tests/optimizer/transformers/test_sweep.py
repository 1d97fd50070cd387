"""Every generative class of transformers that can be built tiny: accelerated or a reasoned fallback, never different.

    python tests/optimizer/transformers/test_sweep.py docs/data/models.json [CLASS ...]

examines all classes, or some, and writes what came of each; `python docs/tools/generated.py` then writes it into the
docs. A class is given text alone and, if it reads more than text, inputs of its own: images, audio, boxes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository is importable under pytest
    sys.path[:0] = map(str, (Path(__file__).resolve().parents[3], Path(__file__).resolve().parents[2] / "kit"))

import harness
import pytest
import tiny_models
import torch
import transformers
import zoo
from tiny_models.shrinking import NotTiny, build, short
from transformers.models.auto import modeling_auto

import fastgen
from fastgen import report
from fastgen.optimizer.transformers import TESTED, versions

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
SECONDS = 20  # for one class, at most; nearly all need less than two
ACCELERATED, FALLBACK, NOT_TRIED, DIFFERENT = "accelerated", "fallback", "not tried", "different"


# ---------------------------------------------------------------------------------------------- one class
@dataclass(frozen=True)
class Verdict:
    """What came of a class with one kind of inputs."""

    outcome: str
    why: str = ""  # not accelerated, or not in all searches
    caches: str = ""  # "tree" or "rows": see `fastgen.Call.cache`
    without: str = ""  # what is not accelerated, though the rest is: "beams", or batches by what is special about them


@dataclass(frozen=True)
class Outcome:
    name: str
    text: Verdict
    own: Verdict | None = None  # with inputs of the class's own kind
    seconds: float = 0.0

    @property
    def state(self) -> str:
        verdicts = [each.outcome for each in (self.own, self.text) if each is not None]
        return DIFFERENT if DIFFERENT in verdicts else verdicts[0]


_DETAILS: dict[str, Any] = dict(return_dict_in_generate=True, output_scores=True)
BEAMS: tuple[dict[str, Any], ...] = (
    dict(num_beams=3, max_new_tokens=9, do_sample=False, **_DETAILS),
    dict(num_beams=4, max_new_tokens=7, do_sample=False, early_stopping=True, no_repeat_ngram_size=2, **_DETAILS)
    | dict(num_return_sequences=2),
)
# Sentences end early and leave, and greedy search is long enough to be replayed.
ENDING: tuple[dict[str, Any], ...] = (
    dict(num_beams=4, max_new_tokens=14, do_sample=False, early_stopping=True, return_dict_in_generate=False),
    dict(num_beams=1, max_new_tokens=14, do_sample=False, return_dict_in_generate=False),
)
SAMPLES: tuple[dict[str, Any], ...] = (
    dict(num_beams=1, max_new_tokens=9, do_sample=False, **_DETAILS),
    dict(num_beams=1, max_new_tokens=9, do_sample=True, num_return_sequences=3, top_k=0, **_DETAILS),
)


def texts(model: Any) -> list[dict[str, Any]]:
    """Texts to try, ragged ones first: the first that stock accepts are used, after plain ones."""
    name, generator = model.main_input_name, torch.Generator().manual_seed(1)
    if name == "input_features":
        shapes = [(2, 8, 24), (2, 24, 8), (2, 80, 128), (2, 128, 80), (2, 24, 160)]
        return [{name: torch.randn(shape, generator=generator)} for shape in shapes]
    if name == "input_values":
        return [{name: torch.randn(2, 2000, generator=generator)}]
    if name == "pixel_values" and not hasattr(model.config, "text_config"):
        return [{name: torch.randn(2, 3, 16, 16, generator=generator)}]
    plain = zoo.text(model, seed=1, batch=2, length=8, ragged=False)
    return [zoo.text(model, seed=2, batch=3, length=8), plain, {"input_ids": plain["input_ids"]}]


def examine(name: str, is_thorough: bool = False) -> Outcome:
    """What comes of a class; `is_thorough`: in all batches and searches, else in some of them."""
    start = time.perf_counter()
    try:
        with time_limit(SECONDS):
            try:
                text, own = _examine(name, 2, is_thorough)
            except NotTiny:  # hybrids alternate kinds of layers, and four hold one of each
                text, own = _examine(name, 4, is_thorough)
    except (NotTiny, TimeoutError) as error:
        text, own = Verdict(NOT_TRIED, str(error)), None
    return Outcome(name, text, own, time.perf_counter() - start)


def _examine(name: str, layers: int, is_thorough: bool) -> tuple[Verdict, Verdict | None]:
    model = build(name, layers)
    model.generation_config.eos_token_id = zoo.UNUSED
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = zoo.PAD
    feeding = tiny_models.INPUTS.get(name)
    own = None if feeding is None else _compared(model, feeding(model), is_thorough)
    try:
        text = _compared(model, _batches_of_text(model), is_thorough)
    except NotTiny as error:
        text = Verdict(NOT_TRIED, str(error))
    if own is None and text.outcome == NOT_TRIED and layers == 2:
        raise NotTiny(text.why)
    return text, own


def _batches_of_text(model: Any) -> list[tuple[str, dict[str, Any]]]:
    inputs = _first_accepted(model)
    # A model is proven once, with its first request: let that be the plain one, and the ragged one follow.
    plain = _full(inputs) if "attention_mask" in inputs else inputs
    ragged = [("padded texts", inputs)] if plain is not inputs else []
    return [("texts", plain), *ragged, ("one text", {name: value[:1] for name, value in plain.items()})]


def _compared(model: Any, batches: list[tuple[str, dict[str, Any]]], is_thorough: bool) -> Verdict:
    """Compare the searches that stock can do on these batches; the first is the plainest."""
    searches = [*BEAMS, *SAMPLES, *ENDING] if is_thorough else [BEAMS[0], ENDING[0], SAMPLES[1]]
    if not is_thorough:
        batches = batches[:2]
    ends: int | None = None
    calls: list[report.Call] = []
    left: dict[str, str] = {}  # what is left to the host, with the reason
    for what, tensors in batches:
        for search in searches:
            has_beams = search["num_beams"] > 1
            if search in ENDING:
                search = {**search, "eos_token_id": ends}
            try:
                stock = _stock(model, tensors, search)
            except NotTiny as error:
                if "eos_token_id" not in search:  # some have their own
                    left.setdefault("beams" if has_beams else what, str(error))
                continue
            if ends is None and not isinstance(stock, torch.Tensor):
                row = stock.sequences[0].flatten()
                ends = int(row[-min(6, len(row))])  # a token that the first sentence has not long before its end
            try:
                output, more = harness.run_fastgen(model, tensors, _generate, strict=False, **search)
                harness.assert_same(stock, output, tolerance=1e-3)  # some of these weights are wild
            except TimeoutError:
                raise
            except Exception as error:  # a crash is as bad as a difference
                return Verdict(DIFFERENT, f"{what}: {short(error)}")
            for call in more:
                if call.tier == "stock" and not call.reason:
                    return Verdict(DIFFERENT, f"{what}: fell back without a reason")
                if call.tier == "stock":
                    left.setdefault(what, str(call.reason))
            calls += more
    return _verdict_of(calls, left, batches[0][0])


def _verdict_of(calls: list[report.Call], left: dict[str, str], plainest: str) -> Verdict:
    if not calls:
        return Verdict(NOT_TRIED, next(iter(left.values()), "its generate runs no search"))
    if plainest in left and any(call.tier == "stock" for call in calls):
        return Verdict(FALLBACK, left[plainest])
    if plainest in left:
        return Verdict(NOT_TRIED, left[plainest])
    caches = "rows" if any(call.cache == "rows" for call in calls) else "tree"
    return Verdict(ACCELERATED, next(iter(left.values()), ""), caches, "; ".join(left))


def _generate(model: Any, arguments: dict[str, Any]) -> Any:
    kept = copy.deepcopy(model.generation_config)
    try:
        output = model.generate(**arguments)
        return torch.cat([row.flatten() for row in output]) if isinstance(output, list) else output
    finally:
        model.generation_config = kept  # some models note there what a call has asked for


def _full(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}


def _stock(model: Any, inputs: dict[str, Any], search: dict[str, Any]) -> Any:
    try:
        return harness.run_stock(model, inputs, _generate, **search)
    except TimeoutError:
        raise
    except Exception as error:  # stock's own search does not work on this class
        raise NotTiny(f"stock: {short(error)}") from error


def _first_accepted(model: Any) -> dict[str, Any]:
    errors = []
    for search in (BEAMS[0], SAMPLES[0]):
        for inputs in texts(model):
            try:
                _stock(model, inputs, search)
                return inputs
            except NotTiny as error:
                errors.append(error)
    raise errors[0]


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"takes more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


# ---------------------------------------------------------------------------------------------- all classes
def _classes() -> dict[str, str]:
    """Class name -> kind, each class once."""
    found: dict[str, str] = {}
    for kind, mapping in MAPPINGS.items():
        for names in getattr(modeling_auto, mapping, {}).values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, kind)
    return found


CLASSES = _classes()


@pytest.mark.parametrize("name", CLASSES)
def test_class(name: str) -> None:
    outcome = examine(name)
    if outcome.state == NOT_TRIED:
        pytest.skip(outcome.text.why)
    assert outcome.state in (ACCELERATED, FALLBACK), f"{name}: {outcome}"


def test_known_outcomes() -> None:
    """The sweep itself can tell them apart."""
    assert examine("LlamaForCausalLM").text == Verdict(ACCELERATED, caches="tree")
    assert examine("BartForConditionalGeneration").text == Verdict(ACCELERATED, caches="tree")
    if versions.PREFILLS:
        assert examine("BloomForCausalLM").text == Verdict(ACCELERATED, caches="rows")
    assert examine("XLNetLMHeadModel").state == FALLBACK


@pytest.mark.skipif(transformers.__version__ != TESTED, reason="other versions have other mappings")
def test_every_tiny_model_is_of_a_class() -> None:
    for name in tiny_models.CONFIGURATIONS.keys() | tiny_models.INPUTS.keys():
        if name not in CLASSES:
            assert not hasattr(transformers, name), f"{name} is in none of the mappings"


# ---------------------------------------------------------------------------------------------- the docs' data
def found(outcomes: list[Outcome]) -> dict[str, Any]:
    """What the docs' table is made of."""
    classes = {
        outcome.name: {
            "kind": CLASSES[outcome.name],
            "text": asdict(outcome.text),
            "own": outcome.own and asdict(outcome.own),
        }
        for outcome in sorted(outcomes, key=lambda outcome: outcome.name.lower())
    }
    return {"transformers": transformers.__version__, "classes": classes}


def main(path: str, *names: str) -> None:
    global SECONDS
    SECONDS = 120  # a busy machine is no reason to leave a class out
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    fastgen.enable()
    outcomes = []
    for name in names or CLASSES:
        outcomes.append(examine(name, is_thorough=True))
        last = outcomes[-1]
        print(f"{last.seconds:5.1f} s  {name}: {last.state}  {last.own or last.text}", file=sys.stderr, flush=True)
    Path(path).write_text(json.dumps(found(outcomes), indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
