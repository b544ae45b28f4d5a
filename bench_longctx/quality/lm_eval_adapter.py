"""HERALD as a model of lm-evaluation-harness, for tasks that generate text.

    python -m bench_longctx.quality.lm_eval_adapter --model herald \\
        --model_args pretrained=/data/model,kv_budget=0.1 --tasks gsm8k

is the harness's own command line with the model "herald" in it; from Python:
``lm_eval.simple_evaluate(HeraldLM("/data/model"), tasks=[...])``. Importing this module registers the name
where the harness is installed; without it the class stands alone (`make_adapter` takes any base). A
block-diffusion model has no left-to-right likelihood, so ``loglikelihood`` requests are refused.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from bench_longctx import output
from herald import LLM, EngineConfig, OffloadConfig, SamplingParams
from herald.errors import UsageError

MAX_TOKENS = 256
# Names of the longest answer, the one that counts first.
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_REMEDY = "use tasks with output_type generate_until"


def make_adapter(base: type) -> type:
    """The adapter as a subclass of ``base``, the harness's ``lm_eval.api.model.LM`` or a stand-in."""

    class HeraldLM(base):  # type: ignore[misc]
        """One `LLM` behind the harness's interface.

        Args:
            pretrained: model folder or name.
            device, dtype: as for `LLM`.
            batch_size: requests that decode together.
            max_length: positions a request may use, 0 for the model's limit.
            confidence_threshold: of decoding.
            llm: a model that is open already (the other arguments but the threshold then do nothing).
            offload: fields of `OffloadConfig`, such as ``kv_budget=0.1`` or ``enabled=False``.

        Raises:
            UsageError: an unknown argument.
        """

        def __init__(
            self,
            pretrained: str = "tiny",
            device: str | None = None,
            dtype: str = "auto",
            batch_size: int | str = 8,
            max_length: int = 0,
            confidence_threshold: float = 0.9,
            max_batch_size: int | None = None,
            llm: LLM | None = None,
            **offload: Any,
        ) -> None:
            super().__init__()
            known = {field.name for field in fields(OffloadConfig)}
            unknown = sorted(set(offload) - known)
            if unknown:
                raise UsageError(
                    f"{unknown[0]!r} is no argument of the model", f"use one of {', '.join(sorted(known))}"
                )
            seats = int(batch_size) if str(batch_size).isdigit() else EngineConfig().max_num_seqs
            self.llm = llm or LLM(
                pretrained,
                device=device or "auto",
                dtype=dtype,
                offload=OffloadConfig(**offload),
                engine=EngineConfig(max_num_seqs=max(seats, 1), max_model_len=max_length),
            )
            self.confidence_threshold = confidence_threshold
            self.model_name = str(pretrained)

        @property
        def tokenizer_name(self) -> str:
            """Names the tokenizer in the harness's cache of requests."""
            return self.model_name.replace("/", "__")

        def chat_template(self, chat_template: bool | str = False) -> str:
            """The template that `apply_chat_template` uses; the harness keeps it with its results."""
            return "model" if chat_template and self.llm.tokenizer.has_chat_template else ""

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            """A conversation as one text that ends where the answer begins."""
            return self.llm.tokenizer.decode(self.llm.tokenizer.chat(chat_history), skip_special_tokens=False)

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            """The texts that follow the contexts, each cut before the first of its ``until`` strings."""
            contexts, params = [], []
            for request in requests:
                context, options = request.args
                contexts.append(self._fitting(context, options))
                params.append(self._params(options))
            if not contexts:
                return []
            outputs = self.llm.generate(prompt_token_ids=contexts, sampling_params=params)
            texts = [output.outputs[0].text for output in outputs]
            for request, text in zip(requests, texts):
                hook = getattr(self, "cache_hook", None)
                if hook is not None:
                    hook.add_partial("generate_until", request.args, text)
            return texts

        def loglikelihood(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            """Refused.

            Raises:
                UsageError: always.
            """
            raise UsageError("a block-diffusion model has no log-likelihood of a continuation", _REMEDY)

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            """Refused.

            Raises:
                UsageError: always.
            """
            raise UsageError("a block-diffusion model has no rolling log-likelihood", _REMEDY)

        def _params(self, options: dict[str, Any]) -> SamplingParams:
            """A request's options as the harness's own models read them: None is as if not given, answers are
            greedy without ``do_sample`` or a temperature, and with ``do_sample=False`` always.

            Raises:
                UsageError: an option is of another kind, or out of range.
            """
            given = {name: value for name, value in options.items() if value is not None}
            until = given.get("until", ())
            texts = (until,) if isinstance(until, str) else until
            if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
                raise UsageError(f"until={until!r} is not valid", "use a text, or a list of texts")
            samples = given.get("do_sample", _number(given, "temperature", 0.0) > 0)
            tokens = next((name for name in _MAX_TOKENS if name in given), _MAX_TOKENS[0])
            return SamplingParams(
                max_tokens=int(_number(given, tokens, MAX_TOKENS)),
                temperature=_number(given, "temperature", 1.0) if samples else 0.0,
                top_p=_number(given, "top_p", 1.0),
                top_k=int(_number(given, "top_k", 0)),
                stop=tuple(text for text in texts if text),
                confidence_threshold=self.confidence_threshold,
            )

        def _fitting(self, context: str, options: dict[str, Any]) -> list[int]:
            """Token ids of a context, cut at its begin where it does not fit, as the harness's own models
            do."""
            ids = self.llm.tokenizer.encode(context)
            block = self.llm.model.config.block_length
            room = self.llm.engine.max_model_len // block * block - self._params(options).max_tokens
            if room < 1:
                raise UsageError(
                    f"max_gen_toks leaves no room for a prompt ({room})", "use a smaller max_gen_toks"
                )
            return ids[-room:]

    return HeraldLM


def _number(options: dict[str, Any], name: str, default: float) -> float:
    """An option as a finite number; the harness's command line leaves some as texts."""
    value = options.get(name, default)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{name}={value!r} is no number", f"use {name}={default:g}, or leave it out")
    return number


def _harness() -> tuple[type, Callable[[str], Callable[[type], type]] | None]:
    """The harness's base class and its decorator for names; a plain class and None without it."""
    try:
        model = importlib.import_module("lm_eval.api.model")
        registry = importlib.import_module("lm_eval.api.registry")
    except ImportError:
        return object, None
    return model.LM, registry.register_model


_base, _register = _harness()
HeraldLM = make_adapter(_base)
if _register is not None:
    HeraldLM = _register("herald")(HeraldLM)


def main(argv: Sequence[str] | None = None) -> int:
    """The harness's command line; without the harness, its help says what this is and what is missing."""
    given = sys.argv[1:] if argv is None else argv
    if _register is None:
        missing = "lm-evaluation-harness is not installed; run: pip install lm-eval"
        if not {"-h", "--help"}.intersection(given):
            return output.say(f"error: {missing}", output.REFUSED)
        print(f"{__doc__}\n{missing}")
        return 0
    importlib.import_module("lm_eval.__main__").cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
