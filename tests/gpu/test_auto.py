"""Auto and CUDA graphs of PyTorch plans on a device: what is measured, and how calls are made."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import dynaflow_xla as dfx

CLOSE = {"rtol": 2e-3, "atol": 2e-3}
LANES = dfx.Lanes(4)


def branches(torch: Any) -> Any:
    def run(x: Any, *ws: Any) -> Any:
        outs = []
        for b in range(6):
            h = x
            for d in range(3):
                h = torch.tanh(h @ ws[(b * 3 + d) % len(ws)])
            outs.append(h)
        return sum(outs[1:], outs[0]), outs[0]

    return run


def arguments(torch: Any, size: int = 128, seed: int = 0) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    made = [torch.randn(64, size, device="cuda", generator=generator)]
    return made + [
        torch.randn(size, size, device="cuda", generator=generator) / 11 for _ in range(4)
    ]


def same(torch: Any, want: Any, got: Any) -> None:
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def decision(torch: Any, fast: Any, *args: Any) -> Any:
    with torch.no_grad():  # as the calls were
        return fast._dfx_core.decision(args, {})


def test_values_whatever_is_chosen(torch: Any) -> None:
    fn = branches(torch)
    fast = dfx.schedule(fn, strategy="auto", backend="torch", lanes=LANES)
    with torch.no_grad():
        for seed in range(8):
            args = arguments(torch, seed=seed)
            same(torch, fn(*args), fast(*args))
    choice = decision(torch, fast, *args)
    print(choice.lines())
    assert choice.medians_ms, choice.lines()


def test_what_is_measured_is_the_devices_time(torch: Any) -> None:
    """A call returns when it has enqueued; a product that takes milliseconds has to look so."""
    size = 6144

    def fn(x: Any, w: Any) -> Any:
        return torch.tanh(x @ w), torch.sin(w @ x)

    x, w = torch.randn(2, size, size, device="cuda").unbind()
    fast = dfx.schedule(fn, strategy="auto", backend="torch", lanes=LANES)
    with torch.no_grad():
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        fn(x, w)
        first.record()
        fn(x, w)
        last.record()
        last.synchronize()
        dfx.tune(fast, x, w, budget_s=20)
    choice, took = decision(torch, fast, x, w), first.elapsed_time(last)
    print(took, choice.lines())
    for name, ms in choice.medians_ms.items():
        assert 0.3 * took < ms < 3 * took, (name, ms, took)


def test_gradients_under_auto(torch: Any) -> None:
    fn = branches(torch)
    fast = dfx.schedule(fn, strategy="auto", backend="torch", lanes=LANES)
    for seed in range(3):
        mine, its = ([a.requires_grad_() for a in arguments(torch, seed=seed)] for _ in range(2))
        sum(o.square().mean() for o in fast(*mine)).backward()
        sum(o.square().mean() for o in fn(*its)).backward()
        same(torch, [a.grad for a in its], [a.grad for a in mine])


def test_a_scheduled_call_inside_of_the_users_graph(torch: Any) -> None:
    fn = branches(torch)
    fast = dfx.schedule(fn, strategy=dfx.Branches(), backend="torch", lanes=LANES)
    x, *ws = arguments(torch)
    with torch.no_grad():
        for _ in range(3):
            fast(x, *ws)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = fast(x * 2, *ws)
        for seed in range(3):
            x.copy_(arguments(torch, seed=seed)[0])
            graph.replay()
            same(torch, fn(x * 2, *ws), outs)
            same(torch, fn(x, *ws), fast(x, *ws))


def test_a_first_call_inside_of_the_users_graph(torch: Any) -> None:
    """Nothing can be captured or planned there by then, so the original's kernels are in the graph."""
    fn = branches(torch)
    x, *ws = arguments(torch)
    with torch.no_grad():
        fn(x, *ws)  # cuBLAS starts outside
        for strategy in (dfx.Branches(), "auto"):
            fast = dfx.schedule(fn, strategy=strategy, backend="torch", lanes=LANES)
            graph = torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", dfx.FallbackWarning)
                with torch.cuda.graph(graph):
                    outs = fast(x, *ws)
            for seed in range(2):
                x.copy_(arguments(torch, seed=seed)[0])
                graph.replay()
                same(torch, fn(x, *ws), outs)


def test_what_no_replay_can_do_runs_at_each_call(torch: Any) -> None:
    """A copy to the CPU that nobody waits for, and memory beside an argument that is read by strides."""

    def copied(x: Any, w: Any) -> Any:
        return (x @ w).sum().to("cpu", non_blocking=True), torch.tanh(x) + torch.sin(x)

    def windows(x: Any, w: Any) -> Any:
        return torch.tanh(x.as_strided((64, 100), (128, 1), 128)), torch.sin(x @ w)

    whole = [torch.randn(66, 128, device="cuda") for _ in range(6)]
    w = torch.randn(128, 128, device="cuda") / 11
    for fn in (copied, windows):
        fast = dfx.schedule(fn, strategy=dfx.Branches(), backend="torch", lanes=LANES)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", dfx.FallbackWarning)
            for each in whole:
                want, got = fn(each[1:65], w), fast(each[1:65], w)
                torch.cuda.synchronize()
                same(torch, want, got)


def test_calls_on_several_streams_and_results_that_stay(torch: Any) -> None:
    fn = branches(torch)
    fast = dfx.schedule(fn, strategy=dfx.Branches(), backend="torch", lanes=LANES)
    streams = [torch.cuda.Stream() for _ in range(3)]
    kept = []
    _, *ws = arguments(torch)
    with torch.no_grad():
        for call in range(60):
            x = arguments(torch, seed=call)[0]
            stream = streams[call % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000)
                kept.append((x, fast(x, *ws)))
        torch.cuda.synchronize()
        for x, outs in kept:
            same(torch, fn(x, *ws), outs)


def test_one_lane_is_a_graph_too(torch: Any) -> None:
    """A chain has nothing to overlap; as one launch it is faster than operator by operator."""

    def fn(x: Any, w: Any) -> Any:
        for _ in range(30):
            x = torch.tanh(x @ w)
        return (x,)

    x, w = torch.randn(2, 64, 64, device="cuda").unbind()
    w = w / 8
    fast = dfx.schedule(fn, strategy="auto", backend="torch", lanes=LANES)
    with torch.no_grad():
        dfx.tune(fast, x, w, budget_s=20)
        same(torch, fn(x, w), fast(x, w))
    choice = decision(torch, fast, x, w)
    print(choice.lines())
    assert choice.name != "original", choice.lines()


@pytest.mark.parametrize("training", [False, True])
def test_a_model_under_auto(torch: Any, training: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda().train(training)
    fast = dfx.schedule(model, strategy="auto", lanes=LANES)
    for _ in range(4):
        x = torch.randn(4, 16, 64, device="cuda")
        if not training:
            with torch.no_grad():
                torch.testing.assert_close(model(x), fast(x), **CLOSE)
            continue
        want = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        got = torch.autograd.grad(fast(x).square().mean(), list(model.parameters()))
        same(torch, want, got)


ALONE = """
import sys, threading, warnings
import torch
import dynaflow_xla as dfx

warnings.simplefilter("error", dfx.FallbackWarning)
w = torch.randn(2, 8, 8, 3, 3, device="cuda").unbind()

def fn(x):
    return torch.tanh(torch.conv2d(x, w[0], padding=1)) + torch.conv2d(x, w[1], padding=1)

def calls():
    with torch.no_grad():
        fast = dfx.schedule(fn, dfx.Branches(), backend="torch", lanes=dfx.Lanes(3))
        x = torch.randn(2, 8, 16, 16, device="cuda")
        for _ in range(4):
            torch.testing.assert_close(fast(x), fn(x), rtol=2e-3, atol=2e-3)
        captured.append(fast._dfx_core.planned((x,), {}).runner._last is not None)

captured = []
if sys.argv[1] == "thread":
    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
else:
    calls()
print("captured", captured, flush=True)
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_what_has_no_products_is_captured_in_a_fresh_process(
    torch: Any, tmp_path: Path, where: str
) -> None:
    """cuBLAS cannot be started while a graph is captured, and nothing else has started it there."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    done = subprocess.run(
        [sys.executable, "-P", str(script), where], capture_output=True, text=True, timeout=100
    )
    assert "captured [True]" in done.stdout, done.stdout + done.stderr
