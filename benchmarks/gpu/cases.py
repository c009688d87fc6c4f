"""Cases for a GPU, each written once for JAX and for PyTorch: products, sums and a few functions.

Every case has parts that do not depend on each other; what a part costs decides whether lanes help.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

Fn = Callable[..., Any]
Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class GpuCase:
    """One benchmark.

    Attributes:
        name: On the command line.
        kind: "multi-branch" (small kernels beside each other), "pair" (two parts that use the GPU in
            other ways) or "other".
        note: What it stands for.
        shapes: Of the arguments, all of one float dtype.
        make: From a namespace of functions (tanh, silu, exp, softmax, sqrt, and of images conv,
            down, up, concat) to the function.
    """

    name: str
    kind: str
    note: str
    shapes: Shapes
    make: Callable[[SimpleNamespace], Fn]


def _branches(width: int, depth: int) -> Callable[[SimpleNamespace], Fn]:
    def make(f: SimpleNamespace) -> Fn:
        def run(x: Any, *ws: Any) -> Any:
            outs = []
            for b in range(width):
                h = x
                for d in range(depth):
                    h = f.tanh(h @ ws[(b * depth + d) % len(ws)])
                outs.append(h)
            return sum(outs[1:], outs[0])

        return run

    return make


def _inception(f: SimpleNamespace) -> Fn:
    """Blocks of a 1x1, a 3x3, a 5x5 and a pooled branch, concatenated."""

    def block(x: Any, ws: Any) -> Any:
        one = f.tanh(f.conv(x, ws[0]))
        three = f.tanh(f.conv(f.tanh(f.conv(x, ws[1])), ws[2]))
        five = f.tanh(f.conv(f.tanh(f.conv(x, ws[3])), ws[4]))
        pooled = f.tanh(f.conv(f.up(f.down(x)), ws[5]))
        return f.concat([one, three, five, pooled], 1)

    return lambda x, *ws: block(block(x, ws[:6]), ws[6:])


def _resnext(f: SimpleNamespace) -> Fn:
    """A block of 16 paths: narrow, 3x3, wide again; all added to what came in."""

    def run(x: Any, *ws: Any) -> Any:
        paths = [ws[i : i + 3] for i in range(0, len(ws), 3)]
        return sum((f.conv(f.tanh(f.conv(f.tanh(f.conv(x, a)), b)), c) for a, b, c in paths), x)

    return run


def _nasnet(f: SimpleNamespace) -> Fn:
    """Two cells of five sums, each of two operators on one of the two states before."""

    def cell(old: Any, x: Any, ws: Any) -> Any:
        pool = f.up(f.down(x))
        sums = [
            f.conv(x, ws[0]) + f.conv(old, ws[1]),
            f.conv(old, ws[2]) + f.conv(x, ws[3]),
            pool + f.conv(old, ws[4]),
            f.up(f.down(old)) + f.conv(x, ws[5]),
            f.conv(old, ws[6]) + x,
        ]
        return f.conv(f.concat([f.tanh(s) for s in sums], 1), ws[7])

    def run(x: Any, *ws: Any) -> Any:
        half = len(ws) // 2
        first = cell(x, x, ws[:half])
        return cell(x, first, ws[half:])

    return run


def _wide(f: SimpleNamespace) -> Fn:
    """Branches of many small operators, one row each."""

    def run(x: Any, *ws: Any) -> Any:
        outs = []
        for i in range(0, len(ws), 2):
            h = f.softmax(f.silu(x @ ws[i]) * f.tanh(x))
            h = h / f.sqrt((h * h).mean(-1)[:, None] + 1e-5)
            outs.append(f.tanh(h @ ws[i + 1]) + x)
        return f.concat(outs, 1)

    return run


def _heads(f: SimpleNamespace) -> Fn:
    """Attention as it is written head by head."""

    def run(x: Any, *ws: Any) -> Any:
        outs = []
        for i in range(0, len(ws), 4):
            q, k, v = (x @ w for w in ws[i : i + 3])
            outs.append((f.softmax((q @ k.T) * 0.125) @ v) @ ws[i + 3])
        return sum(outs[1:], outs[0])

    return run


def _randwire(f: SimpleNamespace) -> Fn:
    edges = {2: (0, 1), 3: (0,), 4: (1, 2), 5: (2, 3), 6: (0, 4), 7: (3, 5), 8: (1, 6), 9: (7, 8)}

    def run(x: Any, *ws: Any) -> Any:
        nodes = {0: f.tanh(x @ ws[0]), 1: f.tanh(x @ ws[1])}
        for node, sources in edges.items():
            nodes[node] = f.tanh(sum(nodes[s] for s in sources) @ ws[node % len(ws)])
        return nodes[9] + nodes[6] + nodes[5]

    return run


def _experts(f: SimpleNamespace) -> Fn:
    def run(x: Any, gate: Any, *ws: Any) -> Any:
        p = f.softmax(x @ gate)
        up, down = ws[: len(ws) // 2], ws[len(ws) // 2 :]
        parts = [
            p[:, i : i + 1] * (f.silu(x @ u) @ d)
            for i, (u, d) in enumerate(zip(up, down, strict=True))
        ]
        return sum(parts[1:], parts[0])

    return run


def _lora(f: SimpleNamespace) -> Fn:
    def run(x: Any, base: Any, *ab: Any) -> Any:
        y = x @ base
        return tuple(y + (x @ ab[2 * i]) @ ab[2 * i + 1] for i in range(len(ab) // 2))

    return run


def _prefill_decode(f: SimpleNamespace) -> Fn:
    def run(prompt: Any, token: Any, cache: Any, *ws: Any) -> Any:
        h = prompt
        for w in ws:
            h = f.silu(h @ w)
        t = token
        for w in ws:
            t = f.silu(t @ w) + f.softmax(t @ cache.T) @ cache
        return h, t

    return run


def _silu_gemm(f: SimpleNamespace) -> Fn:
    return lambda x, y, w: (f.silu(x) * x + f.exp(-x * x), y @ w)


def _qkv(f: SimpleNamespace) -> Fn:
    def norm(x: Any) -> Any:
        return x / f.sqrt((x * x).mean(-1)[:, None] + 1e-5)

    def run(x: Any, q: Any, k: Any, v: Any) -> Any:
        h = norm(x)
        return norm(h @ q), norm(h @ k), h @ v

    return run


def _optimizer(f: SimpleNamespace) -> Fn:
    def run(g: Any, w1: Any, w2: Any, m: Any, v: Any, p: Any, gp: Any) -> Any:
        back = f.tanh(g @ w1.T) @ w2.T
        m2, v2 = 0.9 * m + 0.1 * gp, 0.99 * v * v + 0.01 * gp * gp
        return back, p - 1e-3 * m2 / (f.sqrt(v2) + 1e-8), m2, v2

    return run


def _guidance(f: SimpleNamespace) -> Fn:
    """A U-Net of two levels, with and without its condition."""

    def unet(x: Any, ws: Any) -> Any:
        high = f.silu(f.conv(x, ws[0]))
        low = f.silu(f.conv(f.down(high), ws[1]))
        middle = f.silu(f.conv(f.down(low), ws[2]))
        low = f.silu(f.conv(f.concat([f.up(middle), low], 1), ws[3]))
        high = f.silu(f.conv(f.concat([f.up(low), high], 1), ws[4]))
        return f.conv(high, ws[5])

    def run(x: Any, c: Any, *ws: Any) -> Any:
        free, led = unet(x, ws), unet(x + c, ws)
        return free + 7.5 * (led - free)

    return run


def _llama(f: SimpleNamespace) -> Fn:
    def block(x: Any, ws: Any) -> Any:
        a = f.softmax((x @ ws[0]) @ (x @ ws[1]).T * 0.01) @ (x @ ws[2])
        x = x + a @ ws[3]
        return x + (f.silu(x @ ws[4]) * (x @ ws[5])) @ ws[6]

    return lambda x, y, *ws: (block(x, ws), block(y, ws))


CASES = [
    GpuCase(
        "inception", "multi-branch", "two blocks of 1x1, 3x3, 5x5 and pooled convolutions",
        [(8, 64, 28, 28)]
        + [(16, 64, 1, 1), (16, 64, 1, 1), (16, 16, 3, 3), (16, 64, 1, 1), (16, 16, 5, 5), (16, 64, 1, 1)]
        * 2,
        _inception,
    ),
    GpuCase(
        "branches", "multi-branch", "8 branches of 3 small products",
        [(64, 256)] + [(256, 256)] * 6, _branches(8, 3),
    ),
    GpuCase(
        "randwire", "multi-branch", "a random graph of small products",
        [(64, 256)] + [(256, 256)] * 4, _randwire,
    ),
    GpuCase(
        "moe", "multi-branch", "8 small experts",
        [(64, 512), (512, 8)] + [(512, 256)] * 8 + [(256, 512)] * 8, _experts,
    ),
    GpuCase(
        "lora", "multi-branch", "6 adapters of rank 16",
        [(64, 1024), (1024, 1024)] + [(1024, 16), (16, 1024)] * 6, _lora,
    ),
    GpuCase(
        "ensemble", "multi-branch", "6 models of 4 layers",
        [(32, 512)] + [(512, 512)] * 8, _branches(6, 4),
    ),
    GpuCase(
        "googlenet", "multi-branch", "two of GoogLeNet's modules at batch 1",
        [(1, 192, 28, 28)]
        + [(64, 192, 1, 1), (96, 192, 1, 1), (128, 96, 3, 3), (16, 192, 1, 1), (32, 16, 5, 5),
           (32, 192, 1, 1)]
        + [(128, 256, 1, 1), (128, 256, 1, 1), (192, 128, 3, 3), (32, 256, 1, 1), (96, 32, 5, 5),
           (64, 256, 1, 1)],
        _inception,
    ),
    GpuCase(
        "resnext", "multi-branch", "a block of 16 narrow paths at batch 1",
        [(1, 128, 28, 28)] + [(16, 128, 1, 1), (16, 16, 3, 3), (128, 16, 1, 1)] * 16, _resnext,
    ),
    GpuCase(
        "nasnet", "multi-branch", "two cells of five sums of two operators at batch 1",
        [(1, 64, 28, 28)]
        + ([(64, 64, 3, 3), (64, 64, 5, 5), (64, 64, 5, 5), (64, 64, 3, 3), (64, 64, 3, 3), (64, 64, 3, 3),
            (64, 64, 5, 5), (64, 320, 1, 1)] * 2),
        _nasnet,
    ),
    GpuCase(
        "wide", "multi-branch", "12 branches of small operators at batch 1",
        [(1, 256)] + [(256, 256)] * 24, _wide,
    ),
    GpuCase(
        "heads", "multi-branch", "attention head by head, 12 of them",
        [(128, 768)] + [(768, 64), (768, 64), (768, 64), (64, 768)] * 12, _heads,
    ),
    GpuCase(
        "prefill_decode", "pair", "a prompt beside a token",
        [(1024, 2048), (8, 2048), (4096, 2048)] + [(2048, 2048)] * 4, _prefill_decode,
    ),
    GpuCase(
        "silu_gemm", "pair", "memory beside compute",
        [(8192, 8192), (2048, 4096), (4096, 4096)], _silu_gemm,
    ),
    GpuCase(
        "qkv", "other", "projections and norms of a decode step",
        [(16, 2048)] + [(2048, 2048)] * 3, _qkv,
    ),
    GpuCase(
        "optimizer", "pair", "an update beside the backward",
        [(1024, 4096)] + [(4096, 4096)] * 6, _optimizer,
    ),
    GpuCase(
        "unet_guidance", "other", "two passes of a U-Net, with and without the condition",
        [(2, 64, 64, 64)] * 2
        + [(64, 64, 3, 3), (128, 64, 3, 3), (128, 128, 3, 3), (128, 256, 3, 3), (64, 192, 3, 3),
           (64, 64, 3, 3)],
        _guidance,
    ),
    GpuCase(
        "llama_nano", "other", "two nano-batches of a block; 1.0 is expected",
        [(1024, 2048)] * 2 + [(2048, 2048)] * 4 + [(2048, 5632)] * 2 + [(5632, 2048)], _llama,
    ),
]  # fmt: skip


def small(case: GpuCase) -> GpuCase:
    """The same case, tiny."""
    if len(case.shapes[0]) == 4:  # channels add up in concatenations, and images are halved
        sizes = {28: 4}
        tiny = [tuple(sizes.get(n, n // 4 if n >= 8 else n) for n in s) for s in case.shapes]
        return replace(case, shapes=tiny)
    return replace(case, shapes=[tuple(min(n, 16) for n in s) for s in case.shapes])
