"""Loops and messages of a schedule, in the form in which libtpu writes it."""

from training.estimate import bundles
from training.estimate.bundles import Loop

SEND = (
    "%9 = dma.general (%p1), /*src=*/%s1, /*size_in_granules=*/4096, /*dst=*/%s2 /* vmem-to-vmem */"
)
EXIT = "%7 = scmp.ge.s32.totalorder %s3, {} /* loop exit test */"


def schedule(*rows: tuple[int, str, str]) -> list[str]:
    """Lines of (depth, labels, instruction)."""
    return [
        f"     {hex(i) if i else '0'}   {labels}: {'> ' * depth}{{  {body} }}"
        for i, (depth, labels, body) in enumerate(rows)
    ]


LINES = schedule(
    (0, "", "%1 = add"),
    (1, "LB", "%2 = add"),
    (2, "LB", "%3 = add"),
    (2, "", EXIT.format(5)),
    (1, "", SEND),
    (1, "", EXIT.format(3)),
    (0, "", "%5 = add"),
)


def test_bundles_count_by_the_trips_of_the_loops_around_them():
    assert bundles.weigh(LINES) == 1 + 3 * (1 + 5 * 2 + 2) + 1


def test_the_tree_says_where_in_a_loop_a_message_leaves_and_its_size():
    inner = Loop(2, 5, [2])
    group = Loop(1, 3, [1, inner, 2], sends=[2], sent=4096 * 32)
    assert bundles.loops(LINES) == Loop(0, 1, [1, group, 1])


def test_a_loop_whose_count_is_no_constant_counts_once():
    lines = schedule((1, "LB", "%1 = add"), (1, "", "%2 = scmp.ge %s1, %s2 /* loop exit test */"))
    assert bundles.weigh(lines) == 2


def test_a_folder_is_read_program_by_program(tmp_path):
    for name in (
        "1-fusion.1-01",
        "2-kda_forward.2-01",
        "3-kda_forward.2-01",
        "4-x-00-schedule-analysis",
    ):
        (tmp_path / f"{name}_final_bundles.txt").write_text("\n".join(LINES))
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(path.name.replace("-01_", "-01-")))
    found = bundles.read(str(tmp_path))
    assert found.programs == {"fusion.1": 41, "kda_forward.2": 82}
    assert (found.total, found.of("kda_forward")) == (123, 82)
    assert found.latest == {"fusion.1": 41, "kda_forward.2": 41}
