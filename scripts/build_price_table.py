"""Writes the price table of the package from the installed genai-prices. A step of a release; see CONTRIBUTING.md.

python scripts/build_price_table.py [--date 2026-11-16] [--check]
"""

import argparse
import sys
from datetime import date

from runguard.pricing import book as genai_source
from runguard.pricing.book import PACKAGED, packaged_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--date",
        type=date.fromisoformat,
        help="the day for which the prices hold; default: the day on which genai-prices was installed",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the table would change")
    options = parser.parse_args()
    if options.check:
        built = genai_source.table_text(genai_source.snapshot(), packaged_table().date)
        sys.exit(0 if built == PACKAGED.read_text(encoding="utf-8") else f"{PACKAGED} is out of date")
    text = genai_source.table_text(genai_source.snapshot(), options.date or genai_source.installed_on())
    PACKAGED.write_text(text, encoding="utf-8")
    print(f"{PACKAGED}: {len(text) // 1024} kB, genai-prices {genai_source.release()}")


if __name__ == "__main__":
    main()
