"""Everything that a GPU is needed for, in one command: ``make gpu-all``.

Installs the package, writes the GPU's target text, answers the open questions (probes), runs the tests
and the benchmarks. Each part has a time limit of its own and a failing one stops nothing. All results lie
in one folder: ``summary.json`` says how each part ended and on what machine, ``log.txt`` what it printed.
Needs the standard library only; the parts need what they need, and say what is missing.

Single parts (``--parts``) are bounded together, so that one command on a lent machine holds them: what
there is no time left for is said not to have been started, and is run again later.

Where the driver is a stand-in (``make gpu-rehearsal``) the same commands run on tiny arrays, so that no
script fails for the first time on a GPU; nothing of that is a measurement, and the summary says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REHEARSAL = bool(os.environ.get("DYNAFLOW_XLA_STANDIN"))
KEPT = 4000  # characters of a part's end in the summary
WITHIN = 585  # seconds: a command on a lent machine may take ten minutes
ASIDE = 10  # seconds of these for the summary
IMPORT = 60  # seconds


@dataclass(frozen=True)
class Part:
    """One step: a command, and after how many seconds it is stopped."""

    name: str
    command: list[str]
    seconds: int


def parts(python: str, out: Path, build: Path, more: list[str]) -> list[Part]:
    """All parts, in order; what answers most comes first."""

    def pytest(what: str, words: str) -> list[str]:
        return [
            python, "-P", "-m", "pytest", "tests/gpu", "-v", "-m", "gpu", "-p", "no:cacheprovider",
            "-o", "timeout=120", "-o", "timeout_method=thread", "-k", words,
            f"--junitxml={out / (what + '.xml')}",
        ]  # fmt: skip

    def bench(group: str, seconds: int) -> Part:
        command = [python, "benchmarks/gpu.py", "--groups", group, "--seconds", str(seconds)]
        command += [
            "--out",
            str(out / f"bench-{group}.json"),
            *(["--dry"] if REHEARSAL else []),
            *more,
        ]
        return Part(f"bench-{group}", command, seconds + 90)

    only = "sorts" if REHEARSAL else "dense;sort;eigh;moe;towers;parallel;inception;train"
    cores = ["env", "JAX_PLATFORMS=cpu", python, "benchmarks/width.py", "measure", "--only", only]
    cores += ["--rounds", "2" if REHEARSAL else "11", "--out", str(out / "cores.json")]
    install = [python, "tests/gpu/install.py", str(build / "site"), str(build / "wheels")]
    return [
        Part("install", install, 150),
        Part("target", [python, "-P", "tests/gpu/target.py", str(out / "target.txtpb")], 90),
        Part(
            "tests", pytest("tests", "not test_probes and not test_kernels and not test_jax"), 300
        ),
        Part("probes", pytest("probes", "test_probe and not sanitizer"), 480),
        # Lanes that are XLA clients may hang, which ends their part.
        Part("tests-jax", pytest("tests-jax", "test_kernels or test_jax"), 300),
        bench("torch", 400),
        bench("jax", 260),
        bench("ffi", 180),
        Part("sanitizer", pytest("sanitizer", "test_compute_sanitizer"), 260),
        # Such machines have many cores: what lanes of several gain is measured beside.
        Part("cores", cores, 240),
    ]


def run(
    part: Part, environment: dict[str, str], log: Path, left: float = math.inf
) -> dict[str, object]:
    """Runs a part with everything it starts, for as many seconds as there are left; how it ended."""
    begin = time.monotonic()
    seconds = int(min(part.seconds, left))
    if seconds < 1:
        return {"ended": "not started: no time is left in this run", "seconds": 0.0, "tail": ""}
    with log.open("a") as file:
        file.write(f"\n==== {part.name}: {' '.join(part.command)}\n")
        file.flush()
        at = file.tell()
        try:
            process = subprocess.Popen(
                part.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return {"ended": f"not started: {error}", "seconds": 0.0, "tail": ""}
        try:
            status = process.wait(seconds)
            ended = "passed" if status == 0 else f"status {status}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {seconds} s"
            if seconds < part.seconds:
                ended += f", which were left of this run; it may take {part.seconds} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    with log.open(errors="replace") as file:
        file.seek(at)
        tail = file.read()[-KEPT:]
    return {"ended": ended, "seconds": round(time.monotonic() - begin, 1), "tail": tail}


def machine(python: str, environment: dict[str, str]) -> dict[str, object]:
    """The stamp of the benchmarks, and what nvidia-smi and nvcc say."""
    made: dict[str, object] = {}
    commands = {
        "stamp": [python, "benchmarks/environment.py"],
        "packages": [python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"],
        "nvidia-smi": ["nvidia-smi"],
        "nvcc": ["nvcc", "--version"],
    }
    for name, command in commands.items():
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=15
            )
            made[name] = done.stdout or done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            made[name] = f"{type(error).__name__}: {error}"
    try:
        made["stamp"] = json.loads(str(made["stamp"]))
    except json.JSONDecodeError:
        pass  # then the text says why
    return made


def why_not_installed(python: str, environment: dict[str, str], site: Path) -> str:
    """What is wrong with the package that an earlier run installed; ``""`` if it is of these sources."""
    sys.path.insert(0, str(ROOT / "tests/gpu"))
    import sources

    if sources.beside(site) != sources.current():
        return (
            "not installed here" if not site.exists() else "installed from other sources than these"
        )
    check = [python, "-P", "-c", "import dynaflow_xla.ffi._engine"]
    try:
        done = subprocess.run(check, env=environment, capture_output=True, timeout=IMPORT)
    except subprocess.TimeoutExpired:
        return "installed, and its import hangs"
    except OSError:
        return ""  # no such Python: each part says so
    return "" if done.returncode == 0 else "installed, and cannot be imported"


def packed(out: Path) -> str:
    """Packs the folder beside itself, where that may be written; says where."""
    try:
        return f", packed in {shutil.make_archive(str(out), 'gztar', out.parent, out.name)}"
    except OSError as error:
        return f" (not packed: {error})"


def main() -> int:
    """Runs the parts; the exit status is 1 if one did not pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", default=[], help="default: all, in order")
    parser.add_argument("--out", type=Path, help="default: out/gpu-<date>")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument(
        "--within",
        type=float,
        help=f"seconds in all; default: {WITHIN} with --parts, else no limit",
    )
    parser.add_argument(
        "--as-it-is", action="store_true", help="the package that is there is used, whichever it is"
    )
    parser.add_argument(
        "--bench", nargs=argparse.REMAINDER, default=[], help="passed to benchmarks/gpu.py"
    )
    options = parser.parse_args()
    begin = time.monotonic()
    within = options.within or (WITHIN if options.parts else math.inf)
    out = (
        options.out or ROOT / "out" / time.strftime("gpu-%Y-%m-%dT%H%M%SZ", time.gmtime())
    ).resolve()
    every = parts(options.python, out, options.build.resolve(), options.bench)
    if unknown := set(options.parts) - {p.name for p in every}:
        print(f"no part {sorted(unknown)}; there are {', '.join(p.name for p in every)}")
        return 2
    out.mkdir(parents=True, exist_ok=True)
    # What the caller has on its path must not shadow the package; a stand-in has its own part there.
    site = options.build.resolve() / "site"
    paths = [str(site)]
    paths += [os.environ["PYTHONPATH"]] if REHEARSAL else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GPU_OUT": str(out)}
    # A folder may be filled by several runs, a part at a time.
    target = out / "summary.json"
    summary = json.loads(target.read_text()) if target.exists() else {"format": 1, "parts": {}}
    if REHEARSAL:
        summary["rehearsal"] = (
            "on a stand-in for the driver, without a GPU: no number means anything"
        )
        print(f"rehearsal {summary['rehearsal']}", flush=True)
    chosen = [p for p in every if not options.parts or p.name in options.parts]
    if every[0] not in chosen and not options.as_it_is:
        if why := why_not_installed(options.python, environment, site):
            print(f"the package is {why}: first that", flush=True)
            chosen.insert(0, every[0])  # a fresh machine gets single parts, too
    for part in chosen:
        if part is not every[0] and "machine" not in summary:
            summary["machine"] = machine(options.python, environment)
        left = begin + within - ASIDE - time.monotonic()
        print(f"{part.name:12} at most {min(part.seconds, left):.0f} s ...", flush=True)
        made = summary["parts"][part.name] = run(part, environment, out / "log.txt", left)
        print(f"{part.name:12} {made['ended']} in {made['seconds']} s", flush=True)
        last = str(made["tail"]).strip().splitlines()[-1:] or [""]
        print(f"{'':12} {last[0][:150]}", flush=True)
        if part is every[0]:  # before the parts that are measured: they are what time is left for
            summary["machine"] = machine(options.python, environment)
        target.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"results in {out}{packed(out)}")
    return 0 if all(p["ended"] == "passed" for p in summary["parts"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
