"""The original as ``torch.compile`` runs it: what a schedule with a compiler has to beat."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from dynaflow_xla.frontends.torch._compat import captures
from dynaflow_xla.frontends.torch.capture import marks
from dynaflow_xla.frontends.torch.dynamo.capturing import MAX_CAPTURES, root_function


class _CurrentCall(threading.local):
    to_dynamo = False


_state = _CurrentCall()
_settings = captures.CompilationSettings(
    captures.HOOKS_GUARDED, lambda: _state.to_dynamo and not marks.watched()
)


class CompiledOriginal:
    """Calls the original through ``torch.compile``, with Inductor; no plan of ours.

    It draws the original's random numbers, which ``torch.compile`` does not do by itself.

    Attributes:
        plans: There is no plan.
        splits: Nor nano-batches.

    Args:
        original: A module or function.
        options: For Inductor.
    """

    plans = False
    splits = False

    def __init__(self, original: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._root = root = root_function(original)
        compiled = captures.compiled(
            root, MAX_CAPTURES, options={"fallback_random": True, **options}
        )
        self._compiled = _settings.for_calls(compiled)
        self._shortcut = captures.Shortcut(root)

    def call(self, args: Any, kwargs: Any) -> Any:
        """Runs the original, compiled; its marks have no effect. Raises what the compiler raises."""
        made = self._shortcut.find(args, kwargs)
        with marks.ignore():
            return (self._through_dynamo if made is None else made)(*args, **kwargs)

    def _through_dynamo(self, *args: Any, **kwargs: Any) -> Any:
        before, _state.to_dynamo = _state.to_dynamo, True
        try:
            return self._compiled(*args, **kwargs)
        finally:
            _state.to_dynamo = before

    @property
    def in_parts(self) -> bool:
        """Whether it runs as several graphs: where one fails to compile, another may have run."""
        return captures.in_parts(self._root)
