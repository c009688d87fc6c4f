"""Memory that a process keeps: what malloc does is seen in processes of their own, by page faults."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
from page_faults import small_pages

import dynaflow_xla as dfx
from dynaflow_xla import machine
from dynaflow_xla.errors import PlanError, UnsupportedError
from dynaflow_xla.machine import memory
from dynaflow_xla.tuning import autotune, choice

MIB = 2**20
BLOCK = f"bytearray({64 * MIB})"
"""Every page of it is written; larger than what malloc keeps by itself."""

COUNT = f"""
import threading, warnings
import dynaflow_xla as dfx
from dynaflow_xla.machine import memory

def pages():
    before = memory.faults()
    {BLOCK}
    return memory.faults() - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])
"""
ALL = 64 * MIB // 4096 * 9 // 10  # the heap may have some of it already


pytestmark = small_pages


def printed(code: str, **environment: str) -> list[int]:
    """The numbers that a fresh process prints."""
    import os

    made = subprocess.run(
        [sys.executable, "-P", "-c", COUNT + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return [int(number) for number in made.stdout.split()]


def test_a_block_is_mapped_anew_at_each_call_until_memory_is_kept() -> None:
    before, first, second = printed(
        """
        pages()
        print(pages())
        dfx.keep_memory()
        print(pages(), pages())
        """
    )
    assert before >= ALL <= first
    assert second < ALL // 100


def test_more_than_the_limit_is_given_back() -> None:
    first, second = printed(f"dfx.keep_memory({MIB})\nprint(pages(), pages())")
    assert min(first, second) >= ALL


def test_a_limit_that_suffices() -> None:
    first, second = printed(f"dfx.keep_memory({128 * MIB})\nprint(pages(), pages())")
    assert first >= ALL and second < ALL // 100


def test_zero_gives_back_what_is_free_and_ends_it() -> None:
    kept, after, again, in_force = printed(
        """
        dfx.keep_memory()
        pages()
        print(resident())
        dfx.keep_memory(0)
        pages()
        print(resident(), pages(), memory.is_kept())
        """.replace("memory.is_kept())", "int(memory.is_kept()))")
    )
    assert kept - after >= ALL // 2
    assert again >= ALL and not in_force


def test_what_malloc_keeps_by_itself_is_kept_again_after_that() -> None:
    before, after = printed(
        f"""
        def small():
            for _ in range(4):
                before = memory.faults()
                bytearray({8 * MIB})
            return memory.faults() - before
        print(small())
        dfx.keep_memory()
        dfx.keep_memory()
        dfx.keep_memory(0)
        print(small())
        """
    )
    assert max(before, after) < 100


def test_threads_with_a_heap_of_their_own_are_told_of() -> None:
    printed(
        """
        stop = threading.Event()
        def held():
            mine = bytearray(200_000), [bytearray(5000) for _ in range(9)]
            ready.set()
            stop.wait()
        ready = threading.Event()
        thread = threading.Thread(target=held)
        thread.start()
        ready.wait()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            dfx.keep_memory()
        stop.set()
        thread.join()
        (warned,) = seen
        assert warned.category is dfx.FallbackWarning and warned.filename == "<string>"
        assert "threads have heaps of their own already (1)" in str(warned.message)
        """
    )


def test_threads_that_begin_later_have_no_heap_of_their_own() -> None:
    (second,) = printed(
        """
        dfx.keep_memory()
        found = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: found.append(pages()))
            thread.start()
            thread.join()
        print(found[1])
        """
    )
    assert second < ALL // 100


class Library:
    """A C library whose malloc is not what the process allocates with."""

    def __init__(self) -> None:
        self.set: dict[int, int] = {}

    def mallopt(self, parameter: int, value: int) -> int:
        self.set[parameter] = value
        return 1


def test_another_allocator_is_named_and_nothing_stays_set(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(memory, "_library", lambda: library)
    monkeypatch.setattr(memory, "_from_heap", lambda _: False)
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    with pytest.raises(UnsupportedError, match=r"another one \(LD_PRELOAD=libjemalloc.so.2\)"):
        dfx.keep_memory()
    assert not memory.is_kept()
    assert library.set == memory._DEFAULTS


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    with pytest.raises(UnsupportedError, match="this system's C library is another one"):
        dfx.keep_memory()


@pytest.mark.parametrize("wrong", [-1, 2**31, 1.5, "1G", True])
def test_what_is_no_limit(wrong: Any) -> None:
    with pytest.raises(PlanError, match=r"None or 0 to 2147483647 bytes; got"):
        dfx.keep_memory(wrong)


def test_what_is_told_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "fault_ns", lambda: 2000.0)
    told = memory.told(1024, 10e6)
    assert told.startswith("a call takes 4 MiB of fresh memory from the system: 1024 page faults")
    assert "about 2 ms of 10" in told and "keep_memory()" in told
    assert not memory.told(1024, 100e6)  # a fiftieth of the call
    assert not memory.told(12, 20e3)  # 24 us
    monkeypatch.setattr(memory, "_kept", True)
    assert not memory.told(1024, 10e6)


def test_a_page_fault_is_measured() -> None:
    memory.fault_ns.cache_clear()
    assert 10 < memory.fault_ns() < 1e6


def test_explain_says_it() -> None:
    lines = choice.Choice(None, "it is faster", memory="a call takes much").lines()
    assert "auto: a call takes much" in lines
    assert not any("takes" in line for line in choice.Choice(None, "it is faster").lines())


def test_decisions_of_a_process_that_keeps_memory_are_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = autotune.cache_key("f")
    monkeypatch.setattr(memory, "_kept", True)
    assert autotune.cache_key("f") != before
    assert machine.memory is memory
