"""The text of an operator's parameters: short ones as they are, whatever else it depends on as a hash."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

_MOST = 60
_ADDRESS = re.compile(" at 0x[0-9a-f]+")


def in_words(shown: Iterable[tuple[str, object]], further: Iterable[object]) -> str:
    """Equal for operators of one kind that do the same, in every process; different for others.

    Args:
        shown: Names and values of parameters. What is long, or tells an address, shows in the hash alone.
        further: Numbers in the place of inputs, loops' bodies: what says what it is in its ``str``.
    """
    words, rest = [], [str(part) for part in further]
    for name, value in shown:
        text = f"{name}={value}"
        if len(text) < _MOST + len(name) and " at 0x" not in text:
            words.append(text)
        else:
            rest.append(_ADDRESS.sub("", text))
    if rest:
        words.append("#" + hashlib.sha256("\n".join(rest).encode()).hexdigest()[:8])
    return " ".join(words)
