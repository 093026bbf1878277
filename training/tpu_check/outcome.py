"""The result of a check, as a record that processes exchange as JSON. Does not import JAX."""

import dataclasses
import enum
import json


class Status(enum.StrEnum):
    """How a check ended. FAILED: a bound was exceeded; ERROR: it could not be compared."""

    OK = "ok"
    FAILED = "FAILED"
    ERROR = "ERROR"
    SKIPPED = "skipped"
    NOT_RUN = "not run"


GOOD = (Status.OK, Status.SKIPPED)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a check: `detail` in one line, and figures by name for others to use.

    speeds: measured fields of `training.estimate.factors.Factors`, by name, except those of
    kernels (speed.py).
    """

    status: Status
    detail: str
    speeds: dict[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, passed: bool, detail: str, **speeds: float) -> "Outcome":
        """OK or FAILED."""
        return cls(Status.OK if passed else Status.FAILED, detail, speeds if passed else {})

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Outcome":
        """Raises ValueError, KeyError or TypeError if the text is something else."""
        record = json.loads(text)
        return cls(Status(record["status"]), str(record["detail"]), dict(record["speeds"]))


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine on which a worker runs. error: why it cannot run, else ""."""

    device_kind: str = ""
    devices: int = 0
    jax: str = ""
    libtpu: str = ""
    error: str = ""

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """Raises ValueError or TypeError if the text is something else."""
        return cls(**json.loads(text))


def first_line(error: BaseException) -> str:
    """An exception in one line of a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300].replace("|", "/")
