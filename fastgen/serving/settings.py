"""What a service is asked for; without what serves, so that a command can make it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastgen.pipeline.transformers.settings import ModelSettings
from fastgen.serving.limits import Limits


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """The model, where it is served, and within which bounds; a replica is told all of it."""

    model: ModelSettings
    limits: Limits
    most_queued: int  # inputs that wait in a replica
    token: str | None = field(repr=False)  # that requests need
    host: str
    port: int
    ray: str  # the cluster's address; "" for RAY_ADDRESS, or this machine alone
    replicas: int
    cpus_per_replica: float | None  # by default 1 beside a GPU, else the node's
    gpus_per_replica: float | None  # by default 1 where there are GPUs
