"""PyTorch on two cores: scheduled against the better of plain PyTorch with one and two threads.

Also the cost of a call: a scheduled model of two regions against the two regions called by hand.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

import torch
from common import environment, measure, records
from rich.console import Console
from rich.table import Table
from torch import nn

import dynaflow_xla as dfx
from dynaflow_xla.frontends.torch.dynamo import running

F = nn.functional


class Cells(nn.Module):
    """A GRU over time, written as a loop."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(d, d)

    def forward(self, x: Any) -> Any:
        h = x.new_zeros(x.shape[1:])
        outs = []
        for step in x.unbind(0):
            h = self.cell(step, h)
            outs.append(h)
        return torch.stack(outs)


class BiGru(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.forth, self.back = Cells(d), Cells(d)

    def forward(self, x: Any) -> Any:
        with dfx.mark("forth"):
            a = self.forth(x)
        with dfx.mark("back"):
            b = self.back(x.flip(0)).flip(0)
        return torch.cat([a, b], -1)


def two_sorts(x: Any, y: Any) -> Any:
    with dfx.mark("left"):
        a = torch.sort(x).values
    with dfx.mark("right"):
        b = torch.sort(y).values
    return a * b


def micro_batched(fn: Callable[[Any], Any], n: int) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        outs = []
        for part in x.chunk(n):
            with dfx.mark("part"):
                outs.append(fn(part))
        return torch.cat(outs)

    return run


def towers(x: Any, *weights: Any) -> Any:
    outs = []
    for w in weights:
        with dfx.mark("tower"):
            h = x
            for _ in range(4):
                h = torch.relu(h @ w)
            outs.append(h)
    return sum(outs)


def svd(x: Any) -> Any:
    return tuple(torch.linalg.svd(x))


def eigh(x: Any) -> Any:
    return tuple(torch.linalg.eigh(x))


def eigenvectors(x: Any) -> Any:
    return torch.linalg.eigh(x).eigenvectors


def symmetric(b: int, n: int) -> Any:
    x = torch.randn(b, n, n)
    return x + x.mT


class Logits(nn.Module):
    """A small language model of transformers, called with ids alone."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        import transformers

        cls = getattr(transformers, name)
        self.model = cls(
            cls.config_class(
                vocab_size=64, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
                attention_dropout=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                use_cache=False,
            )
        ).eval()  # fmt: skip

    def forward(self, ids: Any) -> Any:
        return self.model(input_ids=ids).logits


@dataclass(frozen=True)
class Case:
    """What is timed: a function on its arguments, under a strategy; ``bound`` is the ratio to reach.

    With ``training`` a call is the function, the sum of its result, and the backward of that.
    """

    fn: Any
    args: tuple[Any, ...]
    bound: float
    strategy: dfx.Strategy = field(default_factory=dfx.Branches)
    lanes: int = 2
    training: bool = False

    def call(self, fn: Any) -> Callable[[], None]:
        """One call of the function, or of what it is scheduled as."""

        def step() -> None:
            fn(*self.args).sum().backward()

        return step if self.training else partial(fn, *self.args)


def cases() -> dict[str, Case]:
    """By name; a bound of inf: a known loss."""
    torch.manual_seed(0)
    matrices, halves = torch.randn(16, 128, 128), dfx.NanoBatch(2)
    ids, one = torch.randint(3, 64, (8, 16)), dfx.Sequential()
    bert, llama = Logits("BertForMaskedLM", 32), Logits("LlamaForCausalLM", 32)
    wider = Logits("BertForMaskedLM", 128)
    return {
        "two sorts 2^18": Case(two_sorts, (torch.randn(2**18), torch.randn(2**18)), 0.70),
        "bi-GRU loop T64 B64 d256": Case(BiGru(256).eval(), (torch.randn(64, 64, 256),), 0.70),
        "bi-GRU loop T64 B16 d64": Case(BiGru(64).eval(), (torch.randn(64, 16, 64),), 0.70),
        "svdvals 16x128^2, nano": Case(torch.linalg.svdvals, (matrices,), 0.75, halves),
        "svd 16x128^2, nano": Case(svd, (matrices,), 0.75, halves),
        "eigvalsh 16x192^2, nano": Case(torch.linalg.eigvalsh, (symmetric(16, 192),), 0.75, halves),
        "eigh 16x192^2, nano": Case(eigh, (symmetric(16, 192),), 0.75, halves),
        "eigh 64x64^2, nano": Case(eigh, (symmetric(64, 64),), 0.75, halves),
        "eigh 128x32^2, nano": Case(eigh, (symmetric(128, 32),), 0.75, halves),
        "svdvals 16x128^2 in 4": Case(micro_batched(torch.linalg.svdvals, 4), (matrices,), 0.75),
        "eigh 16x192^2 in 4": Case(micro_batched(eigenvectors, 4), (symmetric(16, 192),), 0.75),
        "bi-LSTM T128 B8 d64": Case(
            nn.LSTM(64, 64, bidirectional=True).eval(), (torch.randn(128, 8, 64),), 0.95
        ),
        "bi-LSTM T128 B8 d64, 2 layers": Case(
            nn.LSTM(64, 64, 2, bidirectional=True).eval(), (torch.randn(128, 8, 64),), 0.95
        ),
        "bi-LSTM T64 B64 d256": Case(
            nn.LSTM(256, 256, bidirectional=True).eval(), (torch.randn(64, 64, 256),), 0.95
        ),
        "bi-LSTM T64 B16 d128": Case(
            nn.LSTM(128, 128, bidirectional=True).eval(), (torch.randn(64, 16, 128),), 0.95
        ),
        "two towers d512": Case(
            towers,
            (torch.randn(256, 512), *(torch.randn(512, 512) / 23 for _ in range(2))),
            float("inf"),
        ),
        "eight towers d32": Case(
            towers,
            (torch.randn(16, 32), *(torch.randn(32, 32) / 6 for _ in range(8))),
            float("inf"),
        ),
        "BERT d32 B8 T16": Case(bert, (ids,), 0.95, one, 1),
        "Llama d32 B8 T16": Case(llama, (ids,), 0.95, one, 1),
        "BERT d32 B8 T16, step": Case(bert, (ids,), 1.0, one, 1, training=True),
        "BERT d32 B8 T16, step, one lane": Case(bert, (ids,), 1.2, halves, 1, training=True),
        "BERT d32 B8 T16, step, two lanes": Case(bert, (ids,), 1.2, halves, training=True),
        "BERT d128 B8 T16, step, two lanes": Case(wider, (ids,), 1.2, halves, training=True),
    }


def measure_case(name: str, case: Case, rounds: int) -> dict[str, Any]:
    axes = {"in_axes": 0} if isinstance(case.strategy, dfx.NanoBatch) else {}
    fast = dfx.schedule(case.fn, strategy=case.strategy, backend="torch", lanes=case.lanes, **axes)
    with torch.set_grad_enabled(case.training), measure.torch_threads(1):
        report = dfx.verify(fast, *case.args)
        runs = {"scheduled": fast, "plain 1": case.fn, "plain 2": case.fn}
        runs = {k: case.call(f) for k, f in runs.items()}
        contexts = {"plain 2": lambda: measure.torch_threads(2)}
        with measure.Contention() as contention:
            samples, calls = measure.paired(runs, rounds, contexts=contexts, rest_ms=60.0)
    return {
        "case": name, "strategy": repr(case.strategy), "bound": case.bound,
        "calls_per_sample": calls, "samples_ms": samples,
        "statistics_ms": {k: measure.statistics(v) for k, v in samples.items()},
        "ratio": measure.ratio(samples, "scheduled", ["plain 1", "plain 2"]),
        "max_abs_difference": report.max_abs, "contention": contention.as_dict(),
    }  # fmt: skip


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.b = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x))


def by_hand(fast: Any, x: Any) -> Callable[[], Any]:
    """Calls the compiled regions of a scheduled ``Pair`` one after the other."""
    core = fast._dfx_core
    entry = core.planned((x,), {})
    values: dict[int, Any] = {}

    def grab(inputs: list[Any]) -> list[Any]:
        values.update(zip(entry.captured.graph.inputs, inputs, strict=True))
        return entry(inputs)

    with running.observing(entry, grab):
        fast(x)
    first, second = entry.pg.regions
    a, b = entry.implementations[first.id], entry.implementations[second.id]
    hidden = first.outputs[0]
    ins = [values[v] for v in first.inputs]
    rest = [values.get(v) for v in second.inputs]
    place = list(second.inputs).index(hidden)

    def run() -> Any:
        rest[place] = a(*ins)[0]
        return b(*rest)[0]

    return run


def measure_calls(rounds: int) -> list[dict[str, Any]]:
    """Microseconds that scheduling adds to a call of two small regions on one lane."""
    model, x = Pair().eval(), torch.randn(4, 16)
    rules = [dfx.Module("a"), dfx.Module("b")]
    made = []
    with torch.no_grad(), measure.torch_threads(1):
        program = torch.export.export(model, (x,))
        for compiler in ("eager", "aoti"):
            options = {"strategy": dfx.Sequential(wide=False), "compiler": compiler, "rules": rules}
            scheduled = {
                "module": dfx.schedule(model, **options),
                "exported": dfx.schedule(program, **options),
            }
            hand = (
                by_hand(scheduled["module"], x)
                if compiler == "aoti"
                else lambda: model.b(model.a(x))
            )
            torch.testing.assert_close(hand(), model(x))
            runs = {"by hand": hand, **{k: partial(f, x) for k, f in scheduled.items()}}
            samples, calls = measure.paired(runs, rounds, sample_ms=20.0)
            medians = {k: measure.statistics(v)["median"] * 1e3 for k, v in samples.items()}
            added = {k: v - medians["by hand"] for k, v in medians.items() if k != "by hand"}
            made.append(
                {
                    "compiler": compiler, "calls_per_sample": calls, "samples_ms": samples,
                    "median_us": medians, "added_us": added,
                }
            )  # fmt: skip
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    console, started = Console(), time.perf_counter()
    stamp = environment.stamp()
    rows = []
    table = Table(
        "case", "1 thread ms", "2 threads ms", "scheduled ms", "ratio", "95 %", "to reach"
    )
    for name, case in cases().items():
        if options.only not in name:
            continue
        row = measure_case(name, case, options.rounds)
        rows.append(row)
        s, r = row["statistics_ms"], row["ratio"]
        table.add_row(
            name, *(f"{s[k]['median']:.3g}" for k in ("plain 1", "plain 2", "scheduled")),
            f"{r['ratio']:.2f}", f"{r['low']:.2f}-{r['high']:.2f}", f"{case.bound:.2f}",
        )  # fmt: skip
    console.print(table)
    calls = [] if options.only else measure_calls(options.rounds)
    for entry in calls:
        added = ", ".join(f"{k} {v:.0f} us" for k, v in entry["added_us"].items())
        console.print(
            f"a call of two {entry['compiler']} regions by hand {entry['median_us']['by hand']:.0f} us; "
            f"scheduling adds {added}"
        )
    record = {
        "format": 1, "benchmark": "torch-cpu", "environment": stamp, "rounds": options.rounds,
        "seconds": time.perf_counter() - started, "rows": rows, "calls": calls,
    }  # fmt: skip
    console.print(f"wrote {records.save(record, options.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
