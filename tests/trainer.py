"""Runs train.py as a user does, in separate processes, for the tests that need whole runs."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from checkpoints.manager import Manager

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMOKE = "configs/smoke.py"
LIMIT = 900  # seconds that a run may take on a heavily loaded machine; on an idle one it takes ten
# Compiled programs are cached between runs and test sessions, since most of a short run is
# compilation, but not in the user's own cache folder.
os.environ["XDG_CACHE_HOME"] = os.path.join(
    tempfile.gettempdir(), f"kda-trainer-tests-{os.getuid()}"
)
_PORTS: list[socket.socket] = []


def command(workdir, *arguments: str, config: str = SMOKE, first: str = "") -> list[str]:
    """first: Python code that the process runs before train.py, for actions that need exact timing,
    which a test cannot have from outside; `train` is already imported."""
    hooked = f"import sys, train\n{first}\ntrain.process.leave(train.main(sys.argv))"
    return [
        sys.executable,
        *(["-c", hooked] if first else ["train.py"]),
        f"--config={config}",
        f"--workdir={workdir}",
        *arguments,
    ]


def environment() -> dict[str, str]:
    """The environment without the test session's settings. LLVM's optimizer is off: it costs more
    than it saves."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return ours | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def train(workdir, *arguments: str, code: int = 0, **options) -> subprocess.CompletedProcess:
    """A run from start to end, which must end with this exit code."""
    done = subprocess.run(
        command(workdir, *arguments),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        **options,
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


class Running:
    """A running process; its lines (stdout and stderr) are read as they arrive.

    separate: stderr is a separate stream, for the caller. first: see `command`; it may read
    stdin, which is the caller's as well.
    """

    def __init__(self, workdir, *arguments: str, separate: bool = False, first: str = ""):
        self.process = subprocess.Popen(
            command(workdir, *arguments, first=first),
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE if first else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if separate else subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._watchdog = threading.Timer(LIMIT, self.process.kill)
        self._watchdog.daemon = True  # pytest does not wait for it at its end
        self._watchdog.start()

    def _read(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            yield self.lines[-1]

    def until(self, text: str) -> str:
        """Reads up to the line that contains this text."""
        for line in self._read():
            if text in line:
                return line
        raise AssertionError(f"{text!r} never came:\n{self.text}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, code: int) -> str:
        """Waits for the end, which must have this exit code; returns all lines."""
        for _ in self._read():
            pass
        found = self.process.wait()
        self._watchdog.cancel()
        assert found == code, f"exit {found}\n{self.text}"
        return self.text

    def wait_for(self, path: pathlib.Path) -> None:
        """Waits until this file or folder exists."""
        deadline = time.monotonic() + LIMIT
        while not path.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.end(0)
            time.sleep(0.05)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def take_port() -> int:
    """A port on localhost that nothing else is given until this process ends. JAX's service can
    nevertheless listen on it, because it shares ports."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("localhost", 0))
    _PORTS.append(holder)
    return holder.getsockname()[1]


def reports(workdir) -> dict[int, dict[str, float]]:
    """The contents of metrics.jsonl by step; a step that appears twice is an error."""
    found: dict[int, dict[str, float]] = {}
    for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        assert values["step"] not in found, f"step {values['step']} is reported twice"
        found[values["step"]] = values
    return found


def learning(workdir) -> dict[int, dict[str, float]]:
    """The part of the reports that follows from the options alone, not from the machine.

    Accuracies are left out: rounding on another mesh may change which logit is the highest.
    """
    kept = ("learning/", "eval/loss")
    return {
        step: {k: v for k, v in values.items() if k.startswith(kept) and "accuracy" not in k}
        for step, values in reports(workdir).items()
    }


def steps_on_disk(workdir) -> list[int]:
    folder = pathlib.Path(workdir) / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def digests_of(workdir, step: int) -> dict[str, int]:
    """A digest of every array of a step, as saved."""
    return Manager(str(pathlib.Path(workdir) / "checkpoints")).record(step)["digests"]
