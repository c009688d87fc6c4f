"""Random functions whose regions are all kernels, random plans for them, and what they must compute.

Nothing is compiled: a stage of kernels is a program of the engine, which is run as it is.
"""

from __future__ import annotations

import ctypes
import random
import struct
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import dynaflow_xla as dfx
from dynaflow_xla.ffi import _engine
from dynaflow_xla.ffi.device_lanes import cuda_lanes
from dynaflow_xla.planning.instructions import Launch

N = 16  # elements of each value
Step = tuple[tuple[int, ...], int, int]  # numbers of the values read, of results, a constant


@dataclass(frozen=True)
class Random:
    """A function of two arrays: each step reads some of the values before it."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def __call__(self, a: Any, b: Any) -> Any:
        """On JAX's arrays or on numpy's."""
        values = [a, b]
        for number, (reads, results, constant) in enumerate(self.steps):
            with dfx.mark(f"r{number}"):
                total = values[reads[0]]
                for other in reads[1:]:
                    total = total + values[other]
                total = total * 3 + np.uint32(constant)
                values += [total + np.uint32(o) for o in range(results)]
        return tuple(values[v] for v in self.outputs)


def function(chance: random.Random) -> Random:
    """What nobody reads is a result, and so are some other values."""
    steps: list[Step] = []
    count, read = 2, {0, 1}
    for number in range(chance.randint(2, 9)):
        reads = (0, 1)  # both arguments are read
        if number:
            reads = tuple(chance.sample(range(count), k=min(count, chance.randint(1, 3))))
        results = chance.choice((1, 1, 2))
        steps.append((reads, results, 16 * chance.randrange(1, 100) + number))
        read.update(reads)
        count += results
    made = range(2, count)
    outputs = [v for v in made if v not in read or chance.random() < 0.2]
    return Random(tuple(steps), tuple(outputs))


def _ptx() -> bytes:
    entries = []
    for ins in range(1, 4):
        for outs in range(1, 3):
            parameters = [f".param .u64 p{i}" for i in range(ins + outs)]
            parameters += [".param .u32 n", ".param .u32 c"]
            entries.append(f".visible .entry mix_{ins}_{outs}({', '.join(parameters)}) {{ ret; }}")
    head = ".version 7.0\n.target sm_70\n.address_size 64\n"
    return (head + "\n".join(entries)).encode() + b"\0"


PTX = _ptx()


def parameters(ins: int, outs: int, constant: int) -> list[Any]:
    """What the engine is given of such a kernel."""
    places: list[Any] = [*(("in", i) for i in range(ins)), *(("out", o) for o in range(outs))]
    return [*places, struct.pack("I", N), struct.pack("I", constant)]


def unordered(told: Any, drop: int) -> bool:
    """Whether some step may meet what another lane touches, one of them writing, without this wait.

    Worked out from what the program is told, without the driver. (The results of a call are written once,
    and no two buffers share bytes.)
    """
    done: dict[int, set[int]] = {}  # by lane: steps that are over when it goes on
    recorded: dict[int, set[int]] = {}
    written: dict[int, int] = {}
    waits = steps = 0
    for kind, lane, *what in told:
        known = done.setdefault(lane, set())
        if kind == "step":
            reads, writes = what
            if any(written[b] not in known for b in reads if b in written):
                return True
            written.update(dict.fromkeys(writes, steps))
            known.add(steps)
            steps += 1
        elif kind == "record":
            recorded[what[0]] = set(known)
        elif kind == "wait":
            if waits != drop:
                known |= recorded[what[0]]
            waits += 1
    return False


class Kernels(dfx.Strategy):
    """Each region a kernel; any ready region on any lane."""

    def __init__(self, of: Random, chance: random.Random) -> None:
        self.of, self.chance = of, chance

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            op = self.chance.choice(ready)
            reads, results, constant = self.of.steps[int(op.name[1:])]
            given: list[Any] = [("in", i) for i in range(len(reads))]
            given += [("out", o) for o in range(results)]
            given += [np.uint32(N), np.uint32(constant)]
            kernel = dfx.CudaKernel(PTX, f"mix_{len(reads)}_{results}", (1,), (N,), tuple(given))
            s.execute(op, lane=self.chance.randrange(s.lanes), replace=kernel)


@dataclass(frozen=True)
class Made:
    """A function's only stage under a random plan.

    Attributes:
        of: The function.
        stage: The stage.
        order: The function's steps in the plan's order.
        ins, outs: Which arguments the stage reads, and which results it writes.
    """

    of: Random
    stage: Any
    order: list[int]
    ins: list[int]
    outs: list[int]


class Plans:
    """Makes plans, and runs them on the stand-in driver without XLA."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._engine = cuda_lanes(jax.devices()[0]).kernel_engine(None)
        functions = driver.functions
        functions.fake_stream.restype = ctypes.c_void_p
        self._stream = functions.fake_stream()
        self._memory = jax.block_until_ready(
            [jax.device_put(np.zeros(N, np.uint32)) for _ in range(24)]
        )

    def planned(self, seed: int) -> Made:
        """A random function under a random plan."""
        chance = random.Random(seed)
        of = function(chance)
        lanes = chance.randint(2, 4)
        fast = dfx.schedule(of, Kernels(of, chance), backend="ffi", lanes=dfx.Lanes(lanes))
        spec = jax.ShapeDtypeStruct((N,), np.uint32)
        made = fast.planned((spec, spec), {})
        ((stage, _),) = made.stages
        launches = [i for i in made.plan.instructions if isinstance(i, Launch)]
        graph = made.captured.graph
        return Made(
            of, stage, [int(i.name[1:]) for i in launches], [graph.inputs.index(v) for v in stage.inputs],
            [graph.outputs.index(v) for v in stage.outputs],
        )  # fmt: skip

    def without(self, made: Made, drop: int) -> Any:
        """The stage's program, but for one of its waits."""
        of, stage = made.of, made.stage
        buffers = [t for t in stage.told if t[0] in ("arg", "result", "scratch")]
        rest = [t for t in stage.told if t not in buffers]
        events = sum(t[0] == "record" for t in rest)
        program = _engine.Program(
            max(stage.lanes) + 1, events, len(stage.inputs), len(stage.outputs), stage.scratch_bytes,
            "without a wait",
        )  # fmt: skip
        for told in buffers:
            program.add_buffer(*told)
        steps = iter(made.order)
        waits = 0
        for kind, lane, *what in rest:
            if kind == "step":
                number = next(steps)
                _, results, constant = of.steps[number]
                reads, writes = what
                self._engine.add_kernel_launch(
                    program, lane, f"r{number}", PTX, f"mix_{len(reads)}_{results}", (1, 1, 1), (N, 1, 1),
                    0, parameters(len(reads), results, constant), reads, writes,
                )  # fmt: skip
            elif kind == "record":
                program.add_record(lane, what[0])
            else:
                waits += 1
                if waits - 1 != drop:
                    program.add_wait(lane, what[0])
        program.finish()
        return program

    def run(self, made: Made, seed: int, program: Any = None) -> tuple[Any, bool]:
        """The trace of a call, and whether its values are right."""
        rng = np.random.default_rng(seed)
        arguments = [rng.integers(0, 1 << 32, N, np.uint32) for _ in range(2)]
        places = [a.unsafe_buffer_pointer() for a in self._memory]
        n = len(made.ins)
        results = places[n : n + len(made.outs)]
        self._fill(places, [arguments[i] for i in made.ins], len(results))
        with self._driver.tracing() as traces:
            self._engine.run(
                program or made.stage.loaded.program, places[:n], results, self._stream
            )
            status = self._driver.functions.fake_synchronize(ctypes.c_void_p(self._stream))
        assert status == 0
        lanes = (told[1] for told in made.stage.told if told[0] == "step")
        steps = {
            made.of.steps[number][2]: (lane, number)
            for number, lane in zip(made.order, lanes, strict=True)
        }
        assert len(steps) == len(made.order), (
            "every step has a constant of its own, which tells its kernel"
        )
        for op in traces[0].kernels():
            op.lane, number = steps[int.from_bytes(op.arguments[-1], "little")]
            op.regions = (f"r{number}",)
        with np.errstate(over="ignore"):
            all_ = made.of(*arguments)
        pairs = zip(made.outs, results, strict=True)
        return traces[0], all(np.array_equal(all_[o], self._view(p)) for o, p in pairs)

    def _fill(self, places: list[int], ins: list[Any], outs: int) -> None:
        for place, values in zip(places, ins, strict=False):
            self._view(place)[...] = values
        for place in places[len(ins) : len(ins) + outs]:
            self._view(place)[...] = 0x55555555

    @staticmethod
    def _view(place: int) -> Any:
        return np.frombuffer((ctypes.c_char * (4 * N)).from_address(place), np.uint32)
