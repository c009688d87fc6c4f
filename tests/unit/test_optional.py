"""What is said when a framework is missing, broken, too old or too new: in a fresh interpreter each."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from dynaflow_xla.errors import UnsupportedError, optional

SCHEDULE = {
    "jax": "dfx.schedule(lambda x: x, dfx.Sequential())",
    "torch": "dfx.schedule(lambda x: x, dfx.Sequential(), backend='torch')",
}


def outcome(framework: str, fake: str, folder: Path) -> str:
    """Schedules with a stand-in for the framework in front of whatever is installed."""
    (folder / framework).mkdir()
    (folder / framework / "__init__.py").write_text(textwrap.dedent(fake))
    code = f"""
        import sys
        import dynaflow_xla as dfx
        sys.path.insert(0, {str(folder)!r})
        try:
            {SCHEDULE[framework]}
        except dfx.DynaflowError as error:
            print(type(error).__name__, error)
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=360,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("framework", sorted(SCHEDULE))
def test_missing(framework: str, tmp_path: Path) -> None:
    said = outcome(framework, "raise ModuleNotFoundError('No module named it')", tmp_path)
    assert said.startswith("UnsupportedError scheduling a ")
    assert f"needs the package '{framework}', which cannot be imported (No module" in said
    assert f"pip install 'dynaflow-xla[{framework}]'" in said


@pytest.mark.parametrize("framework", sorted(SCHEDULE))
def test_broken(framework: str, tmp_path: Path) -> None:
    """An installation whose own import fails: its words come through."""
    said = outcome(framework, "import a_library_it_lacks", tmp_path)
    assert "cannot be imported (No module named 'a_library_it_lacks')" in said


@pytest.mark.parametrize(
    ("framework", "version", "wanted"),
    [
        ("jax", "0.4.38", ">= 0.10, < 0.13"),
        ("jax", "0.9.2", ">= 0.10, < 0.13"),
        ("jax", "0.13.0", ">= 0.10, < 0.13"),
        ("jax", "0.13.0.dev20261101", ">= 0.10, < 0.13"),
        ("jax", "1.0", ">= 0.10, < 0.13"),
        ("torch", "2.10.1+cu130", ">= 2.11, < 2.16"),
        ("torch", "1.13", ">= 2.11, < 2.16"),
        ("torch", "2.16.0a0", ">= 2.11, < 2.16"),
    ],
)
def test_wrong_version(framework: str, version: str, wanted: str, tmp_path: Path) -> None:
    """Said before anything of the frontend is imported, which the old version could not serve."""
    said = outcome(framework, f"__version__ = {version!r}", tmp_path)
    assert f"needs {framework} {wanted}; found {version}." in said
    assert f"pip install -U 'dynaflow-xla[{framework}]'" in said


def test_a_module_without_a_version(tmp_path: Path) -> None:
    assert "found a module without a version" in outcome("jax", "", tmp_path)


def test_available_imports_nothing() -> None:
    assert optional.available("json") and not optional.available("no_such_module")
    assert not optional.available("no_such_package.inner")
    code = """
        import sys
        from dynaflow_xla.errors import optional
        print(optional.available("antigravity"), "antigravity" in sys.modules)
        sys.modules["blocked"] = None
        print(optional.available("blocked"))
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=360, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False", "False"]


def test_require_returns_the_module() -> None:
    assert optional.require("json", "this test", "test").dumps([]) == "[]"
    with pytest.raises(UnsupportedError, match=r"this test needs .*dynaflow-xla\[test\]"):
        optional.require("no_such_module", "this test", "test")


@pytest.mark.parametrize("framework", sorted(optional.VERSIONS))
def test_the_versions_are_those_that_the_package_asks_for(framework: str) -> None:
    """An installer and ``schedule`` agree on what is supported."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    oldest, too_new = (f"{a}.{b}" for a, b in optional.VERSIONS[framework])
    wanted = f">={oldest},<{too_new}"
    given = [
        requirement
        for extra in project["optional-dependencies"].values()
        for requirement in extra
        if re.match(rf"{framework}(\[\w+\])?>", requirement)
    ]
    assert given
    assert {requirement[requirement.index(">") :] for requirement in given} == {wanted}
