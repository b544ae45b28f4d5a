"""`ServeConfig`: options of the server, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass

from herald.config import check, check_kinds


@dataclass(frozen=True)
class ServeConfig:
    """How the server listens, and what it allows.

    Args:
        host, port: where it listens; port 0 for a free one.
        served_model_names: names that clients may ask for, the first one is shown; empty for the model's own.
        api_keys: bearer tokens that open ``/v1``, ``/tokenize`` and ``/detokenize``; empty opens them to all.
        max_waiting: requests that may wait beside those that run; more get 429.
        max_body_bytes: of a request; more gets 413.
        max_choices: completions of one call: ``n`` times its prompts.
        max_tokens: of a chat completion that does not say, cut to what the context leaves.
        max_kv_budget: largest ``kv_budget`` a request may ask for, 0 for the engine's own.
        max_block_length: block lengths that a request may ask for divide it, since each has memory of its own
            on the device; 0 for the checkpoint's block length, or 32 where it has none.
        max_denoising_steps: largest ``denoising_steps`` and ``max_post_steps`` of a request.
        keep_alive_seconds: between two comments on a stream that has nothing to say.
        drain_seconds: how long requests under way may go on after SIGTERM.
        watchdog_seconds: a step that takes longer is reported, and ``/health`` fails; 0 for never.
        access_log: log a line for every request (never its text).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 256
    max_body_bytes: int = 32 * 2**20
    max_choices: int = 64
    max_tokens: int = 1024
    max_kv_budget: float = 0.0
    max_block_length: int = 0
    max_denoising_steps: int = 1024
    keep_alive_seconds: float = 10.0
    drain_seconds: float = 30.0
    watchdog_seconds: float = 120.0
    access_log: bool = True

    def __post_init__(self) -> None:
        check_kinds(self)
        check(isinstance(self.host, str) and self.host != "", "host", self.host, "use a name or an address")
        check(0 <= self.port < 65536, "port", self.port, "use 0 to 65535, such as 8000")
        for name in ("served_model_names", "api_keys"):
            values = getattr(self, name)
            check(
                isinstance(values, tuple) and all(isinstance(each, str) and each for each in values),
                name,
                "..." if name == "api_keys" else values,
                "use a tuple of strings that are not empty",
            )
        check(
            all(key.isascii() and key.isprintable() for key in self.api_keys),
            "api_keys",
            "...",
            "use printable ASCII: a key travels in a header",
        )
        check(self.max_waiting >= 0, "max_waiting", self.max_waiting, "use 0 or more, such as 256")
        check(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "use 1024 or more")
        check(self.max_choices >= 1, "max_choices", self.max_choices, "use 1 or more")
        check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "use 1 or more, such as 1024")
        check(
            0.0 <= self.max_kv_budget <= 1.0,
            "max_kv_budget",
            self.max_kv_budget,
            "use a share in (0, 1], or 0 for the engine's",
        )
        check(
            self.max_block_length >= 0,
            "max_block_length",
            self.max_block_length,
            "use 0 for the checkpoint's",
        )
        check(
            self.max_denoising_steps >= 1,
            "max_denoising_steps",
            self.max_denoising_steps,
            "use 1 or more, such as 1024",
        )
        check(self.keep_alive_seconds > 0, "keep_alive_seconds", self.keep_alive_seconds, "use more than 0")
        check(self.drain_seconds >= 0, "drain_seconds", self.drain_seconds, "use 0 or more, such as 30")
        check(
            self.watchdog_seconds >= 0, "watchdog_seconds", self.watchdog_seconds, "use 0 (never) or seconds"
        )
