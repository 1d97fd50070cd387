"""fastgen-bench soak: it finds a fastgen that is wrong, its script shows it again, and its cases are reproducible."""

from __future__ import annotations

import collections
import functools
import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

import fastgen
from fastgen.bench.soak import edits, models, modes, play, program
from fastgen.bench.soak.cases import drawn_case
from fastgen.bench.soak.script import script
from fastgen.cli import bench
from fastgen.optimizer.transformers import dispatch, judge

SEED = 3


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fastgen whose last token is another one, wherever it accelerates."""
    run = dispatch.run

    def wrong(request: Any, stock: Any) -> Any:
        output = run(request, stock)
        judge.sequences_of(output)[..., -1] += 1
        return output

    monkeypatch.setattr(dispatch, "run", wrong)


def test_a_wrong_fastgen_is_found_and_shown_again(
    broken: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["soak", "--seed", str(SEED), "--count", "3", "--output", str(tmp_path), "--quiet"]
    assert bench.main(command) == bench.DIFFERENT
    (path,) = tmp_path.glob("*.py")
    said = capsys.readouterr().out
    assert str(path) in said and "differ" in said
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 1 and "different" in capsys.readouterr().out
    monkeypatch.undo()
    runpy.run_path(str(path), run_name="__main__")  # right again: it ends by itself
    assert "different" not in capsys.readouterr().out


def test_cases_are_reproducible() -> None:
    cases = [drawn_case(SEED, number) for number in range(200)]
    assert cases == [drawn_case(SEED, number) for number in range(200)]
    assert cases == json.loads(json.dumps(cases)), "a case is not plain data"
    assert len({json.dumps({**case, "number": 0}) for case in cases}) == 200
    assert cases != [drawn_case(SEED + 1, number) for number in range(200)]


def test_cases_reach_everything() -> None:
    cases = [drawn_case(SEED, number) for number in range(1500)]
    drawn: dict[str, set[Any]] = collections.defaultdict(set)
    for case in cases:
        drawn["family"].add(case["model"]["family"])
        drawn["mode"].add(case["mode"])
        drawn["edit"] |= {edit["edit"] for call in case["calls"] for edit in call["edits"]}
    assert drawn["family"] == set(models._FAMILIES)
    assert drawn["edit"] == set(edits._EDITS)
    missing = {"compiled_caller", "rounding_functions", "rounding_operators"}
    assert drawn["mode"] == set(modes.MODES) - missing


def test_count_and_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    counts, found = program.soak(functools.partial(drawn_case, SEED), 4, 2, None)
    assert found is None and counts.cases == 2
    assert counts.calls == sum(len(drawn_case(SEED, number)["calls"]) for number in (4, 5))
    command = ["--suite", "soak", "--seed", str(SEED), "--first", "5", "--count", "1", "--output", str(tmp_path)]
    assert bench.main(command) == 0
    assert "1 cases" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_names_of_the_scripts_parts_do_not_collide() -> None:
    """They are in one file there."""
    owners = collections.Counter(
        name
        for part in (models, modes, edits, play)
        for name, value in vars(part).items()
        if getattr(value, "__module__", part.__name__) == part.__name__ and not name.startswith("__")
        if not hasattr(value, "__path__") and not isinstance(value, type(part))
        if callable(value)
    )
    assert [name for name, count in owners.items() if count > 1] == []
    compile(script(drawn_case(SEED, 0), "why", 1), "script", "exec")


# ---------------------------------------------------------------------------------------------- near-ties
def _stock(beams: int, samples: bool) -> tuple[judge.Gaps, Any]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    gaps = judge.Gaps(beams)
    options = dict(num_beams=beams, do_sample=samples, max_new_tokens=6, pad_token_id=0, eos_token_id=3)
    with fastgen.disabled(), gaps.recorded():
        output = model.generate(torch.tensor([[7, 8], [9, 5]]), **options, **judge.DETAILS)
    return gaps, output


@pytest.mark.parametrize(("beams", "samples"), [(1, True), (3, True), (3, False)])
def test_gaps_are_of_stocks_own_choices(beams: int, samples: bool) -> None:
    gaps, output = _stock(beams, samples)
    assert len(gaps.steps) == len(output.scores)
    assert all(torch.isfinite(step).all() and (step > 0).all() for step in gaps.steps), "torch draws in another way"


@pytest.mark.parametrize("gap", [1e-6, 1e-3])
def test_only_a_near_tie_is_allowed(gap: float) -> None:
    """Two outputs that part in the last of two steps, where stock's best two are so close."""
    first = torch.tensor([[0.0, 1.0, -1.0]])
    stock, ours = torch.tensor([[0.0, 1.0, 1.0 - gap]]), torch.tensor([[0.0, 1.0, 1.0 + gap]])
    theirs, mine = (
        transformers.generation.utils.GenerateDecoderOnlyOutput(
            sequences=torch.tensor([[5, 1, last]]), scores=(first, scores)
        )
        for last, scores in ((1, stock), (2, ours))
    )
    why = judge.parted_wrongly(theirs, mine, judge.Gaps(1))
    assert (why is None) == (gap == 1e-6), why


@pytest.mark.parametrize(("error", "kind"), [(3e-4, judge.ROUNDING), (5e-4, judge.DIFFERENT)])
def test_scores_may_be_as_wrong_as_stocks(error: float, kind: str) -> None:
    """Of the same tokens: stock is 2e-4 from what it gives in float64, ours may be twice as far."""

    def run(wrong: float, dtype: torch.dtype = torch.float32) -> Any:
        scores = torch.tensor([[0.0, 9.0 + wrong, 1.0, -math.inf]], dtype=dtype)
        sequences = torch.tensor([[5, 1]])
        return transformers.generation.utils.GenerateDecoderOnlyOutput(sequences=sequences, scores=(scores,))

    def exact(**_: Any) -> Any:
        return run(0.0, torch.float64)

    def judged(exact: Any = None) -> judge.Verdict:
        return judge.judged(lambda **_: run(-2e-4), lambda **_: run(error), 1, exact=exact)

    assert judged(exact).kind == kind
    assert judged().kind == judge.DIFFERENT


def _run(scores: list[float], tokens: tuple[int, ...] = (5, 1), beams: int = 0, **more: Any) -> Any:
    rows = tuple(torch.tensor([[score, 1.0]]) for score in scores)
    kind = "GenerateBeamDecoderOnlyOutput" if beams else "GenerateDecoderOnlyOutput"
    more |= {"beam_indices": torch.tensor([[beams - 1]])} if beams else {}
    return getattr(transformers.generation.utils, kind)(sequences=torch.tensor([tokens]), scores=rows, **more)


@pytest.mark.parametrize(
    "stock, ours, exact",
    [
        pytest.param(_run([2.0]), _run([2.0], (5, 2)), _run([2.1]), id="tokens"),
        pytest.param(_run([2.0]), _run([2.0, 2.0]), _run([2.1]), id="steps"),
        pytest.param(_run([2.0], beams=1), _run([2.0], beams=2), _run([2.1], beams=1), id="beams"),
        pytest.param(
            _run([2.0], beams=1, sequences_scores=torch.tensor([1.0])),
            _run([2.0], beams=1, sequences_scores=torch.tensor([50.0])),
            _run([2.1], beams=1, sequences_scores=torch.tensor([1.0])),
            id="scores of sequences",
        ),
        pytest.param(_run([2.0]), _run([2.3]), ValueError("no float64"), id="an error"),
        pytest.param(_run([2.0]), torch.tensor([[5, 1]]), _run([2.1]), id="a tensor"),
    ],
)
def test_nothing_else_is_rounding(stock: Any, ours: Any, exact: Any) -> None:
    def raised_or_returned(**_: Any) -> Any:
        if isinstance(exact, Exception):
            raise exact
        return exact

    verdict = judge.judged(lambda **_: stock, lambda **_: ours, 1, exact=raised_or_returned)
    assert verdict.kind == judge.DIFFERENT, verdict


def _greedy(error: float, dtype: torch.dtype = torch.float32, gap: float = 3e-5, heeds: bool = True) -> judge.Run:
    """A search of two steps; the second step's best two are `gap` apart, and the second best is `error` too good."""

    def run(logits_processor: Any = (), **_: Any) -> Any:
        tokens, steps = [5], []
        for scores in ([0.0, 1.0, -1.0], [0.0, 1.0, 1.0 - gap + error]):
            given = torch.tensor([scores], dtype=dtype)
            for processor in logits_processor:
                given = processor(torch.tensor([tokens]), given) if heeds else (processor(None, given), given)[1]
            tokens.append(int(given.argmax()))
            steps.append(given)
        return transformers.generation.utils.GenerateDecoderOnlyOutput(
            sequences=torch.tensor([tokens]), scores=tuple(steps)
        )

    return run


@pytest.mark.parametrize(
    "stock, ours, gap, kind",
    [
        pytest.param(-2e-5, 3.9e-5, 1e-5, judge.ROUNDING, id="as wrong as stock"),
        pytest.param(-2e-5, 4.5e-5, 1e-5, judge.DIFFERENT, id="over twice as wrong"),
        pytest.param(-1e-5, 1.9e-5, 1.5e-5, judge.DIFFERENT, id="a gap that stock's error cannot turn round"),
        pytest.param(0.0, 3e-5, 2e-5, judge.DIFFERENT, id="stock is right"),
    ],
)
def test_choices_may_be_as_wrong_as_stocks(stock: float, ours: float, gap: float, kind: str) -> None:
    """Stock's own two candidates are `gap - stock` apart: no near-tie in any of these."""
    runs = _greedy(stock, gap=gap), _greedy(ours, gap=gap)
    exact = _greedy(0.0, torch.float64, gap=gap)
    assert judge.judged(*runs, 1, exact=exact).kind == kind
    assert judge.judged(*runs, 1).kind == judge.DIFFERENT


def test_a_choice_that_scores_do_not_explain_is_no_rounding() -> None:
    """With stock's scores at every step, fastgen still takes another token; or float64 does not run."""

    def raises(**_: Any) -> Any:
        raise ValueError("no float64")

    stock, exact = _greedy(-2e-5, gap=1e-5), _greedy(0.0, torch.float64, gap=1e-5)
    assert judge.judged(stock, _greedy(3e-5, gap=1e-5, heeds=False), 1, exact=exact).kind == judge.DIFFERENT
    assert judge.judged(stock, _greedy(3e-5, gap=1e-5), 1, exact=raises).kind == judge.DIFFERENT


@pytest.mark.parametrize(
    ("stock", "ours", "kind"),
    [
        (-0.15, 0.05, judge.ROUNDING),
        (-0.15, 0.45, judge.DIFFERENT),
        (0.0, 0.15, judge.DIFFERENT),
        (0.0, 0.05, judge.NEAR_TIE),
    ],
)
def test_logits_of_half_precision_may_be_as_wrong_as_stocks(stock: float, ours: float, kind: str) -> None:
    runs = _greedy(stock, torch.bfloat16, gap=0.01), _greedy(ours, torch.bfloat16, gap=0.01)
    assert judge.judged(*runs, 1, "bfloat16", _greedy(0.0, torch.float64, gap=0.01)).kind == kind
    alone = judge.judged(*runs, 1, "bfloat16").kind
    assert alone == (kind if kind == judge.NEAR_TIE else judge.DIFFERENT)


def test_outputs_that_differ_without_a_choice_are_wrong() -> None:
    scores = (torch.tensor([[0.0, 1.0, 1.0]]),)
    output = transformers.generation.utils.GenerateDecoderOnlyOutput(sequences=torch.tensor([[5, 1]]), scores=scores)
    assert judge.parted_wrongly(output, output, judge.Gaps(1)) == "no choice of a token differs"
