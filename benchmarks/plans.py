"""Plans of the shipped configs, remat policies, and the estimate's error on published times.

    python -m benchmarks.plans                     all tables into docs/measurements.md
    python -m benchmarks.plans --only kda_1b       one config's row, there
    python -m benchmarks.plans --remat             the table of remat policies, there
    python -m benchmarks.plans --calibration       the table of errors, printed

Every row compiles a whole training step for a topology that may be absent; this takes half an hour
on two cores.
"""

import argparse
import datetime
import importlib
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from ml_collections import ConfigDict

from errors import UserError
from model.remat import POLICIES
from training.estimate.compile import TooLarge
from training.estimate.plan import Plan, make_plan
from training.estimate.topology import GENERATIONS, Topology

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "measurements.md"
TOPOLOGIES = {
    "smoke": "v6e:1x1",
    "kda_cp4": "v6e:2x2",
    "ledger": "v6e:1x1",
    "experts": "v6e:1x2",
    "kda_400m": "v6e:2x2",
    "hybrid_400m": "v6e:4x4",
    "kda_1b": "v6e:4x4",
    "hybrid_1b": "v6e:4x4",
    "kda_7b": "tpu7x:4x4x4",
    "hybrid_7b": "tpu7x:4x8x8",
    "kimi_linear_48b": "tpu7x:4x4x4",
}
REMAT_CONFIG, REMAT_TOKENS = "kda_cp4", 65_536  # rows so long that activations weigh


class Table(NamedTuple):
    """A table of docs/measurements.md whose rows are written one at a time."""

    head: tuple[str, str]
    order: tuple[str, ...]  # of the first cells


TABLES = {
    "plans": Table(
        (
            "| config | topology | mesh | parameters | rows x tokens | GB per device | fits | "
            "estimated ms per step | estimated MFU | compile s | date |",
            "|" + "---|" * 11,
        ),
        tuple(TOPOLOGIES),
    ),
    "remat": Table(
        (
            "| remat | MB per device | saved activations MB | on the host MB | "
            "hardware FLOPs per step | over the model's | estimated ms per step | date |",
            "|" + "---|" * 8,
        ),
        tuple(POLICIES),
    ),
}


class Published(NamedTuple):
    """A published time of one kernel call, and the bundles of the same kernel compiled here."""

    name: str
    bundles: int
    milliseconds: float


# tokamax 0.0.17's KDA on v7x: its published times, and bundles of its kernels as compiled by
# libtpu 0.0.52 for one core.
TOKAMAX = (
    Published("forward", 2_333_598, 1.777),
    Published("forward + VJP", 5_281_634, 4.593),
    Published("forward + VJP, packed", 6_600_867, 8.810),
)


def config_of(name: str) -> ConfigDict:
    return importlib.import_module(f"configs.{name}").get_config()


def plan_row(name: str, topology: str) -> str:
    """One config as a row of the table, or the reason why it cannot be compiled."""
    try:
        plan = make_plan(config_of(name), Topology.parse(topology))
    except (UserError, TooLarge) as error:
        reason = " ".join(str(error).split())[:120]
        return f"| {name} | {topology} | {reason} |" + " |" * 7 + f" {today()} |"
    mesh = " x ".join(f"{axis} {n}" for axis, n in plan.mesh.items() if n > 1) or "1"
    facts = plan.facts
    return (
        f"| {name} | {topology} | {mesh} | {facts.parameters / 1e6:,.4g}M | "
        f"{plan.rows} x {plan.tokens_a_row:,} | {facts.needed / 1e9:.2f} | {fits(plan)} | "
        f"{1e3 * plan.time.total:,.4g} | {plan.model_flops_utilisation:.0%} | "
        f"{facts.lower_seconds + facts.compile_seconds:.0f} | {today()} |"
    )


def today() -> str:
    return datetime.date.today().isoformat()


def fits(plan: Plan) -> str:
    left = (plan.hbm_capacity - plan.facts.needed) / 1e9
    return f"yes, {left:.1f} GB free" if plan.fits else f"no, {-left:.1f} GB too much"


def with_row(text: str, name: str, row: str) -> str:
    """The document with one row of a table replaced or added; its first cell is its name."""
    table = TABLES[name]
    begin, end = marks(name)
    lines = text.partition(begin)[2].partition(end)[0].splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line[:1] == "|"}
    rows[row.split("|")[1].strip()] = row
    kept = [rows[first] for first in table.order if first in rows]
    return replace_section(text, name, iter([*table.head, *kept]))


def remat_row(policy: str) -> str:
    """Memory and recomputation of one policy, for one config."""
    config = config_of(REMAT_CONFIG)
    config.model.remat = policy
    config.data.sequence_length = REMAT_TOKENS
    try:
        plan = make_plan(config, Topology.parse(TOPOLOGIES[REMAT_CONFIG]))
    except TooLarge as error:
        return f"| {policy} | {error} | | | | | | {today()} |"
    facts = plan.facts
    return (
        f"| {policy} | {facts.needed / 1e6:.2f} | {plan.memory.saved_activations / 1e6:.2f} | "
        f"{facts.host / 1e6:.2f} | {facts.hardware_flops:.3e} | "
        f"{facts.hardware_flops / facts.model_flops:.2f} | {1e3 * plan.time.total:,.4g} | "
        f"{today()} |"
    )


def calibration_table() -> Iterator[str]:
    """The estimate of a kernel's time against published times."""
    tpu7x = GENERATIONS["tpu7x"]
    yield "| tokamax on v7x | bundles | published ms | ns per bundle | estimated ms | error |"
    yield "|" + "---|" * 6
    for each in TOKAMAX:
        estimate = 1e3 * each.bundles * tpu7x.kernel_stalls / tpu7x.clock
        yield (
            f"| {each.name} | {each.bundles:,} | {each.milliseconds} | "
            f"{1e6 * each.milliseconds / each.bundles:.3f} | {estimate:.3f} | "
            f"{estimate / each.milliseconds - 1:+.1%} |"
        )


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by benchmarks.plans -->", f"<!-- {name}: end -->"


def replace_section(text: str, name: str, lines: Iterator[str]) -> str:
    """The text with the contents between a section's two marks replaced."""
    begin, end = marks(name)
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return "\n".join([before + begin, *lines, end + after])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=TOPOLOGIES)
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--calibration", action="store_true")
    args = parser.parse_args()
    if args.calibration:
        print("\n".join(calibration_table()))
        return
    if not args.remat:
        for name in [args.only] if args.only else TOPOLOGIES:
            keep("plans", plan_row(name, TOPOLOGIES[name]))
    if not args.only:
        for policy in POLICIES:
            keep("remat", remat_row(policy))
    if not (args.only or args.remat):
        lines = [f"`python -m benchmarks.plans`, {today()}", "", *calibration_table()]
        DOCUMENT.write_text(replace_section(DOCUMENT.read_text(), "calibration", iter(lines)))


def keep(table: str, row: str) -> None:
    """Prints a row and writes it into its table at once."""
    print(row, flush=True)
    DOCUMENT.write_text(with_row(DOCUMENT.read_text(), table, row))


if __name__ == "__main__":
    main()
