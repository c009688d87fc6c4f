"""A model of the engine, and all of its interleavings.

Threads: one a call (``Engine::Run``, which runs lane 0), one for each other lane, one that may shut down. The
state is what they share: queues of lanes, the ticket of lane 0, events of each call, lanes that are left, the
count of live calls, whether the engine is closed. What a thread does between two looks at that is one action.
``csrc/src/host/engine.cc``, ``host_lane.h``, ``stand_in.h`` and ``csrc/src/call.cc`` name the actions:

    Enqueue   a call enters the queues of all its lanes, and takes its ticket, under one mutex (or is refused)
    TakeTurn  lane 0 of a call goes on when all earlier tickets are served
    Take      a lane's thread takes the first call of its queue, or a member of that call's team does in its
              stead, or its caller when its own lane 0 is left: to the others it makes no difference
              which thread it is
    Help      a lane that waits takes another one of its call that has not begun and whose events are
              all set; until that one is left it does nothing itself
    Launch    a step runs; in the model it may fail the call
    Abort     the lane whose step failed wakes whoever waits for an event of the call
    Record    an event is signalled
    Wait      a lane sleeps, and goes on when its event is signalled or aborted
    Leave     a lane is done with a call
    Return    Run returns when all lanes of its call have left
    Close     the engine takes no more calls, and waits for those that live
    Join      lanes end when they have nothing left, and Close returns
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Fault = Literal["", "queues one by one", "no abort", "close does not wait", "no wait", "helps any"]
"""Ways to break the model, which it has to notice."""


class Instr(NamedTuple):
    """``launch`` of a step, or ``record`` or ``wait`` of an event."""

    kind: Literal["launch", "record", "wait"]
    number: int


Program = tuple[tuple[Instr, ...], ...]
"""The instructions of each lane."""


class Call(NamedTuple):
    """One call of ``Run``.

    ``stage``: new, entering (only if broken), entered, running, ran (lane 0 is left), refused, returned.
    """

    stage: str = "new"
    ticket: int = -1
    entered: int = 0
    at: tuple[int, ...] = ()
    done: tuple[bool, ...] = ()
    signalled: frozenset[int] = frozenset()
    aborted: bool = False
    failed: bool = False
    failing: int = -1
    ran: frozenset[int] = frozenset()
    asleep: frozenset[int] = frozenset()
    helped: frozenset[tuple[int, int]] = frozenset()  # (lane that waits, lane that it runs)


class State(NamedTuple):
    """What all threads share."""

    calls: tuple[Call, ...]
    queues: tuple[tuple[int, ...], ...]
    current: tuple[int, ...]
    next_ticket: int = 0
    serving: int = 0
    closed: bool = False
    joined: bool = False


class Wrong(AssertionError):
    """Something that must hold in every state does not."""


@dataclass(frozen=True)
class Model:
    """Some programs, called side by side.

    Attributes:
        programs: Of each call.
        may_fail: Numbers of steps that may fail.
        shuts_down: Whether another thread shuts the engine down at any time.
        fault: How the engine is broken.
    """

    programs: tuple[Program, ...]
    may_fail: frozenset[int] = frozenset()
    shuts_down: bool = False
    fault: Fault = ""

    def _lanes(self) -> int:
        return max(map(len, self.programs))

    def start(self) -> State:
        """Before anything."""
        calls = tuple(
            Call(at=(0,) * len(p), done=tuple(not lane for lane in p)) for p in self.programs
        )
        return State(calls, ((),) * self._lanes(), (-1,) * self._lanes())

    def actions(self, s: State) -> Iterator[tuple[str, State]]:
        """What can happen next, by name."""
        for c, call in enumerate(s.calls):
            if call.stage in ("new", "entering"):
                yield from self._enqueue(s, c, call)
            elif call.stage == "entered" and call.ticket == s.serving and s.current[0] < 0:
                current = (c, *s.current[1:])
                yield "TakeTurn", self._with(s, c, call._replace(stage="running"), current=current)
            elif call.stage == "ran" and all(call.done):
                yield "Return", self._with(s, c, call._replace(stage="returned"))
        for lane in range(1, self._lanes()):
            if s.current[lane] < 0 and s.queues[lane] and not s.joined:
                first, *rest = s.queues[lane]
                queues = (*s.queues[:lane], tuple(rest), *s.queues[lane + 1 :])
                current = (*s.current[:lane], first, *s.current[lane + 1 :])
                yield "Take", s._replace(queues=queues, current=current)
        for lane, c in enumerate(s.current):
            if c >= 0:
                yield from self._step(s, lane, c)
        if self.shuts_down and not s.closed:
            yield "Close", s._replace(closed=True)
        live = any(c.stage not in ("new", "refused", "returned") for c in s.calls)
        idle = not any(s.queues[1:]) and all(c < 0 for c in s.current[1:])
        may = not live and idle if self.fault != "close does not wait" else True
        if s.closed and not s.joined and may:
            yield "Join", s._replace(joined=True)

    def _with(self, s: State, c: int, call: Call, **changes: object) -> State:
        calls = (*s.calls[:c], call, *s.calls[c + 1 :])
        return s._replace(calls=calls, **changes)  # type: ignore[arg-type]

    def _enqueue(self, s: State, c: int, call: Call) -> Iterator[tuple[str, State]]:
        if s.closed and call.stage == "new":
            yield "Enqueue", self._with(s, c, call._replace(stage="refused"))
            return
        used = [n for n, lane in enumerate(self.programs[c]) if lane and n > 0]
        one_by_one = self.fault == "queues one by one"
        entering = used[call.entered :][:1] if one_by_one else used
        queues = tuple((*q, c) if n in entering else q for n, q in enumerate(s.queues))
        entered = call.entered + len(entering)
        if entered < len(used):
            made = call._replace(stage="entering", entered=entered)
            yield "Enqueue", self._with(s, c, made, queues=queues)
            return
        made = call._replace(stage="entered", entered=entered, ticket=s.next_ticket)
        yield "Enqueue", self._with(s, c, made, queues=queues, next_ticket=s.next_ticket + 1)

    def _step(self, s: State, lane: int, c: int) -> Iterator[tuple[str, State]]:
        call, program = s.calls[c], self.programs[c]
        instructions = program[lane] if lane < len(program) else ()
        at = call.at[lane] if lane < len(program) else 0
        if any(helper == lane for helper, _ in call.helped):
            return
        if lane == call.failing and not call.aborted and self.fault != "no abort":
            yield "Abort", self._with(s, c, call._replace(aborted=True))
            return
        asleep = lane in call.asleep  # it sees nothing but its event
        if at >= len(instructions) or (call.failed and not asleep):
            yield "Leave", self._leave(s, lane, c, call)
            return
        kind, number = instructions[at]
        on = call._replace(at=(*call.at[:lane], at + 1, *call.at[lane + 1 :]))
        if kind == "record":
            yield "Record", self._with(s, c, on._replace(signalled=call.signalled | {number}))
        elif kind == "wait":
            awake = call.asleep - {lane}
            if number in call.signalled or self.fault == "no wait":
                yield "Wait", self._with(s, c, on._replace(asleep=awake))
            elif call.aborted:
                yield "Wait", self._leave(s, lane, c, call._replace(asleep=awake))
            elif not asleep:
                yield "Wait", self._with(s, c, call._replace(asleep=call.asleep | {lane}))
                yield from self._help(s, lane, c, call)
        else:
            yield "Launch", self._with(s, c, on._replace(ran=call.ran | {number}))
            if number in self.may_fail and not call.failed:
                yield "Launch", self._with(s, c, on._replace(failed=True, failing=lane))

    def _help(self, s: State, lane: int, c: int, call: Call) -> Iterator[tuple[str, State]]:
        """A lane that is about to sleep runs one that has not begun, and then looks again."""
        for other, instructions in enumerate(self.programs[c]):
            if other == 0 or s.current[other] >= 0 or s.queues[other][:1] != (c,):
                continue
            waits = {i.number for i in instructions if i.kind == "wait"}
            if waits <= call.signalled or self.fault == "helps any":
                queues = (*s.queues[:other], s.queues[other][1:], *s.queues[other + 1 :])
                current = (*s.current[:other], c, *s.current[other + 1 :])
                made = call._replace(helped=call.helped | {(lane, other)})
                yield "Help", self._with(s, c, made, queues=queues, current=current)

    def _leave(self, s: State, lane: int, c: int, call: Call) -> State:
        call = call._replace(helped=frozenset(pair for pair in call.helped if pair[1] != lane))
        done = (*call.done[:lane], True, *call.done[lane + 1 :])
        current = (*s.current[:lane], -1, *s.current[lane + 1 :])
        if lane > 0:
            return self._with(s, c, call._replace(done=done), current=current)
        made = call._replace(done=done, stage="ran")
        return self._with(s, c, made, current=current, serving=s.serving + 1)

    def check(self, s: State) -> None:
        """Raises Wrong where something does not hold that must."""
        for c, call in enumerate(s.calls):
            if call.stage == "returned" and (not all(call.done) or c in s.current):
                raise Wrong(f"call {c} returned while a lane has it")
            if s.joined and call.stage not in ("new", "refused", "returned"):
                raise Wrong(f"the lanes ended, and call {c} is {call.stage}")
            self._check_order(c, call)

    def _check_order(self, c: int, call: Call) -> None:
        """No step ran before those that stand before it on its lane or behind its waits."""
        before: dict[int, set[int]] = {}
        for lane in self.programs[c]:
            seen: set[int] = set()
            for kind, number in lane:
                if kind == "launch":
                    before[number] = set(seen)
                    seen.add(number)
                elif kind == "wait":
                    seen |= self._behind(c, number)
        for number in call.ran:
            if missing := before[number] - call.ran:
                raise Wrong(f"step {number} of call {c} ran before {sorted(missing)}")

    def _behind(self, c: int, event: int) -> set[int]:
        for lane in self.programs[c]:
            if Instr("record", event) in lane:
                end = lane.index(Instr("record", event))
                return {i.number for i in lane[:end] if i.kind == "launch"}
        return set()

    def ended(self, s: State) -> None:
        """Raises Wrong if nothing can happen, and somebody still waits."""
        for c, call in enumerate(s.calls):
            if call.stage not in ("returned", "refused"):
                raise Wrong(f"deadlock: call {c} is {call.stage}, and nothing can happen")
            everything = {i.number for lane in self.programs[c] for i in lane if i.kind == "launch"}
            if call.stage == "returned" and not call.failed and call.ran != everything:
                raise Wrong(f"call {c} returned without {sorted(everything - call.ran)}")
        if s.closed and not s.joined:
            raise Wrong("deadlock: the engine is closed, and its lanes never end")


@dataclass(frozen=True)
class Explored:
    """What was found: states, transitions between them, and whole interleavings."""

    states: int = 0
    transitions: int = 0
    interleavings: int = 0


def explore(model: Model, seen: Callable[[str], None] = lambda _: None) -> Explored:
    """Goes to every state that any interleaving reaches.

    Args:
        model: What runs.
        seen: Told the name of each action.

    Raises:
        Wrong: with the actions that lead there.
    """
    ways: dict[State, int] = {}
    found = Explored()
    # Depth first, without recursion: (state, what may follow, ways from here).
    start = model.start()
    model.check(start)
    stack = [(start, list(model.actions(start)), [0])]
    path: list[str] = []
    try:
        while stack:
            state, left, count = stack[-1]
            if not left and stack[-1][2][0] == 0 and not list(model.actions(state)):
                model.ended(state)
                count[0] = 1
            if not left:
                ways[state] = count[0]
                found = replace(found, states=found.states + 1)
                stack.pop()
                if stack:
                    stack[-1][2][0] += count[0]
                    path.pop()
                continue
            name, following = left.pop()
            found = replace(found, transitions=found.transitions + 1)
            seen(name)
            if following in ways:
                count[0] += ways[following]
                continue
            path.append(name)
            model.check(following)
            stack.append((following, list(model.actions(following)), [0]))
    except Wrong as error:
        raise Wrong(f"{error}; after {', '.join(path)}") from None
    return replace(found, interleavings=ways[start])
