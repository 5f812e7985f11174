"""Print the words of each page of the documentation, the longest first, and their sums. `make docs` calls it.

Code and the names of links count; the targets of links do not.
"""  # noqa: INP001

import re
from pathlib import Path

DOCS = Path(__file__).parent
GROUPS = (
    "user",
    "reference",
    "contributing",
)  # the folders of the pages, "user" for those that are in none of the others
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
    sums = dict.fromkeys(GROUPS, (0, 0))
    for page, words in counted.items():
        group = next((name for name in GROUPS if page.startswith(f"{name}/")), "user")
        sums[group] = sums[group][0] + 1, sums[group][1] + words
    for page, words in counted.items():
        print(f"{words:7,}  {page}")  # noqa: T201
    for group, (number, words) in sums.items():
        print(f"{words:7,}  words on {number} pages: {group}")  # noqa: T201
    print(f"{sum(counted.values()):7,}  words on {len(counted)} pages")  # noqa: T201


if __name__ == "__main__":
    main()
