"""Differences are excused where the host itself is shown to have a near-tie, and nowhere else."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import pytest
from fake_side import ANSWER, TASK, Fake

from fastgen.bench import measure, models, near_ties, run, runners
from fastgen.bench.measure import Settings, is_answer
from fastgen.bench.runners import Refused
from fastgen.bench.tasks import Task

OTHER: dict[str, Any] = {**ANSWER, "tokens": [[5, 9]], "rows": [[2, 5, 9]]}


# ---------------------------------------------------------------------------------------------- what a host answers
def runner(host: str, task: Task) -> Any:
    order = {"task": task.as_dict(), "folders": {}, "device": "cpu", "dtype": "float32", "options": {}}
    return runners.runner(order | {"runner": host})


@pytest.mark.parametrize("number", [0, 5])
def test_far_from_ties_a_host_does_not_change_its_answer(number: int) -> None:
    pytest.importorskip("transformers")
    demo = Task("demo", "x", "demo", (), batch=4, new=40, beams=3, limit=6)  # two batches
    host = runner("transformers", demo)
    whole = host.outputs(host.generate())
    found = list(near_ties.answers(host, number))
    assert len(found) == 1 + near_ties.TRIES
    assert all(is_answer(whole, number, answer) for answer in found)
    assert not any(is_answer(whole, number - 1, answer) for answer in found)


def test_at_a_tie_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=32, pad_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[3, 4, 5]])
    options = {"max_new_tokens": 1, "min_new_tokens": 1, "do_sample": False}
    best = int(model.generate(ids, **options)[0, -1])
    with torch.no_grad():  # another token is as good, but for rounding
        model.transformer.wte.weight[best + 1] = model.transformer.wte.weight[best]
    job = models.Job(model, options, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    monkeypatch.setattr(models, "build", lambda *_: job)
    found = {tuple(answer["tokens"][0]) for answer in near_ties.answers(runner("transformers", TASK), 0)}
    assert found == {(best,), (best + 1,)}


@pytest.mark.skipif(importlib.util.find_spec("fairseq") is None, reason="fairseq is not installed")
@pytest.mark.parametrize(("model", "number"), [("transformer-base", 1), ("gpt2", 0)])
def test_fairseq_keeps_one_input(model: str, number: int) -> None:
    host = runner("fairseq", Task("tiny", "x", model, (), batch=3, source=7, new=5, beams=3, layers=1))
    whole = host.outputs(host.generate())
    host.keep(number)
    assert is_answer(whole, number, host.outputs(host.generate()))


def test_scores_and_all_hypotheses_count() -> None:
    ours = {"tokens": [[5], [6]], "rows": [[[5], [7]], [[6], [8]]], "scores": [[-1.0, -2.0], [-1.0, -3.0]]}
    alone = {"tokens": [[6]], "rows": [[[6], [8]]], "scores": [[-1.0, -3.0]]}
    assert is_answer(ours, 1, alone) and not is_answer(ours, 0, alone)
    assert not is_answer(ours, 1, {**alone, "scores": [[-1.0, -3.1]]})
    assert not is_answer(ours, 1, {**alone, "rows": [[[6], [9]]]})


def test_rows_count_to_the_end_and_padding_behind_it_does_not() -> None:
    alone = {"tokens": [[5, 6]], "rows": [[2, 5, 6, 3]]}
    rows = {(2, 5, 6, 3): True, (2, 5, 6, 3, 1, 1): True, (2, 5, 6): False, (2, 5, 6, 3, 1, 7): False}
    for row, is_same in rows.items():
        assert is_answer({"tokens": [[5, 6]], "rows": [list(row)]}, 0, alone) is is_same


# ---------------------------------------------------------------------------------------------- what is made of it
@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A task of which fastgen's outputs are others than stock's, and what stock answers when it is asked alone."""

    def take(answers: list[dict[str, Any]] | Exception, outputs: int = 1, **settings: Any) -> tuple[Any, list[int]]:
        asked = []

        class Child(Fake):
            troubles: ClassVar = {}

            def first(self) -> dict[str, Any]:
                answer = OTHER if self.name == "fastgen" else ANSWER
                return {**answer, "tokens": answer["tokens"] * outputs, "rows": answer["rows"] * outputs}

            def near_ties(self, number: int) -> list[dict[str, Any]]:
                assert self.name == "transformers"
                asked.append(number)
                if isinstance(answers, Exception):
                    raise answers
                return answers

        monkeypatch.setattr(measure, "Child", Child)
        monkeypatch.setattr(measure, "PAUSE", 0)
        result, _ = measure.run(TASK, Settings(rounds=2, **settings), [], lambda what: None)
        return result, asked

    return take


def test_an_answer_of_the_host_is_excused_and_said(measured: Any) -> None:
    result, asked = measured([ANSWER, OTHER])
    ours = result["sides"]["fastgen"]
    assert ours["verified"]["different"] == [] and ours["verified"]["near_ties"] == [0] and asked == [0]
    assert "ratio" in ours and run.is_wrong({"tasks": [result]}) == []  # type: ignore[typeddict-item]


# The last: stock is not undecided, so it is not rounding that decides, but what is alone with it in its batch.
@pytest.mark.parametrize("answers", [[ANSWER, ANSWER], Refused("its process died"), [OTHER, OTHER]])
def test_another_output_is_wrong(measured: Any, answers: Any) -> None:
    result, asked = measured(answers)
    ours = result["sides"]["fastgen"]
    assert ours["verified"]["different"] == [0] and "near_ties" not in ours["verified"] and asked == [0]
    assert "ratio" not in ours and "ratio" in result["sides"]["ctranslate2"]
    assert len(run.is_wrong({"tasks": [result]})) == 1  # type: ignore[typeddict-item]


def test_many_differences_are_no_near_ties(measured: Any) -> None:
    result, asked = measured([OTHER], outputs=2)
    assert result["sides"]["fastgen"]["verified"]["different"] == [0, 1] and asked == []


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"counts": True}])
def test_in_half_precision_and_where_counts_are_compared_nothing_is_excused(measured: Any, settings: Any) -> None:
    result, asked = measured([ANSWER, OTHER], **settings)
    assert result["sides"]["fastgen"]["verified"]["different"] == [0] and asked == []
