"""Record a real run of ``runguard demo`` as a picture for the front page: ``python scripts/record_terminal.py``.

The command runs on a terminal of its own. What it prints becomes docs/images/demo.svg, with its colours.
"""

import io
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 60
TARGET = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"


def record(command: list[str]) -> str:
    """Run a command on a terminal; return what it prints, with colours."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as running:
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 65_536):
                parts.append(part)
        except OSError:  # the command has closed its side
            pass
    os.close(ours)
    assert running.returncode == 0, f"{command} ended with {running.returncode}"
    return b"".join(parts).decode("utf-8", "replace").replace("\r\n", "\n")


def last_frame(text: str) -> str:
    """Return what is on the screen at the end: a live table is drawn again and again, over itself."""
    return re.split(r"(?:\x1b\[\d*A|\x1b\[2K|\r)+", text)[-1]


def picture(text: str) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(last_frame(text).strip()))
    svg = console.export_svg(title="runguard demo", unique_id="runguard-demo")
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # the reader's own fonts: nothing is loaded


if __name__ == "__main__":
    shown = record([sys.executable, "-m", "runguard", "demo"])
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(shown, encoding="utf-8")  # what the terminal received
    TARGET.write_text(picture(shown), encoding="utf-8")
    print(f"{TARGET} written, {len(last_frame(shown).splitlines())} lines")
