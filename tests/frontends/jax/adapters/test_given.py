"""What schedule takes besides plain and jitted functions, and what it refuses."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.frontends.jax import _compat  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_to_compile")

X = jnp.arange(8.0)


class Scale:
    def __init__(self) -> None:
        self.factor = 3.0
        self.calls = 0
        self.cache: Any = None
        self.last: Any = None

    def __call__(self, x: Any) -> Any:
        if self.cache is None:
            self.cache = np.arange(8.0, dtype=np.float32)
        return jnp.sort(x) * self.factor + self.cache

    def counted(self, x: Any) -> Any:
        self.calls += 1
        return x

    def kept(self, x: Any) -> Any:
        self.last = x + 1
        return x


@pytest.mark.parametrize("strategy", ["branches", "auto"])
def test_callable_objects_methods_and_partials(strategy: str) -> None:
    scale = Scale()
    for fn in (
        scale,
        scale.__call__,
        functools.partial(scale),
        functools.partial(Scale.__call__, scale),
    ):
        np.testing.assert_array_equal(dfx.schedule(fn, strategy)(X[::-1]), scale(X[::-1]))


def test_a_partial_of_a_jitted_function_keeps_what_jit_was_told() -> None:
    @functools.partial(jax.jit, static_argnames="power", donate_argnums=1)
    def f(scale: Any, x: Any, *, power: int) -> Any:
        return scale * x**power

    fast = dfx.schedule(functools.partial(f, jnp.float32(2), power=2), "branches")
    x = X.copy()
    np.testing.assert_array_equal(fast(x), 2 * X**2)
    assert x.is_deleted()
    split = dfx.schedule(functools.partial(jax.jit(jnp.add), 2.0), dfx.NanoBatch(2), in_axes=(0,))
    np.testing.assert_array_equal(split(X), 2 + X)
    with pytest.raises(dfx.UnsupportedError, match="bound"):
        dfx.schedule(functools.partial(jax.jit(jnp.add), 2.0), dfx.NanoBatch(2), in_axes=0)


def append(x: Any, items: list[Any]) -> Any:
    items.append(x * 2)
    return x


def replace(x: Any, items: dict[str, Any]) -> Any:
    items["a"] = items["a"] + x
    return items["a"]


def remove(x: Any, items: dict[str, Any]) -> Any:
    return x + items.pop("a")


@jax.tree_util.register_dataclass
@dataclass
class State:
    count: Any


def count(x: Any, state: State) -> Any:
    state.count = state.count + 1
    return x


EFFECTS = {
    "append": (append, [X], r"append.* changes its arguments \(argument 1\[1\]\)"),
    "replace": (replace, {"a": X}, r"replace.* changes its arguments \(argument 1\['a'\]\)"),
    "remove": (remove, {"a": X}, r"remove.* changes its arguments \(argument 1\['a'\]\)"),
    "dataclass": (
        count,
        State(jnp.int32(0)),
        r"count.* changes its arguments \(argument 1\.count\)",
    ),
}


@pytest.mark.parametrize("strategy", ["branches", "auto"])
@pytest.mark.parametrize("case", list(EFFECTS))
def test_a_changed_argument_is_refused(case: str, strategy: str) -> None:
    fn, thing, text = EFFECTS[case]
    with pytest.raises(dfx.UnsupportedError, match=text):
        dfx.schedule(fn, strategy)(X, thing)
    with pytest.raises(dfx.UnsupportedError, match="test_given.py"):
        jax.jit(dfx.schedule(fn, strategy))(X, thing)


def test_what_jit_loses_by_itself_is_not_refused() -> None:
    items = {"a": X}
    np.testing.assert_array_equal(dfx.schedule(jax.jit(remove), "branches")(X, items), X + X)
    assert items["a"] is X
    local = dfx.schedule(lambda x, items: replace(x, dict(items)), "branches")
    np.testing.assert_array_equal(local(X, items), X + X)
    with jax.disable_jit():
        assert dfx.schedule(append, "branches")(X, given := []) is X
    assert len(given) == 1


@pytest.mark.parametrize(("method", "attribute"), [("counted", "calls"), ("kept", "last")])
def test_a_changed_attribute_is_refused(method: str, attribute: str) -> None:
    with pytest.raises(dfx.UnsupportedError, match=f"the attribute '{attribute}' of its Scale"):
        dfx.schedule(getattr(Scale(), method), "branches")(X)


class Defaults:
    """Its class says what its attributes are at first."""

    calls, rate, made, warned = 0, 2.0, None, False
    cache: dict[str, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.w = X

    @functools.cached_property
    def factor(self) -> float:
        return 3.0

    def counted(self, x: Any) -> Any:
        self.calls += 1
        return x

    def moved(self, x: Any) -> Any:
        self.w = self.w + x
        self.new = x
        return x

    def cached(self, x: Any) -> Any:
        self.cache["x"], self.made, Defaults.warned = 1, 5, True
        return x * self.factor * self.rate


@pytest.mark.parametrize(
    ("method", "attribute"),
    [("counted", "calls"), ("moved", "w")],
)
def test_a_changed_default_of_the_class_is_refused(method: str, attribute: str) -> None:
    thing = Defaults()
    for _ in range(2):
        with pytest.raises(
            dfx.UnsupportedError, match=f"the attribute '{attribute}' of its Defaults"
        ):
            dfx.schedule(getattr(thing, method), "branches")(X)
        assert vars(thing) == {"w": thing.w} and thing.w is X, "what the trace left is gone"


def test_what_is_filled_in_once_is_no_effect() -> None:
    np.testing.assert_array_equal(dfx.schedule(Defaults().cached, "branches")(X), X * 6)


def test_what_is_compiled_already_is_refused() -> None:
    for stage in (jax.jit(jnp.sin).lower(X).compile(), jax.pmap(jnp.sin)):
        with pytest.raises(dfx.UnsupportedError, match=r"dfx\.schedule\(f\)"):
            dfx.schedule(stage, "branches")


class Plain:
    @dfx.schedule(strategy="branches")
    def double(self, x: Any) -> Any:
        return x * 2

    @dfx.schedule(strategy="branches")
    @functools.partial(jax.jit, static_argnums=0)
    def triple(self, x: Any) -> Any:
        return x * 3


def test_arguments_that_jax_cannot_trace_say_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"argument 0 of 'double' is a Plain.*static_argnums=0"):
        Plain().double(X)
    np.testing.assert_array_equal(Plain().triple(X), X * 3)
    for strategy in ("branches", "auto"):
        fast = dfx.schedule(lambda x, how: x, strategy)
        with pytest.raises(TypeError, match=r"argument 1\['a'\] of '<lambda>' is a str"):
            fast(X, {"a": "max"})
        fast(X, 1.0)
        with pytest.raises(TypeError, match=r"argument 1 of '<lambda>' is a str"):
            fast(X, "max")


def test_prng_keys_are_verified() -> None:
    fast = dfx.schedule(lambda key, x: (jax.random.split(key), x), "branches")
    report = dfx.verify(fast, jax.random.key(0), X)
    assert [row[0] for row in report.rows] == ["result[0]", "result[1]"]


FACTOR = {"k": 2.0}


def _reads_a_global(x: Any) -> Any:
    return jnp.sort(x * FACTOR["k"])


class _Reads:
    k = 2.0

    def method(self, x: Any) -> Any:
        return jnp.sort(x * self.k)

    def __call__(self, x: Any) -> Any:
        return jnp.sort(x * self.k)


@pytest.mark.parametrize("strategy", ["sequential", "branches", "auto"])
@pytest.mark.parametrize("which", ["global", "method", "object"])
def test_verify_tells_that_what_a_trace_read_has_changed(
    which: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ``jax.jit`` such a value is read once; only ``verify`` looks again."""
    owner = _Reads()
    fn = {"global": _reads_a_global, "method": owner.method, "object": owner}[which]
    fast = dfx.schedule(fn, strategy)
    assert dfx.verify(fast, X).bit_equal
    monkeypatch.setitem(FACTOR, "k", 5.0)
    owner.k = 5.0
    np.testing.assert_array_equal(fast(X), 2 * X)
    with pytest.raises(
        dfx.VerificationError, match=r"has the values of its first trace.*clear_cache"
    ):
        dfx.verify(fast, X)
    fast.clear_cache()
    assert dfx.verify(fast, X).bit_equal
    np.testing.assert_array_equal(fast(X), 5 * X)


def test_verify_asks_a_jitted_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    jitted = jax.jit(lambda x: jnp.sort(x * FACTOR["k"]))
    fast = dfx.schedule(jitted, "branches")
    fast(X)
    monkeypatch.setitem(FACTOR, "k", 5.0)
    assert dfx.verify(fast, X).bit_equal and jitted(X)[1] == fast(X)[1] == 2.0


def test_verify_of_a_function_that_refuses_another_trace() -> None:
    traced: list[Any] = []

    def fn(x: Any) -> Any:
        if len(traced) > 8:
            raise ValueError("not again")
        traced.append(x)
        return jnp.sort(x)

    fast = dfx.schedule(fn, "branches")
    np.testing.assert_array_equal(fast(X), fast.original(X))
    traced += 9 * [None]
    report = dfx.verify(fast, X)
    assert report.bit_equal and "a new one raised ValueError: not again, at " in str(report)


def test_verify_compiles_no_second_original() -> None:
    """A new trace tells that nothing has changed; closed-over arrays are compared by their values."""
    tables = [jnp.arange(8.0), jnp.arange(8.0), jnp.arange(8.0) + 1]
    held = tables[:1]
    fast = dfx.schedule(lambda x: jnp.sort(x) * held[0], "branches")
    dfx.verify(fast, X)
    made = fast.original.trace(X)
    for table, same in zip(tables, (True, True, False), strict=True):
        held[0] = table
        assert _compat.same_traces(made, fast.jitted_anew().trace(X)) == same
    with pytest.raises(dfx.VerificationError, match="first trace"):
        dfx.verify(fast, X)


def test_verify_sees_an_array_of_numpy_that_was_written_into() -> None:
    table = np.arange(8, dtype=np.float32)
    fast = dfx.schedule(lambda x: jnp.sort(x) * table, "branches")
    assert dfx.verify(fast, X).bit_equal
    table += 1
    with pytest.raises(dfx.VerificationError, match="differs from"):
        dfx.verify(fast, X)
