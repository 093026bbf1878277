"""Bundles of a compiled program: the instructions that a TPU core issues, read from the compiler.

libtpu compiles for a TPU topology on any x86-64 Linux machine and writes each kernel's final
schedule, one VLIW bundle a line, if environment variables ask for it before JAX starts. A bundle is
one issue slot of the core, so their number is a lower bound on cycles, the same on every run. It
does not include stalls, or waits for HBM or other ranks. Loops count by their trip counts; a loop
whose count is not a constant counts once; a predicated region counts as taken.
"""

import itertools
import pathlib
import re
from dataclasses import dataclass, field

BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+((?:[A-Z]{2}[: ,]*)*)\s*:\s*((?:>\s?)*)\{(.*)")
EXIT = re.compile(r"scmp\.(?:ge|gt|eq)\.s32\.totalorder [^,]+, (-?\d+) /\* loop exit test")
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
class _Loop:
    """A loop being read: bundles in it (inner loops weighted) and its trip count."""

    depth: int
    bundles: int = 0
    trips: int = 1


@dataclass(frozen=True)
class Schedule:
    """Bundles of all programs of a compilation, by name."""

    programs: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.programs.values())

    def of(self, name: str) -> int:
        """Bundles of the kernels with `name` in their names."""
        return sum(n for program, n in self.programs.items() if name in program)


def read(dump: str) -> Schedule:
    """All schedules of a dump directory."""
    programs: dict[str, int] = {}
    for path in pathlib.Path(dump).glob("*-final_bundles.txt"):
        match = KERNEL_FILE.match(path.name)
        if match and "schedule-analysis" not in path.name:
            found = weigh(path.read_text(errors="replace").splitlines())
            programs[match.group(1)] = programs.get(match.group(1), 0) + found
    return Schedule(programs)


def weigh(lines: list[str]) -> int:
    """Bundles of one program's schedule, loops by their trip counts."""
    found = [(match, line) for line in lines if (match := BUNDLE.match(line))]
    depths = _depths([match for match, _ in found])
    loops = [_Loop(0)]

    def close():
        done = loops.pop()
        loops[-1].bundles += done.bundles * done.trips

    for (match, line), depth in zip(found, depths):
        labels, body = match.group(1), match.group(3)
        if body.startswith("}"):  # a delay slot has no loop marks: it belongs to the open loop
            depth = loops[-1].depth
        while loops[-1].depth > depth:
            close()
        if depth > 0 and "LB" in labels and loops[-1].depth == depth:
            close()
        if loops[-1].depth < depth:
            loops.append(_Loop(depth))
        loops[-1].bundles += 1
        if "loop exit test" in line:
            constants = EXIT.findall(line)
            loops[-1].trips = max(int(constants[-1]), 1) if constants else 1
    while len(loops) > 1:
        close()
    return loops[0].bundles


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
