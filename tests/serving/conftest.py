"""One service for the tests that need no network."""

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
