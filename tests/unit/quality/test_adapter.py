"""The adapter for lm-evaluation-harness, on a stand-in for the harness."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench_longctx.quality import lm_eval_adapter
from bench_longctx.quality.lm_eval_adapter import make_adapter
from herald import LLM, OffloadConfig
from herald.errors import UsageError


class Base:
    """What the harness's class gives its subclasses."""

    def __init__(self) -> None:
        self.cached: list[tuple[str, Any, str]] = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *what: self.cached.append(what))

    @classmethod
    def create_from_arg_obj(cls, given: dict[str, Any], more: dict[str, Any]) -> Base:
        return cls(**given, **{k: v for k, v in more.items() if v is not None})


DOCUMENT = "The code of mill is 4711. The code of gate is 12."
QUESTION = DOCUMENT + "\n\nQuestion: What is the code of mill?\nAnswer:"


@pytest.fixture(scope="module")
def model() -> Any:
    adapter: Any = make_adapter(Base)
    llm = LLM("tiny", device="cpu", offload=OffloadConfig(enabled=False))
    made = adapter.create_from_arg_obj(
        {"llm": llm}, {"batch_size": 2, "device": None, "max_batch_size": None}
    )
    yield made
    llm.close()


def request(context: str, **options: Any) -> Any:
    return SimpleNamespace(args=(context, options))


def test_generate_until(model: Any):
    texts = model.generate_until(
        [
            request(QUESTION, until=["\n"], max_gen_toks=32),
            request(QUESTION, until=["1"], max_gen_toks=32, do_sample=False),
            request(QUESTION, until="7", max_gen_toks=32, temperature=0.0),
        ]
    )
    assert texts == [" 4711", " 47", " 4"]
    assert [text for _, _, text in model.cached[-3:]] == texts
    assert model.generate_until([]) == []


def test_options_reach_decoding(model: Any):
    params = model._params(
        {"do_sample": True, "temperature": 0.7, "top_p": 0.5, "until": [], "max_gen_toks": 9}
    )
    assert (params.temperature, params.top_p, params.max_tokens, params.stop) == (0.7, 0.5, 9, ())
    assert model._params({}).max_tokens == 256
    assert model._params({}).temperature == 0


def test_long_contexts_lose_their_begin(model: Any):
    ids = model._fitting("x" * 40_000 + "end", {"max_gen_toks": 100})
    assert len(ids) == 32768 - 100
    assert model.llm.tokenizer.decode(ids).endswith("xend")
    with pytest.raises(UsageError, match="leaves no room"):
        model._fitting("x", {"max_gen_toks": 40_000})


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_likelihoods_are_refused(model: Any, kind: str):
    with pytest.raises(UsageError, match="no .*log-likelihood.*; use tasks with output_type generate_until"):
        getattr(model, kind)([request("a")])


def test_chat_template(model: Any):
    text = model.apply_chat_template([{"role": "user", "content": "Hello?"}])
    assert text == "Hello?\nAnswer:"
    assert model.tokenizer_name == "tiny" and model.chat_template(True) == "model"


def test_unknown_arguments_are_named():
    with pytest.raises(
        UsageError, match="'kv_buget' is no argument of the model; use one of difference_only"
    ):
        make_adapter(Base)(kv_buget=0.1)


def test_registers_where_the_harness_is_installed(monkeypatch: pytest.MonkeyPatch):
    named: dict[str, type] = {}

    def register_model(*names: str) -> Any:
        def decorate(kind: type) -> type:
            named.update(dict.fromkeys(names, kind))
            return kind

        return decorate

    fake = {
        "lm_eval.api.model": SimpleNamespace(LM=Base),
        "lm_eval.api.registry": SimpleNamespace(register_model=register_model),
    }
    monkeypatch.setattr(lm_eval_adapter.importlib, "import_module", fake.__getitem__)
    base, register = lm_eval_adapter._harness()
    assert base is Base and register is not None
    adapter = register("herald")(make_adapter(base))
    assert named == {"herald": adapter}


def test_none_is_as_if_not_given(model: Any):
    names = ("temperature", "do_sample", "until", "max_gen_toks", "top_p", "top_k")
    assert model._params(dict.fromkeys(names)) == model._params({})
    assert model._params({"do_sample": True, "temperature": None}).temperature == 1


@pytest.mark.parametrize(
    "options, temperature",
    [
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": None, "temperature": 0.7}, 0.7),
        ({"do_sample": True, "temperature": "0.7"}, 0.7),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.0}, 0.0),
    ],
)
def test_when_an_answer_is_sampled(model: Any, options: dict[str, Any], temperature: float):
    assert model._params(options).temperature == temperature


def test_names_of_the_longest_answer(model: Any):
    names = ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"]
    for first in range(len(names)):
        assert model._params({name: 9 + names.index(name) for name in names[first:]}).max_tokens == 9 + first


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": "hot"}, "temperature='hot' is no number; use temperature=0"),
        ({"temperature": [1]}, "is no number"),
        ({"top_p": "nan"}, "top_p='nan' is no number"),
        ({"max_gen_toks": "many"}, "max_gen_toks='many' is no number; use max_gen_toks=256"),
        ({"until": 5}, "until=5 is not valid"),
        ({"until": [5]}, "until=.5. is not valid"),
        ({"temperature": -1.0, "do_sample": True}, "temperature=-1.0 is not valid"),
    ],
)
def test_options_of_another_kind(model: Any, options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        model.generate_until([request(QUESTION, **options)])


def test_command_line_without_the_harness(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(lm_eval_adapter, "_register", None)
    assert lm_eval_adapter.main(["--tasks", "gsm8k"]) == 2
    assert capsys.readouterr().err == (
        "error: lm-evaluation-harness is not installed; run: pip install lm-eval\n"
    )
    assert lm_eval_adapter.main(["--help"]) == 0
    assert "--model herald" in capsys.readouterr().out
