"""Train the bundled model `tiny` on retrieval tasks.

    python bench_longctx/train_tiny/train.py --seconds 900 --data .train_data --out DIR
    python bench_longctx/train_tiny/train.py --from herald/models/tiny_weights --seconds 480 --out DIR
    python bench_longctx/train_tiny/train.py --resume DIR --out DIR

The schedule (length curriculum and learning rate) follows training seconds; compiling, evaluation and saving
are not counted in them, but logged. `--from` begins with the weights of an exported folder, a new optimiser
and the last part of the curriculum. `--max-seconds-this-run` limits the wall time of the process: the run
then saves and ends, and `--resume` goes on with it where it stood, on the schedule it has. DIR gets
log.jsonl, eval.json, ckpt_*.safetensors and, when the schedule is done, plot.png and tiny/, the exported
checkpoint folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from bench_longctx.tasks.haystack import Haystack
from bench_longctx.train_tiny import checkpoint, data, evaluate, export
from bench_longctx.train_tiny.model import TinyConfig, TinySDAR
from bench_longctx.train_tiny.optimizer import MuonAdam
from bench_longctx.train_tiny.packing import Packed, attention_mask
from bench_longctx.train_tiny.schedule import Schedule

STARTED = time.perf_counter()
SECONDS = 900.0


def head_loss(
    model: TinySDAR, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, kinds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean cross entropy of the loss slots, and [kinds, 2]: right tokens and all tokens by kind."""
    logits = model.logits(hidden)
    loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum().clamp(min=1.0)
    used = weights > 0
    right = (logits.argmax(-1) == targets) & used
    by_kind = F.one_hot(kinds, len(data.KINDS)).float()
    return loss, torch.stack((right.float() @ by_kind, used.float() @ by_kind), 1).detach()


class Trainer:
    """The training run: state, one step, logging, evaluation and saving."""

    def __init__(self, args: argparse.Namespace, config: TinyConfig):
        self.args = args
        self.heldout = Haystack.load()
        saved = (
            checkpoint.progress(args.resume)
            if args.resume
            else {
                "trained": 0.0,
                "step": 0,
                "tokens": 0,
                "history": {},
                "schedule": asdict(schedule_of(args)),
            }
        )
        self.schedule = Schedule(**saved["schedule"])
        self.trained, self.step, self.tokens, self.history = (
            saved[k] for k in ("trained", "step", "tokens", "history")
        )
        self.curriculum = multiprocessing.Value("d", self.schedule.curriculum(self.progress))
        rows = data.Rows(
            Haystack.load(args.data / "train.txt.xz"),
            args.tokens,
            self.curriculum,
            args.seed + saved["step"],
            args.longest,
            self.schedule.structured,
        )
        # The worker processes start before the GPU is touched.
        self.rows = iter(data.loader(rows, args.workers))
        args.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(args.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = self._first_model(config).to(self.device)
        self.optimizer = MuonAdam(self.model, args.muon_lr, args.adam_lr)
        if args.resume:
            checkpoint.load_optimizer(args.resume, self.optimizer, self.step)
            log = args.resume / "log.jsonl"
            if log.exists() and args.resume.resolve() != args.out.resolve():
                (args.out / "log.jsonl").write_text(log.read_text())
        self.head = head_loss
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            torch._dynamo.config.recompile_limit = 64
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
            self.head = torch.compile(head_loss, dynamic=False)
        self.aside: dict[str, float] = {}

    def _first_model(self, config: TinyConfig) -> TinySDAR:
        if self.args.resume:
            return checkpoint.load_model(self.args.resume)
        return export.read(self.args.weights) if self.args.weights else TinySDAR(config)

    @property
    def progress(self) -> float:
        """Share of the schedule that is done."""
        return min(1.0, self.trained / self.schedule.seconds)

    @property
    def wall(self) -> float:
        """Seconds since the process started."""
        return time.perf_counter() - STARTED

    def note(self, **fields) -> None:
        """Append a line to log.jsonl and print it."""
        entry = json.dumps(
            {"wall_s": round(self.wall, 1), "trained_s": round(self.trained, 1), "step": self.step} | fields
        )
        with (self.args.out / "log.jsonl").open("a") as f:
            f.write(entry + "\n")
        print(entry, flush=True)

    def loss(self, row: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and counts of one packed row on the device."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = self.model.hidden(row.tokens, row.positions, attention_mask(row))
            return self.head(
                self.model, hidden.index_select(0, row.slots), row.targets, row.weights, row.kinds
            )

    def warm(self) -> None:
        """Compile by one step whose gradients are thrown away."""
        began = time.perf_counter()
        self.loss(next(self.rows).to(self.device))[0].backward()
        if self.step == 0:
            self.optimizer.step(0.0)
            self.optimizer.reset()
        for p in self.model.parameters():
            p.grad = None
        self.sync()
        self.aside["compile_s"] = round(time.perf_counter() - began, 1)
        self.note(
            event="ready",
            parameters=sum(p.numel() for p in self.model.parameters()),
            schedule=asdict(self.schedule),
            **self.aside,
        )

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def evaluate(self, lengths: list[int], count: int, name: str) -> None:
        """Decode held-out examples, log the scores and keep them for eval.json."""
        self.model.eval()
        for length in lengths:
            if self.wall > self.args.max_seconds_this_run - 12:
                self.note(event="evaluation skipped", length=length)
                continue
            row_tokens = max(self.args.tokens, length) if self.device.type == "cuda" else length
            result = evaluate.evaluate(self.model, self.heldout, length, count, row_tokens)
            self.history.setdefault(name, {})[str(length)] = result
            self.note(
                event="evaluation",
                name=name,
                length=length,
                exact=result["exact"],
                seconds=result["seconds"],
                forwards=result["forwards"],
                tasks=evaluate.line(result),
            )
        (self.args.out / "eval.json").write_text(json.dumps(self.history, indent=1))
        self.model.train()

    def save(self) -> None:
        """Write the checkpoint."""
        checkpoint.save(
            self.args.out,
            self.model,
            self.optimizer,
            {
                "trained": self.trained,
                "step": self.step,
                "tokens": self.tokens,
                "history": self.history,
                "schedule": asdict(self.schedule),
            },
        )

    def run(self) -> bool:
        """Train until the schedule or this run's time is over. Returns whether the schedule is done."""
        args = self.args
        self.warm()
        stage = data.stage_at(self.curriculum.value)
        counts, losses, waited = torch.zeros(len(data.KINDS), 2, device=self.device), [], 0.0
        saved = logged = mark = time.perf_counter()
        logged_step, events = self.step, []
        while self.progress < 1 and self.wall < args.max_seconds_this_run - args.reserve:
            before = time.perf_counter()
            row = next(self.rows).to(self.device)
            waited += time.perf_counter() - before
            loss, seen = self.loss(row)
            loss.backward()
            self.optimizer.step(self.schedule.rate(self.progress))
            losses.append(loss.detach())
            counts += seen
            self.step += 1
            self.tokens += args.tokens
            if self.device.type == "cuda":
                events.append(torch.cuda.Event())
                events[-1].record()
                if len(events) > 3:
                    events.pop(0).synchronize()
            now = time.perf_counter()
            self.trained += now - mark
            self.curriculum.value = self.schedule.curriculum(self.progress)
            if now - logged > args.log_every:
                share = (counts[:, 0] / counts[:, 1].clamp(min=1)).tolist()
                self.note(
                    stage=stage,
                    loss=round(torch.stack(losses).mean().item(), 4),
                    rate=round(self.schedule.rate(self.progress), 3),
                    tokens_per_s=round((self.step - logged_step) * args.tokens / (now - logged)),
                    data_wait=round(waited / (now - logged), 3),
                    accuracy={k: round(a, 3) for k, a in zip(data.KINDS, share, strict=True)},
                )
                counts.zero_()
                losses, waited, logged, logged_step = [], 0.0, now, self.step
            mark = now
            reached = data.stage_at(self.curriculum.value)
            if reached != stage and self.progress < 1:
                self.evaluate(
                    [n for n in args.stage_lengths if n <= 4 * max(hi for _, hi, _ in data.STAGES[stage][1])],
                    args.stage_count,
                    f"after stage {stage}",
                )
                stage, mark = reached, time.perf_counter()
                logged, logged_step = mark, self.step
                losses, waited = [], 0.0
                counts.zero_()
            if time.perf_counter() - saved > args.save_every:
                self.save()
                saved = mark = time.perf_counter()
        self.sync()
        self.save()
        return self.progress >= 1


def schedule_of(args: argparse.Namespace) -> Schedule:
    """The schedule that the options ask for."""
    seconds = SECONDS if args.seconds is None else args.seconds
    schedule = Schedule.continued(seconds) if args.weights else Schedule.from_nothing(seconds)
    named = {"begin": args.begin, "peak": args.peak, "structured": args.structured}
    return replace(schedule, **{name: value for name, value in named.items() if value is not None})


def plot(log: Path, path: Path) -> None:
    """Draw loss and accuracy by task over training seconds, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = [e for e in map(json.loads, log.read_text().splitlines()) if "loss" in e]
    seconds = [e["trained_s"] for e in entries]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4))
    left.plot(seconds, [e["loss"] for e in entries])
    left.set(xlabel="training seconds", ylabel="loss on masked answer bytes", yscale="log")
    for kind in data.KINDS:
        right.plot(seconds, [e["accuracy"][kind] for e in entries], label=kind)
    right.set(xlabel="training seconds", ylabel="share of masked bytes right")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--seconds", type=float, help=f"training seconds of the whole schedule ({SECONDS:.0f})")
    p.add_argument("--max-seconds-this-run", type=float, default=1e9, help="wall seconds of this process")
    p.add_argument(
        "--reserve",
        type=float,
        default=8,
        help="wall seconds kept back for saving when the limit ends the run",
    )
    p.add_argument("--data", type=Path, default=Path(".train_data"))
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--resume", type=Path, help="folder of a checkpoint, to go on with its run")
    p.add_argument(
        "--from", type=Path, dest="weights", help="exported folder whose weights a new run begins with"
    )
    p.add_argument("--begin", type=float, help="place in the curriculum to begin at (0, or .7 with --from)")
    p.add_argument("--peak", type=float, help="learning-rate factor after warm-up (1, or .5 with --from)")
    p.add_argument(
        "--structured", type=float, help="factor on the weight of json and pairs (1, or 2 with --from)"
    )
    p.add_argument("--tokens", type=int, default=65536, help="tokens of a packed row, a step's batch")
    p.add_argument("--longest", type=int, default=32200, help="longest document in bytes")
    p.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    p.add_argument("--muon-lr", type=float, default=0.015)
    p.add_argument("--adam-lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--log-every", type=float, default=5, help="seconds")
    p.add_argument("--save-every", type=float, default=60, help="seconds")
    p.add_argument("--stage-lengths", type=int, nargs="+", default=[1024, 2048, 8192])
    p.add_argument("--stage-count", type=int, default=8, help="examples of each task at the end of a stage")
    p.add_argument("--final-lengths", type=int, nargs="+", default=[2048, 8192, 16384, 32768])
    p.add_argument("--final-count", type=int, default=16)
    p.add_argument("--model", type=json.loads, default={}, help="JSON with fields of TinyConfig to change")
    args = p.parse_args(argv)
    if args.resume:
        names = ("seconds", "weights", "begin", "peak", "structured")
        if any(getattr(args, name) is not None for name in names):
            p.error(
                "--resume keeps the checkpoint's schedule: "
                "leave out --from, --seconds, --begin, --peak and --structured"
            )
    elif args.begin is not None and not 0 <= args.begin < 1:
        p.error(f"--begin {args.begin} is not a place in the curriculum; use 0 or more and less than 1")
    return args


def main(argv: list[str] | None = None) -> None:
    """Train, and when the schedule is done evaluate, export and plot."""
    args = arguments(argv)
    trainer = Trainer(args, TinyConfig(**args.model))
    if trainer.run():
        export.write(trainer.model, args.out / "tiny")
        trainer.evaluate(args.final_lengths, args.final_count, "final")
        plot(args.out / "log.jsonl", args.out / "plot.png")
    trainer.note(event="end", tokens=trainer.tokens)


if __name__ == "__main__":
    main()
