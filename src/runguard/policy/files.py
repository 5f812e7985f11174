"""Find and read ``runguard.toml``, or ``[tool.runguard]`` in a ``pyproject.toml``.

``Policy.build`` and the commands ask here. The values are validated in ``policy/settings``.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any, Final
from urllib.parse import quote

from runguard.core.errors import PolicyError

FILE_NAME: Final = "runguard.toml"


def find_policy_file(start: Path | None = None) -> Path | None:
    """Return the policy file that applies; None when there is none.

    It is the one named by ``RUNGUARD_POLICY``, or else the first ``runguard.toml``, or ``pyproject.toml`` with
    ``[tool.runguard]``, found upward from ``start`` (None: the working directory). Raise PolicyError when a folder or
    file cannot be read.
    """
    named = os.environ.get("RUNGUARD_POLICY")
    if named:
        return Path(named)
    try:
        here = (start or Path.cwd()).resolve()
    except OSError as error:
        raise PolicyError(
            f"the working directory cannot be read: {error}; start from another one, or name the policy file "
            "in RUNGUARD_POLICY"
        ) from None
    for folder in (here, *here.parents):
        if _is_there(folder / FILE_NAME):
            return folder / FILE_NAME
        project = folder / "pyproject.toml"
        if project.is_file() and _mentions_us(project) and load_policy_file(project):
            return project
    return None


def _is_there(path: Path) -> bool:
    """Return whether a path exists, also as a folder or as a link to nothing.

    Reading such a file reports the mistake; skipping it would drop every limit.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise PolicyError(
            f"{path}: cannot be looked for: {error.strerror}; start from another folder, or name the policy "
            "file in RUNGUARD_POLICY"
        ) from None
    return S_ISREG(mode) or S_ISDIR(mode) or S_ISLNK(mode)  # reading a pipe could block


def _mentions_us(project: Path) -> bool:
    try:
        return b"runguard" in project.read_bytes()
    except OSError as error:
        raise PolicyError(f"{project}: cannot be read: {error}") from None


def values_from_file() -> tuple[dict[str, Any], str]:
    path = find_policy_file()
    if path is None:
        return {}, ""
    return load_policy_file(path), str(path)


_RELATIVE_FILE: Final = re.compile(r"sqlite:///(?!/|:memory:)([^?]+)(.*)$")


def load_policy_file(path: Path) -> dict[str, Any]:
    """Return the values of a policy file as they are written. Raise PolicyError when it cannot be read."""
    import tomllib  # most programs have no policy file

    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors of Windows write a byte order mark
    except FileNotFoundError:
        named = " (named by RUNGUARD_POLICY)" if Path(os.environ.get("RUNGUARD_POLICY") or os.devnull) == path else ""
        raise PolicyError(
            f"{path}: no such policy file{': it is a link to nothing' if path.is_symlink() else ''}{named}"
        ) from None
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: cannot be read: {error}; save it as UTF-8") from None
    except OSError as error:
        if isinstance(error, IsADirectoryError):
            raise PolicyError(f"{path}: is a folder, not a policy file; remove it, or name the file") from None
        raise PolicyError(f"{path}: cannot be read: {error.strerror}; check its permissions") from None
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{path}: not valid TOML: {error}") from None
    if path.name == "pyproject.toml":
        tool = data.get("tool", {})
        data = tool.get("runguard", {}) if isinstance(tool, dict) else {}
        prefix = "tool.runguard."
    else:
        prefix = ""
    if not isinstance(data, dict):
        raise PolicyError(f"{path}: tool.runguard must be a table, not a {type(data).__name__}")
    if fault := _misplaced(data, path.name, prefix):
        raise PolicyError(f"{path}: {fault}")
    store = data.get("store")
    if isinstance(store, str) and (relative := _RELATIVE_FILE.match(store)):
        # The file is found from any folder below: one policy must not become a store in each of them.
        data = {**data, "store": f"sqlite:///{quote(str(path.parent.absolute()))}/{relative[1]}{relative[2]}"}
    return data


def _misplaced(data: Mapping[str, Any], file: str, prefix: str) -> str:
    """Return what is wrong with the headings of the tables; nothing where all is fine."""
    for heading, outer in (("runguard", data), ("tool.runguard", data.get("tool"))):
        if isinstance(outer, dict) and isinstance(outer.get("runguard"), dict):
            where = f"in [{prefix.rstrip('.')}]" if prefix else "at the top level"
            return f"[{prefix}{heading}]: settings stand {where} of {file}; move them there and remove this heading"
    for name in ("budgets", "budget"):
        value = data.get(name)
        if isinstance(value, dict) or (name == "budget" and isinstance(value, list)):
            return (
                f"[{prefix}{name}]: write [[{prefix}budgets]], with two brackets, because there may be several budgets"
            )
    return ""
