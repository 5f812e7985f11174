"""How the documentation is built: ``sphinx-build -W --keep-going -n docs OUT``.

The same Markdown reads well on the repository's host.
"""  # noqa: INP001

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import runguard

ROOT = Path(__file__).parents[1]

project = "RunGuard"
copyright = "the RunGuard authors, Apache-2.0"  # noqa: A001 - the name Sphinx asks for
release = runguard.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["adk-docs-catalogue"]

myst_heading_anchors = 3

html_theme = "furo"
html_title = "RunGuard"
html_favicon = html_logo = "../src/runguard/cli/dashboard/static/icon.svg"
html_show_sphinx = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
highlight_language = "none"

# Only public names are linked. Types of other packages would need their sites while building; what is not public has no
# page.
nitpick_ignore_regex = [("py:.*", r"(?!runguard\.[A-Z]).*")]

# Files of the repository that are pages of the site too. Beside this file each is a line that links there.
OUTSIDE = {
    "benchmarks": "benchmarks/README.md",
    "examples": "examples/README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
}
MODULES = (
    "runguard",
    "runguard.adk",
    "runguard.alerts",
    "runguard.calibrate",
    "runguard.gate",
    "runguard.replay",
    "runguard.testing",
    "runguard.view",
)
for module in MODULES:
    for name in dir(importlib.import_module(module)):
        # loads it here: autodoc would do so with TYPE_CHECKING set, which breaks other packages
        getattr(importlib.import_module(module), name)


def show_outside(app: Any, name: str, source: list[str]) -> None:
    """The whole file in place of the line that links to it, and links between such files and ``docs/`` made links
    between pages.
    """
    if name in OUTSIDE:
        source[0] = _moved((ROOT / OUTSIDE[name]).read_text(encoding="utf-8"), (ROOT / OUTSIDE[name]).parent)
    for page, path in {**OUTSIDE, "index": "README.md"}.items():
        source[0] = source[0].replace(f"](../{path}", f"]({page}.md")


def _moved(text: str, folder: Path) -> str:
    def link(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        at = (folder / target).resolve()
        return f"](../{at.relative_to(ROOT)}{anchor})".replace("(../docs/", "(")

    return re.sub(r"\]\((?!https?://|#)([^)#]+)(#[^)]*)?\)", link, text)


def link_public_name(app: Any, env: Any, node: Any, contents: Any) -> Any:
    """A type is linked by the name under which it is documented, not by the file that it is written in."""
    public = _public_names().get(node.get("reftarget", ""))
    if public is None:
        return None
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contents)


@cache
def _public_names() -> dict[str, str]:
    """Where a name is written -> where it is documented: in the first module that offers it."""
    found: dict[str, str] = {}
    for module in MODULES:
        home = importlib.import_module(module)
        for name in home.__all__:
            found.setdefault(f"{getattr(getattr(home, name), '__module__', module)}.{name}", f"{module}.{name}")
    return found


def shorten(
    app: Any, what: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """A pydantic class takes its fields: they stand in a table, and their validators would fill the page."""
    return ("(**settings)", returns) if what == "class" and issubclass(value, BaseModel) else None


def setup(app: Any) -> None:
    app.connect("source-read", show_outside)
    app.connect("missing-reference", link_public_name)
    app.connect("autodoc-process-signature", shorten)
