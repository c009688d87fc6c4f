"""The numbers in README.md and docs/ are those of the committed result files."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def plot() -> Any:
    from common import plot

    return plot


def _table(page: str, start: str) -> str:
    """The table of a page whose head begins with ``start``."""
    shown = re.search(rf"{re.escape(start)}.*?(?=\n\n)", (ROOT / page).read_text(), re.DOTALL)
    assert shown, f"{page} has no table that begins with {start}"
    return shown.group(0)


def _runs_of_the_cases() -> list[dict[str, Any]]:
    """The committed runs, oldest first: all of them measure the same code."""
    files = sorted(RESULTS.glob("cases-*.json"))
    page = (ROOT / "docs/results.md").read_text()
    assert not [file.name for file in files if file.name not in page], "shown nowhere"
    records: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    code = {record["environment"]["git"]["commit"] for record in records}
    assert len(code) == 1, "results of one commit are kept: delete what a newer one supersedes"
    return records


def test_page_shows_the_committed_result(plot: Any) -> None:
    records = _runs_of_the_cases()
    assert not [c["name"] for record in records for c in record["cases"] if "error" in c]
    shown = _table("docs/results.md", "| case |")
    assert shown == plot.markdown(*records), "benchmarks/common/plot.py FILES --markdown prints it"


def test_readme_shows_gains_and_losses_of_it(plot: Any) -> None:
    rows = [line.split("|") for line in _table("README.md", "| case |").splitlines()]
    measured = [line.split("|") for line in plot.markdown(*_runs_of_the_cases()).splitlines()]
    known = [[*cells[:6], cells[8], cells[10]] for cells in measured]
    assert rows[0] == known[0]
    assert {"|".join(cells) for cells in rows} <= {"|".join(cells) for cells in known}

    def ratio(cells: list[str]) -> float:
        return float(cells[5].split(",")[0])

    ratios = [ratio(cells) for cells in rows[2:]]
    assert 5 <= len(ratios) <= 10
    worst = max(map(ratio, known[2:]))
    assert min(ratios) < 0.6 and max(ratios) == worst, "what gains, and what does not"


def test_page_shows_functions_as_models_have_them(plot: Any) -> None:
    (file,) = RESULTS.glob("functions-*.json")  # a newer one supersedes it
    record = json.loads(file.read_text())
    assert not [case["name"] for case in record["cases"] if "error" in case]
    assert file.name in (ROOT / "docs/results.md").read_text()
    shown = _table("docs/results.md", "| function |")
    assert shown == plot.markdown(record), "benchmarks/common/plot.py FILE --markdown prints it"


def test_page_shows_what_is_simulated_for_more_cores(plot: Any) -> None:
    (file,) = RESULTS.glob("width-simulated-*.json")
    record = json.loads(file.read_text())
    page = (ROOT / "docs/results.md").read_text()
    assert file.name in page
    assert _table("docs/results.md", "| case | 4 cores |") == plot.simulated_markdown(record)
    for by_cores in record["speed_up"].values():
        for found in by_cores.values():
            assert found["branches"] > 0.95, "a plan that is predicted to lose is not chosen"


def test_page_shows_the_study_of_auto() -> None:
    files = sorted(RESULTS.glob("auto-*.json"))
    assert len(files) == 1
    record = json.loads(files[0].read_text())
    page = (ROOT / "docs/results.md").read_text()
    assert files[0].name in page
    summary = record["summary"]
    assert summary["functions"] == len(record["cases"]) >= 25
    for key in ("against_plain", "against_best", "rank_correlation"):
        assert f"{summary[key]:.2f}" in page, key


def test_page_shows_models_in_both_frameworks(plot: Any) -> None:
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
    assert files[0].name in (ROOT / "docs/results.md").read_text()
    shown = _table("docs/results.md", "| model |")
    assert shown == plot.pairs_markdown(record), "plot.py FILE --markdown prints it"


def test_page_on_torch_shows_the_committed_result(plot: Any) -> None:
    files = sorted(RESULTS.glob("torch-cpu-*.json"))
    assert len(files) == 1, "one result is kept: delete what a newer one supersedes"
    record = json.loads(files[0].read_text())
    page = (ROOT / "docs" / "torch.md").read_text()
    assert files[0].name in page
    shown = _table("docs/torch.md", "| case | strategy |")
    assert shown == plot.torch_markdown(record), "plot.py FILE --markdown prints it"
    for entry in record["calls"]:
        for how, added in entry["added_us"].items():
            if how == "module" or entry["compiler"] == "aoti":
                assert f"{added:.0f} us" in page


def test_page_shows_what_is_predicted_and_measured_of_published_strategies() -> None:
    rows = json.loads((RESULTS / "published.json").read_text())["rows"]
    shown = _table("docs/published.md", "| Strategy | paper | lines |").splitlines()[2:]
    for row, r in zip(shown, rows, strict=True):
        times = {
            key: {how: statistics.median(ms) for how, ms in samples.items()}
            for key, samples in r["samples_ms"].items()
        }
        ratios = [times[key]["original"] / times[key]["scheduled"] for key in ("jax", "torch")]
        cells = [f"`{r['strategy']}`", r["paper"], r["lines"], r["model"]]
        numbers = [f"{x:.2f}" for x in (r["h200"], *ratios)]
        assert row == f"| {' | '.join(map(str, (*cells, *numbers)))} |"


def test_page_shows_what_fresh_memory_takes() -> None:
    record = json.loads((RESULTS / "fresh-memory.json").read_text())
    rows = _table("docs/memory.md", "| call |").splitlines()[2:]
    shown = {line.split("|")[1].strip(): line.split("|")[2:6] for line in rows}
    assert list(shown) == [case["title"] for case in record["cases"].values()]
    for case in record["cases"].values():
        medians = [
            statistics.median(
                ms for process in case["processes"][kind] for ms in process[way]["ms"]
            )
            for way in ("plain", "branches")
            for kind in ("fresh", "kept")
        ]
        assert [f"{ms:.3g}" for ms in medians] == [cell.strip() for cell in shown[case["title"]]]


def test_page_shows_what_ran_on_the_stand_in() -> None:
    page = " ".join((ROOT / "docs/gpu.md").read_text().split())
    records = {
        n: json.loads((RESULTS / f"gpu-standin-{n}.json").read_text()) for n in ("matrix", "plans")
    }
    for record in records.values():
        assert record["meaning"] == "on a stand-in for the driver: no GPU was used"
        assert not record["bad"]
    counts = records["matrix"]["counts"]
    assert counts["ran"] == len(records["matrix"]["rows"])
    assert f"Of the matrix's {counts['ran']} tests" in page
    right = f"{counts['right_ffi']} on lanes, {counts['right_xla']} as one XLA program"
    assert right in page and f"{counts['as_it_must']} others" in page
    names = records["matrix"]["not_computed"]
    assert f"{sum(names.values())} need what nobody computes" in page
    counts = records["plans"]["counts"]
    assert (
        counts["plans"] >= 2000 and not counts["with_a_race"] + counts["wrong"] + counts["missed"]
    )
    for number in (
        counts["plans"],
        counts["launches"],
        counts["waits_dropped"],
        counts["of_these_needed"],
    ):
        assert f"{number:,}" in page, number
