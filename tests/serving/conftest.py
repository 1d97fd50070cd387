"""One service for the tests that need no network, and models behind OpenAI's endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi_offline", reason="FastAPI is not installed: pip install -c constraints.txt -e '.[serve]'")


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    from serving_kit import model_settings

    from fastgen.serving.limits import Limits
    from fastgen.serving.service import Service

    service = Service(model_settings(), Limits(body_bytes=20_000, inputs=8, new_tokens=64, beams=6, rows=48), 64)
    yield service
    service.engine.close()


@pytest.fixture
def client(service: Any) -> Iterator[Any]:
    from fastapi.testclient import TestClient

    from fastgen.serving.app import build

    with TestClient(build(service, None), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module", params=("gpt2", "llama", "bart"))
def at(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of each kind of model."""
    yield from _served(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _served("gpt2", tmp_path_factory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _served("llama", tmp_path_factory)


def _served(kind: str, folders: pytest.TempPathFactory) -> Iterator[Any]:
    from openai_kit import served

    with served(kind, folders.mktemp(kind)) as found:
        yield found
