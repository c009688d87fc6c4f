"""What the parts of ``gpu_all.py`` say when they are over: tests counted, logs joined, failures shown.

Needs the standard library only.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

SHOWN = 9000  # characters of the end's summary: of a lent machine's output the last 12,000 are seen
# A line of `pytest -v`, alone (name first) and in several processes (outcome first).
OUTCOMES = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
ALONE = re.compile(rf"^(tests/\S+::.+?) ({OUTCOMES})\b", re.M)
SHARED = re.compile(rf"^\[gw\d+\] \[ *\d+%\] ({OUTCOMES}) (tests/\S+::.+?) *$", re.M)
BEGUN = re.compile(r"^(tests/\S+::[^\s\[]+(?:\[[^\]\n]*\])?)", re.M)


def last_error(text: str) -> str:
    """The last line of a traceback that pytest marks as the error's, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if re.match(r"E(\s|$)", line)]
    return ([e for e in errors if e] or lines or [""])[-1][:300]


def tests(report: Path, log: Path) -> dict[str, Any]:
    """How many tests ended how, and those that failed with their error; from the log if need be.

    A pytest that was killed wrote no report: its log names the tests that were running then, too.
    """
    made: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": {}}
    try:
        cases = list(xml.parse(report).iter("testcase"))
    except (OSError, xml.ParseError):
        return _read_log(log.read_text(errors="replace"), made)
    for case in cases:
        name = f"{case.get('classname', '').removeprefix('tests.gpu.')}::{case.get('name')}"
        bad = [node for node in case if node.tag in ("failure", "error")]
        if bad:
            made["failed"] += 1
            made["failures"][name] = last_error(bad[0].text or bad[0].get("message") or "")
        else:
            made["skipped" if case.find("skipped") is not None else "passed"] += 1
    return made


def _read_log(text: str, made: dict[str, Any]) -> dict[str, Any]:
    outcomes = dict(ALONE.findall(text))
    outcomes |= {name: outcome for outcome, name in SHARED.findall(text)}
    for name, outcome in outcomes.items():
        if outcome in ("FAILED", "ERROR", "XPASS"):
            made["failed"] += 1
            made["failures"][name.removeprefix("tests/gpu/")] = "see the log"
        else:
            made["passed" if outcome == "PASSED" else "skipped"] += 1
    # Where several processes write, a test that waits behind another one is not yet named.
    made["unfinished"] = sorted({n for n in BEGUN.findall(text) if n not in outcomes})[:20]
    return made


def line(name: str, made: dict[str, Any]) -> str:
    """How a part ended, in one line."""
    said = f"{name:12} {made['ended']} in {made['seconds']} s"
    if found := made.get("tests"):
        said += f": {found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"
        if found.get("unfinished"):
            said += f", {len(found['unfinished'])} not ended"
        return said
    last = str(made["tail"]).strip().splitlines()[-1:] or [""]
    return f"{said}: {last[0][:150]}" if last[0] else said


def joined_logs(out: Path, names: list[str]) -> None:
    """``log.txt``: the parts' logs one after another."""
    with (out / "log.txt").open("wb") as file:
        for name in names:
            log = out / f"log-{name}.txt"
            if log.exists():
                file.write(log.read_bytes() + b"\n")


def shown(out: Path, made: dict[str, dict[str, Any]]) -> str:
    """All parts in short: how each ended, what failed with its last line, the probes' answers."""
    lines = ["", "==== summary", *(line(name, part) for name, part in made.items())]
    probes = out / "gpu-probes.json"
    if probes.exists() and {"probes", "probes-timed"} & made.keys():
        try:
            answers = json.loads(probes.read_text())
        except ValueError:
            answers = {"all": "cannot be read"}
        for question, answer in answers.items():
            lines.append(f"probe {question}: {json.dumps(answer)}"[:300])
    for name, part in made.items():
        found = part.get("tests", {})
        for test, error in found.get("failures", {}).items():
            lines.append(f"FAILED {name} {test}: {error}")
        for test in found.get("unfinished", []):
            lines.append(f"NOT ENDED {name} {test}")
        if part["ended"] != "passed" and not found.get("failures"):
            lines += [
                f"---- the end of {name}",
                *(s[:200] for s in part["tail"].splitlines()[-12:]),
            ]
    text = "\n".join(lines)
    if len(text) > SHOWN:
        text = text[:SHOWN].rsplit("\n", 1)[0] + "\n... and more: summary.json has all of it"
    return text
