"""Timelines: critical path, idle reasons, forms and files."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynaflow_xla.errors import PlanError
from dynaflow_xla.timelines.spans import Bound, Span, us
from dynaflow_xla.timelines.timeline import Timeline, complete

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<!--slot:data-->",
    "<!-- <script>",
    "'&quot;&#x3c;b> $x^2$ \\u003c",
    "\ud800 half a pair \x00\x1b",
    "\N{RIGHT-TO-LEFT OVERRIDE}\u2028 line",
    "",
)


def launch(lane: int, name: str, start: int, end: int, region: int, **more: Any) -> Span:
    return Span(lane, name, "launch", start, end, region, **more)


def two_lanes() -> Timeline:
    """``left`` on lane 0; ``right`` on lane 1 is longer, so lane 0 waits for it, then ``join``."""
    spans = [
        launch(0, "left", 10, 110, 0, resource="compute", flops=2e9, source="model.py:3"),
        launch(1, "right", 20, 320, 1, resource="memory", bytes_moved=4_000_000),
        Span(1, "copy out", "copy", 320, 330, bytes_moved=64),
        Span(0, "wait", "wait", 110, 340, reason="waits for 'right' on lane 1", after=(2,)),
        launch(0, "join", 340, 400, 2, after=(0, 1)),
    ]
    bound = Bound(serial_ns=460, critical_path_ns=360, shared_ns=230, lanes=2)
    return complete("predicted", spans, 2, {"name": "two"}, bound)


def with_names(names: tuple[str, ...]) -> Timeline:
    spans = [
        launch(i % 2, n, 100 * i, 100 * i + 90, i, source=n, nano=i % 3, resource=n,
               after=(i - 1,) if i else ())
        for i, n in enumerate(names)
    ]  # fmt: skip
    spans += [
        Span(i % 2, "wait", "wait", 100 * i + 90, 100 * i + 95, reason=n)
        for i, n in enumerate(names)
    ]
    meta = {"name": "".join(names), "notes": list(names)}
    return complete("measured", spans, 2, meta)


def test_critical_path_crosses_lanes() -> None:
    assert [s.name for s in two_lanes().critical_path()] == ["right", "copy out", "join"]


def test_critical_path_follows_lane_order_without_data() -> None:
    spans = [launch(0, "a", 0, 10, 0), launch(0, "b", 10, 30, 1), launch(1, "c", 0, 25, 2)]
    timeline = complete("predicted", spans, 2, {})
    assert [s.name for s in timeline.critical_path()] == ["a", "b"]


def test_critical_path_through_the_outer_program() -> None:
    spans = [
        launch(0, "a", 0, 10, 0),
        launch(1, "b", 0, 50, 1),
        launch(-1, "callback", 50, 60, 2, after=(0, 1)),
        launch(0, "c", 60, 70, 3, after=(2,)),
    ]
    timeline = complete("predicted", spans, 2, {})
    assert [s.name for s in timeline.critical_path()] == ["b", "callback", "c"]


def test_critical_path_ends_on_cyclic_and_empty_spans() -> None:
    """Measured clocks can make two spans of no length follow each other."""
    spans = [launch(0, "a", 5, 5, 0, after=(1,)), launch(1, "b", 5, 5, 1, after=(0,))]
    timeline = complete("measured", spans, 2, {})
    assert {s.name for s in timeline.critical_path()} == {"a", "b"}


def test_idle_reasons() -> None:
    timeline = two_lanes()
    assert [(s.start_ns, s.end_ns, s.reason) for s in timeline.idle(0)] == [
        (110, 340, "waits for 'right' on lane 1"),
        (0, 10, "dispatch"),
    ]
    assert [(s.start_ns, s.end_ns, s.reason) for s in timeline.idle(1)] == [
        (330, 400, "nothing left"),
        (0, 20, "dispatch"),
    ]
    assert timeline.idle()[0].duration_ns == 230


def test_idle_around_an_outer_region() -> None:
    spans = [
        launch(0, "a", 5, 40, 0),
        launch(1, "b", 0, 10, 1),
        launch(1, "b2", 15, 20, 2),
        launch(-1, "callback", 40, 60, 3),
        launch(0, "c", 65, 80, 4),
    ]
    reasons = {
        (s.lane, s.start_ns, s.end_ns): s.reason
        for s in complete("measured", spans, 3, {}).spans
        if s.kind == "idle"
    }
    outer = "waits for 'callback' in the outer program"
    assert reasons == {
        (0, 0, 5): "dispatch", (0, 40, 60): outer, (0, 60, 65): "dispatch",
        (1, 10, 15): "between two steps of its program",
        (1, 20, 40): "nothing left before 'callback'", (1, 40, 60): outer,
        (1, 60, 80): "nothing left",
        (2, 0, 40): "nothing to do", (2, 40, 60): outer, (2, 60, 80): "nothing to do",
    }  # fmt: skip


def test_every_moment_of_a_lane_is_accounted_for() -> None:
    timeline = two_lanes()
    for lane in range(timeline.lanes):
        own = [s for s in timeline.spans if s.lane == lane]
        assert sum(s.duration_ns for s in own) == timeline.total_ns


def test_busy_overlap_and_concurrency() -> None:
    timeline = two_lanes()
    assert (timeline.busy_ns(0), timeline.busy_ns(1)) == (160, 300)
    assert timeline.overlap_ns(0, 1) == timeline.overlap_ns(1, 0) == 90
    assert timeline.concurrent_ns() == 90
    three = [launch(lane, "x", 0, 10 + lane, lane) for lane in range(3)]
    assert complete("predicted", three, 3, {}).concurrent_ns() == 11
    assert timeline.region_ns() == {0: 100, 1: 300, 2: 60}
    assert timeline.busy_ns(-1) == 0  # no operator is in the outer program
    nano = [launch(0, "x", 0, 10, 0), launch(0, "x", 10, 40, 0, nano=1)]
    assert complete("measured", nano, 1, {}).region_ns() == {0: 20}


@pytest.mark.parametrize(("lane", "error"), [
    (2, PlanError), (-2, PlanError), ("0", TypeError), (1.5, TypeError), (True, TypeError),
])  # fmt: skip
def test_lanes_that_a_timeline_does_not_have(lane: Any, error: type[Exception]) -> None:
    timeline = two_lanes()
    for ask in (timeline.busy_ns, lambda n: timeline.overlap_ns(0, n)):
        with pytest.raises(
            error, match=r"lane must be a number from 0 to 1 \(-1: the outer program\)"
        ):
            ask(lane)


def test_text_names_what_matters() -> None:
    text = two_lanes().to_text()
    assert "* critical path, 370 ns: right > join" in text
    assert "at best 1.28x, this plan 1.15x, against one lane" in text
    assert "waits for 'right' on lane 1" in text
    assert "lane 0 busy 40%" in text
    assert str(two_lanes()) == text


@pytest.mark.parametrize(
    "ns, text", [(0, "0 ns"), (999, "999 ns"), (1500, "1.5 us"), (2e6, "2 ms")]
)
def test_times_for_people(ns: float, text: str) -> None:
    assert us(ns) == text


@pytest.mark.parametrize(
    "timeline",
    [two_lanes(), complete("measured", [], 0, {}), complete("predicted", [], 3, {"name": "x"}),
     with_names(tuple(n for n in HOSTILE if n.isprintable()))],
)  # fmt: skip
def test_json_round_trip(timeline: Timeline) -> None:
    again = Timeline.from_json(timeline.to_json())
    assert again == timeline
    assert again.to_json() == timeline.to_json()


def change(**changes: Any) -> str:
    data = json.loads(two_lanes().to_json())
    for key, value in changes.items():
        target = data if key in data else data["spans"][0]
        target[key] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "text, what",
    [
        ("{", "malformed"),
        ("[]", "got None"),
        (change(version=99), "got 99"),
        (change(lanes="two"), "lanes"),
        (change(kind="guessed"), "kind"),
        (change(lane=2), "lane 2"),
        (change(lane=-2), "lane -2"),
        (change(start_ns=200), "200 to 110"),
        (change(end_ns=10**9), "within 0 to 400"),
        (change(after=[99]), "99"),
    ],
)
def test_bad_json_is_refused(text: str, what: str) -> None:
    with pytest.raises(PlanError, match=re.escape(what)):
        Timeline.from_json(text)


# ---- HTML -------------------------------------------------------------------------------------

_VOID = {"meta", "input", "br", "img", "link", "hr"}


class Page(HTMLParser):
    """Checks nesting; collects tags, attributes and the text of scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)


def page_of(timeline: Timeline, path: Path, original: float | Timeline | None = None) -> Page:
    target = timeline.to_html(path / "timeline.html", original)
    text = target.read_text(encoding="utf-8")
    assert "<!--slot:" not in text
    return Page(text)


def test_html_is_self_contained(tmp_path: Path) -> None:
    page = page_of(two_lanes(), tmp_path, 0.5)
    text = (tmp_path / "timeline.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//cdn|@import|url\((?!#)", text)
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] in ("src", "href", "srcset")]
    assert ("meta", "charset", "utf-8") in page.attributes
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_html_holds_what_was_measured(tmp_path: Path) -> None:
    page = page_of(two_lanes(), tmp_path, 0.0005)
    text = " ".join(page.text)
    for part in ("two", "400 ns", "1.25x faster", "at best 1.28x, this plan 1.15x", "75%",
                 "waits for 'right' on lane 1", "model.py:3", "2 G", "nothing left"):  # fmt: skip
        assert part in text, part
    data = json.loads(page.scripts[0])
    original, scheduled = data["groups"]
    assert original["rows"][0]["spans"][0]["e"] == data["end"] == 500
    spans = [s for row in scheduled["rows"] for s in row["spans"]]
    assert sorted(s["c"] for s in spans if "c" in s) == [0, 1, 2]
    assert scheduled["edges"] == [[1, 4]]


def test_html_beside_another_timeline(tmp_path: Path) -> None:
    serial = complete("predicted", [launch(0, "all", 0, 460, 0)], 1, {"name": "serial"})
    page = page_of(two_lanes(), tmp_path, serial)
    assert "1.15x faster" in " ".join(page.text)
    data = json.loads(page.scripts[0])
    assert [g["title"] for g in data["groups"]] == ["original (predicted)", "scheduled (predicted)"]
    assert data["end"] == 460
    measured = msgspec.structs.replace(serial, kind="measured", total_ns=200)
    assert "2.00x slower (predicted against measured)" in " ".join(
        page_of(two_lanes(), tmp_path, measured).text
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_html_escapes_names(name: str, tmp_path: Path) -> None:
    plain, page = (page_of(with_names((n,) * 4), tmp_path) for n in ("name", name))
    assert page.tags == plain.tags
    assert len(page.attributes) == len(plain.attributes)
    assert [a for a in page.attributes if a[0] == "script"] == [
        a for a in plain.attributes if a[0] == "script"
    ]
    assert len(page.scripts) == 2 and page.scripts[1] == plain.scripts[1]
    names = {s["n"] for g in json.loads(page.scripts[0])["groups"] for r in g["rows"]
             for s in r["spans"] if s["k"] == "launch"}  # fmt: skip
    assert names == {name}


@pytest.mark.parametrize("lanes", [0, 1, 4])
def test_html_of_nothing(lanes: int, tmp_path: Path) -> None:
    page = page_of(complete("measured", [], lanes, {}), tmp_path)
    assert len(json.loads(page.scripts[0])["groups"][0]["rows"]) == lanes


@pytest.mark.parametrize("original", [0, -1.0, float("nan"), float("inf"), "fast", True])
def test_html_refuses_other_originals(original: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="original_ms must be"):
        two_lanes().to_html(tmp_path / "x.html", original)
    assert not (tmp_path / "x.html").exists()


# ---- traces and pictures ----------------------------------------------------------------------


def test_trace_event_json(tmp_path: Path) -> None:
    timeline = two_lanes()
    data = json.loads(timeline.to_perfetto(tmp_path / "t.json").read_text())
    events = data["traceEvents"]
    complete_events = [e for e in events if e["ph"] == "X"]
    assert len(complete_events) == len(timeline.spans)
    assert {e["args"].get("source") for e in complete_events} == {None, "model.py:3"}
    (start,), (end,) = ([e for e in events if e["ph"] == phase] for phase in "sf")
    assert (start["tid"], end["tid"]) == (1, 0) and start["id"] == end["id"]


@pytest.mark.parametrize(
    "timeline", [two_lanes(), complete("measured", [], 2, {}), with_names(("a", "<b>", "ü"))]
)
def test_perfetto_protobuf(timeline: Timeline, tmp_path: Path) -> None:
    messages = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    raw = timeline.to_perfetto(tmp_path / "t.pftrace").read_bytes()
    trace = messages.Trace()
    trace.ParseFromString(raw)
    tracks = {p.track_descriptor.uuid for p in trace.packet if p.HasField("track_descriptor")}
    assert len(tracks) == 1 + timeline.lanes
    open_on: dict[int, list[tuple[int, str]]] = {}
    closed, flows = [], Counter()
    times = []
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        times.append(packet.timestamp)
        assert event.track_uuid in tracks
        stack = open_on.setdefault(event.track_uuid, [])
        if event.type == messages.TrackEvent.TYPE_SLICE_BEGIN:
            stack.append((packet.timestamp, event.name))
            flows.update(event.flow_ids)
        else:
            start, name = stack.pop()
            closed.append((name, start, packet.timestamp))
    assert times == sorted(times) and not any(open_on.values())
    assert sorted(closed) == sorted((s.name, s.start_ns, s.end_ns) for s in timeline.spans)
    assert list(flows.values()) == [2] * len(timeline.hand_overs())


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize(
    "timeline",
    [two_lanes(), complete("measured", [], 0, {}), with_names(("$x^{$", "<b>", "ü", "_"))],
)
def test_plot(timeline: Timeline, suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert timeline.plot(tmp_path / f"t{suffix}").stat().st_size > 1000


def test_plot_refuses_other_suffixes(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="t.gif"):
        two_lanes().plot(tmp_path / "t.gif")
