"""What the command line asks of PyTorch: who it is, tensors of a shape, and plain ways to run a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.frontends.torch.tuning.keeping import copies as copies
from dynaflow_xla.ir.marks import mark


def about() -> dict[str, Any]:
    """Versions and devices, as PyTorch tells them."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "threads": torch.get_num_threads(),
        "devices": ["cpu", *(torch.cuda.get_device_name(n) for n in range(gpus))],
        "gpu": gpus > 0,
    }


def cases() -> dict[str, Callable[..., Any]]:
    """By name small functions, see ``dynaflow_xla.cli.cases``."""

    def sorts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sort(x).values + torch.sort(y).values

    def recurrent(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def run(xs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            h, outs = torch.zeros(xs.shape[1:]), []
            for step in xs.unbind(0):
                h = torch.tanh(step + h @ weights)
                outs.append(h)
            return torch.stack(outs)

        with mark("forth"):
            forth = run(x, w)
        with mark("back"):
            back = run(x.flip(0), v).flip(0)
        return forth + back

    def products(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (x @ w) * (x @ v)

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.sort(x @ w, dim=-1).values
        return x

    def small(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) @ x.T + torch.sin(y) @ y.T

    made: tuple[Any, ...] = (sorts, recurrent, products, chain, small)
    return {fn.__name__: fn for fn in made}


def works() -> dict[str, Callable[..., Any]]:
    """By name what a machine is measured with, see ``dynaflow_xla.calibration``."""

    def products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    def convolutions(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, kernel, padding=1)

    def elements(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) * y + x

    def serial(x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x).values

    def pair(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(x), torch.sin(y)

    def chain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(9):
            x = torch.sin(x)
        return x, y + 1

    def steps(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first = x.new_zeros(1, x.shape[1], u.shape[1])
        return torch.lstm(x, (first, first), [w, u, b, b], True, 1, 0.0, False, False, False)[0]

    made: tuple[Any, ...] = (products, convolutions, elements, serial, pair, chain, steps)
    return {fn.__name__: fn for fn in made}


def example(shape: Sequence[int], dtype: str, seed: int) -> torch.Tensor:
    """A tensor of random values: small integers, truth values, or the normal distribution.

    Args:
        shape: Its dimensions.
        dtype: PyTorch's name of the type of its elements.
        seed: Of the values.
    """
    kind: torch.dtype = getattr(torch, dtype)
    drawn = torch.Generator().manual_seed(seed)
    if not (kind.is_floating_point or kind.is_complex):
        return torch.randint(0, 2, tuple(shape), generator=drawn).to(kind)
    return torch.randn(tuple(shape), generator=drawn).to(kind)


def wait(result: Any) -> None:
    """Returns when the results are there."""
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in pytree.tree_leaves(result)):
        torch.cuda.synchronize()


def opponents(
    original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Callable[[], Any]]:
    """By name, what runs the original without a plan and waits for its results.

    ``eager`` is PyTorch with its threads, ``eager, one thread`` with one, ``torch.compile`` is Inductor.
    """
    compiled = torch.compile(original)

    def eager() -> Any:
        result = original(*args, **kwargs)
        wait(result)
        return result

    def one_thread() -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return eager()
        finally:
            torch.set_num_threads(threads)

    def inductor() -> Any:
        result = compiled(*args, **kwargs)
        wait(result)
        return result

    return {"eager": eager, "eager, one thread": one_thread, "torch.compile": inductor}
