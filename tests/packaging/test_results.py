"""The numbers in README.md are those of the committed result file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "plot", raising=False)
    import plot

    return plot


def test_readme_shows_the_committed_result(plot: Any) -> None:
    files = sorted(RESULTS.glob("cases-*.json"))
    assert len(files) == 1, "one result is kept: delete what a newer one supersedes"
    record = json.loads(files[0].read_text())
    assert not [case["name"] for case in record["cases"] if "error" in case]
    readme = (ROOT / "README.md").read_text()
    assert files[0].name in readme
    shown = re.search(r"\| case \|.*?(?=\n\n)", readme, re.DOTALL)
    assert shown, "README.md has no table of results"
    assert shown.group(0) == plot.markdown(record), "benchmarks/plot.py FILE --markdown prints it"


def test_readme_shows_the_study_of_auto() -> None:
    files = sorted(RESULTS.glob("auto-*.json"))
    assert len(files) == 1
    record = json.loads(files[0].read_text())
    readme = (ROOT / "README.md").read_text()
    assert files[0].name in readme
    summary = record["summary"]
    assert summary["functions"] == len(record["cases"]) >= 25
    for key in ("against_plain", "against_best", "rank_correlation"):
        assert f"{summary[key]:.2f}" in readme, key


def test_readme_shows_models_in_both_frameworks(plot: Any) -> None:
    files = sorted(RESULTS.glob("pairs-*.json"))
    assert len(files) == 1, "one result is kept: delete what a newer one supersedes"
    text = files[0].read_text()
    assert "/work/" not in text and "/home/" not in text and str(ROOT) not in text
    record = json.loads(text)
    names = {case["name"] for case in record["cases"] if "error" not in case}
    assert names == {"minilm", "llama_block", "moe_block", "resnet", "bilstm_pair"}
    for case in record["cases"]:
        assert case["difference_between_frameworks"] < 1e-4
        assert all(case["samples_ms"][n] for group in plot.PAIR_COLUMNS.values() for n in group)
    readme = (ROOT / "README.md").read_text()
    assert files[0].name in readme
    shown = re.search(r"\| model \|.*?(?=\n\n)", readme, re.DOTALL)
    assert shown, "README.md has no table of models"
    assert shown.group(0) == plot.pairs_markdown(record), "plot.py FILE --markdown prints it"


def test_page_on_torch_shows_the_committed_result(plot: Any) -> None:
    files = sorted(RESULTS.glob("torch-cpu-*.json"))
    assert len(files) == 1, "one result is kept: delete what a newer one supersedes"
    record = json.loads(files[0].read_text())
    page = (ROOT / "docs" / "torch.md").read_text()
    assert files[0].name in page
    shown = re.search(r"\| case \| strategy \|.*?(?=\n\n)", page, re.DOTALL)
    assert shown, "docs/torch.md has no table of results"
    assert shown.group(0) == plot.torch_markdown(record), "plot.py FILE --markdown prints it"
    for entry in record["calls"]:
        for how, added in entry["added_us"].items():
            if how == "module" or entry["compiler"] == "aoti":
                assert f"{added:.0f} us" in page
