"""Runs snippets one after another, each in a process of its own that has ADK imported already: importing it is most of
what a snippet costs. The server then imports what a snippet has imported, so that the next ones start with it.

``python snippets.py`` reads one JSON line per snippet, {"code", "folder", "seconds"}, and answers each with {"code",
"out", "err"}.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path


class Snippets:
    """The other end: one such server."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str, folder: Path, seconds: float = 60) -> tuple[int, str, str]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({"code": code, "folder": str(folder), "seconds": seconds}) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        return answer["code"], answer["out"], answer["err"]

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(10)


def _serve() -> None:
    warnings.simplefilter("ignore")
    import google.adk.runners
    import google.adk.workflow  # noqa: F401

    import runguard.adk
    import runguard.testing  # noqa: F401

    _leave_alone_what_is_imported()
    for line in sys.stdin:
        asked = json.loads(line)
        with contextlib.ExitStack() as files:
            streams = [files.enter_context(tempfile.TemporaryFile("w+b")) for _ in range(3)]
            child = os.fork()
            if child == 0:
                _run(asked["code"], asked["folder"], *(stream.fileno() for stream in streams))
            code = _wait(child, asked["seconds"])
            texts = [(stream.seek(0), stream.read().decode(errors="replace"))[1] for stream in streams]
        sys.stdout.write(json.dumps({"code": code, "out": texts[0], "err": texts[1]}) + "\n")
        sys.stdout.flush()
        if names := texts[2].split():
            for name in names:
                with contextlib.suppress(Exception):  # it was the snippet's own
                    importlib.import_module(name)
            _leave_alone_what_is_imported()


def _leave_alone_what_is_imported() -> None:
    """The garbage collector of a snippet's process does not walk it, and so does not copy its memory."""
    gc.collect()
    gc.freeze()


def _run(code: str, folder: str, out: int, err: int, imported: int) -> None:
    os.setpgid(0, 0)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    status, before = 1, set(sys.modules)
    try:
        exec(compile(code, "<snippet>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        names = [name for name in sys.modules if name not in before and not name.startswith("__")]
        os.write(imported, "\n".join(names).encode())
        os._exit(status)


def _wait(child: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


if __name__ == "__main__":
    _serve()
