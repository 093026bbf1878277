"""Documents agree with the code, and are written in plain English."""

import pathlib
import re

import pytest

from scripts import file_table, wording

ROOT = pathlib.Path(__file__).parents[1]


def test_the_table_of_files_is_that_of_today():
    assert file_table.DOCUMENT.read_text() == file_table.document(), (
        "run: python scripts/file_table.py --write"
    )


def test_every_module_begins_with_a_sentence():
    rooms = [ROOT / room for room in file_table.ROOMS]
    files = [p for room in rooms for p in room.rglob("*.py") if p.name != "__init__.py"]
    assert not [str(path) for path in files if len(file_table.first_sentence(path)) < 10]


def test_the_readme_is_short_and_honest_in_its_first_screen():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1500
    assert "Nothing has run on a TPU yet" in "\n".join(text.splitlines()[:30])


DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("kernels/*/*.md")]


@pytest.mark.parametrize("path", sorted(DOCUMENTS))
def test_links_lead_somewhere_and_lines_are_short(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), target
    for number, line in enumerate(text.splitlines(), start=1):
        assert len(line) <= 120 or line.startswith("|"), (number, len(line))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("The figure stands in the table.", True),  # wording: an example
        ("training goes on from there", True),  # wording: an example
        ("`--x` is no flag", True),  # wording: an example
        ("needs 3 GB a device", True),  # wording: an example
        ("the rest is assigned anew", True),  # wording: an example
        ("None where there is no such file", True),  # wording: an example
        ("needs 3 GB per device, None if unknown", False),
        ("It continues from the checkpoint.", False),
        ("a stand goes on sale  # wording: an example", False),
    ],
)
def test_the_lint_of_wordings_sees_what_it_should(line, found):
    assert bool(wording.find(line)) == found
