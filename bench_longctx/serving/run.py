"""Load on a running server: GuideLLM sends the requests, this calls it and draws what it measured.

    herald serve --model tiny --port 8000 &
    python -m bench_longctx.serving.run --target http://127.0.0.1:8000 --rates 0.5,1,2,4 --out load
    python -m bench_longctx.serving.run --out load --plot-only

GuideLLM (https://github.com/vllm-project/guidellm, 0.8 or newer) is a program of its own: ``pipx install
guidellm``. It counts tokens with the tokenizer of ``--tokenizer``, a folder or a hub id. Every rate gets
documents of its own, so that all rates find equally much that is shared; a second run on a server that still
runs needs another ``--seed``, or finds its documents remembered (``cached_share`` in the summary shows it).
In ``--out`` are then a folder a rate with dataset, configuration and report, ``summary.json`` and a picture;
``bench_longctx.serving.report`` puts several such runs side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from bench_longctx import machine
from bench_longctx.serving import dataset
from bench_longctx.serving.report import draw, line, summary

DATASET, CONFIG, REPORT, SUMMARY = "requests.jsonl", "guidellm.json", "report.json", "summary.json"
# Options that a figure depends on.
KEPT = ("model", "profile", "rates", "documents", "questions", "bytes", "output_tokens", "order", "seed")


def main() -> None:
    args = _parser().parse_args()
    if args.plot_only:
        if not (args.out / SUMMARY).exists():
            raise SystemExit(f"{args.out} has no {SUMMARY}: run without --plot-only first")
        whole = json.loads((args.out / SUMMARY).read_text("utf-8"))
        _summarise(args.out, whole)
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        options = {name: getattr(args, name) for name in KEPT}
        whole = {"machine": machine.describe(), "options": options}
        _load(args, whole)
    for row in whole["rates"]:
        print(line(row))
    draw({whole["options"]["model"]: whole["rates"]}, args.out / "latency.png")
    if not any(row["requests"] for row in whole["rates"]):
        raise SystemExit(f"no request succeeded; {args.target}, --model and --api-key are what to look at")


def _load(args: argparse.Namespace, whole: dict[str, Any]) -> None:
    """For each rate make a dataset, and let GuideLLM send it. What is done is written after each."""
    tool = shutil.which(args.guidellm)
    if tool is None:
        raise SystemExit(
            f"{args.guidellm} is not there; run: pipx install guidellm, or name it by --guidellm"
        )
    for rate in args.rates:  # A report of an earlier run is none of this one.
        (_folder(args.out, rate) / REPORT).unlink(missing_ok=True)
    for number, rate in enumerate(args.rates):
        folder = _folder(args.out, rate)
        folder.mkdir(exist_ok=True)
        seed = args.seed + number
        sizes = (args.documents, args.questions, args.bytes, args.output_tokens)
        many = dataset.requests(*sizes, seed, args.order)
        lines = "".join(json.dumps(each) + "\n" for each in many)
        (folder / DATASET).write_text(lines, "utf-8")
        config = configuration(args, rate, folder, len(many))
        (folder / CONFIG).write_text(json.dumps(config, indent=1), "utf-8")
        command = [tool, "run", "--config", str(folder / CONFIG), "--disable-progress"]
        status = subprocess.run(command, check=False, env=environment()).returncode
        if status or not (folder / REPORT).exists():
            raise SystemExit(
                f"{args.guidellm} ended with status {status} at {rate:g}/s, its message is above; "
                f"is {args.target} up, and the program GuideLLM 0.8 or newer?"
            )
        _check_schedule(folder / REPORT, rate)
        _summarise(args.out, whole)


def environment() -> dict[str, str]:
    """What GuideLLM finds in its environment: one process sends, unless the caller's environment says more.

    Its processes draw from the same seed (0.8.1), so that ten of them send evenly ten times and then ten at
    once, which is no Poisson process.
    """
    return {"GUIDELLM__MAX_WORKER_PROCESSES": "1", **os.environ}


def _check_schedule(report: Path, rate: float) -> None:
    """Refuse a report, and remove it, whose requests were not sent when they were to be."""
    allowed = max(0.1, 1.0 / rate)
    behind = summary(json.loads(report.read_text("utf-8")))[0]["behind_schedule_seconds"]
    if behind > allowed:
        report.unlink()
        raise SystemExit(
            f"a tenth of the requests at {rate:g}/s was sent {behind:.2f} s or more behind schedule, allowed "
            f"is {allowed:.2f} s: GuideLLM lacked time, or lost its start. Nothing of the rate is kept; run "
            "it again, on a machine with a core to spare"
        )


def _summarise(out: Path, whole: dict[str, Any]) -> None:
    """Read the reports there are of the rates of ``whole``, into it and ``summary.json``."""
    paths = [_folder(out, rate) / REPORT for rate in whole["options"]["rates"]]
    reports = [json.loads(path.read_text("utf-8")) for path in paths if path.exists()]
    if not reports:
        raise SystemExit(f"{out} has no {paths[0].name} of rate {whole['options']['rates'][0]:g}: run again")
    whole["guidellm"] = reports[0]["metadata"]["guidellm_version"]
    whole["rates"] = summary({"benchmarks": [each for report in reports for each in report["benchmarks"]]})
    (out / SUMMARY).write_text(json.dumps(whole, indent=1) + "\n", "utf-8")


def _folder(out: Path, rate: float) -> Path:
    return out / f"{rate:g}"


def configuration(args: argparse.Namespace, rate: float, folder: Path, count: int) -> dict[str, Any]:
    """What GuideLLM is told: to send the ``count`` requests in ``folder`` once."""
    backend = {"kind": "openai_http", "target": args.target, "model": args.model}
    if args.api_key:
        backend["api_key"] = args.api_key
    return {
        "metadata": {"name": "herald-long-documents"},
        "spec": {
            "backend": {**backend, "request_format": "/v1/completions"},
            "profile": {"kind": args.profile, "rate": [rate]},
            "data": [{"kind": "json_file", "path": str(folder / DATASET)}],
            "tokenizer": {"kind": "huggingface_auto", "model": args.tokenizer},
            "constraints": [{"kind": "max_requests", "count": count}],
            "outputs": [{"kind": "json", "path": str(folder / REPORT)}],
        },
    }


def _rates(text: str) -> list[float]:
    rates = [float(rate) for rate in text.split(",")]
    if min(rates) <= 0 or len(set(rates)) < len(rates):
        raise argparse.ArgumentTypeError(f"rates are positive and differ, such as 0.5,1,2, not {text}")
    return rates


def _parser() -> argparse.ArgumentParser:
    tiny = Path(__file__).parents[2] / "herald" / "models" / "tiny_weights"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny", help="a name of /v1/models")
    parser.add_argument("--tokenizer", default=str(tiny), help="folder or hub id (default: that of tiny)")
    parser.add_argument("--api-key")
    parser.add_argument("--rates", type=_rates, default=[0.5, 1.0, 2.0, 4.0], help="requests a second")
    parser.add_argument("--profile", choices=("constant", "poisson"), default="poisson")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--bytes", type=int, default=16_000)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--order", choices=("grouped", "turns", "shuffled"), default="shuffled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guidellm", default="guidellm", help="the program")
    parser.add_argument("--plot-only", action="store_true", help="read and draw the reports of --out again")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    return parser


if __name__ == "__main__":
    main()
