"""Who may import whom. Packages have ranks, and imports go down only."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import runguard

SOURCE = Path(runguard.__file__).parent
REPOSITORY = SOURCE.parents[1]
DOCS = REPOSITORY / "docs"
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}

# From the bottom to the top. Packages of one rank do not import each other.
RANKS = (
    {"_lazy", "_version"},
    {"core"},
    {"background", "validation"},
    {"console", "errors", "pricing", "ledger"},
    {"providers", "reporting"},
    {"alerts", "policy"},
    {"engine"},
    {"termination"},
    {"calls"},
    {"gateway"},
    {"adk", "agent_framework", "agent_hooks", "langchain", "litellm", "openai_agents", "pydantic_ai", "strands"},
    {"replay"},
    {"calibrate", "gate", "view", "testing"},
    {"cli"},
    {"__main__"},
    {""},  # the root package: names the public surface for type checkers
)
RANK = {package: number for number, packages in enumerate(RANKS) for package in packages}
# Top-level packages of frameworks, and who may import them.
FRAMEWORKS = {
    "google": {"adk", "testing", "cli"},
    "langchain": {"langchain"},
    "langchain_core": {"langchain"},
    "langgraph": {"langchain"},
    "agents": {"openai_agents"},
    "openai": {"openai_agents"},
    "pydantic_ai": {"pydantic_ai"},
    "strands": {"strands"},
    "agent_framework": {"agent_framework"},
    "agent_hooks": {"agent_hooks"},
    "litellm": {"litellm"},
}
FORBIDDEN_IN_CORE = {
    "time",
    "asyncio",
    "os",
    "io",
    "pathlib",
    "socket",
    "subprocess",
    "logging",
    "random",
    "secrets",
    "queue",
}


def package_of(module: str) -> str:
    return [*module.split("."), ""][1]


@functools.cache
def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@functools.cache
def imports_of(module: str) -> set[str]:
    """Every module that ``module`` imports anywhere in its text, also under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} uses a relative import"
            base = node.module or ""
            found.update(f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names)
    return found


def outside(module: str) -> set[str]:
    """Top-level packages that are neither the standard library nor this package."""
    tops = {name.split(".")[0] for name in imports_of(module)}
    return {top for top in tops if top not in sys.stdlib_module_names and top != "runguard"}


def inside(module: str) -> set[str]:
    return {name for name in imports_of(module) if name.split(".")[0] == "runguard"}


def test_every_package_has_a_rank() -> None:
    assert {package_of(module) for module in MODULES} == set(RANK)


def test_the_root_holds_few_modules() -> None:
    assert len([module for module, path in MODULES.items() if path.parent == SOURCE]) <= 14


def test_imports_go_down() -> None:
    assert [
        f"{module} imports {name}"
        for module in MODULES
        for name in inside(module)
        if package_of(name) != package_of(module) and RANK[package_of(name)] >= RANK[package_of(module)]
    ] == []


def test_packages_load_nothing_eagerly() -> None:
    eager = []
    for module in (name for name, path in MODULES.items() if path.name == "__init__.py"):
        for node in (node for node in parsed(module).body if isinstance(node, ast.Import | ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            eager += [f"{module} imports {name}" for name in names if name.split(".")[0] not in sys.stdlib_module_names]
    assert [line for line in eager if not line.endswith(" imports runguard._lazy")] == []


def test_only_adapters_and_programs_know_a_framework() -> None:
    assert [
        f"{module} imports {framework}"
        for module in MODULES
        for framework in outside(module) & FRAMEWORKS.keys()
        if package_of(module) not in FRAMEWORKS[framework]
    ] == []


def test_the_core_is_pure() -> None:
    clocks = ("now", "utcnow", "today", "fromtimestamp", "monotonic", "perf_counter")
    for module in (name for name in MODULES if package_of(name) == "core"):
        assert outside(module) == set(), module
        assert not {name.split(".")[0] for name in imports_of(module)} & FORBIDDEN_IN_CORE, module
        for node in ast.walk(parsed(module)):
            assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), module
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("open", "print", "input"), f"{module} calls {called}"
                assert called.rpartition(".")[2] not in clocks, f"{module} calls {called}"


def test_the_pages_show_the_code_as_it_is() -> None:
    """The layers in architecture.md, and the list of files."""
    script = DOCS / "package_diagram.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0


def missing_files(page: Path) -> list[str]:
    """Paths in backticks that are neither in the package nor in the repository."""
    named = re.findall(r"`((?:\w+/)+(?:[\w-]+\.\w+)?)`", page.read_text(encoding="utf-8"))
    assert len(named) > 15
    return [name for name in named if not ((SOURCE / name).exists() or (REPOSITORY / name).exists())]


def test_the_architecture_page_is_short_and_names_files_that_exist() -> None:
    page = DOCS / "contributing" / "architecture.md"
    assert missing_files(page) == []
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 120


def test_the_guide_for_contributors_names_files_that_exist() -> None:
    assert missing_files(REPOSITORY / "CONTRIBUTING.md") == []
