"""The models that stand in for trained ones: no parameter is what memory happens to hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import settings
import torch
import zoo


@pytest.fixture
def poisoned() -> Iterator[None]:
    """PyTorch fills what nobody has written to: floats with NaN."""
    was, fills = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(was)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def unwritten(model: Any) -> list[str]:
    return [name for name, tensor in model.state_dict().items() if torch.isnan(tensor).any()]


def test_whisper_itself_leaves_some(poisoned: None) -> None:
    """The reason for this module, and that the fixture shows it."""
    whisper = pytest.importorskip("whisper")
    model = whisper.model.Whisper(whisper.model.ModelDimensions(80, 50, 32, 4, 1, 51865, 32, 32, 4, 1))
    assert unwritten(model) == ["decoder.positional_embedding"]


def test_whisper_of_the_docs(poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    whisper = pytest.importorskip("whisper")
    settings.whisper_model(monkeypatch)
    assert not unwritten(whisper.load_model("tiny"))


@pytest.mark.parametrize("name", [*zoo.FAMILIES, *zoo.VARIANTS])
def test_families(name: str, poisoned: None) -> None:
    build: Callable[[], Any] = (zoo.FAMILIES.get(name) or zoo.VARIANTS[name]).build
    assert not unwritten(build())
