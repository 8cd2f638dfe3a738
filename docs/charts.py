"""The pictures of `benchmarks.md`, drawn from its own tables.

python docs/charts.py          writes docs/images/
python docs/charts.py --check  exit status 1 where a picture shows other numbers than the page
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
# Picture: the heading of its section, and the columns that are drawn.
CHARTS = {
    "linears": ("Linears", ["patched", "replay", "torchao"]),
    "attention": (
        "Attention",
        ["`sage3` train forward", "`sage3` infer", "`sage3` backward", "`fa4` forward and backward"],
    ),
}

Table = tuple[list[str], list[str], list[list[float]]]


def table(page: str, section: str, columns: list[str]) -> Table:
    """Of the first table of a section: the rows' names, ``columns``, and their numbers, row by row.

    Raises:
        ValueError: the page has no such section or column.
    """
    found = re.search(rf"^## {section}[^|]*?\n((?:\|[^\n]*\n)+)", page, re.MULTILINE)
    if found is None:
        raise ValueError(f"no section {section!r} with a table")
    header, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in found[1].splitlines())
    places = [header.index(column) for column in columns]
    names = [row[0] for row in rows]
    return names, [column.replace("`", "") for column in columns], [[float(row[i]) for i in places] for row in rows]


def shown(content: Table) -> str:
    """What a picture's description holds, so that it can be compared with the page."""
    names, columns, values = content
    return "; ".join(
        f"{name}: " + ", ".join(f"{c} {v:g}" for c, v in zip(columns, row, strict=True))
        for name, row in zip(names, values, strict=True)
    )


def draw(content: Table, path: Path) -> None:
    """Grouped bars of times over bfloat16's, with a line at 1."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    names, columns, values = content
    width = 0.8 / len(columns)
    with plt.rc_context({"svg.hashsalt": "qatpatch", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
        for index, column in enumerate(columns):
            places = [row + (index - (len(columns) - 1) / 2) * width for row in range(len(names))]
            bars = axes.bar(places, [row[index] for row in values], width, label=column)
            axes.bar_label(bars, fmt="%.2f", fontsize=7)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(names)), names, fontsize=7)
        axes.set_ylabel("time over bfloat16's")
        axes.legend(ncols=len(columns), frameon=False, loc="upper left")
        axes.margins(y=0.2)
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Description": shown(content), "Date": None})
        plt.close(figure)


def main(arguments: list[str]) -> int:
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    stale = []
    for name, (section, columns) in CHARTS.items():
        content, path = table(page, section, columns), DOCS / "images" / f"{name}.svg"
        if not path.exists() or shown(content) not in path.read_text(encoding="utf-8"):
            stale.append(path.name)
            if "--check" not in arguments:
                draw(content, path)
    print(f"{'stale' if '--check' in arguments else 'written'}: {', '.join(stale) or 'nothing'}")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
