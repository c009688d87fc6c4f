"""Builds the stand-in for NVIDIA's driver and the libraries around it: ``python build.py FOLDER``.

Sources: ``csrc/tests/fake_cuda``. What JAX's CUDA plugin can look up by name and the sources lack becomes
a function that tells its name when it is called; the names are read from the plugin itself.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "csrc/tests/fake_cuda"
INCLUDES = [ROOT / "csrc" / name for name in ("include", "src", "tests")]
PRODUCTS = [FAKE / "libraries" / name for name in ("blas.cc", "products.cc")]
# Library: its sources' folders or files, what its functions' names look like, "not supported" of its kind.
LIBRARIES = {
    "libcuda.so.1": ([FAKE, FAKE / "standin"], rb"cu[A-Z]\w+", 801),
    "libcudart.so.13": ([FAKE / "libraries/runtime.cc"], rb"(?:__)?cuda[A-Z]\w+", 801),
    "libcublas.so.13": (PRODUCTS, rb"cublas[A-Z]\w+", 15),
    "libcublasLt.so.13": (PRODUCTS, rb"cublas[A-Z]\w+", 15),
    "libcusolver.so.12": ([], rb"cusolver[A-Z]\w+", 9),
    "libcudnn.so.9": ([FAKE / "libraries/dnn.cc"], rb"cudnn[A-Z]\w+", 3000),
    "libnccl.so.2": ([FAKE / "libraries/collectives.cc"], rb"nccl[A-Z]\w+", 3),
    "libnvidia-ml.so.1": ([FAKE / "libraries/management.cc"], rb"nvml[A-Z]\w+", 3),
}
# XLA asks this program to assemble each PTX text. The driver takes texts as they are; each gets a name of
# its own, left in $FAKE_CUDA_PTX too. (Equal texts may belong to arrays of different sizes.)
PTXAS = """#!/bin/sh
case "$1" in --version)
  echo "ptxas: a stand-in that assembles nothing"
  echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;;
esac
from=; to=
while [ $# -gt 0 ]; do
  case "$1" in -o) to=$2; shift;; --input-as-string) exit 0;; -*) ;; *) from=$1;; esac; shift
done
id="$$-$(date +%s%N)"
{ cat "$from"; printf '\\n// made as %s\\0' "$id"; } > "$to" || exit 1
if [ -n "$FAKE_CUDA_PTX" ]; then : > "$FAKE_CUDA_PTX/$id"; fi
"""


class Unavailable(Exception):
    """Something that the machine lacks: the reason why tests are skipped."""


def compiler() -> str:
    """The C++ compiler."""
    named = os.environ.get("CXX")
    found = shutil.which(named) if named else shutil.which("c++") or shutil.which("g++")
    if found is None:
        raise Unavailable(f"no C++ compiler{f' {named}' if named else ''}: install g++ or set CXX")
    return found


def _toolkits() -> Iterator[Path]:
    """Where a CUDA toolkit may be: the environment's, the system's, NVIDIA's wheels."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name])
    yield from sorted(Path("/usr/local").glob("cuda*"))
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        yield from sorted(Path(folder).glob("cu*"))


def headers() -> Path:
    """CUDA's headers, of version 13."""
    for toolkit in _toolkits():
        header = toolkit / "include/cuda.h"
        if header.exists() and re.search(r"#define CUDA_VERSION 13\d+", header.read_text()):
            return header.parent
    raise Unavailable(
        "no cuda.h of CUDA 13: set CUDA_HOME, or pip install nvidia-cuda-runtime nvidia-cuda-crt"
    )


def libdevice() -> Path:
    """The folder with XLA's device library in it."""
    for toolkit in _toolkits():
        if (toolkit / "nvvm/libdevice/libdevice.10.bc").exists():
            return toolkit / "nvvm/libdevice"
    raise Unavailable("no libdevice.10.bc: set CUDA_HOME, or pip install nvidia-nvvm")


def plugin() -> Path:
    """The shared library of JAX's CUDA plugin."""
    try:
        spec = importlib.util.find_spec("jax_plugins.xla_cuda13")
    except ModuleNotFoundError:  # no plugin of JAX at all
        spec = None
    for folder in spec.submodule_search_locations or [] if spec else []:
        for path in Path(folder).glob("xla_cuda_plugin.so"):
            return path
    raise Unavailable("JAX's CUDA plugin is not installed: pip install jax-cuda13-plugin")


def _callers() -> list[Path]:
    """Who looks functions up by their names: XLA's plugin, and jaxlib's own kernels."""
    spec = importlib.util.find_spec("jax_cuda13_plugin")
    folders = spec.submodule_search_locations or [] if spec else []
    return [plugin(), *sorted(path for folder in folders for path in Path(folder).glob("*.so"))]


def _sources(of: Sequence[Path]) -> list[Path]:
    return sorted(f for p in of for f in ([p] if p.is_file() else p.glob("*.cc")))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")


def _stubs(names: list[str], status: int, to: Path) -> None:
    lines = [f'int {n}(void) {{ fake_missing("{n}"); return {status}; }}\n' for n in names]
    to.write_text("int fake_missing(const char*);\n" + "".join(lines))
    _run([compiler(), "-x", "c", "-O1", "-fPIC", "-c", str(to), "-o", str(to.with_suffix(".o"))])


def _defined(objects: list[Path]) -> set[str]:
    if not objects:  # all of the library is stubs
        return set()
    listed = subprocess.run(
        ["nm", "-g", "--defined-only", *map(str, objects)],
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split()[-1] for line in listed.stdout.splitlines() if " T " in line}


def _digest(facts: Sequence[str], paths: Sequence[Path] = ()) -> str:
    digest = hashlib.sha256("\n".join(facts).encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def build(into: Path) -> Path:
    """Makes the libraries, unless the folder has them: `lib`, and `cuda` with a stand-in for ptxas."""
    sources = sorted({f for of, _, _ in LIBRARIES.values() for f in _sources(of)})
    inputs = sorted([*sources, *FAKE.rglob("*.h"), FAKE.parent / "fake_cuda.h"])
    objects = into / f"objects-{_digest([compiler(), str(headers())], inputs)}"
    facts = [
        objects.name,
        str(libdevice()),
        *(f"{p} {p.stat().st_size}" for p in _callers()),
        PTXAS,
    ]
    made = into / f"driver-{_digest(facts)}"
    if made.exists():
        return made
    into.mkdir(parents=True, exist_ok=True)
    if not objects.exists():
        with tempfile.TemporaryDirectory(dir=into) as name:
            _compile(sources, Path(name, "new"))
            _take(Path(name, "new"), objects)
    with tempfile.TemporaryDirectory(dir=into) as name:
        _link(objects, Path(name), Path(name, "new"))
        _take(Path(name, "new"), made)
    return made


def _take(new: Path, to: Path) -> None:
    try:
        new.rename(to)
    except OSError:
        if not to.exists():  # somebody else was faster
            raise


def _object(folder: Path, source: Path) -> Path:
    return folder / ("-".join(source.relative_to(FAKE).parts) + ".o")


def _compile(sources: list[Path], to: Path) -> None:
    to.mkdir()
    flags = ["-std=c++20", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    flags += [f"-I{folder}" for folder in INCLUDES] + ["-isystem", str(headers())]
    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        list(pool.map(
            lambda s: _run([compiler(), *flags, "-c", str(s), "-o", str(_object(to, s))]), sources
        ))  # fmt: skip


def _link(objects: Path, work: Path, made: Path) -> None:
    text = b"\0".join(path.read_bytes() for path in _callers())
    lib = made / "lib"
    lib.mkdir(parents=True)
    for name, (of, pattern, status) in LIBRARIES.items():
        mine = [_object(objects, source) for source in _sources(of)]
        wanted = {m.decode() for m in re.findall(rb"\0(" + pattern + rb")(?=\0)", text)}
        if name == "libcuda.so.1":  # names that start alike
            wanted = {n for n in wanted if not re.match("cu(da|blas|dnn|fft|sparse|solver|pti)", n)}
        stubs = work / f"{name}.c"
        _stubs(sorted(wanted - _defined(mine)), status, stubs)
        needs = [] if name == "libcuda.so.1" else [f"-L{lib}", "-l:libcuda.so.1"]
        _run([
            compiler(), "-shared", "-pthread", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN",
            *map(str, mine), str(stubs.with_suffix(".o")), *needs, "-o", str(lib / name),
        ])  # fmt: skip
    program = made / "cuda/bin/ptxas"
    program.parent.mkdir(parents=True)
    program.write_text(PTXAS)
    program.chmod(0o755)
    (made / "cuda/nvvm").mkdir()
    (made / "cuda/nvvm/libdevice").symlink_to(libdevice())


def environment(made: Path, flags: Sequence[str] = ()) -> dict[str, str]:
    """The environment in which JAX's CUDA plugin finds the stand-ins."""
    xla = [f"--xla_gpu_cuda_data_dir={made / 'cuda'}", "--xla_gpu_autotune_level=0"]
    xla += ["--xla_gpu_dot_merger_threshold_mb=0"]  # else products of two regions may become one
    # Code that nobody runs, or runs once, need not be good.
    xla += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    xla += ["--xla_cpu_parallel_codegen_split_count=1"]
    here = Path(__file__).parent
    paths = [str(here / "site"), str(here), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(made / "lib"),
        "DYNAFLOW_XLA_LIBCUDA": str(made / "lib/libcuda.so.1"),
        "DYNAFLOW_XLA_STANDIN": str(made / "lib/libcuda.so.1"),
        "JAX_PLATFORMS": "cuda,cpu",
        "DYNAFLOW_XLA_PLANS_IN_TRACES": "1",  # here they are looked at
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": " ".join([*xla, *flags]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def main(command: list[str]) -> int:
    """Builds, and runs a Python command where the stand-ins are the driver."""
    if command == ["--check"]:
        try:
            print(compiler(), headers(), libdevice(), plugin())
        except Unavailable as reason:
            print(reason)
            return 1
        return 0
    folder = Path(os.environ.get("STANDIN_BUILD") or ROOT / "build/standin")
    try:
        made = build(folder)
    except Unavailable as reason:
        print(f"no stand-in for the driver: {reason}")
        return 0
    if not command:
        print(made)
        return 0
    return subprocess.run([sys.executable, *command], env=environment(made)).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
