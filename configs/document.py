"""Text about all options: for --help, and docs/configuration.md (python -m configs.document)."""

import dataclasses

from configs import base
from options import Option

HEAD = """# Options

Made by `python -m configs.document` from the declarations in data/options.py, model/config.py,
model/mixers/options.py and training/options.py. Every option can be set in a config file or on the
command line: `--config.train.steps=20`.
"""


def help_text() -> str:
    """Every option with default, unit and constraint, a few lines each."""
    lines = []
    for name, field, metadata in base.all_options():
        lines.append(f"  --config.{name}={field.default!s}{_facts(metadata)}")
        lines.append(f"      {metadata.help}")
    return "\n".join(lines)


def markdown() -> str:
    """docs/configuration.md."""
    parts = [HEAD]
    for group, record in base.RECORDS.items():
        parts.append(f"## config.{group}\n")
        parts.append("| option | default | constraint | |\n|---|---|---|---|")
        for name, field, metadata in base.all_options():
            if name.split(".")[0] == group:
                parts.append(_row(name.split(".")[1], field, metadata))
        parts.append("")
        assert record.__doc__
    return "\n".join(parts)


def _row(name: str, field: dataclasses.Field, metadata: Option) -> str:
    default = '""' if field.default == "" else str(field.default)
    unit = f" {metadata.unit}" if metadata.unit else ""
    cells = (f"`{name}`", f"`{default}`{unit}", metadata.constraint(), metadata.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _facts(metadata: Option) -> str:
    facts = [fact for fact in (metadata.unit, metadata.constraint()) if fact]
    return f"  ({', '.join(facts)})" if facts else ""


if __name__ == "__main__":
    print(markdown(), end="")
