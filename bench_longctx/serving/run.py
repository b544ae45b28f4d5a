"""Load on a running server: GuideLLM sends the requests, this calls it and draws what it measured.

    herald serve --model tiny --port 8000 &
    python -m bench_longctx.serving.run --target http://127.0.0.1:8000 --rates 0.5,1,2,4 --out load
    python -m bench_longctx.serving.run --out load --plot-only

GuideLLM (https://github.com/vllm-project/guidellm, 0.8 or newer) is a program of its own: ``pipx install
guidellm``. It counts tokens with the tokenizer of ``--tokenizer``, a folder or a hub id. Every rate gets
documents of its own, which the server has not seen, so that all rates find equally much that is shared. In
``--out`` are then a folder a rate with dataset, configuration and report, ``summary.json`` and a picture.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from bench_longctx import machine
from bench_longctx.serving import dataset
from bench_longctx.serving.report import draw, summary

DATASET, CONFIG, REPORT = "requests.jsonl", "guidellm.json", "report.json"
# Options that a figure depends on.
KEPT = ("model", "profile", "documents", "questions", "bytes", "output_tokens", "order", "seed")


def main() -> None:
    args = _parser().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.plot_only:
        _load(args)
    reports = [json.loads(path.read_text("utf-8")) for path in args.out.glob(f"*/{REPORT}")]
    found = summary({"benchmarks": [each for report in reports for each in report["benchmarks"]]})
    kept = {name: getattr(args, name) for name in KEPT}
    whole = {"machine": machine.describe(), "options": kept, "rates": found}
    (args.out / "summary.json").write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    for row in found:
        first, latency = row["first_block_seconds"], row["latency_seconds"]
        print(
            f"{row['rate']:>6.2f}/s sent {row['requests_per_second']:>6.2f}/s answered, "
            f"{row['output_tokens_per_second']:>8.1f} tokens/s, first block p50 {first['p50']:.2f} s "
            f"p99 {first['p99']:.2f} s, latency p50 {latency['p50']:.2f} s p99 {latency['p99']:.2f} s, "
            f"{row['failed']} failed"
        )
    draw(found, args.out / "latency.png")


def _load(args: argparse.Namespace) -> None:
    """For each rate make a dataset, and let GuideLLM send it."""
    tool = shutil.which(args.guidellm)
    if tool is None:
        raise SystemExit(
            f"{args.guidellm} is not there; run: pipx install guidellm, or name it by --guidellm"
        )
    for number, rate in enumerate(args.rates):
        folder = args.out / f"{rate:g}"
        folder.mkdir(exist_ok=True)
        seed = args.seed + number
        sizes = (args.documents, args.questions, args.bytes, args.output_tokens)
        many = dataset.requests(*sizes, seed, args.order)
        lines = "".join(json.dumps(each) + "\n" for each in many)
        (folder / DATASET).write_text(lines, "utf-8")
        config = configuration(args, rate, folder, len(many))
        (folder / CONFIG).write_text(json.dumps(config, indent=1), "utf-8")
        command = [tool, "run", "--config", str(folder / CONFIG), "--disable-progress"]
        subprocess.run(command, check=True)


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
    return [float(rate) for rate in text.split(",")]


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
    parser.add_argument("--plot-only", action="store_true", help="draw a report that is there already")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    return parser


if __name__ == "__main__":
    main()
