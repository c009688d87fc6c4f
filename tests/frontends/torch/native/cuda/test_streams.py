"""Plans on streams that only keep books: order, the allocator, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stream_books import Books, model, runner_of  # noqa: E402

from dynaflow_xla.errors import EngineError  # noqa: E402
from dynaflow_xla.frontends.torch.native.cuda import (  # noqa: E402
    streams,
)


def test_reads_are_ordered_and_the_allocator_is_told(args: Any) -> None:
    books = Books()
    runner = runner_of(args, books)
    outs = runner(list(args))
    for want, got in zip(model(*args), outs, strict=True):
        assert torch.equal(want, got)
    assert not books.unordered
    assert {lane for steps, _ in runner._stages for lane in (s.lane for s in steps)} == {0, 1}
    for out in outs:  # freed by the caller, in the order of its stream
        assert (0, out.untyped_storage().data_ptr()) in books.told
    # The caller's stream is behind everything that any lane was given.
    assert books.clocks[0][1] == books.clocks[1][1]


def test_the_check_notices_missing_waits(args: Any) -> None:
    books = Books(ignore_waits=True)
    runner_of(args, books)(list(args))
    assert books.unordered


def test_a_failing_region_is_named_and_the_lanes_are_joined(args: Any) -> None:
    books = Books()
    runner = runner_of(args, books)
    step = [s for steps, _ in runner._stages for s in steps if s.stretch is not None and s.lane][0]

    scope: dict[str, Any] = {}
    exec(
        "def broken(env): raise RuntimeError('a kernel failed')", scope
    )  # one line, like a stretch
    good, step.stretch = step.stretch, replace(step.stretch, run=scope["broken"])
    with pytest.raises(EngineError, match="region .* failed: RuntimeError: a kernel failed"):
        runner(list(args))
    assert books.clocks[0][1] == books.clocks[1][1]
    step.stretch = good
    assert torch.equal(runner(list(args))[0], model(*args)[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_cuda_the_reason_is_told() -> None:
    with pytest.raises(EngineError, match="no CUDA device"):
        streams.CudaStreams(torch.device("cuda", 0), 2)
