"""The site is complete: every public name has an entry, every page a place and an opening."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import dynaflow_xla as dfx

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def _entries() -> list[str]:
    return re.findall(
        r"^::: dynaflow_xla\.(\S+)$", (DOCS / "reference.md").read_text(), re.MULTILINE
    )


def _public() -> set[str]:
    """What ``dynaflow_xla/__init__.py`` exports: its ``X as X`` imports."""
    text = Path(dfx.__file__).read_text()
    return {name for name, same in re.findall(r"(\w+) as (\w+)", text) if name == same}


def test_every_public_name_is_in_the_reference() -> None:
    public = _public()
    assert {"schedule", "Strategy", "Timeline"} <= public
    assert public - {"__version__"} <= set(_entries())


def test_the_reference_has_no_name_twice_and_none_that_is_not_there() -> None:
    entries = _entries()
    assert len(entries) == len(set(entries))
    for entry in entries:
        module, _, name = f"dynaflow_xla.{entry}".rpartition(".")
        found = getattr(importlib.import_module(module), name, None)
        assert found is not None and found.__doc__, entry


def test_the_reference_lists_the_keywords_that_a_users_function_cannot_have() -> None:
    own = {}
    for name in _public() - {"schedule", "together"}:  # their keywords are theirs
        function = getattr(dfx, name, None)
        if not inspect.isfunction(function):
            continue
        parameters = inspect.signature(function).parameters.values()
        kinds = {p.kind for p in parameters}
        if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
            own[name] = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert {"explain", "graph", "verify"} <= set(own)
    text = (DOCS / "reference.md").read_text()
    rows = re.search(r"\| its own keywords \|\n\|[-|]+\|\n((?:\|.*\n)+)", text)
    assert rows
    told = {
        function: re.findall(r"`(\w+)`", names)
        for function, names in re.findall(r"^\| `(\w+)` \| (.*) \|$", rows[1], re.MULTILINE)
    }
    assert told == {name: names for name, names in own.items() if names}
    for name, names in told.items():
        said = (getattr(dfx, name).__doc__ or "").partition("**kwargs:")[2].partition("\n\n")[0]
        assert "functools.partial" in said and all(f"``{one}``" in said for one in names), name


@pytest.mark.parametrize("page", PAGES)
def test_page_has_a_place_and_says_what_it_is_for(page: str) -> None:
    assert len(re.findall(rf"(?<![\w/]){re.escape(page)}", (ROOT / "mkdocs.yml").read_text())) == 1
    title, _, opening = (DOCS / page).read_text().split("\n")[:3]
    assert title.startswith("# ") and opening.startswith("After this page you ")


def test_the_site_links_to_nothing_outside_of_docs() -> None:
    """Files beside docs/ are not on the site: pages name them, they do not link to them."""
    links = {
        (page, link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)#\s]+)", (DOCS / page).read_text())
        if "://" not in link
    }
    assert not [
        x for x in links if not (DOCS / x[0]).parent.joinpath(x[1]).resolve().is_relative_to(DOCS)
    ]
