"""This machine's name: what the kernels of several architectures say about their processors."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynaflow_xla import machine
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
