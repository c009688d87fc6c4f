"""The workers of the GPU benchmark: what hangs or dies costs itself, and everything ends in time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from gpu import cases as gpu_cases, overlap, pool, tables

WORKER = """
import json, os, sys, time
ask = json.load(open(sys.argv[1]))
out = os.fdopen(ask["writes"], "w", buffering=1)
case = ask["case"]
done = {"samples_us": {}, "failed": dict(ask["without"])}
for name in ("first", "second", "third"):
    if name in ask["without"]:
        continue
    print("begin", name, file=out)
    if name == "second":
        if case == "hangs":
            time.sleep(60)
        if case == "dies":
            sys.exit("no such thing")
        if case == "late":
            time.sleep(4)
    done["samples_us"][name] = [time.monotonic()]
save = lambda: json.dump(done, open(ask["target"], "w"))
save()
print("ready", file=out)
if os.fdopen(ask["reads"]).readline().startswith("go"):
    begin = time.monotonic()
    if case == "stuck":
        time.sleep(60)
    time.sleep(0.2)
    done["measured"] = [begin, time.monotonic()]
    save()
    print("end", file=out)
"""


def _run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: list[str], seconds: float = 20.0
) -> dict[str, Any]:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(pool, "HERE", tmp_path)
    for name, value in {"START_S": 20.0, "HUNG_S": 1.0, "GRACE_S": 0.3, "LATE_S": 10.0}.items():
        monkeypatch.setattr(pool, name, value)
    monkeypatch.setattr(pool, "VARIANT_S", {"torch": 1.0 if "hangs" in cases else 20.0})
    monkeypatch.setattr(pool, "MEASURE_S", {"torch": 1.0})
    ask = {"dry": False, "traces": [], "trace_folder": ""}
    (tmp_path / "runs").mkdir()
    made: dict[str, Any] = {}
    workers = [pool.Worker("torch", case, "", tmp_path / "runs", ask) for case in cases]
    begin = time.monotonic()
    prepare = 2.0 if "late" in cases else seconds / 2
    pool.Pool(
        workers, 4, begin + prepare, begin + seconds,
        lambda w: made.update({w.case: {**w.made(), "ended": w.ended}}),
    ).run()  # fmt: skip
    made["took"] = time.monotonic() - begin
    assert all(w.process is None for w in workers)
    return made


def test_one_at_a_time_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ["a", "b", "c"]
    made = _run(tmp_path, monkeypatch, cases)
    spans = [made[case]["measured"] for case in cases]
    ready = max(made[case]["samples_us"]["third"][0] for case in cases)
    assert ready < spans[0][0]  # all are prepared before the first measures
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert not any(made[case]["ended"] for case in cases)


def test_a_variant_that_hangs_or_dies_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _run(tmp_path, monkeypatch, ["hangs", "dies"])
    for case, why in {"hangs": "it hung", "dies": "no such thing"}.items():
        assert set(made[case]["samples_us"]) == {"first", "third"} and "measured" in made[case]
        assert why in made[case]["failed"]["second"]


def test_a_late_one_waits_and_measures_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _run(tmp_path, monkeypatch, ["late", "early"])
    assert made["early"]["measured"][1] <= made["late"]["measured"][0]


def test_one_that_hangs_while_it_measures_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _run(tmp_path, monkeypatch, ["stuck", "good"])
    assert "killed" in made["stuck"]["ended"] and made["stuck"]["samples_us"]
    assert "measured" in made["good"] and made["took"] < 15


def test_the_time_is_kept_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _run(tmp_path, monkeypatch, ["stuck", "late", *"abcdefgh"], seconds=6.0)
    assert made["took"] < 8


def test_overlap_of_kernels() -> None:
    assert overlap.overlap([(0.0, 4.0), (2.0, 4.0), (10.0, 2.0)]) == {
        "kernel_us": 10.0, "busy_us": 8.0, "span_us": 12.0, "concurrency": 1.25
    }  # fmt: skip
    assert overlap.overlap([])["concurrency"] == 0.0


def test_tables_of_all_cases_are_short() -> None:
    names = [name for columns in tables.SHORT.values() for name in columns]
    record: dict[str, Any] = {
        "dry": False, "rounds": 1, "lanes": 4,
        "environment": {"gpu": {}, "versions": {}, "gpu_versions": {}, "date": ""},
        "cases": {
            case.name: {
                "kind": case.kind, "note": case.note, "samples_us": {n: [1234.5] for n in names},
                "failed": {"torch": "x" * 500}, "overlap": {},
            }
            for case in gpu_cases.CASES
        },
    }  # fmt: skip
    text = tables.text(json.loads(json.dumps(record)))
    assert len(text) < 6000 and "best of ours  1.000 (1.00 to 1.00, 11 cases)" in text
    assert tables.page(record).count("| 1234 |") > 0
