"""Checkpoints: what is restored, what is refused, and that no complete step is ever lost.

In a local folder and, with a server on localhost, in a bucket; test_gcs.py tests buckets only.
"""

import contextlib
import json
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints import index
from checkpoints import manager as manager_module
from checkpoints.digest import digests
from checkpoints.errors import CheckpointError, DamagedError
from checkpoints.manager import Manager
from checkpoints.retention import Retention

KEEP = Retention(last=10)


def mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("x",))


def arrays(devices: int = 4, seed: int = 0) -> dict[str, jax.Array]:
    """Sharded and whole arrays of each width of element that a state has."""
    cut = NamedSharding(mesh(devices), PartitionSpec("x"))
    whole = NamedSharding(mesh(devices), PartitionSpec())
    values = np.random.default_rng(seed).normal(size=(8, 96)).astype(np.float32)
    return {
        "params/w": jax.device_put(values, cut),
        "params/v": jax.device_put(values[0], whole),
        "carry/tail": jax.device_put(values.astype(jnp.bfloat16), cut),
        "step": jax.device_put(np.int32(seed), whole),
    }


def want(like: dict[str, jax.Array], devices: int = 4):
    """The target that asks for these arrays on so many devices, whatever the facts."""
    cut = NamedSharding(mesh(devices), PartitionSpec("x"))
    whole = NamedSharding(mesh(devices), PartitionSpec())
    shapes = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=cut if a.ndim == 2 else whole)
        for name, a in like.items()
    }
    return lambda facts: shapes


@pytest.fixture
def lines():
    return []


@pytest.fixture(params=["local", pytest.param("bucket", marks=pytest.mark.slow)])
def folder(request, tmp_path):
    """The folder of a test's checkpoints."""
    if request.param == "local":
        return epath.Path(tmp_path) / "ck"
    return epath.Path(f"gs://{request.getfixturevalue('bucket')}/runs/ck")


@pytest.fixture
def open_manager(folder, lines):
    """Opens managers on one folder and closes them at the end."""
    opened = []

    def make(retention=KEEP, folder=folder):
        opened.append(Manager(str(folder), retention, lines.append))
        return opened[-1]

    yield make
    for manager in opened:
        with contextlib.suppress(CheckpointError):  # a failed save, which the test looked at
            manager.close()


def saved(open_manager, *steps: int) -> Manager:
    manager = open_manager()
    for step in steps:
        manager.save(step, arrays(seed=step), {"position": step})
    manager.wait()
    return manager


def same(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(
        found[n].dtype == expected[n].dtype
        and np.array_equal(np.asarray(found[n]), np.asarray(expected[n]))
        for n in expected
    )


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_arrays_come_back_on_any_number_of_devices(open_manager, devices):
    saved(open_manager, 3)
    restored = open_manager().restore_latest(want(arrays(), devices), "stop")
    assert restored.step == 3 and restored.metadata == {"position": 3}
    assert same(restored.arrays, arrays(seed=3))
    assert len(restored.arrays["params/w"].sharding.device_set) == devices


def test_a_donated_state_is_saved_as_it_was(open_manager):
    """The arrays are donated and overwritten while they are being written."""
    manager = open_manager()
    grow = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
    state = arrays()
    for step in range(1, 6):
        manager.save(step, state, {})
        state = grow(state)
    manager.wait()
    for step in (1, 5):
        found = manager.restore(step, want(arrays())).arrays
        assert int(found["step"]) == step - 1


def test_nothing_saved_is_no_error(open_manager):
    assert open_manager().restore_latest(want(arrays()), "stop") is None


def test_the_final_save_is_on_disk_after_close(open_manager):
    manager = open_manager()
    manager.save(7, arrays(), {})
    manager.close()
    assert open_manager(None).restore_latest(want(arrays()), "stop").step == 7


def tree(folder: epath.Path) -> Iterator[epath.Path]:
    """All files at any depth."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from tree(path)
        else:
            yield path


def files(folder: epath.Path) -> list[epath.Path]:
    """Data files of a step, the largest first."""
    found = [path for path in tree(folder) if path.parent.name == "d"]
    return sorted(found, key=lambda path: -path.stat().length)


def snapshot(folder: epath.Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in tree(folder)
        if path.name not in (".folder", ".lease")
    }


def flip(path: epath.Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 0x10
    path.write_bytes(content)


def truncate(path: epath.Path, place: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().length * place)])


HARM = [("local", harm, place) for harm in (flip, truncate) for place in (0.3, 0.5, 0.8)]
HARM += [
    pytest.param("bucket", harm, place, marks=pytest.mark.slow)
    for harm, place in ((flip, 0.5), (truncate, 0.8))
]


@pytest.mark.parametrize(("folder", "harm", "place"), HARM, indirect=["folder"])
def test_a_damaged_array_stops_in_one_line_and_changes_nothing(open_manager, folder, harm, place):
    saved(open_manager, 3, 6).close()
    harm(files(folder / "6")[0], place)
    before = snapshot(folder)
    with pytest.raises(CheckpointError, match=r"/6: damaged.*skip.*step 3") as caught:
        open_manager().restore_latest(want(arrays()), "stop")
    assert "\n" not in str(caught.value)
    assert snapshot(folder) == before


def test_whole_arrays_that_are_not_those_saved_are_damage(open_manager, folder):
    """Files of another step, each of them intact: only the digests show it."""
    saved(open_manager, 3, 6).close()
    (folder / "6" / "state").rmtree()
    for path in tree(folder / "3" / "state"):
        copy = folder / "6" / path.relative_to(folder / "3")
        copy.parent.mkdir(parents=True, exist_ok=True)
        path.copy(copy)
    with pytest.raises(DamagedError, match="is not what was saved"):
        open_manager().restore(6, want(arrays()))


def test_a_damaged_step_can_be_passed_over_and_saved_again(open_manager, folder, lines):
    saved(open_manager, 3, 6).close()
    flip(files(folder / "6")[0], 0.5)
    manager = open_manager()
    assert manager.restore_latest(want(arrays()), "skip").step == 3
    assert len(lines) == 1 and "skipped" in lines[0] and "/6: damaged" in lines[0]
    manager.move_broken(3)
    manager.save(6, arrays(seed=6), {})
    manager.wait()
    assert manager.steps() == [3, 6]
    assert same(manager.restore(6, want(arrays())).arrays, arrays(seed=6))
    assert [p.name for p in (folder / "broken").iterdir() if p.name != ".folder"] == ["6-0"]
    assert {path.name for path in tree(folder / "broken")} > {"manifest.ocdbt", "metadata"}


@pytest.mark.parametrize("missing", ["record", "state/manifest.ocdbt", "state"])
def test_a_half_written_step_is_passed_over(open_manager, folder, lines, missing):
    saved(open_manager, 3, 6).close()
    path = folder / "6" / missing
    if path.is_dir():
        path.rmtree()
    else:
        path.unlink()
    assert open_manager().restore_latest(want(arrays()), "stop").step == 3
    assert len(lines) == 1 and "/6: incomplete" in lines[0], lines


def test_an_interrupted_save_is_named_and_tidied(open_manager, folder, lines):
    saved(open_manager, 3, 6).close()
    if str(folder).startswith("gs://"):
        (folder / "6" / "commit_success.txt").unlink()
    else:
        (folder / "6").rename(folder / "6.orbax-checkpoint-tmp")
    manager = open_manager()
    assert manager.restore_latest(want(arrays()), "stop").step == 3
    assert len(lines) == 1 and "its save was interrupted" in lines[0], lines
    manager.save(6, arrays(seed=6), {})
    manager.wait()
    assert manager.steps() == [3, 6]


def test_no_whole_step_is_an_error_not_a_new_start(open_manager, folder):
    saved(open_manager, 3).close()
    (folder / "3" / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError, match="none of its 1 checkpoints is usable"):
        open_manager().restore_latest(want(arrays()), "stop")


def test_another_model_is_refused_by_the_first_array_that_differs(open_manager):
    saved(open_manager, 3)
    other = {**arrays(), "params/w": jnp.zeros((8, 95))}
    with pytest.raises(CheckpointError, match=r"params/w is \[\[8, 96\], 'float32'\] there"):
        open_manager().restore_latest(want(other), "stop")
    with pytest.raises(CheckpointError, match="it has no params/new"):
        open_manager().restore_latest(want({"params/new": jnp.zeros(3)}), "stop")
    fewer = {name: a for name, a in arrays().items() if name != "params/v"}
    with pytest.raises(CheckpointError, match="it has params/v, which is not here"):
        open_manager().restore_latest(want(fewer), "stop")


def test_parameters_alone_can_be_read(open_manager):
    saved(open_manager, 3)
    only = {name: a for name, a in arrays().items() if name.startswith("params/")}
    assert same(
        open_manager(None).restore_latest(want(only), "stop").arrays,
        {name: a for name, a in arrays(seed=3).items() if name in only},
    )


@pytest.mark.parametrize("version", [1, "new", None])
def test_an_unknown_format_is_refused(open_manager, folder, version):
    saved(open_manager, 3).close()
    record = folder / "3" / "record" / "metadata"
    record.write_text(record.read_text().replace('"format": 2', f'"format": {json.dumps(version)}'))
    before = snapshot(folder)
    with pytest.raises(CheckpointError, match=r"format .* is unknown; needs format 2"):
        open_manager().restore_latest(want(arrays()), "stop")
    assert snapshot(folder) == before


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write there"):
        Manager(str(tmp_path / "file" / "ck"), KEEP, print)


@pytest.mark.parametrize("place", ["s3://bucket/run", "gs://", "gs:///run", "https://host/run"])
def test_other_places_are_refused(place):
    with pytest.raises(CheckpointError, match=rf"^{place}: needs a local path or gs://bucket/path"):
        Manager(place, KEEP, print)


@pytest.mark.usefixtures("impatient_orbax")
@pytest.mark.parametrize("folder", ["local"], indirect=True)
def test_a_failed_save_is_told_at_the_next_look(open_manager, folder):
    """The folder vanishes while arrays are written: the failure is in the background."""
    manager = saved(open_manager, 1)
    folder.rename(folder.parent / "gone")
    folder.write_text("in the way")
    with pytest.raises(CheckpointError, match="saving step 2 failed"):
        manager.save(2, arrays(), {})
        manager.wait()


@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (Retention(last=1), [6]),
        (Retention(last=2), [5, 6]),
        (Retention(last=1, every=2), [2, 4, 6]),
        (Retention(last=1, best=1), [3, 6]),
        (Retention(last=1, every=4, best=2), [2, 3, 4, 6]),
    ],
)
def test_retention(open_manager, retention, left):
    manager = open_manager(retention)
    for step, score in zip(range(1, 7), [0.5, 0.2, 0.1, 0.3, None, None]):
        manager.save(step, arrays(), {}, score)
    manager.wait()
    assert manager.steps() == left


def test_the_best_is_still_known_after_a_restart(open_manager, folder):
    retention = Retention(last=1, best=1)
    for step, score in ((1, 0.1), (2, 0.2), (3, 0.3)):
        manager = open_manager(retention)
        manager.save(step, arrays(), {}, score)
        manager.wait()
    assert manager.steps() == [1, 3]


def test_a_score_that_is_not_finite_is_no_score(open_manager):
    manager = open_manager(Retention(last=1, best=1))
    scores = [0.5, float("nan"), float("-inf"), float("inf"), None]
    for step, score in enumerate(scores, start=1):
        manager.save(step, arrays(), {}, score)
    manager.wait()
    assert manager.steps() == [1, 5]


def test_a_step_whose_record_cannot_be_read_is_not_removed(open_manager, folder):
    saved(open_manager, 1, 2).close()
    flip(folder / "1" / "record" / "metadata", 0.0)
    manager = open_manager(Retention(last=1))
    manager.save(3, arrays(), {})
    manager.wait()
    assert manager.steps() == [1, 3]


def lose_index(state: epath.Path, other: epath.Path) -> None:
    (state / "manifest.ocdbt").unlink()


def lose_data(state: epath.Path, other: epath.Path) -> None:
    files(state)[0].unlink()


def cut_data(state: epath.Path, other: epath.Path) -> None:
    truncate(files(state)[0], 0.9)


def take_other_arrays(state: epath.Path, other: epath.Path) -> None:
    state.rmtree()
    for path in tree(other):
        copy = state / path.relative_to(other)
        copy.parent.mkdir(parents=True, exist_ok=True)
        path.copy(copy)


@pytest.mark.parametrize(
    ("verify", "harm"),
    [
        ("sizes", lose_index),
        ("sizes", lose_data),
        ("sizes", cut_data),
        ("digests", take_other_arrays),
    ],
)
def test_older_steps_stay_where_a_new_one_cannot_be_read_back(folder, verify, harm):
    manager = Manager(str(folder), Retention(last=1), print, verify=verify)
    manager.save(1, arrays(seed=1), {})
    manager.save(2, arrays(seed=2), {})
    manager._store.wait()  # written, and not read back yet
    harm(folder / "2" / "state", folder / "1" / "state")
    with pytest.raises(CheckpointError, match=r"/2: .*cannot be read back; older steps were kept"):
        manager.wait()
    assert manager.steps() == [1, 2]
    assert same(manager.restore(1, want(arrays())).arrays, arrays(seed=1))


def test_a_save_is_read_back_in_groups_that_fit_beside_the_state(monkeypatch):
    monkeypatch.setattr(manager_module, "_READ_BYTES", 1000)
    shapes = want(arrays(4), 4)({})  # a device has 768, 384, 384 and 4 bytes of them
    groups = list(manager_module._groups(shapes))
    assert [list(group) for group in groups] == [
        ["params/w"],
        ["params/v", "carry/tail", "step"],
    ]
    assert {name: s for group in groups for name, s in group.items()} == shapes


def test_an_index_of_many_nodes_is_walked(tmp_path):
    store = ts.KvStore.open(
        {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{tmp_path}/"},
            "config": {"max_decoded_node_bytes": 200},
        }
    ).result()
    for number in range(40):
        store.write(f"key{number}", bytes(2000 + number)).result()
    found = list(index.extents(epath.Path(tmp_path)))
    assert sorted(extent.length for extent in found) == [2000 + number for number in range(40)]
    index.check_files(epath.Path(tmp_path))


@pytest.mark.parametrize("folder", ["local"], indirect=True)
def test_a_folder_that_cannot_be_saved_to_is_refused_before_step_1(folder, lines, monkeypatch):
    """What is read is not what was written, as if a library misreads a name."""
    monkeypatch.setattr(ocp.CheckpointManager, "item_metadata", lambda self, step: {"state": {}})
    with pytest.raises(CheckpointError, match=r"/ck: cannot save there"):
        Manager(str(folder), KEEP, lines.append)
    monkeypatch.undo()
    manager = Manager(str(folder), KEEP, lines.append)
    assert manager.restore_latest(want(arrays()), "stop") is None and not lines
    assert {path.name for path in folder.iterdir()} <= {".folder"}


@pytest.mark.parametrize(
    "name", ["a[1]b", "all*", "what?", "[", "run\udcff", "x/[y]/z", "a\\b", "gs:"]
)
def test_names_that_could_not_be_restored_are_refused_before_anything_is_saved(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"misread|not valid UTF-8|cannot save"):
        Manager(str(tmp_path / name), KEEP, print)


@pytest.mark.parametrize(
    "name",
    ["with blank", "é漢😀", "a{1}b", "~", "a%20b", "!x", "q'\"", "a#b", "x/", "5", "n\nl"],
)
def test_other_names_are_saved_and_restored(tmp_path, name):
    manager = Manager(str(tmp_path / name), KEEP, print)
    manager.save(3, arrays(seed=3), {})
    manager.close()
    restored = Manager(str(tmp_path / name)).restore_latest(want(arrays()), "stop")
    assert restored is not None and same(restored.arrays, arrays(seed=3))


def test_digests_are_the_same_on_every_mesh_and_notice_every_change():
    one, four = digests(arrays(1)), digests(arrays(4))
    assert one == four
    changed = arrays()
    values = np.asarray(changed["params/w"]).copy()
    values[3, 5], values[3, 6] = values[3, 6], values[3, 5]  # a swap keeps every plain sum
    changed["params/w"] = jnp.asarray(values)
    assert digests(changed)["params/w"] != one["params/w"]
    assert digests(changed)["params/v"] == one["params/v"]


def test_damage_to_the_record_is_noticed(open_manager, folder):
    saved(open_manager, 3).close()
    flip(folder / "3" / "record" / "metadata", 0.0)
    with pytest.raises(DamagedError):
        open_manager().restore(3, want(arrays()))
