"""Finds a Chromium for the browser tests, or tries to install one: from the system's packages as root, else
Playwright's own.

Ends well also when there is none: those tests are skipped then, and say so.
"""

import os
import shutil
import subprocess
import sys

from tests.kit.dashboards import BROWSERS

WAYS = [
    *(
        [["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "chromium"]]
        if hasattr(os, "geteuid") and os.geteuid() == 0
        else []
    ),
    [sys.executable, "-m", "playwright", "install", "chromium"],
]


def find() -> str | None:
    if found := next(filter(None, map(shutil.which, BROWSERS)), None):
        return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        own = driver.chromium.executable_path
    return own if os.path.exists(own) else None  # noqa: PTH110


def main() -> None:
    found = find()
    for way in WAYS if found is None else ():
        if shutil.which(way[0]) is None:
            continue
        print("no browser yet:", " ".join(way[:4]))
        subprocess.run(
            way,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=600,
            check=False,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
        found = find()
        if found is not None:
            break
    print(
        f"browser: {found}"
        if found
        else "no browser could be found or installed: the dashboard's tests in a browser are skipped"
    )


if __name__ == "__main__":
    main()
