"""TensorBoard event files, on disk when a call returns.

Built on tensorboardX's record writer without its `SummaryWriter`, whose `flush` leaves what is
still in its queue: a run killed right after it would lose its last points.
"""

import os
import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary


class Events:
    """Writer of one event file in a folder."""

    def __init__(self, folder: Path):
        """Start a new event file."""
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        self._open = True

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point; `flush` puts it on disk."""
        self._write(Summary.Value(tag=tag, simple_value=float(value)), step)

    def image(self, tag: str, png: bytes, height: int, width: int, step: int = 0) -> None:
        """Add an encoded PNG of `height` × `width` pixels; `flush` puts it on disk."""
        image = Summary.Image(encoded_image_string=png, height=height, width=width, colorspace=3)
        self._write(Summary.Value(tag=tag, image=image), step)

    def flush(self) -> None:
        """Put every event added so far on disk."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        if self._open:
            self._writer.close()
            self._open = False

    def _write(self, value: Summary.Value, step: int) -> None:
        event = Event(wall_time=time.time(), step=int(step), summary=Summary(value=[value]))
        self._writer.write_event(event)
