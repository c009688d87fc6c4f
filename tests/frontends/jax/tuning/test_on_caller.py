"""Small programs on the thread that calls them: when Auto offers that, what runs, what stays as it is."""

from __future__ import annotations

import functools
import pickle
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from unhurried import unhurried

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.regions import handed_out, on_caller
from dynaflow_xla.frontends.jax.tuning import auto
from dynaflow_xla.tuning import autotune, quiet


def small(x: Any, w: Any) -> Any:
    for _ in range(3):
        x = jnp.tanh(x @ w) + 0.1 * x
    return {"x": x, "sum": x.sum(), "w": w}


def arguments(size: int = 48) -> tuple[Any, Any]:
    kx, kw = jax.random.split(jax.random.key(size))
    return jax.random.normal(kx, (size, 48)), jax.random.normal(kw, (48, 48)) / 7


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that got a host callback."""
    seen: list[Any] = []
    real = _compat.add_host_callback

    def add(context: Any, callback: Any) -> None:
        seen.append(context)
        real(context, callback)

    monkeypatch.setattr(_compat, "add_host_callback", add)
    return seen


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[str, Any]:
    """What shall be measured as the fastest; and what was measured."""
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    told: dict[str, Any] = {"fastest": auto.ON_CALLER, "measured": []}

    def measure(runs: dict[str, Any], *_: Any, **__: Any) -> autotune.Medians:
        for run in runs.values():
            run()
        told["measured"].append(list(runs))
        return autotune.Medians(
            {name: [told.get(name, 1.0 if name == told["fastest"] else 2.0)] for name in runs}
        )

    monkeypatch.setattr(autotune, "measure", measure)
    unhurried(monkeypatch)
    return told


@pytest.mark.parametrize("shares", [False, True])
def test_a_marked_program_is_over_when_the_call_returns(shares: bool) -> None:
    """JAX's own returns at once: its result is not there yet."""

    def long(x: Any) -> Any:
        return jax.lax.fori_loop(0, 60, lambda _, y: jnp.sort(-y), x)

    x = jax.random.normal(jax.random.key(0), (1 << 16,))
    here = dfx.schedule(jax.jit(long)).by_decision.on_caller(long, shares=shares)
    want = jax.block_until_ready(jax.jit(long)(x))
    jax.block_until_ready(here(x))
    late = here(jax.jit(long)(x))
    assert not late.is_ready(), "XLA runs it when its argument is there, on a thread of its own"
    jax.block_until_ready(late)
    for _ in range(3):  # the second call goes straight through JAX's C++
        result = here(x)
        assert result.is_ready()
        assert (result == want).all()
        apart = jax.jit(long)(x)
        assert not apart.is_ready()
        jax.block_until_ready(apart)


def test_auto_offers_and_runs_it(fastest: Any, added: list[Any], assert_same: Any) -> None:
    fast = dfx.schedule(jax.jit(small), dfx.Auto(min_cost_ns=0.0))
    args = arguments()
    assert_same(small(*args), fast(*args))
    candidates = [repr(next(iter(fast.candidates().values()))), auto.ON_CALLER]
    assert fastest["measured"] == [["original", *candidates]]
    choice = fast.decision(args, {})
    assert choice.on_caller and choice.child is None and choice.name == auto.ON_CALLER
    assert f"auto: the {auto.ON_CALLER} runs" in dfx.explain(fast, *args)
    assert len(added) == 1  # what was measured is what runs
    for _ in range(3):
        assert_same(small(*args), fast(*args))
    assert len(added) == 1
    assert dfx.verify(fast, *args).rows
    again = dfx.schedule(jax.jit(small), dfx.Auto(min_cost_ns=0.0))
    assert_same(small(*args), again(*args))
    assert again.decision(args, {}).on_caller and len(fastest["measured"]) == 1, "kept on disk"
    fast.clear_cache()
    assert_same(small(*args), fast(*args))
    fastest["fastest"] = "original"
    assert dfx.tune(fast, *args, budget_s=5.0).on_caller is False
    before = len(added)
    assert_same(small(*args), fast(*args))
    assert len(added) == before


def test_inside_other_programs_it_leaves_no_trace(
    fastest: Any, added: list[Any], assert_same: Any
) -> None:
    """Compiler options and callbacks would be the whole program's."""
    fast = dfx.schedule(jax.jit(small), dfx.Auto(min_cost_ns=0.0))
    x, w = arguments()
    fast(x, w)
    del added[:]
    loss = lambda f, x: f(x, w)["sum"]  # noqa: E731
    assert_same(jax.jit(small)(x, w), jax.jit(lambda *a: fast(*a))(x, w))
    assert_same(
        jax.grad(functools.partial(loss, small))(x), jax.grad(functools.partial(loss, fast))(x)
    )
    many = jnp.stack([x, 2 * x])
    assert_same(
        jax.vmap(small, in_axes=(0, None))(many, w), jax.vmap(fast, in_axes=(0, None))(many, w)
    )
    assert_same(
        jax.jvp(lambda x: small(x, w), (x,), (x,)), jax.jvp(lambda x: fast(x, w), (x,), (x,))
    )
    stepped = lambda f: jax.lax.scan(lambda c, _: (f(c, w)["x"], None), x, length=3)[0]  # noqa: E731
    assert_same(stepped(small), stepped(fast))
    assert not added
    assert_same(small(x, w), fast(x, w))


@pytest.mark.parametrize(
    ("here", "plan", "runs"),
    [
        (1.0, 0.95, "here"),
        (1.0, 0.85, "plan"),
        (1.99, 1.9, "plan"),
        (2.1, 1.9, "plan"),
        (2.1, 1.99, "original"),
    ],
)
def test_a_plan_has_to_be_clearly_faster(fastest: Any, here: float, plan: float, runs: str) -> None:
    fast = dfx.schedule(jax.jit(small), dfx.Auto(min_cost_ns=0.0))
    branches = repr(next(iter(fast.candidates().values())))
    fastest |= {"original": 2.0, auto.ON_CALLER: here, branches: plan}
    fast(*arguments())
    names = {"here": auto.ON_CALLER, "plan": branches, "original": "original"}
    choice = fast.decision(arguments(), {})
    assert choice.name == names[runs]
    assert f"the {auto.ON_CALLER if here == 1.0 else 'original'} " in choice.reason


@pytest.mark.parametrize(
    ("waited", "plan", "runs"),
    [
        (1.7, 3.0, "waited"),
        (1.7, 1.75, "waited"),
        (1.7, 1.6, "plan"),
        (1.9, 1.92, "plan"),
        (1.9, 1.99, "original"),
        (2.1, 2.2, "original"),
    ],
)
def test_longer_programs_may_be_waited_for(
    fastest: Any, added: list[Any], assert_same: Any, waited: float, plan: float, runs: str
) -> None:
    """By a tenth, as Python does nothing meanwhile; loops and products are shared out as ever."""
    fast = dfx.schedule(jax.jit(small), dfx.Auto(min_cost_ns=0.0))
    args = jnp.ones((256, 256)), jax.random.normal(jax.random.key(0), (256, 256)) / 16
    branches = repr(next(iter(fast.candidates().values())))
    fastest |= {"original": 2.0, auto.WAITED_FOR: waited, branches: plan}
    fast(*args)
    assert auto.WAITED_FOR in fastest["measured"][0]
    assert auto.ON_CALLER not in fastest["measured"][0]
    choice = fast.decision(args, {})
    names = {"waited": auto.WAITED_FOR, "plan": branches, "original": "original"}
    assert choice.name == names[runs]
    assert f"auto: {'the ' * (runs != 'plan')}{names[runs]} runs" in dfx.explain(fast, *args)
    assert choice.on_caller == (runs == "waited")
    measured = len(added)
    for _ in range(2):
        assert_same(small(*args), fast(*args))
    assert_same(jax.jit(small)(*args), jax.jit(lambda *a: fast(*a))(*args))
    assert len(added) == measured, "what was measured is what runs, and nothing in other programs"


def test_signatures_that_differ(fastest: Any, added: list[Any], assert_same: Any) -> None:
    fast = dfx.schedule(jax.jit(small), dfx.Auto(min_cost_ns=0.0))
    names = {}
    branches = repr(next(iter(fast.candidates().values())))
    for size, name in ((48, auto.ON_CALLER), (32, "original"), (16, branches)):
        fastest["fastest"] = name
        before = len(added)
        fast(*arguments(size))
        assert len(added) - before == 1  # what is measured is what runs, if it is chosen
        names[size] = fast.decision(arguments(size), {}).name
    assert names == {48: auto.ON_CALLER, 32: "original", 16: branches}
    for size in (48, 32, 16, 48, 16, 32):
        args = arguments(size)
        assert_same(small(*args), fast(*args))
        assert fast.decision(args, {}).name == names[size]


@pytest.mark.parametrize("forwarded", [True, False])
def test_arguments_that_come_back(fastest: Any, assert_same: Any, forwarded: bool) -> None:
    """Donated, static and keyword arguments, keys, and results that are arguments."""

    @functools.partial(jax.jit, static_argnames="power", donate_argnums=0)
    def f(x: Any, key: Any, *, power: int) -> Any:
        noise = jax.random.normal(key, x.shape)
        first = key if forwarded else jax.random.fold_in(key, 1)
        return first, (x + noise) ** power @ x.T

    fast = dfx.schedule(f, dfx.Auto(min_cost_ns=0.0))
    key = jax.random.key(3)
    for _ in range(3):
        x = jnp.cos(jnp.arange(256.0)).reshape(16, 16)
        assert_same(f(x.copy(), key, power=2), fast(x, key, power=2))
        assert x.is_deleted()
    assert fast.decision((jnp.ones((16, 16)), key), {"power": 2}).on_caller


def test_errors_and_checks_are_the_originals(fastest: Any) -> None:
    fast = dfx.schedule(jax.jit(small), dfx.Auto(min_cost_ns=0.0))
    x, w = arguments()
    fast(x, w)
    with pytest.raises(TypeError, match="dot_general"):
        fast(x, w[:5])
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        fast(x * jnp.nan, w)
    with jax.disable_jit():
        assert fast(x, w)["x"].shape == x.shape


def test_where_it_is_not_offered(fastest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(f: Any = small, args: Any = None, **options: Any) -> bool:
        """Decisions are kept on disk: one made where it was offered serves only where it is."""
        fast = dfx.schedule(jax.jit(f), dfx.Auto(**options))
        fast(*(args or arguments()))
        return bool(fast.decision(args or arguments(), {}).on_caller)

    assert offered(min_cost_ns=0.0)
    assert offered(min_cost_ns=1e12), "too small for lanes, not for this"
    assert fastest["measured"][1] == ["original", auto.ON_CALLER]
    big = jax.random.normal(jax.random.key(0), (1024, 1024))
    assert not offered(args=(big, big), min_cost_ns=0.0)
    assert not offered(lambda x: {"x": x + 1.0}, (jnp.ones(3),), min_cost_ns=0.0)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=dce")
        assert not offered(min_cost_ns=0.0)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        assert not offered(min_cost_ns=0.0)
    finally:
        jax.config.update("jax_cpu_enable_async_dispatch", True)
    jax.config.update("jax_compiler_enable_remat_pass", False)
    try:
        assert not offered(min_cost_ns=0.0)
    finally:
        jax.config.update("jax_compiler_enable_remat_pass", True)
    regions = dfx.graph(dfx.schedule(jax.jit(small), dfx.Branches()), *arguments()).regions
    assert on_caller.may_help(regions, arguments(), {}, {}) == "caller"
    assert not on_caller.may_help(regions, arguments(), {}, handed_out.OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        assert not on_caller.may_help(regions, arguments(), {}, {})


def test_arrays_on_several_devices(run_program: Any) -> None:
    out = run_program(
        """
from jax.sharding import NamedSharding, PartitionSpec as P
from dynaflow_xla.frontends.jax.regions import on_caller
mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 8)), jnp.float32)
xs = jax.device_put(x, NamedSharding(mesh, P("d")))
f = lambda x: jnp.tanh(x @ x.T)
fast = dfx.schedule(f, "auto")
regions = dfx.graph(fast, x).regions
print(*(bool(on_caller.may_help(regions, (a,), {}, {})) for a in (x, xs)))
np.testing.assert_allclose(dfx.schedule(f).by_decision.on_caller(f)(xs), f(x), rtol=1e-5, atol=1e-5)
""",
        devices=8,
    )
    assert out.split() == ["True", "False"]


@pytest.mark.parametrize("runs", [auto.ON_CALLER, "original", "branches"])
def test_a_function_with_compiler_options(fastest: Any, assert_same: Any, runs: str) -> None:
    """JAX takes them for whole programs only; lanes are compiled with them, too."""
    options = {"xla_cpu_enable_fast_math": True}
    f = jax.jit(small, compiler_options=options)
    fast = dfx.schedule(f, dfx.Auto(min_cost_ns=0.0))
    fastest["fastest"] = (
        repr(next(iter(fast.candidates().values()))) if runs == "branches" else runs
    )
    args = arguments()
    for _ in range(3):
        assert_same(f(*args), fast(*args))
    assert fast.decision(args, {}).name == fastest["fastest"]
    assert fast.with_strategy(dfx.Branches())._options.compiler_options == options
    if runs == "branches":
        assert_same(f(*args), jax.jit(lambda *a: fast(*a))(*args))
    else:
        with pytest.raises(ValueError, match="can only be passed to top-level"):
            jax.jit(lambda *a: fast(*a))(*args)
    again = pickle.loads(pickle.dumps(fast))  # noqa: S301
    assert again.jit_compiler_options == options


@pytest.mark.parametrize("mixed", [False, True])
def test_auto_steps_back_while_another_thread_is_busy(fastest: Any, mixed: bool) -> None:
    """Its lanes would wait for the interpreter, a switch interval each; nothing else makes it step back."""

    def f(x: Any) -> Any:
        return jnp.sort(x) + jnp.sort(-x)

    x = jax.random.normal(jax.random.key(0), (1 << 15,))
    fast = dfx.schedule(jax.jit(f), dfx.Auto(min_cost_ns=0.0))
    fastest["fastest"] = repr(next(iter(fast.candidates().values())))
    jax.block_until_ready(fast(x))
    assert fast.decision((x,), {}).child is not None
    if mixed:
        fastest["fastest"] = auto.ON_CALLER
        fast(x[:256])
        assert fast.decision((x[:256],), {}).on_caller
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.02)
    thread = threading.Thread(target=spin)
    thread.start()
    try:
        for _ in range(300):
            jax.block_until_ready(fast(x))
            if fast.stepped_back():
                break
        if not fast.stepped_back():
            # Lanes wait for who runs. On a busy machine the other thread waits itself, for a core.
            ran, wanted = quiet._seconds(thread.native_id or 0)
            assert ran < 0.8 * wanted
            (fast.by_decision._watched if mixed else fast)._step_back = 50
        assert fast.stepped_back()
        assert "another Python thread is busy" in dfx.explain(fast, x)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    for left in range(fast.stepped_back(), 0, -1):
        assert fast.stepped_back() == left
        fast(x)
    assert (fast(x) == f(x)).all()
