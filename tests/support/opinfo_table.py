"""A page of what came of PyTorch's samples of operators, split along axis 0, from files of the sweep.

``python -P tests/support/opinfo_table.py [--note TEXT] FILE... > docs/opinfo.md``
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import torch

HEAD = """# PyTorch's operators in nano-batches

After this page you know which of PyTorch's operators can be split along their first axis, and why the
others are not.

Made by `tests/support/opinfo_sweep.py --ways nano,halves --samples 2 --json FILE` and
`tests/support/opinfo_table.py`; do not edit. PyTorch {version} on a CPU, float32 where an operator has it: of
each operator's own samples (OpInfo) the first and the last, split in halves (*halves*) and into all rows but
one and one (*nano*). A sample counts if the original runs and its first tensor has two rows or more; rows are
axis 0 of all tensors with as many rows as the first, or of the first alone, whichever works. *Equal*: the
values of the original, also where what mixes rows is joined. *Original*: no graph can be captured, so that
the original runs, with a warning. *Refused*: an error of dynaflow_xla that says why. *Wrong*, *raw*, *hang*,
*crash*: other values, another error, no end, no process.
"""

CLASSES = (
    (
        r"fixes it to",
        "the size of the batch meets another size that is no batch (a product, a broadcast)",
    ),
    (r"ties it to", "the size of the batch follows from other sizes"),
    (r"draws random numbers", "draws random numbers whose distribution depends on data"),
    (r"as many results as", "how many rows the result has depends on data"),
    (r"no rule says", "no rule, and the values differ on the first call"),
    (r"cannot run on a nano-batch", "the operator itself refuses so few rows"),
    (r"makes \[.*\] of a nano-batch", "the shape of the result is another one for a nano-batch"),
    (r"sorts the batch", "sorts the batch, and its result is asked for"),
)


def reason_of(text: str) -> str:
    """The class that a refusal belongs to."""
    for pattern, name in CLASSES:
        if re.search(pattern, text):
            return name
    body = re.sub(r"\(at .*?\)|at \S+:\d+:?", "", text.partition("): ")[2] or text)
    return " ".join(re.sub(r"\d+", "N", body).split())[:100]


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="of lines of JSON")
    parser.add_argument("--note", default="", help="what else to say of how it was made")
    options = parser.parse_args()
    tried = [json.loads(line) for file in options.files for line in file.read_text().splitlines()]
    ways: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    breaks: Counter[str] = Counter()
    for one in tried:
        ways[one["way"]][one["outcome"]] += 1
        if one["outcome"] == "refused":
            reasons[reason_of(one["reason"])][one["operator"]] += 1
        if one["outcome"] == "original":
            breaks[one["operator"]] += 1
    names = ("equal", "original", "refused", "wrong", "raw", "hang", "crash")
    print(HEAD.format(version=torch.__version__.partition("+")[0]))
    if options.note:
        print(f"{options.note}\n")
    print(f"| way | samples | {' | '.join(names)} |")
    print(f"|---|---|{'---|' * len(names)}")
    total: Counter[str] = Counter()
    for way, counts in sorted(ways.items()):
        total += counts
        print(f"| {way} | {counts.total()} | {' | '.join(str(counts[n]) for n in names)} |")
    print(f"| all | {total.total()} | {' | '.join(str(total[n]) for n in names)} |")
    ran = total["equal"] + total["original"]
    print(
        f"\n{len({t['operator'] for t in tried})} operators; {ran / total.total():.0%} of the samples run."
    )
    print("\n## Why refused\n\n| samples | reason | operators |\n|---|---|---|")
    for reason, of in sorted(reasons.items(), key=lambda item: -item[1].total()):
        print(f"| {of.total()} | {reason} | {' '.join(f'`{n}`' for n in sorted(of))} |")
    print("\n## The original runs\n")
    print(" ".join(f"`{n}`" for n in sorted(breaks)))


if __name__ == "__main__":
    main()
