"""Runs the application until a signal, a failed start, or `HeraldServer.stop`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn

from herald.async_llm import AsyncLLM
from herald.errors import UsageError
from herald.serve.app import build_app
from herald.serve.config import ServeConfig
from herald.serve.lifecycle import FAREWELL_SECONDS, Lifecycle

KEEP_ALIVE_SECONDS = 15
BACKLOG = 2048

logger = logging.getLogger(__name__)


class HeraldServer(uvicorn.Server):
    """A server that drains before it ends.

    Args:
        config: options.
        load: makes the model; runs in a thread once the server listens.
        model: the model's own name.

    Attributes:
        lifecycle: where it stands.
        url: where it listens.

    Raises:
        UsageError: the address is in use, or not this machine's.
    """

    def __init__(self, config: ServeConfig, load: Callable[[], AsyncLLM], model: str) -> None:
        self.lifecycle = Lifecycle(load, config.drain_seconds, config.watchdog_seconds)
        self.lifecycle.on_end = self._end
        self._sockets = [_listen(config.host, config.port)]
        host, port = self._sockets[0].getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(
            uvicorn.Config(
                build_app(config, self.lifecycle, model),
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(FAREWELL_SECONDS),
                server_header=False,
            )
        )

    def run_until_end(self) -> None:
        """Serve; returns once everything has ended.

        Raises:
            HeraldError: the model could not be loaded.
        """
        self.run(self._sockets)
        if self.lifecycle.error is not None:
            raise self.lifecycle.error

    def stop(self) -> None:
        """As SIGTERM: drain; a second time, end what is under way. Thread-safe."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self.lifecycle.stop)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        logger.info("listening on %s", self.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first one drains, the second ends requests, the third leaves at once."""
        self._signals = getattr(self, "_signals", 0) + 1
        if self._signals > 2 or self._loop is None:
            self.force_exit = self.should_exit = True
        else:
            self.stop()

    def _end(self) -> None:
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port} ({error.strerror})",
            "choose another --host or --port, or --port 0 for a free one",
        ) from error
    listener.set_inheritable(True)
    return listener
