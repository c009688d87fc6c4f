"""What regions on all cores gain: measured against ``jax.jit`` here, and simulated for other machines.

    python benchmarks/cpu/width.py simulate [--out FILE]   # 4, 16 and 64 cores; runs nothing
    python benchmarks/cpu/width.py measure [--rounds 15] [--only NAMES] [--out FILE]

``measure`` times each case (with ``--only``, functions as models have them, too) under plain jit,
``Branches()``, ``Branches(wide=False)``, ``Sequential()`` and ``Auto()``, interleaved; ``by_hand`` is a
function whose branches alone are scheduled, inside jit. The dense layers around two LSTMs are measured in
PyTorch, too, against eager.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

import jax
import jax.numpy as jnp
from common.environment import stamp
from common.measure import STEADY, Contention, blocking, paired
from models import functions
from models.cases import CASES, lstm, lstm_parameters

import dynaflow_xla as dfx
from dynaflow_xla import machine

SHAPES = ((64, 16, 512, 128), (32, 8, 256, 128), (128, 8, 256, 64))
"""Steps, batch, width, hidden width of a bi-LSTM between dense layers."""

_KNOWN = machine.numbers()
ASSUMED = (
    "costs of one core as dynaflow_xla estimates them for this processor, Amdahl's law by kind of work "
    f"({dict(_KNOWN.shared)}), {_KNOWN.lanes_ns / 1e3:.0f} us a phase of lanes, "
    f"{_KNOWN.lane_wake_ns / 1e3:.0f} us to wake one, {_KNOWN.fork_ns / 1e3:.0f} us to hand out an "
    "operator; Branches() chooses how many cores its lanes have ('lanes alike': up to eight, each with "
    "an even share)"
)


def dense_bilstm(
    steps: int, batch: int, width: int, hidden: int
) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """The function, the same with its two LSTMs scheduled, and its arguments."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "in": jax.random.normal(keys[0], (width, width)) / width**0.5,
        "forward": lstm_parameters(keys[1], width, hidden),
        "backward": lstm_parameters(keys[2], width, hidden),
        "out": jax.random.normal(keys[3], (2 * hidden, width)) / (2 * hidden) ** 0.5,
    }

    def both(p: Any, x: Any) -> Any:
        forward = lstm(p["forward"], x, reverse=False)
        return forward, lstm(p["backward"], x, reverse=True)

    def around(branches: Callable[..., Any]) -> Callable[..., Any]:
        def model(p: Any, x: Any) -> Any:
            states = branches(p, jax.nn.gelu(x @ p["in"]))
            return jax.nn.gelu(jnp.concatenate(states, axis=-1) @ p["out"])

        return model

    x = jax.random.normal(keys[4], (steps, batch, width))
    return around(both), around(dfx.schedule(both, dfx.Branches(wide=False))), (params, x)


def torch_bilstm(steps: int, batch: int, width: int, hidden: int) -> dict[str, Callable[[], Any]]:
    """The same in PyTorch: ways to call it, with its inputs."""
    import torch
    from torch import nn

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.forwards, self.backwards = nn.LSTM(width, hidden), nn.LSTM(width, hidden)

        def forward(self, x: Any) -> Any:
            return self.forwards(x)[0], self.backwards(x.flip(0))[0].flip(0)

    class Model(nn.Module):
        def __init__(self, both: Any, first: Any, last: Any) -> None:
            super().__init__()
            self.both, self.first, self.last = both, first, last

        def forward(self, x: Any) -> Any:
            y = nn.functional.gelu(self.first(x))
            return nn.functional.gelu(self.last(torch.cat(self.both(y), -1)))

    torch.manual_seed(0)
    parts = nn.Linear(width, width), nn.Linear(2 * hidden, width)
    model = Model(Both(), *parts).eval()
    x = torch.randn(steps, batch, width)
    lstms: dict[str, Any] = {"lanes": 2, "rules": [dfx.Module(nn.LSTM)]}
    narrow = dfx.schedule(model.both, dfx.Branches(wide=False), **lstms)
    ways = {
        "eager": model,
        "by_hand": Model(narrow, *parts).eval(),
        "branches": dfx.schedule(model, dfx.Branches(), **lstms),
        "on lanes only": dfx.schedule(model, dfx.Branches(wide=False), **lstms),
        "sequential": dfx.schedule(model, dfx.Sequential(), **lstms),
        "auto": dfx.schedule(model, dfx.Auto(), **lstms),
    }

    def call(way: Any) -> Any:
        with torch.no_grad():
            return way(x)

    want = call(model)
    for way in ways.values():
        torch.testing.assert_close(call(way), want, rtol=1e-4, atol=1e-5)
    return {name: lambda way=way: call(way) for name, way in ways.items()}


class Whole(dfx.Strategy):
    """Every region has all cores: the original program."""

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            s.execute(ready[0], width="all")


def measured(
    ways: dict[str, Callable[..., Any]], args: Any, rounds: int, plain: str = "jit"
) -> dict[str, Any]:
    """Milliseconds of every round by name, and medians of the ratios to the plain way."""
    runs = {name: blocking(fn, args) for name, fn in ways.items()}
    samples, _ = paired(runs, rounds, **STEADY)
    against = {
        name: statistics.median(a / b for a, b in zip(times, samples[plain], strict=True))
        for name, times in samples.items()
    }
    return {
        "ratio": against, "ms": samples, "ms_far": samples.far, "round_trips_ns": samples.round_trips_ns,
    }  # fmt: skip


def _decided(auto: Any, args: Any) -> list[str]:
    """What Auto says of its decision."""
    return [line for line in dfx.explain(auto, *args).splitlines() if line.startswith("auto:")]


def measure(rounds: int, only: str | None, keep: Callable[[Any], None]) -> dict[str, Any]:
    """All cases, or those whose names hold one of ``only``; ``keep`` gets what there is after each."""

    def wanted(name: str) -> bool:
        return not only or any(part in name for part in only.split(";"))

    todo: list[tuple[str, dict[str, Callable[..., Any]], Any]] = []
    for shape in SHAPES:
        fn, by_hand, args = dense_bilstm(*shape)
        todo.append(
            (f"dense_bilstm{shape}", {"jit": jax.jit(fn), "by_hand": jax.jit(by_hand)}, args)
        )
    for case in (*CASES, *(functions.CASES if only else ())):
        if not wanted(case.name):
            continue
        fn, args = case.make()
        todo.append((case.name, {"jit": jax.jit(fn)}, args))
    made = {}
    for name, ways, args in todo:
        if not wanted(name):
            continue
        plain: Any = ways["jit"]
        ways["branches"] = dfx.schedule(plain, dfx.Branches())
        ways["on lanes only"] = dfx.schedule(plain, dfx.Branches(wide=False))
        ways["sequential"] = dfx.schedule(plain, dfx.Sequential())
        ways["auto"] = dfx.schedule(plain, dfx.Auto())
        if (cores := machine.cores()) > 2:
            even = dfx.Lanes(min(8, cores), width=max(1, cores // min(8, cores)))
            ways["lanes alike"] = dfx.schedule(plain, dfx.Branches(), lanes=even)
        with Contention() as contention:
            made[name] = measured(ways, args, rounds)
        made[name]["contention"] = contention.as_dict()
        made[name]["auto"] = _decided(ways["auto"], args)
        made[name]["widths"] = dfx.plan(ways["branches"], *args).widths
        keep(made)
        print(name, {k: round(v, 3) for k, v in made[name]["ratio"].items()}, flush=True)
    for shape in SHAPES:
        name = f"dense_bilstm{shape} in PyTorch"
        if not wanted(name):
            continue
        with Contention() as contention:
            made[name] = measured(torch_bilstm(*shape), (), rounds, "eager")
        made[name]["contention"] = contention.as_dict()
        keep(made)
        print(name, {k: round(v, 3) for k, v in made[name]["ratio"].items()}, flush=True)
    return made


def simulate(counts: tuple[int, ...] = (4, 16, 64)) -> dict[str, Any]:
    """Predicted speed-up over the original on all cores, by case and number of cores; cores of its lanes."""
    chosen = [(f"dense_bilstm{shape}", *dense_bilstm(*shape)[::2]) for shape in SHAPES]
    chosen += [(case.name, *case.make()) for case in (*CASES, *functions.CASES)]
    found: dict[str, Any] = {}
    for name, fn, args in chosen:
        found[name] = {}
        for cores in counts:
            with mock.patch.object(os, "sched_getaffinity", lambda _, cores=cores: range(cores)):
                count = min(8, cores)
                even = dfx.Lanes(count, width=cores // count)
                fast = {
                    "original": dfx.schedule(fn, Whole(), lanes=count),
                    "branches": dfx.schedule(fn, dfx.Branches(), lanes=count),
                    "lanes alike": dfx.schedule(fn, dfx.Branches(), lanes=even),
                    "on lanes only": dfx.schedule(fn, dfx.Branches(wide=False), lanes=count),
                }
                took = {how: dfx.simulate(made, *args).total_ns for how, made in fast.items()}
                widths = dfx.plan(fast["branches"], *args).widths
            whole = took.pop("original")
            found[name][str(cores)] = {how: whole / ns for how, ns in took.items()}
            found[name][str(cores)]["widths"] = sorted(widths.values(), reverse=True)
        shown = {
            n: (round(x["branches"], 2), round(x["lanes alike"], 2), x["widths"])
            for n, x in found[name].items()
        }
        print(name, shown, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["simulate", "measure"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="parts of names, separated by ;")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    environment = stamp()

    def keep(result: dict[str, Any]) -> None:
        if given.out:
            given.out.write_text(
                json.dumps({"environment": environment, **result}, indent=1) + "\n"
            )

    if given.what == "simulate":
        keep({"assumed": ASSUMED, "speed_up": simulate()})
        return
    measure(
        given.rounds,
        given.only,
        lambda found: keep({"load_after": stamp()["load_average"], "cases": found}),
    )


if __name__ == "__main__":
    main()
