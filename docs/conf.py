"""How the documentation is built: ``sphinx-build -W --keep-going -n docs OUT``.

The same Markdown reads well on the repository's host.
"""  # noqa: INP001

import importlib
import posixpath
import re
from functools import cache
from typing import Any

from pydantic import BaseModel

import runguard

project = "RunGuard"
copyright = "the RunGuard authors, Apache-2.0"  # noqa: A001 - the name Sphinx asks for
release = runguard.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["contributing"]  # read in the repository, by those who change the code

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


def link_outside(app: Any, name: str, source: list[str]) -> None:
    """Make links to Markdown files that are no pages of this site, as those of the repository, links to the file."""

    def link(found: re.Match[str]) -> str:
        page = posixpath.normpath(posixpath.join(posixpath.dirname(name), found[1]))
        return found[0] if page in app.env.found_docs else f"](path:{found[1]}.md)"

    source[0] = re.sub(r"\]\(([^)#:]+)\.md(?:#[^)]*)?\)", link, source[0])


def link_public_name(app: Any, env: Any, node: Any, contents: Any) -> Any:
    """Link a type by the name under which it is documented, not by the file that it is written in."""
    public = _public_names().get(node.get("reftarget", ""))
    if public is None:
        return None
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contents)


@cache
def _public_names() -> dict[str, str]:
    """Return where each name is documented: in the first module that offers it."""
    found: dict[str, str] = {}
    for module in MODULES:
        home = importlib.import_module(module)
        for name in home.__all__:
            found.setdefault(f"{getattr(getattr(home, name), '__module__', module)}.{name}", f"{module}.{name}")
    return found


def shorten(
    app: Any, what: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Shorten the signature of a pydantic class: its fields stand in a table, their validators would fill the page."""
    return ("(**settings)", returns) if what == "class" and issubclass(value, BaseModel) else None


def setup(app: Any) -> None:
    app.connect("source-read", link_outside)
    app.connect("missing-reference", link_public_name)
    app.connect("autodoc-process-signature", shorten)
