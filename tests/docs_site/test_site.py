"""The documentation builds without a warning, every page can be reached, every link has a target, and nothing is asked
of another host.
"""

import ast
import importlib
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
if absent := [package for package in ("sphinx", "myst_parser", "furo") if find_spec(package) is None]:
    pytest.skip(
        f"the documentation is built on the newest environment alone; not installed here: {', '.join(absent)}",
        allow_module_level=True,
    )
pytestmark = pytest.mark.timeout(180)

PUBLIC = tuple(
    f"runguard{part}"
    for part in (
        "",
        ".adk",
        ".alerts",
        ".calibrate",
        ".errors",
        ".gate",
        ".policy",
        ".replay",
        ".termination",
        ".testing",
        ".view",
    )
)
# not installed where the documentation is built
ADAPTERS = ("agent_framework", "agent_hooks", "langchain", "litellm", "openai_agents", "pydantic_ai", "strands")
LOADING = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """What a built page offers and asks for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.anchors.add(value)
            elif (tag, name) in LOADING and value:
                self.loads.append(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", str(DOCS), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return out


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_link_has_a_target(site: Path, pages: dict[Path, Page]) -> None:
    @cache  # the sidebar is the same on every page of a folder
    def target_of(folder: Path, path: str) -> Path | None:
        at = (folder / unquote(path)).resolve()
        return at if at.is_file() else None

    dead = []
    for path, page in pages.items():
        for link in set(page.links):
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            at = target_of(path.parent, target.path) if target.path else path
            if at is None or (target.fragment and at in pages and unquote(target.fragment) not in pages[at].anchors):
                dead.append(f"{path.relative_to(site)} -> {link}")
    assert dead == []


def test_every_page_can_be_reached_from_the_first(site: Path, pages: dict[Path, Page]) -> None:
    written = {
        source.relative_to(DOCS).with_suffix(".html")
        for source in DOCS.rglob("*.md")
        if DOCS / "contributing" not in source.parents
    }
    # the sidebar lists the whole tree
    listed = {Path(unquote(urlsplit(link).path)) for link in pages[site / "index.html"].links}
    assert written - listed <= {Path("index.html")}


def test_no_page_asks_another_host(pages: dict[Path, Page]) -> None:
    assert sorted({address for page in pages.values() for address in page.loads if "//" in address}) == []


def exported(adapter: str) -> list[str]:
    """Return the names in the ``__all__`` of an adapter that cannot be imported here."""
    home = ROOT / "src" / "runguard" / adapter
    path = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
    source = ast.parse(path.read_text(encoding="utf-8"))
    for statement in source.body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["__all__"]:
            return list(ast.literal_eval(statement.value))
    raise AssertionError(f"runguard.{adapter} has no __all__")


@pytest.fixture(scope="session")
def documented(site: Path) -> set[str]:
    """Return every Python name that the built documentation explains."""
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as inventory:
        return {
            name
            for kind, names in InventoryFile.load(inventory, "", lambda base, path: path).items()
            if kind.startswith("py:")
            for name in names
        }


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_name_of_an_adapter_is_in_the_reference(adapter: str, documented: set[str]) -> None:
    names = {f"runguard.{adapter}.{name}" for name in exported(adapter)}
    assert names
    assert names - documented == set()


def test_every_public_name_is_in_the_reference(documented: set[str]) -> None:
    for module in PUBLIC:
        home = importlib.import_module(module)
        missing = [
            name
            for name in home.__all__
            if not {f"{module}.{name}", f"runguard.{name}", f"runguard.adk.{name}"} & documented
        ]
        assert missing == [], f"public names of {module} without a place in docs/reference"


def test_the_words_of_every_page_are_printed() -> None:
    done = subprocess.run([sys.executable, str(DOCS / "words.py")], capture_output=True, text=True, check=True)
    *lines, user, reference, contributing, total = done.stdout.replace(",", "").splitlines()
    counted = {page: int(words) for words, page in map(str.split, lines)}
    groups = [int(line.split()[0]) for line in (user, reference, contributing)]
    assert [line.split()[-1] for line in (user, reference, contributing)] == ["user", "reference", "contributing"]
    assert groups[1] == sum(words for page, words in counted.items() if page.startswith("reference/"))
    assert sum(groups) == sum(counted.values())
    assert counted.keys() == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert total.split()[0] == str(sum(counted.values()))
    assert list(counted.values()) == sorted(counted.values(), reverse=True)
    assert min(counted.values()) > 0


def test_the_settings_page_is_up_to_date() -> None:
    made = _module(DOCS / "settings_table.py")
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run: python docs/settings_table.py"


def _module(path: Path) -> Any:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
