"""Record real runs of two commands as pictures for the documentation: ``python scripts/record_terminal.py [NAME]``.

Each command runs on a terminal of its own. What it prints becomes a picture in docs/images, with its colours.
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
IMAGES = Path(__file__).parents[1] / "docs" / "images"
COMMANDS = {"demo": ("demo",), "gateway": ("run", "--demo")}  # by the name of the picture


def record(*arguments: str) -> str:
    """Run ``runguard`` on a terminal; return what it prints, with colours."""
    command = [sys.executable, "-m", "runguard", *arguments]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as running:
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


def picture(name: str, text: str) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(last_frame(text).strip()))
    svg = console.export_svg(title=f"runguard {' '.join(COMMANDS[name])}", unique_id=f"runguard-{name}")
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # the reader's own fonts: nothing is loaded


if __name__ == "__main__":
    for name in sys.argv[1:] or COMMANDS:
        shown = record(*COMMANDS[name])
        (IMAGES / f"{name}.svg").write_text(picture(name, shown), encoding="utf-8")
        print(f"{name}.svg written, {len(last_frame(shown).splitlines())} lines")
