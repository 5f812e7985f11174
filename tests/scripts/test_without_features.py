"""Optional features of the guard can be taken out; the script that tries it needs minutes, its parts do not."""

import ast
from pathlib import Path

import pytest

import runguard
from runguard.policy.settings import Policy
from scripts import without_features
from scripts.without_features import GUARD, ROOT, features_of, take_out
from tests.kit.examples import each_row

ENGINE = Path(runguard.__file__).parent / "engine"
FEATURES = features_of((ROOT / "src" / GUARD).read_text(encoding="utf-8"))


def test_the_list_is_read_from_the_guard() -> None:
    assert FEATURES["Outlook"] == "runguard.engine.forecast"
    assert len(set(FEATURES.values())) == len(FEATURES) >= 6
    assert set(without_features.SHOW) <= set(FEATURES)


def test_nothing_but_the_list_imports_a_feature() -> None:
    importers: dict[str, list[Path]] = {module: [] for module in FEATURES.values()}
    for path in ENGINE.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in importers:
                importers[node.module].append(path.relative_to(ENGINE.parent.parent))
    assert importers == {module: [GUARD] for module in FEATURES.values()}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_and_its_line_are_taken_out(feature: str, tmp_path: Path) -> None:
    module = tmp_path / (FEATURES[feature].replace(".", "/") + ".py")
    module.parent.mkdir(parents=True)
    module.write_text("")
    guard = tmp_path / GUARD
    guard.write_text((ROOT / "src" / GUARD).read_text(encoding="utf-8"), encoding="utf-8")
    take_out(tmp_path, feature, FEATURES[feature])
    left = guard.read_text(encoding="utf-8")
    assert not module.exists()
    assert feature not in left
    assert set(features_of(left)) == set(FEATURES) - {feature}


def test_what_is_not_one_line_cannot_be_taken_out(tmp_path: Path) -> None:
    (tmp_path / GUARD).parent.mkdir(parents=True)
    (tmp_path / GUARD).write_text("FEATURES: tuple = (Gone,)\n")
    (tmp_path / "runguard/engine/gone.py").write_text("")
    with pytest.raises(LookupError, match="Gone is not one line"):
        take_out(tmp_path, "Gone", "runguard.engine.gone")


@each_row("feature", FEATURES)
def test_a_feature_names_settings_that_exist(feature: str) -> None:
    """``Setting: ...`` of the docstring, but for a feature that has none."""
    text = (ROOT / "src" / (FEATURES[feature].replace(".", "/") + ".py")).read_text(encoding="utf-8")
    about = ast.get_docstring(ast.parse(text)) or ""
    named = [line for line in about.splitlines() if line.startswith(("Setting:", "Settings:", "No setting."))]
    assert len(named) == 1, f"{FEATURES[feature]} names no setting"
    words = [word.strip("`.,") for word in named[0].split(".")[0].split() if word.startswith("``")]
    assert [word for word in words if word not in {*Policy.model_fields, "model"}] == []
