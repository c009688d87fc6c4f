"""Compiling structures in processes of their own: Inductor is not safe for threads.

``python -m dynaflow_xla.frontends.torch.native.compile_worker REQUEST`` compiles what a file asks for. The
request and what it holds are written and read by the same user's processes only.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import compiling

Request = tuple[torch.fx.GraphModule, list[torch.Tensor], str]
"""(module, examples, the file to make)"""


def place(data: bytes | Path, path: str) -> None:
    """Puts a file where others may look for it, whole or not at all."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as file:
        if isinstance(data, bytes):
            file.write(data)
        else:
            with open(data, "rb") as source:
                shutil.copyfileobj(source, file)
    os.replace(file.name, path)


def compile_aoti(
    module: torch.fx.GraphModule,
    examples: Sequence[torch.Tensor],
    settings: Mapping[str, Any],
    path: str,
    where: str = "a region",
) -> None:
    """Compiles a module to a library at ``path``; ``where`` is for messages.

    Raises:
        UnsupportedError: an operator needs PyTorch's own executor, which a library cannot bring.
    """
    made = compiling.aot_compile(module, examples, settings)
    if made.with_suffix(".json").exists():  # calls that only PyTorch's own executor can make
        raise UnsupportedError(
            f"compiler='aoti': {where} holds operators that AOTInductor has no code for; use "
            "compiler='inductor' or 'eager'"
        )
    place(made, path)


def compile_one(compiler: str, settings: Mapping[str, Any], request: Request) -> None:
    """Compiles one structure into the disk cache."""
    module, examples, path = request
    if compiler == "aoti":
        compile_aoti(module, examples, settings, path)
    else:
        compiling.inductor(module, examples, settings)
        place(b"", path)


def compile_all(compiler: str, settings: Mapping[str, Any], requests: Sequence[Request]) -> None:
    """Compiles structures side by side; what a process could not do is left to the caller.

    Shows progress on the standard error stream if that is a terminal.
    """
    jobs = max(1, min(len(os.sched_getaffinity(0)), len(requests)))
    if jobs < 2:
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="dynaflow_xla-") as folder:
        started: list[subprocess.Popen[bytes]] = []
        for number in range(jobs):
            path = Path(folder) / f"{number}.pickle"
            work = (compiler, dict(settings), torch.get_num_threads(), list(requests[number::jobs]))
            try:
                path.write_bytes(pickle.dumps(work))
            except (pickle.PicklingError, AttributeError, TypeError):
                continue  # a module that cannot travel is compiled by the caller
            command = [sys.executable, "-P", "-m", __name__, os.fspath(path)]
            started.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
        try:
            _wait(started, requests, compiler)
        finally:
            for process in started:
                process.kill()
                process.wait()


def _wait(
    started: Sequence[subprocess.Popen[bytes]], requests: Sequence[Request], compiler: str
) -> None:
    shown = -1
    while any(process.poll() is None for process in started):
        done = sum(os.path.exists(path) for _, _, path in requests)
        if done != shown and sys.stderr.isatty():
            shown = done
            print(f"dynaflow_xla: {compiler} {done} of {len(requests)} regions", file=sys.stderr)
        for process in started:
            if process.poll() is None:
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    break


def main(path: str) -> None:
    """Compiles what a request file holds."""
    compiler, settings, threads, requests = pickle.loads(Path(path).read_bytes())
    torch.set_num_threads(threads)
    for request in requests:
        compile_one(compiler, settings, request)


if __name__ == "__main__":
    main(sys.argv[1])
