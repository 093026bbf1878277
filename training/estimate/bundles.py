"""Bundles of a compiled program: the instructions that a TPU core issues, read from the compiler.

libtpu compiles for a TPU topology on any x86-64 Linux machine. If environment variables request it
before JAX starts, it writes each kernel's final schedule, one VLIW bundle per line. A bundle is one
issue slot of the core, so the number of bundles is a lower bound on cycles, and the same on every
run. It does not include stalls, or waits for HBM or other ranks. Loops are multiplied by their trip
counts; a loop without a constant trip count counts once; a predicated region counts as taken.
"""

import itertools
import pathlib
import re
from dataclasses import dataclass, field

BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+((?:[A-Z]{2}[: ,]*)*)\s*:\s*((?:>\s?)*)\{(.*)")
EXIT = re.compile(  # of an outer loop it may have a predicate: the inner loop's exit
    r"scmp\.(?:ge|gt|eq)\.s32\.totalorder (?:\([^)]*\), )?[^,]+, (-?\d+) /\* loop exit test"
)
# A copy into another device's VMEM, and its size in granules of 32 bytes.
SEND = re.compile(r"= dma\.general .*size_in_granules=\*/(\d+).*vmem-to-vmem")
GRANULE = 32
KERNEL_FILE = re.compile(r"\d+-(.*)-\d+-final_bundles\.txt$")


def compiler_environment(dump: str) -> dict[str, str]:
    """Environment of a process that compiles for an absent TPU and writes schedules to `dump`."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_bundles",
    }


@dataclass
class Loop:
    """Bundles in the order of the schedule: runs of them, and inner loops.

    sends: indices in `items` before which a message to another device starts; sent: bytes of one.
    """

    depth: int
    trips: int = 1
    items: list["int | Loop"] = field(default_factory=list)
    sends: list[int] = field(default_factory=list)
    sent: int = 0

    def bundles(self, begin: int = 0, end: int | None = None) -> int:
        """Bundles of one trip, of all items or those in a range."""
        return sum(
            item.trips * item.bundles() if isinstance(item, Loop) else item
            for item in self.items[begin:end]
        )

    def add(self) -> None:
        """One more bundle."""
        if self.items and isinstance(self.items[-1], int) and len(self.items) not in self.sends:
            self.items[-1] += 1
        else:
            self.items.append(1)


@dataclass(frozen=True)
class Schedule:
    """Bundles of all programs of a compilation, by name. Programs of the same name are summed;
    `trees` has the loops of the last one."""

    programs: dict[str, int] = field(default_factory=dict)
    trees: dict[str, Loop] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.programs.values())

    @property
    def latest(self) -> dict[str, int]:
        """Bundles of the last program of each name: the compiler may compile one twice."""
        return {name: tree.bundles() for name, tree in self.trees.items()}

    def of(self, name: str) -> int:
        """Bundles of the kernels with `name` in their names."""
        return sum(n for program, n in self.programs.items() if name in program)


def read(dump: str) -> Schedule:
    """All schedules of a dump directory."""
    schedule = Schedule()
    for path in sorted(pathlib.Path(dump).glob("*-final_bundles.txt")):  # by time
        match = KERNEL_FILE.match(path.name)
        if match and "schedule-analysis" not in path.name:
            name = match.group(1)
            tree = loops(path.read_text(errors="replace").splitlines())
            schedule.programs[name] = schedule.programs.get(name, 0) + tree.bundles()
            schedule.trees[name] = tree
    return schedule


def weigh(lines: list[str]) -> int:
    """Bundles of one program's schedule, loops multiplied by their trip counts."""
    return loops(lines).bundles()


def loops(lines: list[str]) -> Loop:
    """The tree of loops of one program's schedule."""
    found = [(match, line) for line in lines if (match := BUNDLE.match(line))]
    depths = _depths([match for match, _ in found])
    open_loops = [Loop(0)]
    for (match, line), depth in zip(found, depths):
        labels, body = match.group(1), match.group(3)
        if body.startswith("}"):  # a delay slot has no loop marks: it belongs to the open loop
            depth = open_loops[-1].depth
        while open_loops[-1].depth > depth:
            open_loops.pop()
        if depth > 0 and "LB" in labels and open_loops[-1].depth == depth:
            open_loops.pop()
        if open_loops[-1].depth < depth:
            open_loops[-1].items.append(loop := Loop(depth))
            open_loops.append(loop)
        here = open_loops[-1]
        if send := SEND.search(line):
            here.sends.append(len(here.items))
            here.sent = int(send.group(1)) * GRANULE
        here.add()
        if "loop exit test" in line:
            constants = EXIT.findall(line)
            here.trips = max(int(constants[-1]), 1) if constants else 1
    return open_loops[0]


def _depths(bundles: list[re.Match]) -> list[int]:
    """The number of loops around each bundle.

    Bundles inside a loop may carry fewer marks than its depth. A loop ends at the last bundle of
    its depth, or where the next one begins (LB).
    """
    depths = [match.group(2).count(">") for match in bundles]
    for depth in range(max(depths, default=0), 0, -1):
        inside = [i for i, d in enumerate(depths) if d >= depth]
        for last, following in itertools.pairwise(inside):
            if "LB" not in bundles[following].group(1):
                depths[last + 1 : following] = [depth] * (following - last - 1)
    return depths
