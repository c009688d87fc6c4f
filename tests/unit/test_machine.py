"""This machine's name: what the kernels of several architectures say about their processors."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynaflow_xla import machine, settings
from dynaflow_xla.caches import private_files
from dynaflow_xla.errors import FallbackWarning, PlanError
from dynaflow_xla.machine import figures, processors
from dynaflow_xla.tuning import autotune

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9R14
cpu MHz\t\t: {mhz}

processor\t: 1
model name\t: AMD EPYC 9R14
"""
ARM = """processor\t: 0
BogoMIPS\t: 2100.00
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: {part}
CPU revision\t: 1
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (X86.format(mhz="2600.1"), "AMD EPYC 9R14"),
        ("model name\t: A\nmodel name\t: B\nmodel name\t: A\n", "A, B"),
        ("cpu\t\t: POWER9, altivec supported\nmachine\t: PowerNV\n",
         "cpu POWER9, altivec supported, machine PowerNV"),
        ("hart\t: 0\nisa\t: rv64imafdc\nuarch\t: sifive,u74-mc\n",
         "uarch sifive,u74-mc, isa rv64imafdc"),
        ("model name\t:\n", ""),
        ("", ""),
        ("no colon here\n", ""),
    ],
)  # fmt: skip
def test_the_name_in_a_text_of_the_kernel(text: str, name: str) -> None:
    assert machine.named(text) == name


def test_what_changes_from_second_to_second_is_no_part_of_the_name() -> None:
    assert machine.named(X86.format(mhz="2600")) == machine.named(X86.format(mhz="3700"))


def test_processors_without_a_name_differ_by_their_parts() -> None:
    one, other = (machine.named(ARM.format(part=part)) for part in ("0xd40", "0xd4f"))
    assert one != other and "0xd40" in one


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    machine.cpu_model.cache_clear()
    yield tmp_path / "cpuinfo"
    machine.cpu_model.cache_clear()


def test_without_a_text_python_is_asked(cpuinfo: Path) -> None:
    assert machine.cpu_model() == (platform.processor() or platform.machine())


def test_another_processor_is_another_key_of_a_decision(cpuinfo: Path) -> None:
    keys = []
    for model in ("AMD EPYC 9R14", "Intel(R) Xeon(R) Platinum 8488C"):
        cpuinfo.write_text(f"processor\t: 0\nmodel name\t: {model}\n")
        machine.cpu_model.cache_clear()
        keys.append(autotune.cache_key("graph"))
        assert autotune.cache_key("graph") == keys[-1]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "OMP_NUM_THREADS"])
def test_another_environment_is_another_key(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variable, raising=False)
    before = autotune.cache_key("graph")
    monkeypatch.setenv(variable, "3")
    assert autotune.cache_key("graph") != before


def test_the_order_of_options_is_no_part_of_a_key() -> None:
    assert autotune.cache_key({"a": 1, "b": 2}) == autotune.cache_key({"b": 2, "a": 1})
    assert autotune.cache_key({"a": 1}) != autotune.cache_key({"a": 2})
    assert autotune.cache_key({"a": "1"}) != autotune.cache_key({"a": 1})


# -- numbers ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path / "cache"))
    machine.use(None)
    yield tmp_path / "cache"
    machine.use(None)


MEASURED = dataclasses.replace(
    machine.ASSUMED, hand_over_ns=7000.0, shared={**machine.ASSUMED.shared, "elements": 0.5},
    speeds={"jax products": 1.25}, measured="2026-11-23",
)  # fmt: skip


def test_numbers_are_assumed_until_they_are_measured(folder: Path) -> None:
    assert machine.numbers() == machine.assumed() and machine.numbers().digest == ""
    key = autotune.cache_key("a")
    file = machine.keep(MEASURED)
    assert file.parent == folder and machine.numbers() == MEASURED
    assert MEASURED.digest and autotune.cache_key("a") != key
    machine.use(None)  # as another process
    assert machine.numbers() == MEASURED and machine.numbers().digest == MEASURED.digest
    assert machine.numbers().speed("jax", "products") == 1.25
    assert machine.numbers().speed("torch", "products") == 1.0
    assert machine.numbers().speed_up("elements", 2) == pytest.approx(1 / 0.75)
    assert machine.numbers().hand_over(800) == pytest.approx(7000 + 2 * 100)


def test_of_another_machine_they_are_not_taken(folder: Path) -> None:
    machine.keep(MEASURED)
    assert figures.kept(("another",)) == machine.ASSUMED


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"hand_over_ns": 5e6}, "1000 times what is assumed"),
        ({"hand_over_ns": float("nan")}, "hand_over_ns is nan"),
        ({"copy_bytes_per_ns": 0.0}, "copy_bytes_per_ns is 0 times"),
        ({"speeds": {"jax products": 1e9}}, "jax products is 1e"),
        ({"shared": {"products": 0.5}}, "shares must lie between 0 and 1"),
        ({"shared": {**machine.ASSUMED.shared, "elements": 1.5}}, "shares must lie"),
        ({"lanes_ns": "long"}, "holds no numbers"),
        ({"speeds": [1]}, "holds no numbers"),
    ],
)
def test_no_machine_is_so(folder: Path, changed: dict[str, Any], why: str) -> None:
    content = dataclasses.asdict(MEASURED) | changed
    with pytest.raises(private_files.Broken, match=why):
        figures.checked(content)
    file = figures.path(machine.identity())
    private_files.write(file, private_files.sealed(content, figures.VERSION))
    machine.use(None)
    with pytest.warns(FallbackWarning, match=r"doctor --measure"):
        assert machine.numbers() == machine.assumed()


def test_a_file_that_was_changed_is_reported(folder: Path) -> None:
    file = machine.keep(MEASURED)
    file.write_bytes(file.read_bytes().replace(b"7000", b"6000"))
    machine.use(None)
    with pytest.warns(FallbackWarning, match="its hash is not that of its content"):
        assert machine.numbers() == machine.assumed()


def test_a_file_that_others_may_write_is_refused(folder: Path) -> None:
    machine.keep(MEASURED).chmod(0o666)
    machine.use(None)
    with pytest.warns(FallbackWarning, match="is not used"):
        assert machine.numbers() == machine.assumed()


def test_without_a_home_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run programs for users that have none: plans need none."""

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(private_files, "cache_folder", none)
    assert figures.kept(machine.identity()) == figures.ASSUMED


def test_a_folder_that_others_may_write_is_told_of_only_for_a_file(folder: Path) -> None:
    folder.mkdir(mode=0o777, parents=True)
    folder.chmod(0o777)
    assert machine.numbers() == machine.assumed()  # no warning: warnings are errors here


def test_the_day_makes_no_other_numbers() -> None:
    assert MEASURED.digest == dataclasses.replace(MEASURED, measured="later").digest


CPUINFO = (
    "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel name\t: X\nflags\t\t: fpu sse2 {}\n"
)


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "products"),
    [
        ("GenuineIntel", "6", "avx avx2 avx512f avx512dq", 1.0),
        ("GenuineIntel", "6", "avx avx2 fma", 0.5),
        ("AuthenticAMD", "25", "avx avx2 avx512f", 0.5),  # Zen 4
        ("AuthenticAMD", "25", "avx avx2", 0.4),  # Zen 3
        ("AuthenticAMD", "26", "avx avx2 avx512f", 1.0),  # Zen 5
        ("GenuineIntel", "6", "sse4_2", 0.5),
    ],
)
def test_what_is_assumed_of_a_processor(
    vendor: str, family: str, flags: str, products: float
) -> None:
    numbers = processors.assumed_of(CPUINFO.format(vendor, family, flags))
    assert numbers.speed("jax", "products") == products
    assert numbers.speed("torch", "products") == 1.0 and not numbers.digest
    far = vendor == "GenuineIntel" and "avx512f" in flags
    assert numbers.step_ns == (9_000.0 if far else 4_000.0)
    assert dataclasses.replace(numbers, speeds={}, step_ns=4_000.0) == machine.ASSUMED


def test_nothing_is_assumed_of_what_does_not_say_what_it_is() -> None:
    for text in ("", "CPU part\t: 0xd40\nFeatures\t: fp asimd sve\n", ":::\n"):
        assert processors.assumed_of(text) == machine.ASSUMED


@pytest.mark.parametrize(
    ("variables", "mine", "threads", "said"),
    [
        ({"OMP_PROC_BIND": "true"}, {3}, [{3}, {1}], "or call os.sched_setaffinity(0, {1, 3})"),
        ({"OMP_PROC_BIND": "close"}, {0}, [{0, 1}], "or call os.sched_setaffinity(0, range(0, 2))"),
        ({"GOMP_CPU_AFFINITY": "0-1"}, {0}, [{1}], "GOMP_CPU_AFFINITY=0-1 has OpenMP bind"),
        ({"OMP_PROC_BIND": "FALSE"}, {0}, [{1}], ""),
        ({"KMP_AFFINITY": "none"}, {0}, [{1}], ""),
        ({}, {0}, [{1}], ""),
        ({"OMP_PROC_BIND": "true"}, {0}, [{0}], ""),
        ({"OMP_PROC_BIND": "true"}, {0, 1}, [{0}], ""),
    ],
)  # fmt: skip
def test_openmp_may_bind_a_process_to_a_core(
    variables: dict[str, str], mine: set[int], threads: list[set[int]], said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Lanes would be silently one, or refused without a word of why."""
    for name in machine._BINDING:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "listdir", lambda _: [str(n + 1) for n in range(len(threads))])
    monkeypatch.setattr(os, "sched_getaffinity", lambda t: threads[t - 1] if t else mine)
    monkeypatch.setattr(settings, "_told", False)
    if not said:
        assert machine.bound_by() == "" and settings.resolve_lanes(None) == len(mine)
        return
    assert said in machine.bound_by() and f"to core {min(mine)}, of 2" in machine.bound_by()
    with pytest.warns(FallbackWarning, match=f"by default there is one lane: .*{re.escape(said)}"):
        assert settings.resolve_lanes(None) == 1
    assert settings.resolve_lanes(None) == 1  # said once: warnings are errors here
    with pytest.raises(PlanError, match="must not exceed the cores .*, 1; got 2") as raised:
        settings.resolve_lanes(2)
    assert said in str(raised.value)
