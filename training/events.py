"""TensorBoard event files whose names and times increase within a run, whatever the clock does.

TensorBoard reads a run's files in the order of their names. Otherwise a process whose clock is
behind that of the previous process would write a file that is read first, and its steps would be
lost.
"""

import glob
import os
import re
import socket
import time

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import SummaryMetadata
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import Summary, hparams, text

from training.descriptions import describe

_SECONDS = re.compile(r"tfevents\.(\d+)\.")


class EventFile:
    """A new file. It is written immediately, without a queue, because the events of a step must be
    on disk before its checkpoint is.

    Args:
        folder: the run's folder; TensorBoard names the run after it.
        start: number of steps done before; later steps in older files are dropped.
        not_before: lower bound of all times, in seconds since 1970.
    """

    def __init__(self, folder: str, start: int, not_before: float):
        self._time = max([not_before, *_seconds_of_files(folder)])
        self._described: set[str] = set()
        name = f"events.out.tfevents.{int(self.now() + 1):010d}.{socket.gethostname()}"
        self._file = RecordWriter(os.path.join(folder, name))
        self._write(0, file_version="brain.Event:2")
        self._write(start + 1, session_log=SessionLog(status=SessionLog.START))

    def now(self) -> float:
        """Seconds since 1970, later than at the last call and than in older files."""
        self._time = max(time.time(), self._time + 1e-6)
        return self._time

    def scalars(self, step: int, values: dict[str, float], now: float) -> None:
        """Writes values by their tags."""
        summary = Summary(value=[self._scalar(tag, value) for tag, value in values.items()])
        self._file.write(Event(wall_time=now, step=step, summary=summary).SerializeToString())
        self._file.flush()

    def text(self, step: int, tag: str, content: str) -> None:
        """Writes a text for TensorBoard's text page, in Markdown."""
        self._write(step, summary=text(tag, content))

    def hyperparameters(
        self, step: int, options: dict[str, int | float | str], metrics: tuple[str, ...]
    ) -> None:
        """Writes the run's row for TensorBoard's HParams page."""
        experiment, session, _ = hparams(options, dict.fromkeys(metrics, 0.0))
        self._write(step, summary=experiment)
        self._write(step, summary=session)

    def close(self) -> None:
        self._file.close()

    def _scalar(self, tag: str, value: float) -> Summary.Value:
        if tag in self._described:
            return Summary.Value(tag=tag, simple_value=value)
        self._described.add(tag)
        metadata = SummaryMetadata(
            plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"),
            summary_description=describe(tag),
        )
        return Summary.Value(tag=tag, simple_value=value, metadata=metadata)

    def _write(self, step: int, **content: object) -> None:
        event = Event(wall_time=self.now(), step=step, **content)
        self._file.write(event.SerializeToString())
        self._file.flush()


def _seconds_of_files(folder: str) -> list[float]:
    names = glob.glob(os.path.join(glob.escape(folder), "events.out.tfevents.*"))
    return [float(found.group(1)) for name in names if (found := _SECONDS.search(name))]
