"""Serves one copy of the model from this process, by uvicorn alone: without Ray."""

from __future__ import annotations

import logging
import math
import threading
import time

import torch
import uvicorn
from uvicorn.protocols.http import auto

from fastgen import config
from fastgen.pipeline.errors import DONE, WorkerError
from fastgen.pipeline.transformers import prepare
from fastgen.serving import cores, logs, services, starting
from fastgen.serving.app import build
from fastgen.serving.observed import LOG
from fastgen.serving.proxy import watched
from fastgen.serving.service import BaseService
from fastgen.serving.settings import ServiceSettings

_LOOK_SECONDS = 0.05  # between looks at how many requests still run
_HEALTH_SECONDS = 1.0
_GRACE_SECONDS = 5  # for answers to reach the clients


def run(settings: ServiceSettings) -> int:
    """Serve until SIGINT or SIGTERM; running requests are then still answered, and new ones refused.

    Raises:
        InputError: the service cannot start.
        WorkerError: the engine, or the server, has stopped.
    """
    prepare.prepared(settings.model, starting.say)  # refuses bad settings in a sentence, before anything is started
    services.check(settings.model)
    starting.warn_if_open(settings)
    threads = settings.threads or max(1, int(cores.available()))
    if words := cores.oversubscribed(1, threads):
        starting.say(words)
    listener = starting.bound(settings.host, settings.port)  # which refuses connections until the model is loaded
    torch.set_num_threads(threads)
    config.configure(prefix_cache=settings.prefix_cache)
    _log_to_stderr(settings.log_format)
    service = services.service_of(settings.model, settings.limits, settings.most_queued)
    server = _server(service, settings)
    thread = threading.Thread(target=server.run, args=([listener],), name="fastgen-http", daemon=True)
    thread.start()
    try:
        with starting.stop_signals() as stopped:
            while not server.started:
                if not thread.is_alive():
                    raise WorkerError("The HTTP server has not started: another service may have taken the port")
                time.sleep(_LOOK_SECONDS)
            starting.say_ready(settings, services.path_of(settings.model))
            while not stopped.wait(_HEALTH_SECONDS):
                if not (service.engine.is_alive and thread.is_alive()):
                    raise WorkerError("The engine or the HTTP server has stopped: start the command again")
            starting.say_stopping()
            _drain(service, settings.limits.seconds)
            server.should_exit = True
            thread.join(2 * _GRACE_SECONDS)
    finally:
        service.engine.close()
    return DONE


def _server(service: BaseService, settings: ServiceSettings) -> uvicorn.Server:
    limits = settings.limits
    return uvicorn.Server(
        uvicorn.Config(
            build(service, settings.token),
            # The protocol that uvicorn uses by default, with the limits of connections that Ray's proxies get.
            http=watched(auto.AutoHTTPProtocol, limits.receive_seconds, limits.connections),
            ws="none",
            log_config=None,
            access_log=False,  # the application logs requests itself
            proxy_headers=False,
            timeout_keep_alive=math.ceil(limits.receive_seconds),
            timeout_graceful_shutdown=_GRACE_SECONDS,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )
    )


def _drain(service: BaseService, seconds: float) -> None:
    """Let the service refuse requests, and wait for running ones, at most as long as they may take."""
    service.stop()
    end = time.monotonic() + seconds
    while service.running and service.engine.is_alive and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)


def _log_to_stderr(form: str) -> None:
    """Log requests, and what the HTTP server warns of, in the same form."""
    logs.log_to_stderr(form)
    server = logging.getLogger("uvicorn.error")
    server.handlers, server.propagate = LOG.handlers, False
    server.setLevel(logging.WARNING)
