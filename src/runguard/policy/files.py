"""Finds and reads ``runguard.toml``, or ``[tool.runguard]`` in a ``pyproject.toml``."""

import os
import re
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any, Final
from urllib.parse import quote

from runguard.core.errors import PolicyError

FILE_NAME: Final = "runguard.toml"


def find_policy_file(start: Path | None = None) -> Path | None:
    """The file that applies: ``RUNGUARD_POLICY``, or the nearest one upward from the working directory."""
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
    """Also a folder or a link to nothing: reading it reports the mistake, and skipping it would drop every
    limit.
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
    """The raw values of a policy file; PolicyError when it cannot be read."""
    import tomllib  # most programs have no policy file

    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        named = " (named by RUNGUARD_POLICY)" if Path(os.environ.get("RUNGUARD_POLICY") or os.devnull) == path else ""
        raise PolicyError(
            f"{path}: no such policy file{': it is a link to nothing' if path.is_symlink() else ''}{named}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{path}: not valid TOML: {error}") from None
    if path.name == "pyproject.toml":
        tool = data.get("tool", {})
        data = tool.get("runguard", {}) if isinstance(tool, dict) else {}
    if not isinstance(data, dict):
        raise PolicyError(f"{path}: tool.runguard must be a table, not a {type(data).__name__}")
    store = data.get("store")
    if isinstance(store, str) and (relative := _RELATIVE_FILE.match(store)):
        # The file is found from any folder below: one policy must not become a store in each of them.
        data = {**data, "store": f"sqlite:///{quote(str(path.parent.absolute()))}/{relative[1]}{relative[2]}"}
    return data
