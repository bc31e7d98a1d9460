"""Recordings that libsndfile cannot read, decoded with PyAV (extra `aac`), which has FFmpeg.

Letters: S samples, C channels.
"""

import errno
from collections.abc import Iterator
from shlex import quote
from typing import Any

import numpy as np

from speakerlab.data.sources import (
    BinaryFile,
    count_rest,
    find_wav_length,
    refuse_cut,
    refuse_cut_ogg,
    size_of,
)

# Formats that PyAV may open. Others of FFmpeg are lists of files or addresses to read, or do not
# say that a recording was cut. Its list of all formats is not used: it grows with every version.
FORMATS = (
    "mov,mp4,m4a,3gp,matroska,webm,aac,adts,loas,ac3,eac3,amr,aiff,ape,asf,au,avi,caf,flac,flv,mp3,"
    "mpeg,mpegts,nistsphere,ogg,tta,w64,wav,wv"
)
# Formats whose header has the duration of the sound; of others, FFmpeg estimates it.
WITH_DURATION = (
    "ape",
    "asf",
    "avi",
    "flac",
    "matroska",
    "mov",
    "nistsphere",
    "tta",
    "wv",
)
# Codecs add samples at the ends, which some headers count.
SLACK_SHARE = 0.02
SLACK_SECONDS = 0.3
# Formats without marks within the sound: other bytes behind it may be sound, too.
UNMARKED = ("aiff", "au", "caf", "w64", "wav")
MAX_REST_SHARE = 0.1
MICROSECONDS = 1_000_000


class AvDecoder:
    """Recording that PyAV decodes, from its start.

    unreadable: the problem of a file that PyAV does not decode; None: as PyAV states it.
    min_samples: what cannot be decoded after so many samples is no sound.
    Raises ValueError with one line, also if PyAV is not installed.
    """

    stated_samples: int | None = None  # only what is decoded counts

    def __init__(
        self,
        file: BinaryFile,
        where: str,
        *,
        unreadable: str | None = None,
        min_samples: int = 0,
    ) -> None:
        try:
            import av
            from av.error import FFmpegError
        except ImportError:
            problem = unreadable or "is not a format that libsndfile reads"
            raise ValueError(
                f"{where}: {problem}; pip install av, which reads more formats, or"
                " convert it to 16-bit wav or flac"
            ) from None
        self.file = file
        self.where = where
        self.min_samples = min_samples
        # ValueError of the resampler: the rate or the number of channels changes.
        self.faults = (FFmpegError, ValueError)
        self.last_byte = 0  # behind the last packet
        # FFmpeg does not report a wav file that was cut.
        wav_length = find_wav_length(file)
        if wav_length is not None:
            stated, present = wav_length
            refuse_cut(stated, present, "bytes", where)
        file.seek(0)
        # PyAV opens no other files that this one refers to.
        options = {"format_whitelist": FORMATS, "protocol_whitelist": "file"}
        try:
            self.container: Any = av.open(_Seekable(file), "r", options=options)
        except self.faults as error:
            problem = unreadable or f"is not readable audio: '{_reason(error)}'"
            # FFmpeg knows the format, and FORMATS lacks it.
            if unreadable is None and getattr(error, "errno", None) == errno.EINVAL:
                problem = "is not readable audio: of a format that is not read"
            raise ValueError(
                f"{where}: {problem}; convert it to 16-bit wav or flac"
            ) from error
        self.to_int16 = _int16_converter()
        self.frames = self._decode()
        if self.container.format.name == "ogg":
            refuse_cut_ogg(file, where)
        # The first frame has the rate and the channels, and proves that there is sound.
        self.first = self._next_frame(0)
        if self.first is None:
            self.close()
            problem = unreadable or "holds no sound"
            raise ValueError(f"{where}: {problem}; give a recording")
        self.sample_rate: int = self.first.sample_rate
        self.num_channels: int = self.first.layout.nb_channels

    def can_seek(self, end: int) -> bool:
        """Return False: samples cannot be decoded without those before them."""
        return False

    def blocks(
        self, start: int = 0, num_samples: int | None = None
    ) -> Iterator[np.ndarray]:
        """Yield blocks of int16, wave_SC, from the start to the end."""
        assert not start and num_samples is None
        num_decoded = 0
        frame = self.first
        while frame is not None:
            num_decoded += frame.samples
            yield frame.to_ndarray().reshape(-1, self.num_channels)
            frame = self._next_frame(num_decoded)
        self._refuse_cut(num_decoded)
        self._refuse_rest(num_decoded)

    def close(self) -> None:
        self.container.close()

    def _decode(self) -> Iterator[Any]:
        """Yield the frames as int16."""
        if not self.container.streams.audio:
            return
        fault: Exception | None = None
        num_decoded = 0
        for packet in self.container.demux(audio=0):
            if packet.pos is not None:
                self.last_byte = max(self.last_byte, packet.pos + packet.size)
            # The last packet of a file that a recorder or a stream made is often incomplete. Behind
            # the end that the header states, there may be tags as well as sound.
            is_behind = 0 < self.min_samples <= num_decoded
            if fault is not None and packet.size and not is_behind:
                raise fault
            try:
                coded_frames = packet.decode()
            except self.faults as error:
                fault = error
                continue
            for frame in coded_frames:
                num_decoded += frame.samples
                yield from self.to_int16.resample(frame)
        if fault is not None and not num_decoded:
            raise fault

    def _next_frame(self, num_decoded: int) -> Any:
        """Return the next frame; None at the end."""
        try:
            return next(self.frames, None)
        except self.faults as error:
            raise ValueError(
                f"{self.where}: cannot be decoded after sample {num_decoded}:"
                f" '{_reason(error)}'; copy it again"
            ) from error

    def _refuse_cut(self, num_decoded: int) -> None:
        """Raise ValueError if there is less sound than the header states."""
        seconds = num_decoded / self.sample_rate
        stated_seconds = self._stated_seconds()
        slack_seconds = SLACK_SECONDS + SLACK_SHARE * stated_seconds
        if seconds + slack_seconds < stated_seconds:
            raise ValueError(
                f"{self.where}: is cut short, after {seconds:.2f} of"
                f" {stated_seconds:.2f} s; copy it again"
            )

    def _stated_seconds(self) -> float:
        """Return the duration of the sound in the header; 0.0 if it has none."""
        container = self.container
        stream = container.streams.audio[0]
        if container.format.name == "caf":
            return stream.frames / self.sample_rate
        if not container.format.name.startswith(WITH_DURATION):
            return 0.0
        if stream.duration is not None:
            return float(stream.duration * stream.time_base)
        # The duration of the file may be longer: that of its pictures.
        if container.duration is not None and len(container.streams) == 1:
            return container.duration / MICROSECONDS
        return 0.0

    def _refuse_rest(self, num_decoded: int) -> None:
        """Raise ValueError if many bytes behind the sound may be sound, too."""
        if self.container.format.name not in UNMARKED:
            return
        num_rest = count_rest(self.file, self.last_byte)
        if num_rest <= MAX_REST_SHARE * size_of(self.file):
            return
        fix = "write it again with the program that made it, or remove them"
        if self.container.format.name == "wav":
            command = f"ffmpeg -ignore_length 1 -i {quote(self.where)} OUT.wav"
            fix = f"if they are sound, run {command}"
        raise ValueError(
            f"{self.where}: has {num_rest} more bytes behind the {num_decoded} samples"
            f" that its header states; {fix}"
        )


def _int16_converter() -> Any:
    """Return a converter to 16 bits, without threads; rate and channels stay.

    The channels of a sample lie together, because PyAV reads beyond the memory of a frame that has
    more than eight planes.
    """
    import av

    make: Any = av.AudioResampler
    # PyAV 19 ends the threads of a converter when Python collects garbage. If that happens in a
    # data worker, forked meanwhile, it waits for threads that it does not have, for ever.
    try:
        return make(format="s16", threads=1)
    except TypeError:  # older versions end them at once
        return make(format="s16")


class _Seekable:
    """View of a file for FFmpeg, without a name.

    In a damaged file, FFmpeg goes to places that cannot be; PyAV would print the error.
    """

    def __init__(self, file: BinaryFile) -> None:
        self.file = file
        self.read = file.read
        self.tell = file.tell

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return self.file.seek(offset, whence)
        except (OSError, ValueError):
            return -errno.EINVAL


def _reason(error: Exception) -> str:
    """Return the message of an error of PyAV, without the file name that PyAV adds."""
    return getattr(error, "strerror", None) or str(error)
