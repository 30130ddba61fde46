"""
What is at a path, before it is opened: a link would be followed, a pipe waited for, a device read without end, and
what nobody else may read only looks damaged.
"""

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any


_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe"}
_KINDS |= {stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
# What may be waited for, or read without end.
ENDLESS = ("pipe", "socket", "device")


def kind_of(path: str | os.PathLike, follow: bool = False) -> str | None:
    """
    What is at a path: a `"file"`, `"folder"`, `"pipe"`, `"socket"`, `"device"`, or `None` for nothing. Unless `follow`
    is set, a `"link"` is not followed.
    """
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    return _KINDS[stat.S_IFMT(mode)]


def check_readable(path: str | os.PathLike) -> None:
    """Refuse what is there and no file, such as a pipe, which would be waited for, and a file that may not be read."""
    kind = kind_of(path, follow=True)
    if kind in ENDLESS:
        raise ValueError(f"{path} is a {kind}, expected a file")
    if kind == "file" and not os.access(path, os.R_OK):
        mode = stat.filemode(os.stat(path).st_mode)
        raise PermissionError(
            f"{path} may not be read, its permissions are {mode}: its owner can allow it (chmod a+r)"
        )


def read_plain(path: str | os.PathLike) -> bytes:
    """The content of a file, see [`check_readable`]."""
    check_readable(path)
    return Path(path).read_bytes()


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file, or it cannot be read or holds something else."""
    try:
        found = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def check_own(path: Path, kind: str) -> None:
    """Refuse what is in the place of a file or folder of this package and is another kind: it would be followed."""
    found = kind_of(path)
    if found not in (None, kind):
        raise FileExistsError(f"{path} is a {found}, where only a {kind} of sparsebert may be: move it elsewhere")


def drop_links(paths: Iterable[Path]) -> None:
    """Remove links at paths that a library is to write to, which would follow them, and refuse what is no file."""
    for path in paths:
        if (kind := kind_of(path)) == "link":
            path.unlink()
        elif kind not in (None, "file"):
            raise FileExistsError(f"{path} is a {kind}, which cannot be replaced: move it elsewhere")
