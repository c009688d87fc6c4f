"""The proof that a plan is right before anything runs; the first broken rule is named."""

from __future__ import annotations

from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.machine import ALIGNMENT
from dynaflow_xla.planning.instructions import Launch, Merge, PlanBuffer, Record, Slice, Wait
from dynaflow_xla.planning.memory import disjoint_in_time
from dynaflow_xla.planning.order import HappensBefore
from dynaflow_xla.planning.plan import PLAN_VERSION, Plan


def validate(plan: Plan, pg: PartitionedGraph) -> None:
    """Proves a plan against the graph it was made for.

    Checked: every region runs exactly once, on a lane in range with as many cores as all others there, or
    on all cores and no lane, as outer regions always do, in program order; every event is recorded
    once, and before its waits, and no wide launch stands between, since its lanes could wait for ever;
    every read is ordered after its write in every run; buffers match their values, scratch is aligned
    and in bounds, and two buffers share bytes only if all accesses of one happen before all of the
    other; every output is written exactly once, its parts leaving no gap and no overlap.

    Raises:
        PlanError: naming the first offending instructions, regions and buffer.
    """
    _Validator(plan, pg).run()


_MOST, _MOST_BYTES = 2**31 - 1, 2**63 - 1
"""What the engine counts with."""


class _Validator:
    def __init__(self, plan: Plan, pg: PartitionedGraph):
        self.plan = plan
        self.pg = pg
        self.launch_of: dict[int, int] = {}
        self.writer: dict[int, int] = {}
        self.accesses: dict[int, list[int]] = {}
        graph = pg.graph
        self.viewed = {view.value: {(view.input, view.offset)} for view in graph.views}
        self.joined: dict[int, set[tuple[int, int]]] = {}
        for join in graph.joins:
            for index, output in enumerate(graph.outputs):
                if output == join.value:
                    for part, offset in zip(join.parts, join.offsets, strict=True):
                        self.joined.setdefault(part, set()).add((index, offset))

    @staticmethod
    def _places(
        value: int, whole: tuple[int, ...], parts: dict[int, set[tuple[int, int]]]
    ) -> set[tuple[int, int]]:
        """Argument or result numbers and offsets that hold a value; offset -1 is all of it."""
        return {(i, -1) for i, v in enumerate(whole) if v == value} | parts.get(value, set())

    def run(self) -> None:
        plan = self.plan
        if plan.version != PLAN_VERSION:
            raise PlanError(f"plan version must be {PLAN_VERSION}; got {plan.version}")
        for what, least, most, got in (
            ("lanes", 1, _MOST, plan.lanes),
            ("cores", 0, _MOST, plan.cores),
            ("events", 0, _MOST, plan.events),
            ("scratch_bytes", 0, _MOST_BYTES, plan.scratch_bytes),
            ("copied_bytes", 0, _MOST_BYTES, plan.copied_bytes),
        ):
            if not least <= got <= most:
                raise PlanError(f"a plan's {what} must be {least} to {most}; got {got}")
        self._buffers()
        self._instructions()
        self._cuts()
        self._regions()
        before = HappensBefore(plan.instructions)
        self._reads(before)
        self._outputs()
        self._overlaps(before)

    def _describe(self, number: int) -> str:
        instruction = self.plan.instructions[number]
        if isinstance(instruction, Launch):
            return (
                f"instruction {number} (launch of {instruction.name!r} on lane {instruction.lane})"
            )
        kind = type(instruction).__name__.lower()
        if isinstance(instruction, Slice | Merge):
            return f"instruction {number} ({kind} to buffer {instruction.out})"
        return f"instruction {number} ({kind} on lane {instruction.lane})"

    def _buffers(self) -> None:
        graph = self.pg.graph
        for position, buffer in enumerate(self.plan.buffers):
            what = f"buffer {position}"
            if buffer.id != position:
                raise PlanError(f"{what} must have id {position}; got {buffer.id}")
            if not 0 <= buffer.value < len(graph.values):
                raise PlanError(f"{what} holds value {buffer.value}, which the graph does not have")
            value = graph.values[buffer.value]
            if (buffer.shape, buffer.dtype, buffer.bytes) != (
                value.shape,
                value.dtype,
                value.bytes,
            ):
                raise PlanError(
                    f"{what} must be {value.type_str()} of {value.bytes} bytes; got "
                    f"{buffer.dtype}{list(buffer.shape)} of {buffer.bytes}"
                )
            if buffer.kind == "arg" and (buffer.index, buffer.offset) not in self._places(
                buffer.value, graph.inputs, self.viewed
            ):
                raise PlanError(
                    f"{what} is argument {buffer.index} at {buffer.offset}, which is not value "
                    f"{buffer.value}"
                )
            if buffer.kind == "result" and (buffer.index, buffer.offset) not in self._places(
                buffer.value, graph.outputs, self.joined
            ):
                raise PlanError(
                    f"{what} is result {buffer.index} at {buffer.offset}, which is not value "
                    f"{buffer.value}"
                )
            if (buffer.kind not in ("arg", "result") and buffer.index != -1) or (
                buffer.kind in ("local", "stage") and buffer.offset != -1
            ):
                raise PlanError(
                    f"{what} is neither part of an argument nor of a result; got index {buffer.index} and "
                    f"offset {buffer.offset}"
                )
            if buffer.kind == "scratch" and (
                buffer.offset < 0
                or buffer.offset % ALIGNMENT
                or buffer.offset + buffer.bytes > self.plan.scratch_bytes
            ):
                raise PlanError(
                    f"{what}: offset {buffer.offset} with {buffer.bytes} bytes must be a multiple of "
                    f"{ALIGNMENT} and end within {self.plan.scratch_bytes} bytes of scratch"
                )

    def _instructions(self) -> None:
        plan, regions = self.plan, self.pg.regions
        recorded: dict[int, int] = {}
        last_outer = -1
        wide = -1
        widths: dict[int, int] = {}
        for number, instruction in enumerate(plan.instructions):
            what = self._describe(number)
            if isinstance(instruction, Slice | Merge):
                continue
            if isinstance(instruction, Launch):
                if not 0 <= instruction.region < len(regions):
                    raise PlanError(f"{what}: there is no region {instruction.region}")
                region = regions[instruction.region]
                if region.outer and instruction.lane != -1:
                    raise PlanError(f"{what}: region {region.name!r} stays in the outer program")
                self._width(what, region.outer, instruction, widths)
                if instruction.lane == -1:
                    wide = number
                if region.outer:
                    if region.id < last_outer:
                        raise PlanError(f"{what}: outer regions must keep program order")
                    last_outer = region.id
                if instruction.region in self.launch_of:
                    raise PlanError(
                        f"{what}: region {region.name!r} is launched already by "
                        f"{self._describe(self.launch_of[instruction.region])}"
                    )
                self.launch_of[instruction.region] = number
            if not (isinstance(instruction, Launch) and instruction.lane == -1) and not (
                0 <= instruction.lane < plan.lanes
            ):
                raise PlanError(f"{what}: lanes go from 0 to {plan.lanes - 1}")
            if isinstance(instruction, Record | Wait) and not 0 <= instruction.event < plan.events:
                raise PlanError(f"{what}: events go from 0 to {plan.events - 1}")
            if isinstance(instruction, Record):
                if instruction.event in recorded:
                    raise PlanError(
                        f"{what}: event {instruction.event} is recorded already by "
                        f"{self._describe(recorded[instruction.event])}"
                    )
                recorded[instruction.event] = number
            if isinstance(instruction, Wait) and instruction.event not in recorded:
                raise PlanError(
                    f"{what}: event {instruction.event} is waited for before it is recorded; lanes "
                    "could wait for each other for ever"
                )
            if isinstance(instruction, Wait) and recorded[instruction.event] < wide:
                raise PlanError(
                    f"{what}: event {instruction.event} is recorded before {self._describe(wide)}, which has "
                    "all cores, and waited for behind it: no lane may wait across such a launch, which "
                    "itself waits for all lanes"
                )

    def _width(self, what: str, outer: bool, launch: Launch, widths: dict[int, int]) -> None:
        """A launch has the cores of its lane; or it is on no lane, where the plan knows such launches."""
        if launch.lane == -1:
            if launch.width != 0:
                raise PlanError(
                    f"{what}: what is on no lane has all cores, so its width must be 0; got {launch.width}"
                )
            if not outer and self.plan.cores < 1:
                raise PlanError(
                    f"{what}: it must run on a lane; this plan knows no launches on all cores"
                )
            return
        first = widths.setdefault(launch.lane, launch.width)
        if not 1 <= launch.width <= _MOST or launch.width != first:
            raise PlanError(
                f"{what}: its width must be 1 or more and the same for all of lane {launch.lane} "
                f"({first}); got {launch.width}"
            )

    def _cuts(self) -> None:
        """Views and parts are declared by the graph's own slices and merges, which leave no gap."""
        plan, graph = self.plan, self.pg.graph
        views = {view.value: view for view in graph.views}
        declared: set[int] = set()
        first = next((n for n, i in enumerate(plan.instructions) if not isinstance(i, Slice)), 0)
        merges = sum(isinstance(i, Merge) for i in plan.instructions)
        for number, instruction in enumerate(plan.instructions):
            if not isinstance(instruction, Slice | Merge):
                continue
            what = self._describe(number)
            sources = (instruction.src,) if isinstance(instruction, Slice) else instruction.srcs
            for number_of in (*sources, instruction.out):
                if not 0 <= number_of < len(plan.buffers):
                    raise PlanError(f"{what}: there is no buffer {number_of}")
            if instruction.out in declared:
                raise PlanError(f"{what} declares its buffer a second time")
            declared.add(instruction.out)
            out = plan.buffers[instruction.out]
            if isinstance(instruction, Slice):
                view = views.get(out.value)
                want = view and (view.axis, view.start, view.stop)
                got = (instruction.axis, instruction.start, instruction.stop)
                src = plan.buffers[instruction.src]
                if number > first or want != got or (src.kind, src.index, src.offset) != (
                    "arg", out.index, -1
                ):  # fmt: skip
                    raise PlanError(f"{what} is not a slice of the graph, at the plan's beginning")
            else:
                self._tiles(what, instruction, out)
                if instruction.axis not in {j.axis for j in graph.joins if j.value == out.value}:
                    raise PlanError(f"{what} is along axis {instruction.axis}, unlike the graph's")
                if number < len(plan.instructions) - merges:
                    raise PlanError(f"{what} must come after all launches")
        for buffer in plan.buffers:
            if buffer.kind == "arg" and buffer.offset >= 0 and buffer.id not in declared:
                raise PlanError(
                    f"{self._name(buffer)} is part of an argument, but no slice says so"
                )
        for index, value in enumerate(graph.outputs):
            if any(join.value == value for join in graph.joins) and not any(
                plan.buffers[b].index == index for b in declared if plan.buffers[b].kind == "result"
            ):
                raise PlanError(f"output {index} (value {value}) has parts, but no merge")

    def _tiles(self, what: str, merge: Merge, out: PlanBuffer) -> None:
        end = 0
        for number in merge.srcs:
            part = self.plan.buffers[number]
            if (part.kind, part.index, part.offset) != ("result", out.index, end):
                raise PlanError(
                    f"{what}: {self._name(part)} must begin at byte {end} of result {out.index}; it "
                    f"is {part.kind} {part.index} at {part.offset}"
                )
            end += part.bytes
        if end != out.bytes or (out.kind, out.offset) != ("result", -1):
            raise PlanError(f"{what}: its parts end at byte {end} of {out.bytes}")

    def _regions(self) -> None:
        for region in self.pg.regions:
            if region.id not in self.launch_of:
                raise PlanError(f"region {region.name!r} is never launched")
            number = self.launch_of[region.id]
            launch = self.plan.instructions[number]
            if not isinstance(launch, Launch):
                raise PlanError(f"{self._describe(number)} must be a launch")
            for buffer in (*launch.ins, *launch.outs):
                if not 0 <= buffer < len(self.plan.buffers):
                    raise PlanError(f"{self._describe(number)}: there is no buffer {buffer}")
            if launch.nano != region.nano:
                raise PlanError(
                    f"{self._describe(number)} must be of nano-batch {region.nano}; it says "
                    f"{launch.nano}"
                )
            read = tuple(self.plan.buffers[b].value for b in launch.ins)
            if read != region.inputs:
                raise PlanError(
                    f"{self._describe(number)} must read values {region.inputs}; it reads {read}"
                )
            written = {self.plan.buffers[b].value for b in launch.outs}
            if written != set(region.outputs):
                raise PlanError(
                    f"{self._describe(number)} must write values {sorted(region.outputs)}; it "
                    f"writes {sorted(written)}"
                )
            for buffer in launch.outs:
                if self.plan.buffers[buffer].kind == "arg":
                    raise PlanError(f"{self._describe(number)} writes the argument buffer {buffer}")
                if buffer in self.writer:
                    raise PlanError(
                        f"{self._describe(number)} writes buffer {buffer}, which "
                        f"{self._describe(self.writer[buffer])} writes already"
                    )
                self.writer[buffer] = number
            for buffer in (*launch.ins, *launch.outs):
                self.accesses.setdefault(buffer, []).append(number)

    def _reads(self, before: HappensBefore) -> None:
        for number, launch in enumerate(self.plan.instructions):
            if not isinstance(launch, Launch):
                continue
            for buffer_id in launch.ins:
                buffer = self.plan.buffers[buffer_id]
                if buffer.kind == "arg":
                    continue
                if buffer_id not in self.writer:
                    raise PlanError(
                        f"{self._describe(number)} reads buffer {buffer_id}, never written"
                    )
                write = self.writer[buffer_id]
                if not before(write, number):
                    raise PlanError(
                        f"{self._describe(number)} reads {self._name(buffer)}, but nothing orders it "
                        f"after {self._describe(write)}, which writes it: a wait is missing"
                    )
                self._reachable(number, launch, write, buffer)

    def _reachable(self, number: int, launch: Launch, write: int, buffer: PlanBuffer) -> None:
        """The kind of a buffer must fit where its writer and reader run."""
        writer = self.plan.instructions[write]
        between = any(
            isinstance(i, Launch) and i.lane < 0 for i in self.plan.instructions[write : number + 1]
        )
        lane = writer.lane if isinstance(writer, Launch) else -1
        inside = not between and lane >= 0
        same_lane = inside and lane == launch.lane
        kinds = {"local": same_lane, "scratch": inside and not same_lane, "stage": not inside}
        if not kinds.get(buffer.kind, False):
            raise PlanError(
                f"{self._describe(number)} cannot read {self._name(buffer)} written by "
                f"{self._describe(write)}: a {buffer.kind} buffer does not reach that far"
            )

    def _name(self, buffer: PlanBuffer) -> str:
        return f"buffer {buffer.id} ({buffer.kind}, value {buffer.value})"

    def _outputs(self) -> None:
        made = self.pg.producer_region()
        have = {
            (b.index, b.value)
            for b in self.plan.buffers
            if b.kind == "result" and b.id in self.writer
        }
        joins = {join.value: join.parts for join in self.pg.graph.joins}
        for index, value in enumerate(self.pg.graph.outputs):
            for part in joins.get(value, (value,) if value in made else ()):
                if (index, part) not in have:
                    raise PlanError(f"output {index} (value {part}) is never written")

    def _overlaps(self, before: HappensBefore) -> None:
        scratch = sorted(
            (b for b in self.plan.buffers if b.kind == "scratch" and b.bytes),
            key=lambda b: b.offset,
        )
        for position, first in enumerate(scratch):
            for second in scratch[position + 1 :]:
                if second.offset >= first.offset + first.bytes:
                    break
                a, b = self.accesses.get(first.id, []), self.accesses.get(second.id, [])
                if not disjoint_in_time(a, b, before):
                    raise PlanError(
                        f"{self._name(first)} and {self._name(second)} share bytes of scratch, but "
                        f"{self._describe(a[0])} and {self._describe(b[0])} may run at the same time"
                    )
