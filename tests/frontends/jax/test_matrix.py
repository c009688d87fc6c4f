"""Every transformation of JAX, under every strategy, on functions of many kinds: equal to the original.

The full product has about twenty thousand members and is marked ``slow``, but for a quick part in which every
function meets two strategies and transformations (half of them as one XLA program), and every pair of
these two several functions.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from function_table import CASES, Case
from strategies import PROVED, REFUSING, SPLITS, STRATEGIES
from transformations import TRANSFORMATIONS, inexact

import dynaflow_xla as dfx

# A split adds in another order, and a derivative adds more; narrow types round each time.
TOLERANCES = {"bfloat16": 0.06, "float16": 0.01}
BACKENDS = ("ffi", "xla")
MEETS = 2  # pairs of transformation and strategy for each function in the quick part
# Once wrong, and not in the quick part by themselves.
AGAIN: dict[str, set[tuple[str, str, str]]] = {
    "ffi": {("vmap_of_grad", "nano_rows", "special_functions")},
    "xla": {
        ("vmap_of_grad", "together", "custom_jvp"),
        ("grad_of_vmap", "branches", "custom_vjp"),
    },
}
SECOND = 5.0  # times the tolerance of second derivatives


def mixes(case: Any, transformation: str, strategy: str) -> bool:
    """Whether rows meet where they cannot be put together: vouched for as separate, or in a loop."""
    loop = transformation == "scheduled_scan" and strategy in SPLITS
    return bool(case.refused) and (loop or strategy in SPLITS - PROVED)


def covering() -> list[tuple[str, str, str]]:
    """Transformation, strategy and function of the quick part.

    Each function meets two strategies under two transformations, those that met least often so far.
    """
    met: Counter[tuple[str, str]] = Counter()
    picked = []
    for case in CASES.values():
        left = [
            (t, s)
            for t, s in itertools.product(TRANSFORMATIONS, STRATEGIES)
            if TRANSFORMATIONS[t].applies(case) and not mixes(case, t, s)
        ]
        for _ in range(MEETS):
            if not left:
                break
            pair = min(left, key=met.__getitem__)
            met[pair] += 1
            picked.append((*pair, case.name))
            left = [(t, s) for t, s in left if t != pair[0] and s != pair[1]]
    return picked


def product() -> list[Any]:
    covered = covering()
    quick = {"ffi": {*covered, *AGAIN["ffi"]}, "xla": {*covered[::2], *AGAIN["xla"]}}
    found = []
    for (name, case), backend, strategy in itertools.product(CASES.items(), BACKENDS, STRATEGIES):
        for transformation, how in TRANSFORMATIONS.items():
            if how.applies(case) and not mixes(case, transformation, strategy):
                one = (transformation, strategy, name)
                marks = () if one in quick[backend] else (pytest.mark.slow,)
                found.append(pytest.param(*one, backend, marks=marks))
    return found


def assert_close(want: Any, got: Any, tolerance: float = 0.0, times: float = 1.0) -> None:
    """Same tree and types; values within rounding of the largest."""
    wanted, tree = jax.tree_util.tree_flatten_with_path(want)
    found, tree_found = jax.tree_util.tree_flatten_with_path(got)
    assert tree == tree_found
    narrow = {str(x.dtype) for _, x in wanted if hasattr(x, "dtype")} & TOLERANCES.keys()
    least = max([2e-4, tolerance, *(TOLERANCES[dtype] for dtype in narrow)])
    for (path, w), (_, g) in zip(wanted, found, strict=True):
        where = "result" + jax.tree_util.keystr(path)
        assert (w.dtype, w.shape) == (g.dtype, g.shape), where
        assert getattr(w, "weak_type", False) == getattr(g, "weak_type", False), where
        if jnp.issubdtype(w.dtype, jax.dtypes.prng_key):
            w, g = jax.random.key_data(w), jax.random.key_data(g)
        a, b = np.asarray(w), np.asarray(g)
        if not inexact(w):
            np.testing.assert_array_equal(b, a, err_msg=where)
            continue
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        a, b = a.astype(wide), b.astype(wide)
        within = least * times
        scale = float(np.max(np.abs(a[np.isfinite(a)]), initial=0.0))
        np.testing.assert_allclose(
            b, a, rtol=within, atol=within * scale, equal_nan=True, err_msg=where
        )


_made: dict[Any, Any] = {}
_wanted: dict[Any, Any] = {}


pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.fixture(autouse=True)
def kept_decisions(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def made(
    case: Case, strategy: str, transformation: str, backend: str, lanes: int
) -> tuple[Any, Any]:
    """The original and the scheduled function, the same for all transformations that allow it."""
    make = TRANSFORMATIONS[transformation].make
    key = case.name, make
    if key not in _made:
        if len(_made) > 8:
            _made.clear()
            _wanted.clear()
            jax.clear_caches()
        _made[key] = make(case)
    original, of = _made[key]
    key = (*key, strategy, backend)
    if key not in _made:
        axes = {"in_axes": of.in_axes, "out_axes": of.out_axes} if strategy in SPLITS else {}
        _made[key] = dfx.schedule(
            original, STRATEGIES[strategy](), lanes=lanes, backend=backend, **axes
        )
    return original, _made[key]


@pytest.mark.parametrize(("transformation", "strategy", "name", "backend"), product())
def test_equal(transformation: str, strategy: str, name: str, backend: str, lanes: int) -> None:
    case, how = CASES[name], TRANSFORMATIONS[transformation]
    original, fast = made(case, strategy, transformation, backend, lanes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        key = transformation, name
        if key not in _wanted:
            with jax.default_device(jax.devices("cpu")[0]):
                _wanted[key] = how.run(original, case)
        got = how.run(fast, case)
        assert_close(_wanted[key], got, case.tolerance, SECOND if how.second else 1.0)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.refused])
@pytest.mark.parametrize("strategy", sorted(REFUSING))
def test_mixing_is_refused(strategy: str, name: str, lanes: int) -> None:
    case = CASES[name]
    fast = dfx.schedule(
        case.fn,
        REFUSING[strategy](),
        in_axes=case.in_axes,
        out_axes=case.out_axes,
        lanes=lanes,
        backend="ffi",
    )
    for run in (fast, jax.jit(fast), jax.grad(lambda *a: fast(*a).sum(), case.wrt)):
        with pytest.raises(dfx.SeparabilityError, match=case.refused) as error:
            run(*case.arguments())
        assert re.search(r"\.py:\d+", str(error.value)), "it names no line"
        assert "assume_separable=True" in str(error.value)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.refused])
def test_mixing_in_a_loop_is_refused(name: str, lanes: int) -> None:
    case = CASES[name]
    _, fast = made(case, "nano_2", "scheduled_scan", "ffi", lanes)
    with pytest.raises(dfx.SeparabilityError, match="inside of the loop scan at .*not joined"):
        TRANSFORMATIONS["scheduled_scan"].run(fast, case)


def test_the_quick_part_covers() -> None:
    """Every pair of a transformation and a strategy meets a function, every function some of them."""
    quick = covering()
    assert len(CASES) >= 40
    assert {(t, s) for t, s, _ in quick} == set(itertools.product(TRANSFORMATIONS, STRATEGIES))
    often = Counter(name for _, _, name in quick)
    assert all(often[name] == MEETS or case.refused for name, case in CASES.items())
