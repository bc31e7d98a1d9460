"""TensorBoard files in `exp/<name>/tensorboard`; no step appears twice after a resume.

Written here and not by tensorboard's own writer, because that one loses what it holds on the first
write that fails, and its thread ends in a traceback. Letters: N points, D embedding.
"""

import io
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue] # made when it is imported
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.record_writer import RecordWriter

from speakerlab.core.atomic import write_text
from speakerlab.training.appended import AppendedFile

log = logging.getLogger(__name__)
PREFIX = "events.out.tfevents"
MAX_POINTS = 2000  # of the projector: more are slow in a browser
PROJECTOR = """embeddings {
  tensor_name: "validation"
  tensor_path: "projector/tensors.tsv"
  metadata_path: "projector/metadata.tsv"
}
"""


@dataclass(frozen=True)
class Pictures:
    """What a validation shows besides its numbers; `det_png` is None if it cannot be drawn."""

    det_png: bytes | None
    emb_ND: np.ndarray
    speakers: Sequence[str]
    utterances: Sequence[str]


class Events:
    """One file of events; TensorBoard drops steps after `start_step` from earlier files."""

    def __init__(self, folder: Path, *, start_step: int) -> None:
        self.folder = folder
        # Files are read in the order of their names. The clock alone does not order them: a run
        # may resume within the second, or on a host whose clock is behind.
        times = [int(path.name.split(".")[3]) for path in folder.glob(f"{PREFIX}.*")]
        stamp = max([int(time.time()), *(before + 1 for before in times)])
        name = f"{PREFIX}.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self.file = AppendedFile(folder / name)
        self._append(Event(file_version="brain.Event:2"))
        restart = SessionLog(status=SessionLog.START)
        self._append(Event(step=start_step + 1, session_log=restart))

    def add_scalars(self, step: int, group: str, values: Mapping[str, float]) -> None:
        """Add one number per name."""
        found = [Summary.Value(tag=f"{group}/{k}", simple_value=v) for k, v in values.items()]
        self._append(Event(step=step, summary=Summary(value=found)))

    def add_pictures(self, step: int, pictures: Pictures) -> None:
        """Add the DET curve of this step, and replace the embeddings."""
        if pictures.det_png is not None:
            value = Summary.Value(tag="valid/det", image=_image(pictures.det_png))
            self._append(Event(step=step, summary=Summary(value=[value])))
        try:
            _write_projector(self.folder, pictures)
        except OSError as error:
            log.warning("%s/projector: not written: %s", self.folder, error.strerror)

    def close(self) -> None:
        self.file.close()

    def _append(self, event: Event) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self.file.append(record.getvalue())


def _image(png: bytes) -> Summary.Image:
    """Return a PNG with the size in its first chunk; colorspace 4: RGBA."""
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    return Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)


def _write_projector(folder: Path, pictures: Pictures) -> None:
    """Write a table of embeddings and one of names, always to the same files."""
    emb_ND = pictures.emb_ND
    chosen = np.linspace(0, len(emb_ND) - 1, min(len(emb_ND), MAX_POINTS)).round().astype(int)
    points = ["\t".join(f"{value:.5g}" for value in emb_ND[row]) for row in chosen]
    names = [f"{pictures.speakers[row]}\t{pictures.utterances[row]}" for row in chosen]
    write_text(folder / "projector" / "tensors.tsv", "\n".join(points) + "\n")
    write_text(folder / "projector" / "metadata.tsv", "\n".join(["speaker\tutterance", *names, ""]))
    write_text(folder / "projector_config.pbtxt", PROJECTOR)
