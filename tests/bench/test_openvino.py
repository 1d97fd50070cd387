"""OpenVINO as a side: what it is handed, and what it is left out for."""

from __future__ import annotations

import importlib
import importlib.machinery
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.bench import models
from fastgen.bench.runners import Missing, Refused, openvino_inputs
from fastgen.bench.runners.openvino import IDS, JOB, MASK, exported, properties

ORDER = {"folders": {}, "device": "cpu", "dtype": "float32"}


def job(*, is_encoder_decoder: bool = False, **options: Any) -> models.Job:
    config: Any = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
    return models.Job(SimpleNamespace(config=config), options, [])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("openvino_genai", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)


def test_options_that_openvino_has() -> None:
    given = {"num_beams": 4, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 2, "no_repeat_ngram_size": 3}
    assert openvino_inputs.options_of(job(**given)) == {"num_beams": 4, "max_new_tokens": 9, "no_repeat_ngram_size": 3}


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (job(is_encoder_decoder=True), "decoder-only models alone"),
        (job(do_sample=True, top_k=3), "samples of its own"),
        (job(num_beams=1, prefix_allowed_tokens_fn=print), "does not hand prefix_allowed_tokens_fn to OpenVINO"),
    ],
)
def test_what_openvino_does_not_do(refused: models.Job, why: str) -> None:
    with pytest.raises(Refused, match=why) as raised:
        openvino_inputs.options_of(refused)
    assert not isinstance(raised.value, Missing)


def test_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Missing, match="not installed: pip install openvino-genai"):
        openvino_inputs.Runner(ORDER)


@pytest.mark.usefixtures("installed")
def test_there_is_no_folder() -> None:
    with pytest.raises(Missing, match="it needs --openvino DIR"):
        openvino_inputs.Runner(ORDER)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("other", [{"device": "cuda"}, {"dtype": "bfloat16"}])
def test_other_devices_and_dtypes_are_refused(other: dict[str, str]) -> None:
    with pytest.raises(Refused, match="on a CPU alone, in float32"):
        openvino_inputs.Runner(ORDER | other)


def test_a_folder_without_the_model_is_said(tmp_path: Path) -> None:
    (tmp_path / "smollm-float32").mkdir()
    (tmp_path / "smollm-float32" / "openvino_model.xml").touch()
    assert exported(tmp_path, "smollm", is_int8=False) == tmp_path / "smollm-float32"
    with pytest.raises(Missing, match="has no exported model smollm-int8"):
        exported(tmp_path, "smollm", is_int8=True)


def test_float32_is_float32() -> None:
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")
    ops = importlib.import_module("openvino.opset13")
    given = ops.parameter([1, 4], dtype=openvino.Type.f32)
    model = openvino.Model([ops.relu(given)], [given])
    compiled = openvino.Core().compile_model(model, "CPU", properties(is_int8=False, threads=1))
    for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"):
        assert compiled.get_property(name) == openvino.Type.f32, name
    assert int(compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE")) == 0
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 1
    assert properties(is_int8=True, threads=1) == {"INFERENCE_NUM_THREADS": 1}


def test_a_batch_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of OpenVINO's own but the pipeline, which needs an exported model."""
    genai = pytest.importorskip("openvino_genai", reason="OpenVINO is not installed")
    import numpy

    from fastgen.bench.runners.openvino import Runner

    class Pipeline:
        def __init__(self, folder: str, device: str, **chosen: Any) -> None:
            scheduler = chosen.pop("scheduler_config")
            assert not scheduler.enable_prefix_caching and scheduler.max_num_batched_tokens > 1_000_000
            assert (folder, device, chosen) == (str(tmp_path / "smollm-int8"), "CPU", properties(True, 1))

        def generate(self, inputs: Any, config: Any) -> Any:
            assert inputs.input_ids.data.tolist() == [[2, 5], [6, 7]]
            assert inputs.attention_mask.data.tolist() == [[0, 1], [1, 1]]
            assert (config.num_beams, config.max_new_tokens, config.stop_token_ids) == (3, 4, {2})
            return SimpleNamespace(tokens=[[8, 9, 2], [8, 9, 9, 9]])

    monkeypatch.setattr(genai, "LLMPipeline", Pipeline)
    (tmp_path / "smollm-int8").mkdir()
    (tmp_path / "smollm-int8" / "openvino_model.xml").touch()
    for name, rows in ((IDS, [[2, 5], [6, 7]]), (MASK, [[0, 1], [1, 1]])):
        numpy.save(tmp_path / name.format(0), numpy.array(rows))
    document = {"batches": 1, "options": {"num_beams": 3, "max_new_tokens": 4}, "ends": [2]}
    (tmp_path / JOB).write_text(json.dumps(document))
    order = {"folder": str(tmp_path), "folders": {"openvino": str(tmp_path)}, "threads": 1, "options": {"int8": True}}
    runner = Runner(order | {"task": {"model": "smollm"}})
    assert runner.outputs(runner.generate()) == {"tokens": [[8, 9], [8, 9, 9, 9]]}
