"""Rejects unidiomatic wordings in code, comments and documents.

    python scripts/wording.py     prints each occurrence; exits with 1 if there is any

A line that needs such a wording gives a reason in a comment: `wording: reason`.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
_MEASURES = r"[KMGT]i?B|bytes?|bits?|nats|ms|us|ns|seconds?|bundles?|[MGT]?FLOPs?|TFLOP/s|tokens"
_UNITS = (
    "token|second|byte|device|step|core|chip|rank|row|layer|chunk|call|process|hop|unit|head|"
    "piece|group|parameter|bundle|message"
)
# Pattern, what to write instead.
WORDINGS = {
    rf"(?<!rather )\b({_MEASURES}) an? ({_UNITS})\b": "per: `GB per device`, `tokens per second`",
    r"\b(stands?|stood) (in|on|at|after|beside|behind|with|there|apart|twice)\b": "is, is at",
    r"\blies? (on|after|beside|behind|there|apart)\b": "is, is at",
    r"\bgoes? on (from|with|in|to|at|over|until)\b": "continues",
    r"\bas (it|they) (lies?|stands?)\b": "as it is, in place",
    r"\b(is|are|was|were) told\b(?! apart)": "is reported, is signalled",
    r"\bso much is\b": "this is",
    r"\ba \w+ of its own\b": "a separate",
    r"\b(is|are) no (flag|file|folder|python|number|tokenizer|json|utf-?8)\b": "is not a",
    r"\b(None|Raises \w+|\"\"|else \w+) where (there|it|they|the|no|a|one|another)\b": "if",
    r"\bwhere (there is (none|one)|it is not known)\b": "if there is none, if there is one",
    r"\b(at most|after|within|once there are|waits?) so many\b": "that many, the parameter's name",
    r"\banew\b": "again, from the start, to start a new run",
    r"\bas against\b": "compared with, instead of",
    r"\bpassed over\b": "skipped",
    r"\bworked out\b": "computed",
    r"\bunless (it|they) says? (so|otherwise)\b|\bunless said\b": "unless noted",
    r"\b(was|were|is|are|be) asked for\b": "requested",
    r"\bof ours\b": "of this project",
    r"\btells whether\b": "returns whether",
    r"\ball the same\b": "nevertheless",
    r"\b(has|have|had) met\b": "has read, has seen",
    r"\bhand(s|ed)? \w+ on\b": "passes on",
    r"\b(tried and lost|dearer)\b": "rejected, more expensive",
    r"\bbehind the (forward|backward|kernel|step)\b": "after",
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
