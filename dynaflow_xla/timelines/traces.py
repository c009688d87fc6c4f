"""Timelines as trace files: Trace Event JSON and Perfetto protobuf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynaflow_xla.errors import optional
from dynaflow_xla.timelines.run import Run
from dynaflow_xla.timelines.spans import Span

_SEQUENCE = 1
_PROCESS_TRACK = 1


def write_trace(timeline: Run, path: Path) -> Path:
    """Writes the trace of ``Timeline.to_perfetto``, its form by the suffix; returns its path."""
    if path.suffix == ".pftrace":
        path.write_bytes(_protobuf(timeline))
    else:
        path.write_text(json.dumps(_events(timeline)), encoding="utf-8")
    return path


def _rows(timeline: Run) -> list[tuple[int, str]]:
    """(lane, row name); the outer program has a row only if something ran there."""
    rows = [(lane, f"lane {lane}") for lane in range(timeline.lanes)]
    if any(s.lane < 0 for s in timeline.spans):
        rows.append((-1, "outer program"))
    return rows


def _details(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {"region": span.region, "nano_batch": span.nano}
    for name in ("resource", "flops", "bytes_moved", "source", "reason"):
        if value := getattr(span, name):
            found[name] = value
    return found


def _thread(timeline: Run, lane: int) -> int:
    return lane if lane >= 0 else timeline.lanes


def _events(timeline: Run) -> dict[str, Any]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name",
         "args": {"name": f"{timeline.name} ({timeline.kind})"}}
    ]  # fmt: skip
    for lane, name in _rows(timeline):
        thread = _thread(timeline, lane)
        events.append(
            {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}
        )
    for span in timeline.spans:
        events.append(
            {"ph": "X", "pid": 1, "tid": _thread(timeline, span.lane), "name": span.name,
             "cat": span.kind, "ts": span.start_ns / 1e3, "dur": span.duration_ns / 1e3,
             "args": _details(span)}
        )  # fmt: skip
    for number, (before, after) in enumerate(timeline.hand_overs()):
        # An arrow's ends bind to the slices that enclose them.
        for phase, span in (("s", timeline.spans[before]), ("f", timeline.spans[after])):
            event = {
                "ph": phase, "id": number, "pid": 1, "tid": _thread(timeline, span.lane),
                "name": "hand-over", "cat": "data", "ts": span.start_ns / 1e3,
            }  # fmt: skip
            events.append(event if phase == "s" else {**event, "bp": "e"})
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": dict(timeline.meta)}


def _protobuf(timeline: Run) -> bytes:
    why, extra = "Timeline.to_perfetto with the suffix .pftrace", "trace"
    builder = optional.require("perfetto.trace_builder.proto_builder", why, extra)
    messages = optional.require("perfetto.protos.perfetto.trace.perfetto_trace_pb2", why, extra)
    trace, event_type = builder.TraceProtoBuilder(), messages.TrackEvent

    def describe(uuid: int, name: str) -> None:
        track = trace.add_packet().track_descriptor
        track.uuid, track.name = uuid, name
        if uuid != _PROCESS_TRACK:
            track.parent_uuid = _PROCESS_TRACK

    def track_of(lane: int) -> int:
        return _PROCESS_TRACK + 1 + _thread(timeline, lane)

    describe(_PROCESS_TRACK, f"{timeline.name} ({timeline.kind})")
    for lane, name in _rows(timeline):
        describe(track_of(lane), name)
    flows: dict[int, list[int]] = {}
    for number, ends in enumerate(timeline.hand_overs(), 1):
        for i in ends:
            flows.setdefault(i, []).append(number)
    stamped = []
    for i, span in enumerate(timeline.spans):
        # Ends come before the starts of the same time, and an empty span's start before its end.
        empty = span.duration_ns == 0
        stamped.append(((span.start_ns, 1, i), i, True))
        stamped.append(((span.end_ns, 2 if empty else 0, i), i, False))
    for (time, _, _), i, begins in sorted(stamped):
        span = timeline.spans[i]
        packet = trace.add_packet()
        packet.timestamp = time
        packet.trusted_packet_sequence_id = _SEQUENCE
        event = packet.track_event
        event.track_uuid = track_of(span.lane)
        if not begins:
            event.type = event_type.TYPE_SLICE_END
            continue
        event.type = event_type.TYPE_SLICE_BEGIN
        event.name = span.name
        event.categories.append(span.kind)
        event.flow_ids.extend(flows.get(i, ()))
        for name, value in _details(span).items():
            note = event.debug_annotations.add()
            note.name = name
            if isinstance(value, str):
                note.string_value = value
            elif isinstance(value, float):
                note.double_value = value
            else:
                note.int_value = value
    return trace.serialize()  # type: ignore[no-any-return]
