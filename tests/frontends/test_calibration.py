"""Measuring this machine: what is measured is kept, taken by later plans, and refused if it cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla import calibration, dispatch, machine
from dynaflow_xla.caches import private_files
from dynaflow_xla.errors import PlanError

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path / "cache"))
    machine.use(None)
    yield tmp_path / "cache"
    machine.use(None)


def _calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run beside this one: here the times need not be right."""
    monkeypatch.setattr(calibration, "_busy", lambda: 0.0)
    monkeypatch.setattr(calibration, "_limits", lambda _: [])


def test_what_is_measured_is_kept_and_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _calm(monkeypatch)
    told: list[str] = []
    made = dfx.measure_machine(budget_s=1.0, tell=told.append)
    assert {f"jax {kind}" for kind in calibration.WORK} <= made.speeds.keys()
    assert "jax: products" in told and f"jax {jax.__version__}" in made.measured
    assert machine.numbers() is made
    machine.use(None)  # as another process
    assert machine.numbers() == made
    numbers = [v for v in vars(made).values() if isinstance(v, float)]
    assert all(v > 0 for v in numbers) and all(0 <= s < 1 for s in made.shared.values())


def test_costs_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost() -> Any:
        f = dfx.schedule(
            jax.jit(lambda x: jnp.sort(x @ x)), dfx.Sequential(), rules=[dfx.Op("sort")]
        )
        return {r.name: r.cost_ns for r in dfx.graph(f, jnp.ones((256, 256))).regions}

    machine.use(_numbers())
    before = cost()
    machine.use(_numbers(speeds={"jax serial": 2.0}))
    after = cost()
    assert after.keys() == before.keys()
    changed = {name: before[name] / after[name] for name in before}
    assert changed["sort"] == pytest.approx(2.0) and sum(r > 1.5 for r in changed.values()) == 1


def _numbers(**changed: Any) -> machine.Numbers:
    return dataclasses.replace(machine.ASSUMED, measured="by hand", **changed)


@pytest.mark.wide
def test_where_handing_over_is_slow_fewer_lanes_are_used() -> None:
    def lanes() -> Any:
        f = dfx.schedule(jax.jit(lambda x, y: (jnp.sort(x), jnp.sort(y))), dfx.Branches(), lanes=2)
        return dfx.plan(f, jnp.ones(1 << 13), jnp.ones(1 << 13)).lanes_used

    assert len(lanes()) == 2
    machine.use(_numbers(lanes_ns=2e6))
    assert len(lanes()) < 2


def test_the_simulator_takes_them() -> None:
    f = dfx.schedule(
        jax.jit(lambda x, y: jnp.sort(x) + jnp.sort(y)), dfx.Branches(wide=False), lanes=2
    )
    args = jnp.ones(1 << 16), jnp.ones(1 << 16)
    before = dfx.simulate(f, *args).total_ns
    machine.use(_numbers(hand_over_ns=1e5))
    assert dfx.simulate(f, *args).total_ns > before + 5e4


def test_no_time_is_refused() -> None:
    for wrong in (0, -1.0, float("nan"), "long", 1e9):
        with pytest.raises(PlanError, match="budget_s must be seconds"):
            dfx.measure_machine(wrong)  # type: ignore[arg-type]


def test_a_busy_machine_is_not_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_busy", lambda: 1.5)
    with pytest.raises(RuntimeError, match="other programs use 1.5 of its"):
        dfx.measure_machine()
    assert not folder.exists() and machine.numbers() == machine.assumed()


def test_what_no_machine_can_be_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_measured", lambda *_: _numbers(copy_bytes_per_ns=1e6))
    with pytest.raises(RuntimeError, match="Measure again when the machine is quiet"):
        dfx.measure_machine()
    assert machine.numbers() == machine.assumed()


def test_a_folder_that_cannot_be_written_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _numbers(hand_over_ns=6000.0)
    monkeypatch.setattr(calibration, "_measured", lambda *_: made)

    def full(path: Path, data: bytes) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(private_files, "write", full)
    with pytest.warns(dfx.FallbackWarning, match="hold for this process"):
        assert dfx.measure_machine() is made
    assert machine.numbers() is made


def test_what_a_step_loses_is_measured_with_a_recurrent_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    _calm(monkeypatch)
    monkeypatch.setattr(calibration, "lanes_ns", lambda _: {})
    monkeypatch.setattr(calibration, "fork_ns", lambda *_: {})
    monkeypatch.setattr(calibration, "work_ns", lambda *_: (2e6, 1e6, 2e6))
    took = {"one": 1.92e6, "all": 1.64e6}
    monkeypatch.setattr(
        calibration, "_times", lambda *_: {n: [t, t, 9 * t] for n, t in took.items()}
    )
    monkeypatch.setattr(machine, "cores", lambda: 2)
    made = dfx.measure_machine()
    assert made.step_ns == pytest.approx(0.64e6 / 64, rel=0.01)

    frontend = dispatch.frontend("torch")
    args = calibration._arguments(frontend, calibration._RECURRENT)
    layer = torch.nn.LSTM(64, 64)
    with torch.no_grad():
        for there, value in zip(layer.parameters(), (*args[1:], args[-1]), strict=True):
            there.copy_(value)
        torch.testing.assert_close(frontend.works()["steps"](*args), layer(args[0])[0])


@pytest.mark.parametrize(
    ("gain", "cores", "share"), [(2, 2, 0.99), (1, 2, 0), (0.5, 4, 0), (1.6, 2, 0.75)]
)
def test_amdahls_law_read_backwards(gain: float, cores: int, share: float) -> None:
    assert calibration.share(gain, cores) == pytest.approx(share)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_works_are_what_their_names_say(framework: str) -> None:
    pytest.importorskip(framework)
    frontend = dispatch.frontend(framework)
    works = frontend.works()
    known = {*calibration.WORK, "pair", "chain"} | ({"steps"} if framework == "torch" else set())
    assert works.keys() == known
    for kind, shapes in calibration.WORK.items():
        args = [frontend.example(shape, "float32", 0) for shape, _ in shapes]
        graph = dfx.graph(dfx.schedule(works[kind], dfx.Sequential(), lanes=2), *args)
        shared = {k for r in graph.regions for k, v in r.spread._asdict().items() if v} - {"forks"}
        named = "rows" if (framework, kind) == ("torch", "elements") else kind
        assert shared == ({named} if kind != "serial" else set()), kind
    little = [frontend.example((8,), "float32", 0)] * 2
    for name, lanes in (("pair", 2), ("chain", 2)):
        fast = dfx.schedule(works[name], calibration._Deal(2), lanes=2)
        assert len(dfx.plan(fast, *little).lanes_used) == lanes


def test_differences_that_noise_makes_nothing_are_those_of_no_slow_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _calm(monkeypatch)
    monkeypatch.setattr(calibration, "lanes_ns", lambda _: {"lanes_ns": -1.0, "lane_wake_ns": 0.0})
    monkeypatch.setattr(calibration, "fork_ns", lambda *_: {"fork_ns": 1e12})
    monkeypatch.setattr(calibration, "work_ns", lambda *_: (2e6, 1e6, 2e6))
    made = dfx.measure_machine()
    assert 0 < made.lanes_ns < made.lane_wake_ns * 2 and machine.numbers() == made
    machine.use(None)
    assert machine.numbers() == made


def test_a_process_that_may_not_use_all_cores_measures_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_busy", lambda: 0.0)
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(RuntimeError, match="OMP_NUM_THREADS=1 is set in the environment"):
        dfx.measure_machine()
    assert not folder.exists()


def test_what_an_absent_framework_measured_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _calm(monkeypatch)
    machine.use(_numbers(speeds={"torch products": 1.5}))
    monkeypatch.setattr(calibration, "FRAMEWORKS", ("jax",))
    monkeypatch.setattr(calibration, "work_ns", lambda *_: (2e6, 1e6, 2e6))
    monkeypatch.setattr(calibration, "lanes_ns", lambda _: {})
    monkeypatch.setattr(calibration, "fork_ns", lambda *_: {})
    made = dfx.measure_machine()
    assert made.speeds["torch products"] == 1.5 and made.speeds["jax products"] == 1.0
