"""``python -m dynaflow_xla`` and the command ``dynaflow-xla``."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; without the packages that it is made with, says which to install."""
    try:
        from dynaflow_xla.cli.main import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("click", "rich"):
            raise
        sys.exit(
            f"dynaflow-xla: error: the command line needs the package {missing!r}, which is not "
            "installed. Install it with: pip install 'click>=8.1,<9' 'rich>=13.9,<16'"
        )
    sys.exit(run())


if __name__ == "__main__":
    main()
