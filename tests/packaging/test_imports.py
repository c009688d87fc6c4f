"""What a user gets from the installed distribution, seen from a fresh interpreter."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

try:
    _DISTRIBUTION = importlib.metadata.distribution("dynaflow_xla")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("dynaflow_xla is not installed", allow_module_level=True)

_EDITABLE = '"editable": true' in (_DISTRIBUTION.read_text("direct_url.json") or "").lower()

# Blocks a set of top-level modules as if they were not installed.
_BLOCK = """
import sys

class Block:
    names = {names!r}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, Block())
"""


def _run(code: str, *, block: tuple[str, ...] = (), cwd: Path | None = None) -> str:
    """Runs ``code`` in a fresh interpreter that has no source folder on its path."""
    source = (_BLOCK.format(names=set(block)) if block else "") + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-P", "-c", source], capture_output=True, text=True, timeout=360, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_FRAMEWORKS = ("jax", "jaxlib", "torch", "torch_xla")


def test_import_needs_no_framework() -> None:
    out = _run(
        """
        import dynaflow_xla as dfx
        print(dfx.Strategy.__name__, issubclass(dfx.PlanError, dfx.DynaflowError))
        """,
        block=_FRAMEWORKS,
    )
    assert out.split() == ["Strategy", "True"]


def test_import_is_light() -> None:
    """Importing the package imports no framework, even when they are all installed."""
    out = _run(
        """
        import sys
        import dynaflow_xla
        print([n for n in ("jax", "jaxlib", "torch", "torch_xla") if n in sys.modules])
        """
    )
    assert out.strip() == "[]"


def test_schedule_without_jax_names_the_extra() -> None:
    out = _run(
        """
        import dynaflow_xla as dfx
        try:
            dfx.schedule(lambda x: x + 1, dfx.Sequential())(1.0)
        except dfx.UnsupportedError as error:
            print(error)
        else:
            print("no error")
        """,
        block=_FRAMEWORKS,
    )
    assert "dynaflow-xla[jax]" in out, out


def test_version() -> None:
    out = _run("import dynaflow_xla as dfx; print(dfx.__version__)")
    assert out.strip() == importlib.metadata.version("dynaflow_xla")


def test_every_public_name_resolves() -> None:
    names = (
        "Auto Branches Call DynaflowError EngineError Module Op PlanError RuleError Scope "
        "SeparabilityError Sequential Split Strategy Timeline UnsupportedError VerificationError explain "
        "graph mark plan profile schedule simulate tune verify check_determinism debug stats"
    )
    out = _run(
        f"""
        import dynaflow_xla as dfx
        print([n for n in {names.split()!r} if not hasattr(dfx, n)])
        """
    )
    assert out.strip() == "[]"


def test_engine_loads_without_a_framework() -> None:
    """The extension module itself links to no framework."""
    out = _run(
        """
        import importlib.machinery, importlib.util, pathlib
        import dynaflow_xla
        spec = importlib.util.find_spec("dynaflow_xla.ffi")
        folders = [pathlib.Path(p) for p in spec.submodule_search_locations]
        file = next(f for d in folders for f in d.glob("_engine*.so"))
        loader = importlib.machinery.ExtensionFileLoader("_engine", str(file))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_engine", loader))
        loader.exec_module(module)
        print(module.PLAN_ABI_VERSION)
        """,
        block=_FRAMEWORKS,
    )
    assert int(out) >= 1


@pytest.mark.skipif(_EDITABLE, reason="an editable install refers to the source folders")
class TestWheel:
    def _files(self) -> list[str]:
        return [str(f) for f in _DISTRIBUTION.files or []]

    def test_nothing_but_the_package_is_installed(self) -> None:
        # The command of pyproject.toml lies beside the interpreter, outside of where packages are.
        files = [f for f in self._files() if not f.endswith("/bin/dynaflow-xla")]
        tops = {f.partition("/")[0] for f in files}
        tops = {t for t in tops if not t.endswith(".dist-info")}
        assert tops == {"dynaflow_xla"}

    @pytest.mark.parametrize("name", ["frontends", "ffi", "csrc"])
    def test_no_top_level(self, name: str, tmp_path: Path) -> None:
        out = _run(
            f"import importlib.util; print(importlib.util.find_spec({name!r}))", cwd=tmp_path
        )
        assert out.strip() == "None"

    def test_typed(self) -> None:
        files = self._files()
        assert "dynaflow_xla/py.typed" in files
        assert "dynaflow_xla/ffi/_engine.pyi" in files

    def test_parts_are_there_and_sources_are_not(self) -> None:
        files = self._files()
        for part in ("frontends/__init__.py", "ffi/__init__.py", "strategies/__init__.py"):
            assert f"dynaflow_xla/{part}" in files
        assert not [f for f in files if f.endswith((".cc", ".h", "CMakeLists.txt"))]
        assert not [f for f in files if "/tests/" in f or "/test_" in f]

    def test_license(self) -> None:
        told = _DISTRIBUTION.metadata["License-Expression"]
        assert told == "Apache-2.0 AND BSD-3-Clause AND MIT"
        for name in ("LICENSE", "nanobind.txt", "openxla.txt", "robin-map.txt"):
            assert any(f.endswith(f"/{name}") for f in self._files()), name

    def test_extras(self) -> None:
        extras = set(_DISTRIBUTION.metadata.get_all("Provides-Extra") or [])
        assert extras >= {
            "jax",
            "torch",
            "torch-xla",
            "cuda",
            "bench",
            "trace",
            "test",
            "docs",
            "dev",
        }
