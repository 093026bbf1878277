"""The import table of CONTRIBUTING.md, checked against every import statement."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# What each package may import from this project. A dotted name allows only that module.
ALLOWED = {
    "configs": {
        "configs",
        "data.options",
        "model.config",
        "model.mixers.options",
        "training.options",
    },
    "kernels": {"kernels"},
    "model": {"model", "kernels"},
    "data": {"data"},
    "checkpoints": {"checkpoints"},
    "training": {"training", "model", "data.batch"},
}
# Modules that tie the packages together may import more than their package.
TIES = {"checkpoints", "configs", "data"}
MORE = {
    "training/build.py": TIES,
    "training/restore.py": TIES,
    "training/evaluation.py": TIES,
    "training/run.py": TIES,
    "training/weights.py": {"checkpoints"},
    "training/generate.py": {"data"},
    "training/export.py": {"data"},
    "training/estimate/": TIES,
    "training/tpu_check/": {"configs", "kernels"},
}
# The kinds of errors and the declaration of options: they import the standard library only.
EVERYWHERE = {"errors", "options"}
OURS = {*ALLOWED, *EVERYWHERE, "train", "tests", "benchmarks"}
# External names that a package must not import, and the exceptions. Importing jax may create
# devices, and a data worker should never load it.
FORBIDDEN = {
    "configs": {"jax", "numpy"},
    "data": {"jax"},
    "checkpoints": {"absl", "ml_collections"},
    "model": {"absl", "ml_collections", "orbax", "grain"},
    "kernels": {"absl", "ml_collections", "orbax", "grain", "os"},
    "training": {"absl", "orbax", "grain"},
}
EXCEPTIONS = {("data/loader.py", "jax")}
# Comparable projects may be imported by benchmarks and tests, never by the product.
PEERS = {"tokamax", "fla", "MaxText", "torchtitan", "levanter", "flax", "haiku", "equinox", "torch"}


def imported_names(path: pathlib.Path) -> set[str]:
    """Every dotted name that a file imports, at any nesting depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import by the full name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, allowed: set[str]) -> bool:
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def more(path: pathlib.Path) -> set[str]:
    name = path.relative_to(ROOT).as_posix()
    return {x for place, names in MORE.items() if name.startswith(place) for x in names}


def files(room: str) -> list[pathlib.Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_the_table_allows(room):
    assert files(room), f"{room}/ holds no Python file: has it moved?"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(room)
        for name in sorted(imported_names(path))
        if name.split(".")[0] in OURS and not within(name, ALLOWED[room] | EVERYWHERE | more(path))
    ]
    assert not wrong, f"{room} may import only {sorted(ALLOWED[room])}: {wrong}"


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_does_not_know_what_is_not_its_business(room):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(room)
        for name in sorted(imported_names(path))
        if name.split(".")[0] in FORBIDDEN[room]
        and (str(path.relative_to(ROOT)), name.split(".")[0]) not in EXCEPTIONS
    ]
    assert not wrong, wrong


def test_no_peer_is_part_of_the_product():
    product = [ROOT / "train.py", *(path for room in ALLOWED for path in files(room))]
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in product
        for name in imported_names(path)
        if name.split(".")[0] in PEERS
    ]
    assert not wrong, wrong


def test_the_walk_sees_imports_inside_functions(tmp_path):
    path = tmp_path / "nested.py"
    path.write_text("def f():\n    import model.decoder\n    from data import loader\n")
    assert imported_names(path) == {"model.decoder", "data.loader"}
