"""Rejects wordings that native readers stumble over, in code, comments and documents.

    python scripts/wording.py     prints each place and exits with 1 where there is one

A line that needs such a wording says why: `wording: reason` in a comment on it.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Pattern, what to write instead.
WORDINGS = {
    r"\b(stands?|stood) (in|on|at|after|beside|behind|with|there|apart|twice)\b": "is, is at",
    r"\blies? (on|after|beside|behind|there|apart)\b": "is, is at",
    r"\bgoes? on (from|with|in|to|at|over|until)\b": "continues",
    r"\bas (it|they) (lies?|stands?)\b": "as it is, in place",
    r"\b(is|are|was|were) told\b(?! apart)": "is reported, is signalled",
    r"\bso much is\b": "this is",
    r"\ba \w+ of its own\b": "a separate",
    r"\bis no (flag|file|folder|python|option|number|tokenizer|json)\b": "is not a",
    r"\bbehind the (next|last|first)\b": "after",
    r"\bread in all at once\b": "read at the same point by all",
    r"\bwhat came out\b": "the result",
}
SKIPPED = {"scripts/wording.py"}


def find(text: str) -> list[tuple[int, str, str]]:
    """(line, wording, instead) of each place in a text."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if "wording:" in line:
            continue
        for pattern, instead in WORDINGS.items():
            if match := re.search(pattern, line, re.IGNORECASE):
                found.append((number, match.group(0), instead))
    return found


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.sh"], cwd=ROOT, capture_output=True, text=True
    )
    places = [
        f"{name}:{number}: {wording!r}; try: {instead}"
        for name in listed.stdout.split()
        if name not in SKIPPED and (ROOT / name).exists()
        for number, wording, instead in find((ROOT / name).read_text())
    ]
    print("\n".join(places), end="\n" if places else "")
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(main())
