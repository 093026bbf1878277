"""Draws docs/evidence/ledger.svg from ledger.jsonl: accuracy by distance, one panel per length.

python -m benchmarks.ledger_plot [--results docs/evidence/ledger.jsonl]
"""

import argparse
import os
import statistics
from html import escape

from benchmarks.ledger import ARMS, DISTANCES, DOCUMENTS, ROOT, read_results

WIDTH, HEIGHT, GAP, TOP, LEFT = 230, 200, 40, 30, 40
COLOURS = ("#888888", "#bbbbbb", "#d62728", "#e8a33d", "#2ca02c", "#1f77b4", "#9467bd")
Series = tuple[str, bool]  # arm, and whether its state is carried from row to row


def main() -> None:
    """Writes the plot next to the results."""
    folder = os.path.join(ROOT, "docs", "evidence")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", default=os.path.join(folder, "ledger.jsonl"))
    options = parser.parse_args()
    with open(os.path.splitext(options.results)[0] + ".svg", "w", encoding="utf-8") as file:
        file.write(picture(read_results(options.results)))


def picture(records: list[dict]) -> str:
    """The plot as SVG."""
    known = {(record["arm"], record["carried"]) for record in records}
    series = sorted(known, key=lambda s: (s[1], ARMS.index(s[0])))
    width = LEFT + len(DOCUMENTS) * (WIDTH + GAP)
    height = TOP + HEIGHT + 50 + 16 * len(series)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, rows in enumerate(DOCUMENTS):
        here = [record for record in records if record["rows"] == rows]
        left = LEFT + number * (WIDTH + GAP)
        parts.append(f'<g transform="translate({left} {TOP})">{panel(here, series, rows)}</g>')
    for number, (arm, carried) in enumerate(series):
        y = TOP + HEIGHT + 45 + 16 * number
        name = f"{arm}, {'rolled out' if carried else 'reset at each row'}"
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + 24}" y1="{y}" y2="{y}" stroke="{COLOURS[number]}" '
            f'stroke-width="2"/><text x="{LEFT + 32}" y="{y + 4}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def panel(records: list[dict], series: list[Series], rows: int) -> str:
    """One document length: a line per model, a point per distance."""
    parts = [f'<text x="{WIDTH / 2}" y="-10" text-anchor="middle">documents of {rows} rows</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = HEIGHT * (1 - share)
        parts.append(f'<line x1="0" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="-6" y="{y + 4}" text-anchor="end">{share:g}</text>')
    for number, name in enumerate(DISTANCES):
        x = _x(number)
        parts.append(f'<text x="{x}" y="{HEIGHT + 16}" text-anchor="middle">{name}</text>')
    for colour, (arm, carried) in zip(COLOURS[: len(series)], series, strict=True):
        same = [r for r in records if (r["arm"], r["carried"]) == (arm, carried)]
        points = [
            (_x(number), HEIGHT * (1 - share))
            for number, name in enumerate(DISTANCES)
            if (share := _share(same, name)) is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return "".join(parts)


def _x(number: int) -> float:
    return WIDTH * (number + 0.5) / len(DISTANCES)


def _share(records: list[dict], distance: str) -> float | None:
    """The mean accuracy over seeds; None without answers."""
    counts = [record["answers"][distance] for record in records]
    shares = [correct / total for correct, total in counts if total]
    return statistics.mean(shares) if shares else None


if __name__ == "__main__":
    main()
