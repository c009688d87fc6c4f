"""Marks and sizes of ``jax.vmap``: nothing is kept for each of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax.capture import marks
from dynaflow_xla.frontends.jax.transform import primitive
from dynaflow_xla.ir.marks import MarkInfo


def sized() -> dict[str, int]:
    return {k: len(v) for k, v in vars(marks).items() if isinstance(v, dict | list | set)}


def test_marks_leave_nothing_behind() -> None:
    def f(x: Any) -> Any:
        with dfx.mark("left", resource="compute", tags={"a"}):
            return jnp.sin(x)

    f(jnp.ones(2))
    before = sized()
    for _ in range(50):
        f(jnp.ones(2))  # not under jit: each call enters the mark
    assert sized() == before


@pytest.mark.parametrize(
    "info",
    [
        MarkInfo("plain", None, frozenset()),
        MarkInfo("attention", "memory", frozenset({"attn", "layer 3/4 (a)#1.x", "ü"})),
        MarkInfo("with#1.numbers", "compute", frozenset()),
        MarkInfo("", None, frozenset({""})),
    ],
)
def test_a_scope_says_all_of_a_mark(info: MarkInfo) -> None:
    first, second = marks.new_key(info), marks.new_key(info)
    assert first != second and marks.is_mark(first) and marks.plain_name(first) == info.name
    assert marks.split_scope(f"a/transpose(jvp({first}))/b") == ["a", first, "b"]
    numbers: dict[Any, int] = {}
    found = [marks.find_mark([scope], numbers, {}) for scope in (first, second, first)]
    for mark in found:
        assert mark is not None and mark.name == info.name
        assert (mark.resource, mark.tags) == (info.resource, info.tags)
    assert [mark.instance for mark in found if mark is not None] == [0, 1, 0]


def test_scopes_of_others_are_no_marks() -> None:
    for scope in ("dfx:", "dfx:a", "dfx:a#", "dfx:a#b", "dfx:a#1.", "dfx:a#1.????", "dfx:a#1.Zm9v"):
        assert not marks.is_mark(scope), scope


def test_sizes_of_vmap_are_bounded(monkeypatch: pytest.MonkeyPatch, assert_same: Any) -> None:
    kept: list[Any] = []

    class Small(primitive.Recent):  # type: ignore[misc,name-defined]
        def __init__(self, size: int) -> None:
            super().__init__(min(size, 2))
            kept.append(self)

    monkeypatch.setattr(primitive, "Recent", Small)

    def f(x: Any) -> Any:
        return jnp.sort(x) + jnp.sort(-x)

    fast = dfx.schedule(f, "branches")
    for size in (2, 3, 4, 2):
        x = jax.random.normal(jax.random.key(size), (size, 16))
        assert_same(jax.vmap(f)(x), jax.vmap(fast)(x))
    assert max(map(len, kept)) == 2
