"""The bill of materials lists what the wheel contains from other projects."""

import json

from tests.kit.scripts import ROOT, script

sbom = script("sbom")
VENDORED = ROOT / "src" / "runguard" / "cli" / "dashboard" / "static" / "vendor"


def test_it_is_current() -> None:
    assert sbom.SBOM.read_text(encoding="utf-8") == sbom.text(), "run python scripts/sbom.py"


def test_every_vendored_file_is_listed() -> None:
    listed = {file["name"] for part in sbom.document()["components"] for file in part.get("components", ())}
    assert {path.name for path in VENDORED.iterdir() if path.suffix in (".js", ".css")} == listed


def test_it_is_a_closed_graph() -> None:
    document = json.loads(sbom.text())
    known = {document["metadata"]["component"]["bom-ref"], *(part["bom-ref"] for part in document["components"])}
    named = {ref for entry in document["dependencies"] for ref in (entry["ref"], *entry["dependsOn"])}
    assert named == known
