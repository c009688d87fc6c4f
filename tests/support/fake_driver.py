"""The fake CUDA driver as a libcuda, and plans of kernels on it: ``python fake_driver.py SCENARIO``.

Each scenario is a process of its own, because a process keeps the driver that it found first.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
N = 1000


def build(folder: Path, green: bool = True) -> Path:
    """Compiles the library, as far as the folder lacks it; FileNotFoundError without a C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("a C++ compiler")
    folders = [ROOT / "csrc" / name for name in ("include", "src", "tests")]
    flags = ["-std=c++20", "-O1", "-fPIC", *(f"-I{folder}" for folder in folders)]
    jobs, objects = [], []
    for source in sorted((ROOT / "csrc/tests/fake_cuda").glob("*.cc")):
        exports = source.stem == "library" and not green
        objects.append(folder / f"{source.stem}{'_old' if exports else ''}.o")
        if objects[-1].exists():
            continue
        more = ["-DFAKE_CUDA_WITHOUT_GREEN_CONTEXTS"] if exports else []
        command = [compiler, *flags, *more, "-c", str(source), "-o", str(objects[-1])]
        jobs.append(subprocess.Popen(command))
    assert all([job.wait() == 0 for job in jobs])
    made = folder / ("libfake_cuda.so" if green else "libfake_cuda_old.so")
    subprocess.run(
        [compiler, "-shared", "-pthread", *map(str, objects), "-o", str(made)], check=True
    )
    return made


class Driver:
    """What the library has for tests."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["DYNAFLOW_XLA_LIBCUDA"])
        self._library.fake_stream.restype = ctypes.c_void_p
        self._library.fake_calls.restype = ctypes.c_longlong

    def stream(self) -> int:
        return int(self._library.fake_stream())

    def wait(self, stream: int) -> int:
        return int(self._library.fake_synchronize(ctypes.c_void_p(stream)))

    def capture(self, stream: int, work: Any) -> int:
        assert self._library.fake_begin_capture(ctypes.c_void_p(stream)) == 0
        work()
        graph = int(self._library.fake_end_capture(ctypes.c_void_p(stream)))
        assert graph > 0, "the capture is invalid, or a stream was not joined"
        return graph

    def replay(self, graph: int, stream: int) -> None:
        assert self._library.fake_launch_graph(graph, ctypes.c_void_p(stream)) == 0

    def calls(self, symbol: str) -> int:
        return int(self._library.fake_calls(symbol.encode()))

    def fail(self, symbol: str, status: int, skip: int = 0) -> None:
        self._library.fake_fail(symbol.encode(), status, skip)

    def sms(self, stream: int) -> int:
        return int(self._library.fake_sms(ctypes.c_void_p(stream)))

    def left(self) -> str:
        """What was made and not given back, or ``""``."""
        text = ctypes.create_string_buffer(500)
        return "" if self._library.fake_left(text, 500) else text.value.decode()


def lanes() -> Any:
    """CUDA lanes on device 0 of the fake driver."""
    from types import SimpleNamespace

    from dynaflow_xla.ffi import device_lanes

    return device_lanes.CudaLanes(SimpleNamespace(local_hardware_id=0))


def scale(n: int, factor: float) -> Any:
    import dynaflow_xla as dfx

    return dfx.CudaKernel(
        b"fake\0", "scale", (4,), (256,),
        [("in", 0), ("out", 0), np.float32(factor), np.uint32(n)],
    )  # fmt: skip


def add(n: int) -> Any:
    import dynaflow_xla as dfx

    return dfx.CudaKernel(
        b"fake\0", "add", (4,), (256,), [("in", 0), ("in", 1), ("out", 0), np.uint32(n)]
    )


FACTORS = {"x2": 2.0, "y2": 2.0, "x3": 3.0, "y3": 3.0, "five": 5.0}
LANE = {"x2": 0, "y2": 1, "x3": 1, "y3": 0, "left": 0, "right": 1, "sum": 1, "five": 0}


def function(x: Any, y: Any) -> Any:
    """Eight regions, each of which one kernel can do."""
    import dynaflow_xla as dfx

    def region(name: str, value: Any) -> Any:
        with dfx.mark(name):
            return value()

    x2, y2 = region("x2", lambda: x * 2.0), region("y2", lambda: y * 2.0)
    x3, y3 = region("x3", lambda: x * 3.0), region("y3", lambda: y * 3.0)
    left, right = region("left", lambda: x2 + y2), region("right", lambda: x3 + y3)
    return region("sum", lambda: left + right), region("five", lambda: left * 5.0)


def strategy(but: str = "", broken: str = "") -> Any:
    """Every region is a kernel, except one, and but for one that faults."""
    import dynaflow_xla as dfx

    class Kernels(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            assert s.context.platform == "cuda"
            while ready := s.ready():
                for op in ready:
                    kernel = scale(N, FACTORS[op.name]) if op.name in FACTORS else add(N)
                    if op.name == broken:
                        kernel = dfx.CudaKernel(b"fake\0", "fault", (1,), (1,), [("out", 0)])
                    s.execute(
                        op, lane=LANE[op.name] % s.lanes,
                        replace=None if op.name == but else kernel,
                    )  # fmt: skip

    return Kernels()


def arrays(seed: int = 0) -> list[Any]:
    return list(np.random.default_rng(seed).standard_normal((2, N)).astype(np.float32))


class Run:
    """A stage of a plan on the fake device, as the custom call would run it."""

    def __init__(self, fast: Any, driver: Driver):
        ((self.stage, outer),) = fast.planned(tuple(arrays()), {}).stages
        assert outer is None
        self.driver, self.stream = driver, driver.stream()
        self.args = arrays()
        self.results = [np.full(a.shape, np.nan, a.dtype) for a in self.stage.output_avals]
        self.scratch = np.zeros(self.stage.scratch_bytes + 256, np.uint8)

    def enqueue(self, engine: Any, device: int = 0) -> None:
        engine.run(
            self.stage.program, [a.ctypes.data for a in self.args],
            [r.ctypes.data for r in self.results], self.stream, self.scratch.ctypes.data, device,
        )  # fmt: skip

    def fill(self, seed: int) -> None:
        for kept, new in zip(self.args, arrays(seed), strict=True):
            kept[:] = new
        for result in self.results:
            result[:] = np.nan

    def check(self) -> None:
        assert self.driver.wait(self.stream) == 0
        for want, got in zip(function(*self.args), self.results, strict=True):
            np.testing.assert_allclose(want, got, rtol=1e-4, atol=1e-5)


def values() -> None:
    """Plans of kernels: values, one graph that replays, the custom call that XLA may record."""
    import jax

    import dynaflow_xla as dfx
    from dynaflow_xla.frontends.jax.lanes import device_stage

    driver, made = Driver(), lanes()
    with device_stage.use_lanes(made):
        fast = dfx.schedule(function, strategy=strategy(), lanes=2, backend="ffi")
        run = Run(fast, driver)
        text = jax.jit(fast).trace(*arrays()).lower(lowering_platforms=("cuda",)).as_text()
        explained = dfx.explain(fast, *arrays())
    assert run.stage.capturable and text.count("@dfx_run_graph(") == 1, text
    assert "8 kernels, recorded into XLA's CUDA graph" in explained, explained
    assert "region 'x2' is kernel 'scale' on lanes of a GPU; elsewhere" in explained, explained
    engine = made.kernel_engine(None)
    for seed in range(20):
        run.fill(seed)
        run.enqueue(engine)
        run.check()
    graph = driver.capture(run.stream, lambda: run.enqueue(engine))
    for seed in range(20):
        run.fill(seed)
        driver.replay(graph, run.stream)
        run.check()
    # On a CPU the regions run as they were written, in the same program.
    for want, got in zip(function(*arrays()), fast(*arrays()), strict=True):
        np.testing.assert_allclose(want, got, rtol=1e-4, atol=1e-5)


def mixed() -> None:
    """A region that is an XLA executable makes the plan one that cannot be recorded."""
    import jax

    import dynaflow_xla as dfx
    from dynaflow_xla.errors import UnsupportedError
    from dynaflow_xla.ffi import _engine, device_lanes
    from dynaflow_xla.frontends.jax.lanes import device_stage

    driver, made = Driver(), lanes()
    own = _engine.CudaEngine(0)
    cpu = device_lanes.DeviceLanes("cuda", lambda: jax.devices()[0].client, 0, 256)
    made.make_client, made.clients = cpu.make_client, cpu.clients
    made.engine = lambda count: own
    with device_stage.use_lanes(made):
        fast = dfx.schedule(function, strategy=strategy(but="left"), lanes=2, backend="ffi")
        ((stage, _),) = fast.planned(tuple(arrays()), {}).stages
        text = jax.jit(fast).trace(*arrays()).lower(lowering_platforms=("cuda",)).as_text()
        confined = dfx.schedule(
            function, strategy=strategy(but="left"), lanes=dfx.Lanes(2, sms=(0, 8)), backend="ffi"
        )
        try:
            _ = confined.planned(tuple(arrays()), {}).stages
            raise AssertionError("lanes of XLA executables were confined")
        except UnsupportedError as error:
            assert "streams that XLA's clients make" in str(error), error
    assert not stage.capturable and "@dfx_run(" in text and "dfx_run_graph" not in text
    assert "1 steps of 1 compiled programs; 7 kernels" in stage.note, stage.note
    assert driver.left() == "" or "streams" in driver.left()


def faults() -> None:
    """A kernel that faults: named with a check after each step; later calls say what is lost."""
    import dynaflow_xla as dfx
    from dynaflow_xla.frontends.jax.lanes import device_stage

    driver, made = Driver(), lanes()
    with device_stage.use_lanes(made):
        fast = dfx.schedule(function, strategy=strategy(broken="right"), lanes=2, backend="ffi")
        run = Run(fast, driver)
    engine = made.kernel_engine(None)
    for wanted in ("step 'right': cuStreamSynchronize after it failed", "CUDA context is lost"):
        try:
            run.enqueue(engine)
            raise AssertionError("a faulting kernel went unnoticed")
        except RuntimeError as error:
            assert wanted in str(error), error
    assert driver.wait(run.stream) == 700


def refusals() -> None:
    """What the driver refuses: named, nothing left behind, and the next call works."""
    import dynaflow_xla as dfx
    from dynaflow_xla.errors import EngineError, UnsupportedError
    from dynaflow_xla.ffi import _engine
    from dynaflow_xla.frontends.jax.lanes import device_stage

    def fails(kind: type[Exception], words: str, call: Any) -> None:
        try:
            call()
        except kind as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no {kind.__name__}: {words}")

    driver, made = Driver(), lanes()
    bad = dfx.CudaKernel("no image", "scale", (1,), (1,))

    class Bad(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    s.execute(op, replace=bad)

    def schedule(strategy_: Any, **more: Any) -> Any:
        return dfx.schedule(function, strategy=strategy_, backend="ffi", **{"lanes": 2, **more})

    def stages(fast: Any) -> Any:
        with device_stage.use_lanes(made):
            return fast.planned(tuple(arrays()), {}).stages

    fails(EngineError, "kernel 'scale' cannot replace region 'x2': cuModuleLoadData failed",
          lambda: stages(schedule(Bad())))  # fmt: skip
    fails(EngineError, "asks for 500 multiprocessors; 128 of the device's 132 are left",
          lambda: stages(schedule(strategy(), lanes=dfx.Lanes(2, sms=(0, 500)))))  # fmt: skip
    fails(EngineError, "lane 1 cannot have priority 9",
          lambda: stages(schedule(strategy(), lanes=dfx.Lanes(2, priorities=(0, 9)))))  # fmt: skip
    fails(UnsupportedError, "one XLA program has no lanes",
          lambda: dfx.schedule(function, backend="xla", lanes=dfx.Lanes(2, sms=(0, 8))))  # fmt: skip
    fails(UnsupportedError, "needs backend='ffi'",
          lambda: dfx.schedule(function, strategy(), backend="xla", lanes=2)(*arrays()))  # fmt: skip

    confined = dfx.Lanes(2, priorities=(0, -1), sms=(0, 20))
    with device_stage.use_lanes(made):
        run = Run(schedule(strategy(), lanes=confined), driver)
    engine = made.kernel_engine(confined)
    assert engine.sms == [0, 24]
    for symbol, calls in (
        ("cuGreenCtxStreamCreate", 1),
        ("cuEventCreate", 3),
        ("cuEventRecord", 3),
    ):
        for skip in range(calls):
            driver.fail(symbol, 2, skip)
            fails(RuntimeError, "CUDA_ERROR_OUT_OF_MEMORY", lambda: run.enqueue(engine))
            driver.wait(run.stream)
    run.fill(1)
    run.enqueue(engine)
    run.check()
    fails(RuntimeError, "its arrays are on device 1", lambda: run.enqueue(engine, device=1))
    run.enqueue(engine)
    run.check()
    streams = _engine.CudaStreams(0, 3, [0, -1], [0, 0, 30])
    assert [driver.sms(s) for s in streams.streams] == [132, 32] and streams.sms == [0, 0, 32]


def no_green() -> None:
    """A driver that has no green contexts runs everything but confined lanes."""
    from dynaflow_xla.ffi import _engine

    _engine.CudaEngine(0)
    for make in (
        lambda: _engine.CudaEngine(0, sms=[0, 8]),
        lambda: _engine.CudaStreams(0, 2, [], [0, 8]),
    ):
        try:
            make()
            raise AssertionError("lanes were confined")
        except RuntimeError as error:
            assert "no green contexts (CUDA 12.5 brought them)" in str(error), error


def problem() -> None:
    """Prints why CUDA cannot be used."""
    from dynaflow_xla.ffi import _engine

    print(_engine.cuda_problem())


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("error")
    globals()[sys.argv[1]]()
