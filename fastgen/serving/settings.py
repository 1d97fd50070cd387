"""The settings of a service, in a module that imports nothing heavy, so that a command can make them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastgen.pipeline.transformers.settings import ModelSettings
from fastgen.serving.limits import Limits


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """The settings of a service: model, address, limits; sent to each replica."""

    model: ModelSettings
    limits: Limits
    most_queued: int  # the most inputs that wait in a replica
    token: str | tuple[str, ...] | None = field(repr=False)  # the bearer token, or tokens, of which requests need one
    prefix_cache: int = 256 * 2**20  # bytes of a replica's prefix cache: see the option of this name
    host: str
    port: int
    ray: str  # the cluster's address; "" for RAY_ADDRESS, or this machine alone
    replicas: int
    cpus_per_replica: float | None  # by default 1 with a GPU, else all of the node
    gpus_per_replica: float | None  # by default 1 where there are GPUs
    threads: int | None = None  # of torch in a replica; by default its CPUs
    log_format: str = "text"  # or "json"
    ssl_certfile: str | None = None  # with the key: the service answers over HTTPS
    ssl_keyfile: str | None = None
