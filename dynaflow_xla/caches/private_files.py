"""Files that later processes of the same user read: in folders of the owner alone, their contents checked.

Whoever may write such a file decides what this process runs: a decision, or compiled code. So nothing is
read from a folder, or of a file, that another user owns or may write to. Contents bear a version and a hash;
nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from dynaflow_xla.watching import telling

_MAX_BYTES = 64 << 20
"""No decision and no plan is as large."""

_VERSION, _HASH = "version", "sha256"
_refused: set[str] = set()


class Untrusted(PermissionError):
    """A file or folder that somebody else may have written."""


class NoFolder(OSError):
    """There is no folder for what is kept: the user has no home, and none is named."""


class Broken(ValueError):
    """A file does not hold what was written to it, or was written by another version."""


def cache_folder() -> Path:
    """Folder of what is kept: ``DYNAFLOW_XLA_CACHE_DIR``, else ``dynaflow_xla`` in the user's cache folder.

    That is ``XDG_CACHE_HOME`` where it is set, else ``~/.cache``.

    Raises:
        NoFolder: there is none, as in containers that run as a user without an entry, or it is that of a
            user who does not exist.
    """
    root = os.environ.get("DYNAFLOW_XLA_CACHE_DIR")
    if root:
        folder = os.path.expanduser(root)
        if folder.startswith("~"):
            raise NoFolder(
                f"DYNAFLOW_XLA_CACHE_DIR is {root!r}, and there is no such user: name a folder in it"
            )
        return Path(folder)
    caches = os.environ.get("XDG_CACHE_HOME", "")
    # The standard of these variables has relative paths ignored.
    if os.path.isabs(caches):
        return Path(caches) / "dynaflow_xla"
    try:
        return Path.home() / ".cache" / "dynaflow_xla"
    except RuntimeError as error:
        raise NoFolder(
            f"there is no home folder (HOME is not set, and user {os.getuid()} has no entry): "
            "name a folder in DYNAFLOW_XLA_CACHE_DIR"
        ) from error


def _check(path: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise Untrusted(f"{path} belongs to another user ({found.st_uid})")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Untrusted(f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):o})")


def check_folder(folder: Path) -> None:
    """Raises Untrusted for a folder that is there and not the user's alone to write."""
    try:
        _check(str(folder), os.stat(folder))
    except FileNotFoundError:
        return
    above = os.stat(folder.parent)
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise Untrusted(
            f"{folder.parent} may be written by all, who could put another folder there"
        )


def make_folder(folder: Path) -> None:
    """Makes a folder for its owner alone; one that is there is checked.

    Raises:
        Untrusted: it is not the user's alone to write.
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)


def refused(folder: Path, error: Untrusted) -> None:
    """Says once a process and folder that it is not used, and why."""
    if str(folder) not in _refused:
        _refused.add(str(folder))
        telling.count("refused_caches")
        telling.told("cache", str(error), reason=str(error), folder=str(folder))
        telling.fallback(
            f"the cache {folder} is not used: {error}. What is in it could have been put there by somebody "
            "else. Make it yours alone (chown, chmod go-w), or name another in DYNAFLOW_XLA_CACHE_DIR",
            may_wait=True,
        )


def not_kept(error: NoFolder) -> None:
    """Says once a process that nothing is kept, and why."""
    if str(error) not in _refused:
        _refused.add(str(error))
        telling.fallback(
            f"decisions cannot be kept ({error}); they are made again in each process",
            may_wait=True,
        )


def read(path: Path, most: int = _MAX_BYTES) -> bytes:
    """The bytes of a file in a folder that is the user's own.

    Raises:
        Untrusted: somebody else may have written it.
        Broken: it is no file, or too large to be one of ours.
        OSError: it cannot be read.
    """
    check_folder(path.parent)
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        _check(str(path), found)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise Broken(f"{found.st_size} bytes are more than it can have")
        return file.read(most)


def write(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all, for its owner alone.

    Raises:
        OSError: it cannot be written, or its folder is not the user's alone to write.
    """
    make_folder(path.parent)
    replace(path, data)


def replace(path: Path, data: bytes) -> None:
    """The same in whatever folder the user names, which has to be there.

    Raises:
        OSError: it cannot be written.
    """
    try:
        made = tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False)  # noqa: SIM115
    except OSError as error:
        error.filename = os.fspath(path)  # which the user knows
        raise
    with made as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def sealed(content: dict[str, Any], version: int) -> bytes:
    """JSON of a dictionary, with a version and a hash over all else."""
    whole = {_VERSION: version, **content}
    return json.dumps(whole | {_HASH: _hash(whole)}).encode()


def opened(data: bytes, version: int) -> dict[str, Any]:
    """The dictionary of ``sealed``.

    Raises:
        Broken: it is not as it was written, or of another version.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Broken(f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise Broken("it is not an object")
    told = found.pop(_HASH, None)
    try:
        wanted = _hash(found)
    except (ValueError, RecursionError) as error:
        raise Broken(f"it cannot be hashed: {error}") from error
    if found.pop(_VERSION, None) != version:
        raise Broken(f"it must be of version {version}")
    if told != wanted:
        raise Broken("its hash is not that of its content")
    return found


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
