"""Compiling structures in processes of their own: Inductor is not safe for threads.

``python -m dynaflow_xla.frontends.torch.native.compiling.worker`` compiles what its standard input asks for:
memory that only the two processes have. On disk are libraries, each with a note of its hash, in folders of
the owner alone (see ``dynaflow_xla.caches.private_files``).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dynaflow_xla.caches import private_files, trimming
from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import compiling
from dynaflow_xla.watching import progress

Request = tuple[torch.fx.GraphModule, list[torch.Tensor], str]
"""(module, examples, the file to make)"""


VERSION = 1
"""Of the notes."""

_MAX_LIBRARY_BYTES = 1 << 31


def place(library: Path | None, note: str) -> None:
    """Keeps a library (or for None that PyTorch's own cache has what it needs), and writes a note of it.

    The library has its hash in its name, so that a note and what it names always fit.
    """
    path = Path(note)
    content: dict[str, Any] = {"library": None}
    if library is not None:
        data = library.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        content = {"library": f"{path.stem}-{digest[:16]}.so", "digest": digest}
        private_files.write(path.with_name(content["library"]), data)
    private_files.write(path, private_files.sealed(content, VERSION))
    trimming.trim(path.parent)


def kept(path: Path) -> Path | None:
    """The library that a note names, if it is there and what was written, or the note if it names none.

    None: it has to be made.

    Raises:
        Untrusted: somebody else may have written it.
        Broken: the note or the library is not what was written.
    """
    try:
        content = private_files.opened(private_files.read(path), VERSION)
        if content.get("library") is None:
            trimming.used(path)
            return path
        name, digest = str(content["library"]), content.get("digest")
        if os.path.basename(name) != name:
            raise private_files.Broken("it names a file elsewhere")
        library = path.with_name(name)
        data = private_files.read(library, _MAX_LIBRARY_BYTES)
    except FileNotFoundError:
        return None
    if hashlib.sha256(data).hexdigest() != digest:
        raise private_files.Broken(f"the hash of {library.name} is not the one noted")
    trimming.used(path, library)
    return library


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
        place(None, path)


def compile_all(compiler: str, settings: Mapping[str, Any], requests: Sequence[Request]) -> None:
    """Compiles structures side by side; what a process could not do is left to the caller.

    Shows progress on the standard error stream if that is a terminal.
    """
    jobs = max(1, min(len(os.sched_getaffinity(0)), len(requests)))
    if jobs < 2:
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(jobs):
            threads, part = torch.get_num_threads(), list(requests[number::jobs])
            work = (compiler, dict(settings), threads, compiling.surroundings(), part)
            try:
                data = pickle.dumps(work)
            except (pickle.PicklingError, AttributeError, TypeError):
                continue  # a module that cannot travel is compiled by the caller
            command = [sys.executable, "-P", "-m", __name__]
            with open(os.memfd_create("dynaflow_xla"), "w+b") as given:
                given.write(data)
                given.seek(0)
                started.append(
                    subprocess.Popen(
                        command, env=environment, stdin=given, stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )  # fmt: skip
        _wait(started, requests, compiler)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _wait(
    started: Sequence[subprocess.Popen[bytes]], requests: Sequence[Request], compiler: str
) -> None:
    told = -1
    while any(process.poll() is None for process in started):
        done = sum(os.path.exists(path) for _, _, path in requests)
        if done != told and progress.shown():
            told = done
            progress.say(f"dynaflow_xla: {compiler} {done} of {len(requests)} regions")
        for process in started:
            if process.poll() is None:
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    break


def main() -> None:
    """Compiles what the process that started this one asks for."""
    compiler, settings, threads, surroundings, requests = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    compiling.surround(surroundings)
    for request in requests:
        compile_one(compiler, settings, request)


if __name__ == "__main__":
    main()
