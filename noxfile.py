"""Tests in environments of their own: other versions of JAX and PyTorch, torch-xla, JAX's CUDA plugin.

``make`` has a door to each session (``make test-versions`` is ``nox -s versions``) and installs nox in
``.venv``. The environments are large and outlive a clone, so sessions find or make them by themselves
(``venv_backend = none``): those with PyTorch or CUDA in the user's cache folder, the others in ``build/``.
Versions and folders come from the environment; the names are those of make's variables.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path.insert(0, str(Path(__file__).parent / "tests/gpu"))
import sources  # noqa: E402 - the GPU's machine has it, too

nox.options.default_venv_backend = "none"
nox.options.sessions = []
nox.options.stop_on_first_error = True

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynaflow_xla"
VERSIONS = Path("build/versions").resolve()
WHEELS = Path("build/wheels").resolve()
TAG = f"py{sys.version_info.major}.{sys.version_info.minor}"


def given(name: str, default: str = "") -> list[str]:
    """The words of an environment variable."""
    return shlex.split(os.environ.get(name) or default)


JAX = given("JAX", "jax>=0.10,<0.11 jaxlib>=0.10,<0.11")
JAX_VERSIONS = given("JAX_VERSIONS", "0.10 0.11 0.12")
TORCH_VERSIONS = given("TORCH_VERSIONS", "2.11 2.15")
GPU_JAX = given("GPU_JAX", "0.10.2 0.12.0")
STANDIN_JAX = given("STANDIN_JAX", "0.11.2 0.12.0 0.10.2")
STANDIN_QUICK = "tests/gpu_standin/test_structure.py tests/gpu_standin/test_driver.py"
TORCH_ENVS = os.environ.get("TORCH_ENVS") or f"{CACHE}/torch"
TORCH_XLA_ENV = os.environ.get("TORCH_XLA_ENV") or f"{CACHE}/torch-xla-2.9.0"
GPU_ENVS = Path(os.environ.get("GPU_ENVS") or CACHE / "gpu-compile")


class Environment:
    """A virtual environment at a place of its own, made if its packages cannot be found.

    Args:
        session: Who asks.
        folder: Where it is kept.
        python: The interpreter it is made with.
        needs: Modules that say by their presence that it is whole.
        installs: What to install into a new one: arguments of one ``pip install`` each.
    """

    def __init__(
        self,
        session: nox.Session,
        folder: Path,
        python: str,
        needs: Sequence[str] = (),
        installs: Sequence[Sequence[str]] = (),
    ) -> None:
        self.session, self.python = session, folder / "bin" / "python"
        if not self._whole(needs):
            session.log(f"making {folder}")
            session.run(python, "-P", "-m", "venv", "--clear", str(folder), external=True)
            for packages in installs:
                self.pip("install", *packages)

    def _whole(self, needs: Sequence[str]) -> bool:
        """Whether its Python starts and finds the modules."""
        look = "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
        command = [str(self.python), "-P", "-c", look, *needs]
        return self.python.exists() and not subprocess.run(command, capture_output=True).returncode

    def run(self, *args: str) -> None:
        """Runs the environment's Python."""
        self.session.run(str(self.python), "-P", *args, external=True)

    def pip(self, *args: str) -> None:
        """Runs the environment's pip."""
        self.run("-m", "pip", args[0], "-q", *args[1:])

    def test(self, wheel: Path, *args: str) -> None:
        """Installs the wheel and runs pytest."""
        self.pip("install", "--no-deps", "--force-reinstall", str(wheel))
        self.run("-m", "pytest", *args, *given("PYTEST_ARGS"))


def python312(session: nox.Session) -> str:
    """Python 3.12, which all versions of JAX have."""
    found = os.environ.get("PYTHON312") or shutil.which("python3.12")
    if not found:
        session.error("Python 3.12 is needed: make PYTHON312=...")
    return found


@functools.cache
def wheel_of_312(session: nox.Session) -> Path:
    """One wheel, built on the oldest headers, for every JAX; kept while its sources are the same."""
    made_of = sources.current()
    dist, stamp = VERSIONS / "dist", VERSIONS / "dist" / sources.MADE_OF
    if sources.beside(dist) == made_of:
        return next(dist.glob("*.whl"))
    shutil.rmtree(dist, ignore_errors=True)
    build = Environment(session, VERSIONS / "build", python312(session))
    build.pip("wheel", "--no-deps", "-w", str(dist), ".")
    stamp.write_text(made_of)
    return next(dist.glob("*.whl"))


@functools.cache
def own_wheel(session: nox.Session) -> Path:
    """A wheel for the Python of ``.venv``, built with its tools: objects of earlier builds are used."""
    folder = Path("build/own-wheel").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    command = ["wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder), "."]
    session.run(sys.executable, "-P", "-m", "pip", *command, external=True)
    return next(folder.glob("*.whl"))


@nox.session
def wheels(session: nox.Session) -> None:
    """A wheel for each Python of WHEEL_PYTHONS that is here, tried alone in an environment."""
    tried = 0
    for python in given("WHEEL_PYTHONS", "python3.11 python3.12 python3.13 python3.14"):
        # A shim of pyenv is there for versions that are not.
        if (
            not shutil.which(python)
            or subprocess.run([python, "-c", ""], capture_output=True).returncode
        ):
            session.log(f"no {python} here")
            continue
        folder = WHEELS / Path(python).name
        for name in ("build", "bare"):
            session.run(python, "-P", "-m", "venv", "--clear", str(folder / name), external=True)
        shutil.rmtree(folder / "dist", ignore_errors=True)
        build = Environment(session, folder / "build", python)
        build.pip("wheel", "--no-deps", "-w", str(folder / "dist"), ".")
        wheel = next((folder / "dist").glob("*.whl"))
        bare = Environment(session, folder / "bare", python)
        bare.pip("install", f"{wheel}[jax]")
        bare.run("tests/packaging/bare_environment.py")
        session.log(f"{wheel.name} works where nothing else is")
        tried += 1
    if not tried:
        session.error("none of these is here: WHEEL_PYTHONS='python3.12 /opt/python/bin/python3'")


def tests(default: str) -> list[str]:
    """Which tests a session on versions runs, in as many processes as make says."""
    return ["-q", *given("IN_PARALLEL"), *given("VERSION_TESTS", default)]


@nox.session
def versions(session: nox.Session) -> None:
    """One wheel under each JAX of JAX_VERSIONS."""
    helpers = "flatbuffers hypothesis psutil pytest pytest-timeout pytest-xdist matplotlib".split()
    wheel = wheel_of_312(session)
    for jax in JAX_VERSIONS:
        env = Environment(
            session,
            VERSIONS / f"jax-{jax}",
            python312(session),
            ["jax", "flatbuffers", "hypothesis", "psutil", "xdist", "matplotlib"],
            [[f"jax=={jax}.*", f"jaxlib=={jax}.*", str(wheel), *helpers]],
        )
        env.run("-c", "import jax, jaxlib; print('jax', jax.__version__, jaxlib.__version__)")
        env.test(wheel, *tests("tests/frontends tests/property"))


@nox.session
def torch_versions(session: nox.Session) -> None:
    """One wheel under each torch of TORCH_VERSIONS; 5 GB each, for PyPI's builds bring CUDA."""
    wheel = own_wheel(session)
    for torch in TORCH_VERSIONS:
        env = Environment(
            session,
            Path(f"{TORCH_ENVS}-{torch}-{TAG}"),
            sys.executable,
            ["torch", "jax", "pytest", "xdist", "transformers"],
            [[f"torch=={torch}.*", *JAX, f"{wheel}[jax,torch,test,test-torch]"]],
        )
        env.run("-c", "import torch; print('torch', torch.__version__)")
        env.test(wheel, *tests("tests/frontends/torch"))


@nox.session
def torch_xla(session: nox.Session) -> None:
    """The tests of torch-xla, which works with torch 2.9.0 alone; 7 GB."""
    helpers = ["msgspec", "threadpoolctl", "psutil", "pytest", "pytest-timeout"]
    env = Environment(
        session,
        Path(f"{TORCH_XLA_ENV}-{TAG}"),
        sys.executable,
        ["torch_xla", "jax"],
        [["torch==2.9.0", "torch-xla==2.9.0", *JAX, *helpers]],
    )
    env.test(own_wheel(session), "tests/torch_xla")


def gpu_environment(session: nox.Session, jax: str) -> Environment:
    """A version of JAX with its CUDA plugin, without CUDA; 700 MB.

    XLA needs ptxas and libdevice: those of an installed CUDA toolkit, else NVIDIA's wheels.
    """
    base = "flatbuffers msgspec threadpoolctl pytest pytest-timeout pytest-xdist psutil hypothesis optax"
    plugin = [f"jax-cuda13-plugin=={jax}", f"jax-cuda13-pjrt=={jax}"]
    if not shutil.which("ptxas"):
        plugin += ["nvidia-cuda-nvcc==13.0.*", "nvidia-nvvm==13.0.*"]
    needs = "jax hypothesis optax flatbuffers pytest_timeout xdist jax_plugins.xla_cuda13"
    return Environment(
        session,
        GPU_ENVS / f"jax-{jax}",
        python312(session),
        needs.split(),
        [[f"jax=={jax}", f"jaxlib=={jax}", *base.split()], ["--no-deps", *plugin]],
    )


def gpu_environments(session: nox.Session) -> dict[str, Environment]:
    """By version of JAX of GPU_JAX."""
    return {jax: gpu_environment(session, jax) for jax in GPU_JAX}


@nox.session
def gpu_compile(session: nox.Session) -> None:
    """Programs for GPUs, compiled without one under each JAX of GPU_JAX, and read back."""
    for jax, env in gpu_environments(session).items():
        session.log(f"jax {jax}")
        env.test(wheel_of_312(session), "-q", "tests/gpu_compile")


STANDIN = "tests/gpu_standin/build.py"


def standin_environment(session: nox.Session, jax: str) -> Environment:
    """An environment in which STANDIN can build the stand-in for NVIDIA's driver.

    That needs a C++ compiler and CUDA's headers: those of an installed toolkit, else NVIDIA's wheels.
    """
    if not (os.environ.get("PYTHON312") or shutil.which("python3.12")):
        session.skip("no Python 3.12, which all versions of JAX have: make PYTHON312=...")
    try:
        env = gpu_environment(session, jax)
    except CommandFailed:
        session.skip(f"JAX {jax} and its CUDA plugin cannot be installed")
    # Not in the environment: JAX's plugin would load the CUDA runtime that comes with the headers, which
    # wants a real driver.
    headers = GPU_ENVS / "cuda-headers"
    found = headers / "nvidia/cu13"
    if found.exists():
        os.environ.setdefault("CUDA_HOME", str(found))
    check = [env.python, "-P", STANDIN, "--check"]
    said = subprocess.run(check, capture_output=True, text=True)
    if said.returncode and "cuda.h" in said.stdout:
        wheels = ["nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*"]
        env.pip("install", "--no-deps", "--target", str(headers), *wheels)
        os.environ["CUDA_HOME"] = str(found)
        said = subprocess.run(check, capture_output=True, text=True)
    if said.returncode:
        session.skip(said.stdout.strip())
    return env


@nox.session
def gpu_standin(session: nox.Session) -> None:
    """JAX's CUDA plugin on a stand-in for NVIDIA's driver, without a GPU, under each JAX of STANDIN_JAX.

    All tests under the first version, under the others those of the calls that XLA makes.
    """
    every = given(
        "STANDIN_TESTS",
        "tests/gpu_standin tests/gpu/test_engine.py tests/gpu/test_kernels.py tests/gpu/test_models.py",
    )
    quick = given("STANDIN_TESTS", STANDIN_QUICK)
    for jax, tests_ in zip(STANDIN_JAX, [every, *[quick] * len(STANDIN_JAX)], strict=False):
        session.log(f"jax {jax}")
        env = standin_environment(session, jax)
        env.pip("install", "--no-deps", "--force-reinstall", str(wheel_of_312(session)))
        plugin = ["-p", "standin_plugin", "-p", "no:cacheprovider"]
        env.run(STANDIN, "-P", "-m", "pytest", "-q", *plugin, *tests_, *given("PYTEST_ARGS"))


@nox.session
def standin_results(session: nox.Session) -> None:
    """The matrix of functions and thousands of random plans on the stand-in, as result files."""
    env = standin_environment(session, os.environ.get("REHEARSAL_JAX") or STANDIN_JAX[0])
    env.pip("install", "--no-deps", "--force-reinstall", str(wheel_of_312(session)))
    rows = Path("build/standin-matrix.jsonl").resolve()
    rows.unlink(missing_ok=True)
    os.environ |= {"FAKE_CUDA_DELAY_US": "100", "STANDIN_RESULTS": str(rows)}
    plugin = ["-p", "standin_plugin", "-p", "no:cacheprovider", "--skip-uncomputed"]
    env.run(STANDIN, "-P", "-m", "pytest", "-q", *plugin, "tests/frontends/jax/test_matrix.py")
    record = "benchmarks/gpu/standin.py"
    env.run(STANDIN, record, "matrix", str(rows), *given("BENCH_ARGS"))
    env.run(STANDIN, record, "plans", *given("BENCH_ARGS"))


@nox.session
def gpu_rehearsal(session: nox.Session) -> None:
    """Every part of `make gpu-all` on the stand-in: so that no script fails first where the GPU is."""
    env = standin_environment(session, os.environ.get("REHEARSAL_JAX") or STANDIN_JAX[0])
    folder = Path("build/gpu-rehearsal").resolve()
    (folder / "wheels").mkdir(parents=True, exist_ok=True)
    for old in (folder / "wheels").glob("*.whl"):
        old.unlink()
    wheel = wheel_of_312(session)
    for path in (wheel, wheel.parent / sources.MADE_OF):
        shutil.copy(path, folder / "wheels")
    parts, bench = given("PARTS"), given("BENCH_ARGS")
    env.run(
        STANDIN, "benchmarks/gpu_all.py", "--python", str(env.python), "--build", str(folder),
        "--out", os.environ.get("GPU_OUT") or "out/gpu-rehearsal",
        *(["--parts", *parts] if parts else []), *(["--bench", *bench] if bench else []),
    )  # fmt: skip


@nox.session
def sim_gpu(session: nox.Session) -> None:
    """Simulated times of the GPU benchmark's cases, from traces of the stand-in; no GPU is used."""
    env = standin_environment(session, os.environ.get("REHEARSAL_JAX") or STANDIN_JAX[0])
    env.pip("install", "--no-deps", "--force-reinstall", str(wheel_of_312(session)))
    env.run(STANDIN, "benchmarks/gpu/sim_gpu.py", *given("BENCH_ARGS"))


@nox.session
def report_xla(session: nox.Session) -> None:
    """The cases of docs/xla_report.md, and the page."""
    environments, files = gpu_environments(session), []
    for jax, env in environments.items():
        session.log(f"jax {jax}")
        files.append(f"benchmarks/results/xla-{jax}.json")
        env.pip("install", "--no-deps", "--force-reinstall", str(wheel_of_312(session)))
        session.run(
            str(env.python), "benchmarks/gpu/xla_report.py", "measure", files[-1], *given("BENCH_ARGS"),
            external=True,
        )  # fmt: skip
    write = ["benchmarks/gpu/xla_report.py", "write", "docs/xla_report.md", *files]
    session.run(str(list(environments.values())[-1].python), *write, external=True)


CARRY = "msgspec threadpoolctl pytest pytest-timeout pytest-xdist execnet iniconfig pluggy packaging pygments"


@nox.session
def gpu_wheel(session: nox.Session) -> None:
    """The cp312 wheel and small ones beside it, to carry to a machine with a GPU."""
    folder = Path("build/gpu").resolve()
    shutil.rmtree(folder / "wheels", ignore_errors=True)
    env = Environment(session, folder / "venv", python312(session))
    env.pip("wheel", "--no-deps", "-w", str(folder / "wheels"), ".")
    (folder / "wheels" / sources.MADE_OF).write_text(sources.current())
    small = ["--only-binary=:all:", *CARRY.split()]
    env.pip("download", "--no-deps", "-d", str(folder / "wheels"), *small)
    session.log(" ".join(sorted(path.name for path in (folder / "wheels").iterdir())))
