"""Which arrays have memory in common: from addresses, sizes and strides alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dynaflow_xla.caches.recent import Recent

_WORK: Any = 10_000  # NumPy's types know two values only
"""Candidates to look at for an exact answer, tens of microseconds; beyond, views are taken to overlap."""

_ANYWHERE = 1 << 50
"""Only differences of addresses count; NumPy takes 0 for no memory."""

_known: Recent[tuple[MemoryLayout, ...], tuple[tuple[int, int], ...]] = Recent(256)


class MemoryLayout(NamedTuple):
    """How an array lies in memory.

    Attributes:
        address: Of its first element.
        shape: Sizes, at least one element.
        strides: In bytes.
        itemsize: Bytes of an element.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def span(self) -> tuple[int, int]:
        """The first byte, and the one behind the last."""
        low, high = self.address, self.address + self.itemsize
        for n, stride in zip(self.shape, self.strides, strict=True):
            if stride < 0:
                low += (n - 1) * stride
            else:
                high += (n - 1) * stride
        return low, high

    def is_dense(self) -> bool:
        """Whether every byte of its span is one of its elements'."""
        inside = self.itemsize
        sized = [(abs(s), n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1]
        for stride, n in sorted(sized):
            if stride != inside:
                return False
            inside *= n
        return True


def overlapping(views: Sequence[MemoryLayout]) -> list[tuple[int, int]]:
    """Pairs of views (by number, the smaller one first) that have a byte in common.

    Exact, but for pairs of many odd strides, which are taken to overlap. Nothing in proportion to the
    memory is looked at or allocated.
    """
    found = []
    for group in _groups(views):
        base = min(views[i].address for i in group)
        key = tuple(views[i]._replace(address=views[i].address - base) for i in group)
        pairs = _known.get(key)
        if pairs is None:
            pairs = _known[key] = tuple(_pairs(key))
        found += [(group[i], group[j]) for i, j in pairs]
    return sorted((min(pair), max(pair)) for pair in found)


def _groups(views: Sequence[MemoryLayout]) -> Iterator[list[int]]:
    """Views whose spans meet, directly or by way of others; those of one view are left out."""
    spans = sorted((*view.span(), number) for number, view in enumerate(views))
    group: list[int] = []
    end = 0
    for low, high, number in spans:
        if group and low >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(number)
        end = max(end, high) if len(group) > 1 else high
    if len(group) > 1:
        yield group


def _pairs(views: Sequence[MemoryLayout]) -> Iterator[tuple[int, int]]:
    spans = [view.span() for view in views]
    dense = [view.is_dense() for view in views]
    for j, b in enumerate(views):
        for i, a in enumerate(views[:j]):
            if spans[i][0] >= spans[j][1] or spans[j][0] >= spans[i][1]:
                continue
            if (dense[i] and dense[j]) or _share(a, b):
                yield i, j


class _Holder:
    """What NumPy takes for an array. Nobody reads it: it may be another device's memory."""

    def __init__(self, view: MemoryLayout) -> None:
        self.__array_interface__ = {
            "shape": view.shape, "strides": view.strides, "typestr": f"|V{view.itemsize}",
            "data": (_ANYWHERE + view.address, True), "version": 3,
        }  # fmt: skip


def _share(a: MemoryLayout, b: MemoryLayout) -> bool:
    try:
        first, second = (np.asarray(_Holder(view)) for view in (a, b))
        return np.shares_memory(first, second, max_work=_WORK)
    except np.exceptions.TooHardError:
        return True
