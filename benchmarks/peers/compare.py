"""What a CPU user would pick instead, on the same models and weights, in one run.

``jax.jit`` with its flags, PyTorch eager and compiled, threads written by hand, ONNX Runtime, OpenVINO and
IREE, each with every split of the cores into threads inside of operators and operators side by side, and its
own sequential mode beside it: what better code does is not credited to scheduling. A way is compared with
eager PyTorch before it is timed; one that is not installed, or fails on a model, is told, and the rest
goes on.

    python benchmarks/peers/compare.py -o FILE

runs what FILE does not hold yet, each model in a process of its own; ``--seconds 240`` stops before that, and
the next run goes on. ``--markdown FILE`` prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from common import environment, records

ROUNDS = 20
CASE_SECONDS = 200.0
SLOW = 20.0
"""A way that takes so many times the fastest is timed less often."""
PACKAGES = ("onnx", "onnxruntime", "openvino", "iree-base-compiler", "iree-base-runtime")


def study(model: Any, rounds: int, tolerance: float = 1e-3) -> dict[str, Any]:
    """All ways to run a model against each other, compared with eager PyTorch first."""
    from common import measure

    from peers import ways as peer_ways

    want = model.module(*model.args)
    scale = max(1.0, float(want.abs().max()))
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    differences: dict[str, float] = {}
    seconds: dict[str, float] = {}
    sources = {f"dynaflow {k}": (v, k) for k, v in peer_ways.OURS.items()} | peer_ways.PEERS
    for source, (ways, package) in sources.items():
        found[source] = {}
        if not peer_ways.installed(package):
            failed[source] = f"{package} is not installed"
            continue
        try:
            for name, make in ways(model):
                began = time.perf_counter()
                try:
                    way = make()
                    with measure.torch_threads(way.threads):
                        for _ in range(2):  # a tuner's first answer may be another than its second
                            got = way.value(way.run())
                            if got.shape != want.shape:
                                raise ValueError(f"has shape {tuple(got.shape)}")
                            differences[name] = float((got - want).abs().max())
                            if not differences[name] <= tolerance * scale:
                                raise ValueError(f"differs by {differences[name]:.1e}")
                except Exception as error:
                    failed[name] = _words(error)
                else:
                    found[source][name] = way
                seconds[name] = round(time.perf_counter() - began, 2)
        except Exception as error:
            failed[source] = _words(error)
    return {
        "name": model.name,
        **_timed({n: w for ways in found.values() for n, w in ways.items()}, model, rounds),
        "peers": {source: list(ways) for source, ways in found.items() if ways},
        "modes": {n: w.mode for ways in found.values() for n, w in ways.items()},
        "failed": failed,
        "max_abs_difference": differences,
        "seconds_to_prepare": seconds,
    }


def _words(error: Exception) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()  # colours
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0][:160]}"


def _timed(ways: dict[str, Any], model: Any, rounds: int) -> dict[str, Any]:
    from common import measure

    def run(names: list[str], rounds: int) -> dict[str, Any]:
        contexts = {n: (lambda k=ways[n].threads: measure.torch_threads(k)) for n in names}
        rest = 110.0 if model.lapack else 10.0
        return measure.timed(
            {n: ways[n].run for n in names}, {}, rounds, contexts=contexts, rest_ms=rest
        )

    first = run(list(ways), 3)
    least = {name: min(samples) for name, samples in first["samples_ms"].items()}
    slow = [name for name, ms in least.items() if ms > SLOW * min(least.values())]
    made = run([name for name in ways if name not in slow], rounds)
    return {**made, "slow_ms": {name: first["samples_ms"][name] for name in slow}}


# -- what a case says -----------------------------------------------------------------------------------


def summary(case: dict[str, Any]) -> dict[str, Any]:
    """The best of ours, of each framework, against the best of each peer and of its sequential mode."""
    from common import measure

    samples, modes = case["samples_ms"], case["modes"]

    def median(name: str) -> float:
        return statistics.median(samples[name])

    ours = [
        n for source in ("dynaflow jax", "dynaflow torch") for n in case["peers"].get(source, ())
    ]
    ours = [n for n in ours if n in samples and modes[n] == "parallel"]
    if not ours:
        return {}
    best = min(ours, key=median)
    made: dict[str, Any] = {"ours": best, "ms": median(best), "against": {}}
    for peer, names in case["peers"].items():
        timed = [n for n in names if n in samples]
        if peer.startswith("dynaflow") or not timed:
            continue
        alone = [n for n in timed if modes[n] == "sequential"]
        beside = [n for n in timed if modes[n] == "parallel"]
        made["against"][peer] = {
            **measure.ratio(samples, best, timed),
            "sequential_ms": min(map(median, alone)) if alone else None,
            "parallel_ms": min(map(median, beside)) if beside else None,
        }
    # All their ways, so that each resample picks the best anew: the interval knows that they were picked.
    everyone = [
        n
        for peer, names in case["peers"].items()
        for n in names
        if n in samples and not peer.startswith("dynaflow")
    ]
    if everyone:
        made["all"] = measure.ratio(samples, best, everyone)
    return made


def markdown(record: dict[str, Any]) -> str:
    """The table of a result."""
    peers = list(
        dict.fromkeys(p for c in record["cases"] for p in c["peers"] if "dynaflow" not in p)
    )
    lines = [
        f"| model | ours, ms | {' | '.join(peers)} | of the best peer |",
        "|---" * (3 + len(peers)) + "|",
    ]
    for case in record["cases"]:
        told = summary(case)
        if not told:
            lines.append(f"| {case['name']} | failed" + " | -" * (1 + len(peers)) + " |")
            continue
        cells = []
        for peer in peers:
            against = told["against"].get(peer)
            if against is None:
                cells.append("-")
                continue
            both = (against["sequential_ms"], against["parallel_ms"])
            cells.append(" / ".join("-" if ms is None else f"{ms:.3g}" for ms in both))
        best = told.get("all")
        last = (
            f"{best['ratio']:.2f} ({best['low']:.2f} to {best['high']:.2f}), {best['baseline']}"
            if best
            else "-"
        )
        ours = told["ours"].removeprefix("dynaflow ")
        lines.append(f"| {case['name']} | {told['ms']:.3g} {ours} | {' | '.join(cells)} | {last} |")
    return "\n".join(lines)


# -- cases, each in a process of its own ------------------------------------------------------------------


def one(name: str, rounds: int, out: Path) -> None:
    """Runs a case in this process, and writes what it found."""
    from peers import cases as peer_cases, ways as peer_ways

    with peer_ways.quiet():
        made = study(peer_cases.make(name), rounds)
    out.write_text(json.dumps({"case": name, **made}))


def in_process(name: str, rounds: int) -> dict[str, Any]:
    """Runs a case in a process of its own: one that crashes or hangs is told, and the rest goes on."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "case.json"
        command = [sys.executable, "-W", "ignore", __file__, "--one", name]
        command += ["--rounds", str(rounds), "-o", str(out)]
        # Decisions and programs of earlier runs would make this one look quicker than it is.
        env = os.environ | {"DYNAFLOW_XLA_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        try:
            done = subprocess.run(
                command, timeout=CASE_SECONDS, capture_output=True, text=True, env=env
            )
        except subprocess.TimeoutExpired:
            why = f"took longer than {CASE_SECONDS:.0f} s"
        else:
            if out.exists():
                return json.loads(out.read_text())  # type: ignore[no-any-return]
            why = (
                f"status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:200]}"
            )
    return {
        "case": name,
        "name": name,
        "failed": {"all": why},
        "peers": {},
        "modes": {},
        "samples_ms": {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--case", action="append", help="only these")
    parser.add_argument("--seconds", type=float, default=20 * 60.0, help="begin no case after this")
    parser.add_argument("-o", "--out", type=Path, default=records.RESULTS / "peers.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print the table of a result")
    given = parser.parse_args()
    if given.markdown:
        print(markdown(json.loads(given.markdown.read_text())))
        return
    if given.one:
        one(given.one, given.rounds, given.out)
        return
    from peers import cases as peer_cases

    unknown = set(given.case or ()) - set(peer_cases.CASES)
    if unknown:
        parser.error(
            f"no case {', '.join(sorted(unknown))}; there are {', '.join(peer_cases.CASES)}"
        )
    record: dict[str, Any] = {
        "format": 1,
        "benchmark": "peers",
        "rounds": given.rounds,
        "cases": [],
    }
    if given.out.exists():
        record = json.loads(given.out.read_text())
    began, longest = time.perf_counter(), 0.0
    for name in given.case or peer_cases.CASES:
        if any(case["case"] == name for case in record["cases"]):
            continue
        start = time.perf_counter()
        if start - began + longest > given.seconds:
            print(f"{name} and later ones are left for another run")
            break
        stamp = environment.stamp()
        stamp["versions"] |= {package: environment._version(package) for package in PACKAGES}
        case = in_process(name, given.rounds)
        case["seconds"] = time.perf_counter() - start
        longest = max(longest, case["seconds"])
        case["load_average"] = stamp["load_average"]
        record.setdefault("environment", stamp)
        if record["environment"]["git"]["commit"] != stamp["git"]["commit"]:
            case["git"] = stamp["git"]
        record["cases"].append(case)
        record["seconds"] = sum(x["seconds"] for x in record["cases"])
        records.save(record, given.out)
        print(f"{name}: {case['seconds']:.0f} s", flush=True)
        for what, why in case["failed"].items():
            print(f"  {what} left out: {why}", flush=True)
    print(markdown(record))


if __name__ == "__main__":
    main()
