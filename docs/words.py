"""Print the words of each page of the documentation, the longest first, and their sum. `make docs` calls it.

Code and the names of links count; the targets of links do not.
"""  # noqa: INP001

import re
from pathlib import Path

DOCS = Path(__file__).parent
_TARGET = re.compile(r"\]\([^)]*\)")


def words_of(page: Path) -> int:
    """Return the number of words of a page."""
    return len(_TARGET.sub("]", page.read_text(encoding="utf-8")).split())


def pages() -> dict[str, int]:
    """Return the words of each page, the longest first."""
    counted = {str(page.relative_to(DOCS)): words_of(page) for page in DOCS.rglob("*.md")}
    return dict(sorted(counted.items(), key=lambda item: -item[1]))


def main() -> None:
    counted = pages()
    for page, words in counted.items():
        print(f"{words:7,}  {page}")  # noqa: T201
    print(f"{sum(counted.values()):7,}  words on {len(counted)} pages")  # noqa: T201


if __name__ == "__main__":
    main()
