"""Everything that a GPU is needed for, in one command: ``make gpu-all``.

Installs the package, writes the GPU's target text, answers the open questions (probes), runs the tests
and the benchmarks. What measures nothing runs beside each other; then what measures, one after another.
Each part has a time limit of its own and a failing one stops nothing. All results lie in one folder:
``summary.json`` says how each part ended and on what machine, ``log-<part>.txt`` what it printed, and
``log.txt`` holds these texts together. Needs the standard library only; the parts need what they need,
and say what is missing.

Single parts (``--parts``) are bounded together (``--within``), so that one command on a lent machine
holds them: what there is no time left for is said not to have been started, and is run again later.

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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
REHEARSAL = bool(os.environ.get("DYNAFLOW_XLA_STANDIN"))
KEPT = 4000  # characters of a part's end in the summary
WITHIN = 585  # seconds: a command on a lent machine may take ten minutes
ASIDE = 10  # seconds of these for the summary
IMPORT = 60  # seconds
SLACK = 20  # seconds beyond those that a benchmark is told, in which it writes what it has
FIRST = 0.6  # of the time: what measures nothing may take no more where measuring follows
APART = 12  # cores: from so many on, benchmarks of the GPU and of the CPU share the machine
OF_GPU = 4  # cores of these for the GPU's benchmarks
BY_NAME = {"bench-torch", "bench-jax", "bench-ffi"}  # each a part of `bench`

sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu import reports  # noqa: E402


@dataclass(frozen=True)
class Part:
    """One step: a command, and after how many seconds it is stopped."""

    name: str
    command: list[str]
    seconds: int
    timed: bool = False
    """Its results are times, so it has the machine to itself."""
    workers: int = 0
    """Processes that share the work of a pytest command, where pytest-xdist is there."""
    measures: int = 0
    """Seconds that a benchmark is told to measure, if they are left."""


def parts(python: str, out: Path, build: Path, more: list[str], workers: int = 4) -> list[Part]:
    """All parts, in order."""

    def pytest(name: str, words: str, seconds: int, timed: bool = False, share: int = 0) -> Part:
        command = [
            python, "-P", "-m", "pytest", "tests/gpu", "-v", "-m", "gpu", "-p", "no:cacheprovider",
            "-p", "no:benchmark",
            "-o", "timeout=120", "-o", "timeout_method=thread", "-k", words,
            f"--junitxml={out / (name + '.xml')}",
        ]  # fmt: skip
        return Part(name, command, seconds, timed, share)

    def bench(name: str, seconds: int, *groups: str) -> Part:
        if "--seconds" in more[:-1]:
            seconds = math.ceil(float(more[more.index("--seconds") + 1]))
        command = [python, "benchmarks/gpu/bench.py", "--groups", *groups]
        command += ["--out", str(out / f"{name}.json"), *(["--dry"] if REHEARSAL else []), *more]
        return Part(name, command, seconds + 90, timed=True, measures=seconds)

    only = "sorts" if REHEARSAL else "dense;sort;eigh;moe;towers;parallel;inception;train"
    cores = [
        "env",
        "JAX_PLATFORMS=cpu",
        python,
        "benchmarks/cpu/width.py",
        "measure",
        "--only",
        only,
    ]
    cores += ["--rounds", "2" if REHEARSAL else "11", "--out", str(out / "cores.json")]
    install = [python, "tests/gpu/install.py", str(build / "site"), str(build / "wheels")]
    others = "not test_probes and not test_kernels and not test_jax"
    return [
        Part("install", install, 150),
        Part("target", [python, "-P", "tests/gpu/target.py", str(out / "target.txtpb")], 90),
        pytest("tests", others, 300, share=workers),
        pytest(
            "probes", "test_probe and not test_timed and not sanitizer", 340, share=min(3, workers)
        ),
        # Lanes that are XLA clients may hang, which ends their part where pytest-xdist is missing.
        pytest("tests-jax", "test_kernels or test_jax", 300, share=workers),
        pytest("sanitizer", "test_compute_sanitizer", 260),
        pytest("probes-timed", "test_timed", 440, timed=True),
        # All groups in one command compile side by side; one of them alone is asked for by name.
        bench("bench", 600, "torch", "jax", "ffi"),
        bench("bench-torch", 400, "torch"),
        bench("bench-jax", 260, "jax"),
        bench("bench-ffi", 180, "ffi"),
        # Such machines have many cores: what lanes of several gain is measured beside.
        Part("cores", cores, 240, timed=True),
    ]


def granted(part: Part, queue: list[Part], left: float) -> tuple[int, list[str]]:
    """After how many seconds a part is stopped, and its command; `queue` begins with it.

    Of what is left, benchmarks get shares by the seconds that they would measure, and what one does not
    use is there for the next. The slack is kept once, because it is rarely used.
    """
    seconds = int(min(part.seconds, left))
    if not part.measures:
        return seconds, part.command
    share = part.measures / sum(p.measures or p.seconds for p in queue)
    measures = max(
        5, min(part.measures, int((left - SLACK) * share) if left < math.inf else part.measures)
    )
    seconds = int(min(measures + 90, left))
    return seconds, [*part.command, "--seconds", str(measures)]


@dataclass
class Queue:
    """Parts that run one after another, beside other queues; on some of the cores if these are named."""

    parts: list[Part]
    cores: set[int] = field(default_factory=set)
    beside: str = ""


@dataclass
class Running:
    """A part that was started."""

    part: Part
    process: subprocess.Popen[bytes]
    file: IO[bytes]
    at: int
    begin: float
    seconds: int
    beside: str


class Runner:
    """Starts parts and ends them with everything that they started; keeps how they ended."""

    def __init__(
        self,
        environment: dict[str, str],
        out: Path,
        made: dict[str, Any],
        save: Callable[[], object] = lambda: None,
    ) -> None:
        self.environment, self.out, self.made, self.save = environment, out, made, save
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.xdist = False

    def run(self, queues: list[Queue], until: float = math.inf) -> None:
        """Runs all queues beside each other; all that still runs then is killed."""
        waiting = [list(q.parts) for q in queues]
        running: dict[int, Running] = {}
        try:
            while any(waiting) or running:
                for number, queue in enumerate(queues):
                    if number not in running and waiting[number]:
                        if made := self.start(queue, waiting[number], until - time.monotonic()):
                            running[number] = made
                        waiting[number].pop(0)
                for number, one in list(running.items()):
                    late = time.monotonic() - one.begin >= one.seconds
                    if late or exited(one.process):
                        self.end(one, late)
                        del running[number]
                if running:
                    time.sleep(0.1)
        finally:
            for one in running.values():
                self.end(one, None)
            sweep(self.mark)

    def start(self, queue: Queue, waiting: list[Part], left: float) -> Running | None:
        """Starts the first that waits, unless there is no time."""
        part = waiting[0]
        seconds, command = granted(part, waiting, left)
        if seconds < 1:
            return self.note(part, {"ended": "not started: no time is left in this run"})
        if part.workers > 1 and self.xdist:
            # A hanging test ends its own process only, and another one takes what it would have run.
            command = [*command, "-n", str(part.workers), "--dist", "worksteal"]
        for name in (f"{part.name}.xml", f"log-{part.name}.txt"):
            (self.out / name).unlink(missing_ok=True)
        print(f"{part.name:12} at most {seconds} s ...", flush=True)
        file = (self.out / f"log-{part.name}.txt").open("ab")
        file.write(f"==== {part.name}: {' '.join(command)}\n".encode())
        file.flush()
        at = file.tell()  # before the part starts, which shares the place with this process
        environment = {**self.environment, "GPU_PART": f"{self.mark}:{part.name}:"}
        before = os.sched_getaffinity(0)
        try:
            # A child has the cores of the thread that starts it: so it never runs on others.
            os.sched_setaffinity(0, queue.cores or before)
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            file.close()
            return self.note(part, {"ended": f"not started: {error}"})
        finally:
            os.sched_setaffinity(0, before)
        begin = time.monotonic()
        return Running(part, process, file, at, begin, seconds, queue.beside)

    def end(self, one: Running, late: bool | None) -> None:
        """Kills what a part left behind, and keeps how it ended; `late` is none if all was interrupted."""
        part, process = one.part, one.process
        done = exited(process)
        if process.returncode is None:  # not reaped: the group, also where its leader is over
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        status = process.wait()
        sweep(f"{self.mark}:{part.name}:")
        one.file.close()
        if done:
            ended = "passed" if status == 0 else f"status {status}"
        elif late is None:
            ended = "interrupted"
        else:
            ended = f"stopped after {one.seconds} s"
            if one.seconds < part.seconds:
                ended += f", which were left of this run; it may take {part.seconds} s"
        log = self.out / f"log-{part.name}.txt"
        made: dict[str, Any] = {"ended": ended, "seconds": round(time.monotonic() - one.begin, 1)}
        with log.open("rb") as file:
            file.seek(max(one.at, log.stat().st_size - 4 * KEPT))
            made["tail"] = file.read().decode(errors="replace")[-KEPT:]
        if one.beside:
            made["beside"] = one.beside
        if "pytest" in part.command:
            made["tests"] = reports.tests(self.out / f"{part.name}.xml", log)
        self.note(part, made)

    def note(self, part: Part, made: dict[str, Any]) -> None:
        """Keeps how a part ended, and says it."""
        self.made[part.name] = {"seconds": 0.0, "tail": "", **made}
        print(reports.line(part.name, self.made[part.name]), flush=True)
        self.save()


def exited(process: subprocess.Popen[bytes]) -> bool:
    """Whether it is over; it is not reaped, so that its number stays that of its group."""
    flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
    return process.returncode is not None or os.waitid(os.P_PID, process.pid, flags) is not None


def sweep(mark: str) -> None:
    """Kills what parts started in sessions of their own: known by how their marks begin."""
    wanted = f"GPU_PART={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
            if int(entry.name) != os.getpid() and any(w.startswith(wanted) for w in words):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            pass  # it is gone, or another user's


def stages(
    chosen: list[Part], cores_beside: bool, of_gpu: int = OF_GPU
) -> Iterator[tuple[bool, list[Queue]]]:
    """What runs together: first what measures nothing, then each of what does; whether it is timed."""
    free = [p for p in chosen if not p.timed and p.name != "install"]
    if free:
        names = ", ".join(p.name for p in free) if len(free) > 1 else ""
        yield False, [Queue([p], beside=names) for p in free]
    timed = [p for p in chosen if p.timed]
    benches = [p for p in timed if p.measures]
    usable = sorted(os.sched_getaffinity(0))
    cores = [p for p in timed if p.name == "cores"]
    if not (cores_beside and cores and benches and len(usable) >= max(APART, of_gpu + 1)):
        if timed:
            yield True, [Queue(timed)]
        return
    if others := [p for p in timed if p not in benches and p not in cores]:
        yield True, [Queue(others)]
    few, many = usable[:of_gpu], usable[of_gpu:]
    said = f"bench on cores {few[0]}-{few[-1]}, cores on cores {many[0]}-{many[-1]}"
    yield True, [Queue(benches, set(few), said), Queue(cores, set(many), said)]


def machine(python: str, environment: dict[str, str]) -> dict[str, object]:
    """The stamp of the benchmarks, and what nvidia-smi, lscpu and nvcc say."""
    made: dict[str, object] = {}
    commands = {
        "stamp": [python, "benchmarks/common/environment.py"],
        "packages": [python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"],
        "nvidia-smi": ["nvidia-smi"],
        "lscpu": ["lscpu", "--extended"],
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


def succeeds(python: str, environment: dict[str, str], code: str) -> bool | None:
    """Whether a Python runs some code; none if it does not come to an end."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", code], env=environment, capture_output=True, timeout=IMPORT
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode == 0


def why_not_installed(python: str, environment: dict[str, str], site: Path) -> str:
    """What is wrong with the package that an earlier run installed; ``""`` if it is of these sources."""
    sys.path.insert(0, str(ROOT / "tests/gpu"))
    import sources

    if sources.beside(site) != sources.current():
        return (
            "not installed here" if not site.exists() else "installed from other sources than these"
        )
    try:
        fine = succeeds(python, environment, "import dynaflow_xla.ffi._engine")
    except OSError:
        return ""  # no such Python: each part says so
    if fine is None:
        return "installed, and its import hangs"
    return "" if fine else "installed, and cannot be imported"


def has_xdist(python: str, environment: dict[str, str]) -> bool:
    """Whether that Python can share tests among processes."""
    try:
        return bool(succeeds(python, environment, "import xdist"))
    except OSError:
        return False


def packed(out: Path) -> str:
    """Packs the folder beside itself, where that may be written; says where."""
    try:
        return f", packed in {shutil.make_archive(str(out), 'gztar', out.parent, out.name)}"
    except OSError as error:
        return f" (not packed: {error})"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", nargs="*", default=[], help="default: all, the benchmarks as one"
    )
    parser.add_argument("--out", type=Path, help="default: out/gpu-<date>")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument(
        "--within",
        type=float,
        help=f"seconds in all; default: {WITHIN} with --parts, else no limit",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(4, max(2, len(os.sched_getaffinity(0)) // 4)),
        help="processes for the tests of a part, with pytest-xdist",
    )
    parser.add_argument(
        "--cores-beside",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"the part cores beside the GPU's benchmarks, each on cores of its own, from {APART} on",
    )
    parser.add_argument(
        "--gpu-cores", type=int, default=OF_GPU, help="cores of the GPU's benchmarks then"
    )
    parser.add_argument(
        "--as-it-is", action="store_true", help="the package that is there is used, whichever it is"
    )
    parser.add_argument(
        "--bench", nargs=argparse.REMAINDER, default=[], help="passed to benchmarks/gpu/bench.py"
    )
    return parser.parse_args()


def seconds_until(end: float) -> float:
    """Seconds that a thread can be waited for; a run without a limit has an infinite end."""
    return min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX)


def interrupt(number: int, _: object) -> None:
    """A signal ends the parts and not the summary; a second one is not heard."""
    for heard in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(heard, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> int:
    """Runs the parts; the exit status is 1 if one did not pass."""
    options = parse()
    begin = time.monotonic()
    within = options.within or (WITHIN if options.parts else math.inf)
    out = (
        options.out or ROOT / "out" / time.strftime("gpu-%Y-%m-%dT%H%M%SZ", time.gmtime())
    ).resolve()
    every = parts(
        options.python, out, options.build.resolve(), options.bench, max(1, options.workers)
    )
    if unknown := set(options.parts) - {p.name for p in every}:
        print(f"no part {sorted(unknown)}; there are {', '.join(p.name for p in every)}")
        return 2
    out.mkdir(parents=True, exist_ok=True)
    # What the caller has on its path must not shadow the package; a stand-in has its own part there.
    site = options.build.resolve() / "site"
    paths = [str(site)]
    paths += [os.environ["PYTHONPATH"]] if REHEARSAL else []
    # Several processes share the GPU's memory, and the cores.
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    shared = {name: os.environ.get(name, value) for name, value in shared.items()}
    path = os.pathsep.join(paths)
    environment = {**os.environ, **shared, "PYTHONPATH": path, "GPU_OUT": str(out)}
    # A folder may be filled by several runs, a part at a time.
    target = out / "summary.json"
    summary = json.loads(target.read_text()) if target.exists() else {"format": 1, "parts": {}}
    summary["environment"] = shared
    if REHEARSAL:
        summary["rehearsal"] = (
            "on a stand-in for the driver, without a GPU: no number means anything"
        )
        print(f"rehearsal {summary['rehearsal']}", flush=True)
    asked = set(options.parts) or {p.name for p in every} - BY_NAME
    chosen = [p for p in every if p.name in asked]
    if every[0] not in chosen and not options.as_it_is:
        if why := why_not_installed(options.python, environment, site):
            print(f"the package is {why}: first that", flush=True)
            chosen.insert(0, every[0])  # a fresh machine gets single parts, too

    def save() -> None:
        target.write_text(json.dumps(dict(summary), indent=1) + "\n")

    runner = Runner(environment, out, summary["parts"], save)
    for heard in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(heard, interrupt)
    try:
        end = begin + within - ASIDE
        if every[0] in chosen:
            runner.run([Queue([every[0]])], end)
        runner.xdist = has_xdist(options.python, environment)
        asking = threading.Thread(
            target=lambda: summary.update(machine=machine(options.python, environment)), daemon=True
        )
        asking.start()
        for timed, queues in stages(chosen, options.cores_beside, options.gpu_cores):
            until = end
            if timed:
                asking.join(seconds_until(end))  # nothing else runs while something is measured
            elif any(p.timed for p in chosen):
                until = time.monotonic() + FIRST * (end - time.monotonic())
            runner.run(queues, until)
        asking.join(seconds_until(end))
    finally:
        for heard in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(heard, signal.SIG_IGN)
        save()
        reports.joined_logs(out, [p.name for p in every])
        ran = {p.name: summary["parts"][p.name] for p in chosen if p.name in summary["parts"]}
        print(reports.shown(out, ran))
        print(f"results in {out}{packed(out)}", flush=True)
    return 0 if all(p["ended"] == "passed" for p in summary["parts"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
