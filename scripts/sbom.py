"""Write the software bill of materials that is shipped in the wheel (PEP 770, CycloneDX 1.6).

    python scripts/sbom.py            write sboms/runguard-agents.cdx.json
    python scripts/sbom.py --check    fail if the file is out of date

It lists what the wheel contains from other projects: vendored files with their digests, and the price data. Packages
that pip installs beside it are in the metadata of the wheel.
"""

import json
import re
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SBOM = ROOT / "sboms" / "runguard-agents.cdx.json"
_VENDOR = ROOT / "src" / "runguard" / "cli" / "dashboard" / "static" / "vendor"
_PRICES = ROOT / "src" / "runguard" / "pricing" / "price_table.jsonl"


def version() -> str:
    text = (ROOT / "src" / "runguard" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "(.+)"', text)
    assert found is not None
    return found[1]


def _digest(path: Path) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256(path.read_bytes()).hexdigest()}]


def _uplot() -> dict[str, Any]:
    script = _VENDOR / "uPlot.iife.min.js"
    found = re.search(r"uPlot \(v([\d.]+)\)", script.read_text(encoding="utf-8")[:200])
    assert found is not None, "the vendored uPlot does not name its version"
    number = found[1]
    files = [
        {"type": "file", "bom-ref": f"file:{path.name}", "name": path.name, "hashes": _digest(path)}
        for path in (script, _VENDOR / "uPlot.min.css")
    ]
    return {
        "type": "library",
        "bom-ref": f"pkg:npm/uplot@{number}",
        "name": "uplot",
        "version": number,
        "purl": f"pkg:npm/uplot@{number}",
        "licenses": [{"license": {"id": "MIT"}}],
        "components": files,
    }


def _prices() -> dict[str, Any]:
    with _PRICES.open(encoding="utf-8") as file:
        number = json.loads(file.readline())["genai_prices"]
    return {
        "type": "data",
        "bom-ref": f"pkg:pypi/genai-prices@{number}",
        "name": "genai-prices",
        "version": number,
        "purl": f"pkg:pypi/genai-prices@{number}",
        "description": "The price table is made from this release.",
        "licenses": [{"license": {"id": "MIT"}}],
        "hashes": _digest(_PRICES),
    }


def document() -> dict[str, Any]:
    """Return the bill of materials; the same tree gives the same document."""
    whole = f"pkg:pypi/runguard-agents@{version()}"
    parts = [_uplot(), _prices()]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": whole,
                "name": "runguard-agents",
                "version": version(),
                "purl": whole,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": parts,
        "dependencies": [
            {"ref": whole, "dependsOn": [part["bom-ref"] for part in parts]},
            *({"ref": part["bom-ref"], "dependsOn": []} for part in parts),
        ],
    }


def text() -> str:
    return json.dumps(document(), indent=2) + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        is_current = SBOM.is_file() and SBOM.read_text(encoding="utf-8") == text()
        if not is_current:
            print(f"{SBOM.relative_to(ROOT)} is out of date: run python scripts/sbom.py")
        return 0 if is_current else 1
    SBOM.parent.mkdir(exist_ok=True)
    SBOM.write_text(text(), encoding="utf-8")
    print(f"{SBOM.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
