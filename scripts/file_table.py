"""Generates the table of files in docs/architecture.md from each module's first sentence.

python scripts/file_table.py          prints the document with the current table
python scripts/file_table.py --write  writes it
"""

import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- files: made by scripts/file_table.py -->\n", "<!-- files: end -->\n"
ROOMS = ("configs", "data", "model", "kernels", "training", "checkpoints", "benchmarks")
ENTRIES = ("train.py", "generate.py", "export.py", "options.py", "errors.py")


def first_sentence(path: pathlib.Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    text = " ".join(docstring.split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".:").replace("|", "\\|")


def table() -> str:
    """Markdown: one table per folder."""
    parts = [_rows("at the top level", [ROOT / name for name in ENTRIES])]
    for room in ROOMS:
        folders = sorted({path.parent for path in (ROOT / room).rglob("*.py")})
        for folder in folders:
            files = sorted(p for p in folder.glob("*.py") if p.name != "__init__.py")
            if files:
                parts.append(_rows(f"{folder.relative_to(ROOT)}/", files))
    return "\n".join(parts)


def document() -> str:
    """The document with the current table."""
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def _rows(title: str, files: list[pathlib.Path]) -> str:
    rows = [f"| `{path.name}` | {first_sentence(path)} |" for path in files]
    return "\n".join([f"| {title} | |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    if "--write" in sys.argv:
        DOCUMENT.write_text(document())
    else:
        print(document(), end="")
