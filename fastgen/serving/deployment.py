"""Deploys replicas of the service on Ray Serve."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import ray
import torch
from fastapi import FastAPI
from ray import serve
from ray.serve._private import replica
from ray.serve.config import BackpressureConfig, HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from fastgen import config
from fastgen.distributed.connection import connected, is_node_alive
from fastgen.distributed.placement import Placement, nodes_of, placement
from fastgen.pipeline.errors import DONE, InputError, WorkerError, first_line
from fastgen.pipeline.transformers import prepare
from fastgen.serving import cores, proxy, services, starting
from fastgen.serving.app import build
from fastgen.serving.limited import RETRY_AFTER
from fastgen.serving.observed import LOG
from fastgen.serving.service import BaseService
from fastgen.serving.settings import ServiceSettings

_APP = "fastgen"
_HEALTH_SECONDS = 5.0
_LOOK_SECONDS = 0.2  # between looks at how many requests still run
_GRACE_SECONDS = 1.0  # for answers to reach the clients


_service: tuple[BaseService, str | tuple[str, ...] | None] | None = None  # of this process, which has one replica


def _app() -> FastAPI:
    assert _service is not None
    return build(*_service, behind_ray=True)


@serve.ingress(_app)
class Replica:
    """One copy of the model, which answers requests."""

    def __init__(self, settings: ServiceSettings) -> None:
        global _service
        assigned = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        torch.set_num_threads(settings.threads or max(1, int(assigned)))
        _listen_on_loopback()
        config.configure(prefix_cache=settings.prefix_cache)
        self._service = services.service_of(settings.model, settings.limits, settings.most_queued)
        _service = self._service, settings.token
        # Log to the replica's own file, to which Ray Serve logs, too.
        LOG.handlers, LOG.propagate = logging.getLogger("ray.serve").handlers, False
        LOG.setLevel(logging.INFO)

    def stop(self) -> int:
        """Refuse requests from now on; returns how many still run."""
        self._service.stop()
        return self._service.running

    def check_health(self) -> None:
        """Raise an error if the engine has stopped: Ray Serve then replaces the replica."""
        if not self._service.engine.is_alive:
            raise RuntimeError("the engine has stopped")


def _listen_on_loopback() -> None:
    """Bind the port between replicas to the loopback if Ray is on it: Ray Serve would bind it to all addresses."""
    node, bind = ray.util.get_node_ip_address(), getattr(replica, "add_port_to_grpc_server", None)
    if bind is None:
        LOG.warning("the port between replicas is open at all addresses: this version of Ray binds it in another way")
    elif node == "127.0.0.1":
        replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", node))


def run(settings: ServiceSettings) -> int:
    """Serve until SIGINT or SIGTERM; running requests are then still answered, and new ones refused.

    Raises:
        InputError: the service cannot start.
        WorkerError: Ray's node on this machine has died.
    """
    limits = settings.limits
    prepare.prepared(settings.model, starting.say)  # refuses bad settings in a sentence, before anything is started
    services.check(settings.model)
    starting.warn_if_open(settings)
    is_alone = not settings.ray and "RAY_ADDRESS" not in os.environ  # otherwise other machines may listen and work
    if is_alone:
        starting.bound(settings.host, settings.port).close()
    with connected(settings.ray, starting.say, proxy.environment(limits.receive_seconds, limits.connections)):
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        how = placement(
            str(settings.replicas), settings.cpus_per_replica, settings.gpus_per_replica, nodes_of(ray.nodes())
        )
        if is_alone and (words := cores.oversubscribed(how.least, settings.threads or max(1, int(how.cpus)))):
            starting.say(words)
        if _is_serving():
            raise InputError("Ray Serve runs on this cluster already: end its applications, or name another cluster.")
        try:
            try:
                serve.start(http_options=_http_options(settings))
                handle = serve.run(_application(settings, how), name=_APP)
            except (RuntimeError, ValueError, OSError) as error:
                # Ray's message of an actor's error is a traceback; the cause has the sentence.
                what = first_line(getattr(error, "cause", error))
                raise InputError(f"Cannot start the service: {what}.") from error
            with starting.stop_signals() as stopped:
                starting.say_ready(settings, services.path_of(settings.model))
                while not stopped.wait(_HEALTH_SECONDS):
                    if not is_node_alive():
                        raise WorkerError("Ray's node on this machine has died: start the command again")
                starting.say_stopping()
                _drain(handle, limits.seconds)
        finally:
            serve.shutdown()  # even if it did not start: a cluster would keep the half that did
    return DONE


def _is_serving() -> bool:
    """Whether Ray Serve already runs applications of others, which this command would end with its own."""
    try:
        return bool(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve"))
    except ValueError:
        return False


def _drain(handle: DeploymentHandle, seconds: float) -> None:
    """Let all replicas refuse requests, and wait for running ones, at most as long as they may take.

    Only then is the application removed: from that moment Ray's proxies answer 404.
    """
    end, running = time.monotonic() + seconds + _HEALTH_SECONDS, 1
    while running and time.monotonic() < end and is_node_alive():
        time.sleep(_LOOK_SECONDS)
        try:
            running = sum(handle.broadcast("stop").results(timeout_s=_HEALTH_SECONDS))  # also to new replicas
        except (ray.exceptions.RayError, RayServeException, TimeoutError):  # from a replica that has just died
            running = 1
    time.sleep(_GRACE_SECONDS)


def _http_options(settings: ServiceSettings) -> HTTPOptions:
    files = {"ssl_certfile": settings.ssl_certfile, "ssl_keyfile": settings.ssl_keyfile}
    # Ray's processes may have another working directory.
    paths = {name: os.path.abspath(path) for name, path in files.items() if path is not None}
    return HTTPOptions(host=settings.host, port=settings.port, **paths)


def _application(settings: ServiceSettings, how: Placement) -> Any:
    limits = settings.limits
    deployment = serve.deployment(
        name="generate",
        num_replicas=how.least,
        # The engine's own queue refuses first: Ray's queue only holds if replicas are busy with other things.
        max_ongoing_requests=settings.most_queued + limits.rows + limits.receiving + 64,
        max_queued_requests=settings.most_queued,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER),
        graceful_shutdown_timeout_s=limits.seconds + 5.0,
        graceful_shutdown_wait_loop_s=_LOOK_SECONDS,
        health_check_period_s=_HEALTH_SECONDS,
        # The application logs requests itself.
        logging_config=LoggingConfig(enable_access_log=False, encoding=settings.log_format.upper()),
        ray_actor_options={"num_cpus": how.cpus, "num_gpus": how.gpus},
    )
    return deployment(Replica).bind(settings)
