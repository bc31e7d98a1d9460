"""`speakerlab diarize --live`: turns of audio on the standard input, printed as they are final.

The input is a WAV file or raw samples; both are 16-bit PCM.
"""

import logging
import os
import signal
import struct
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from speakerlab.bin.command import Parser, model_of
from speakerlab.core.counting import count_of
from speakerlab.diarization.regions import Turn, format_rttm

if TYPE_CHECKING:  # each imports its runtime
    from speakerlab.diarization.resegmentation import Segment
    from speakerlab.inference.speaker_model import SpeakerModel
    from speakerlab.inference.stream import Stream

log = logging.getLogger(__name__)
RECORDING = "stream"  # in the lines of RTTM
STDIN = "standard input"
MAX_READ_BYTES = 1 << 16
SAMPLE_BYTES = 2
# Options of `diarize` that need the whole recording, or files.
OFFLINE_OPTIONS = (
    "speakers",
    "min_speakers",
    "vad",
    "method",
    "development",
    "out",
    "words",
    "force",
)
# First bytes of other formats, which would be heard as noise.
OTHER_FORMATS = {
    b"fLaC": "FLAC",
    b"OggS": "Ogg",
    b"ID3": "MP3",
    b"FORM": "AIFF",
    b"RIFX": "RIFX",
    b".snd": "AU",
    b"caff": "CAF",
    b"\x1aE\xdf\xa3": "Matroska",
    b"NIST_1A": "NIST SPHERE",
}
FIX = "give 16-bit PCM, such as `ffmpeg -i FILE -f wav -`"
PCM, EXTENSIBLE = 1, 0xFFFE  # formats in the header of a WAV file
# Programs that cannot know the length state the largest one, or 0.
UNKNOWN_BYTES = 0x7FFF0000


def check_options(options: Parser, args: Namespace) -> None:
    """Refuse options that do not fit to `--live`, or need it."""
    if not args.live:
        for name in ("latency", "sample_rate"):
            if getattr(args, name) is not None:
                options.error(f"{_option(name)}: needs --live")
        if not args.files:
            options.error("FILE: is missing; --live reads the standard input instead")
        return
    if args.files:
        options.error(f"--live: reads the standard input, not {args.files[0]}")
    for name in OFFLINE_OPTIONS:
        if getattr(args, name) != options.get_default(name):
            reason = "needs whole recordings"
            if name in ("out", "force"):
                reason = "is for files"
            options.error(f"{_option(name)}: {reason}, and cannot be used with --live")
    if args.channel == "each":
        options.error("--channel: each needs whole recordings; give a number or mix")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def diarize_live(args: Namespace) -> None:
    """Print the turns of the audio on the standard input as lines of RTTM."""
    audio_input = _open_input(args.sample_rate)
    model = model_of(args)
    if args.known is not None:
        model.load_speakers(args.known)
    stream = _start(model, audio_input.sample_rate, args)
    started = time.monotonic()
    with _stopped_by_ctrl_c(audio_input):
        for wave_SC in audio_input.chunks():
            _print(stream.push(wave_SC))
    _print(stream.finish())
    seconds = time.monotonic() - started
    result = stream.diarization
    log.info(
        "%s: %s of %s in %.1f s of audio, read in %.1f s",
        RECORDING,
        count_of(len(result), "turn"),
        count_of(len(result.speakers), "speaker"),
        result.seconds,
        seconds,
    )
    if audio_input.is_stopped:
        raise KeyboardInterrupt
    if audio_input.fault:
        raise ValueError(audio_input.fault)


def _start(model: "SpeakerModel", sample_rate: int, args: Namespace) -> "Stream":
    options: dict[str, Any] = {}
    if args.latency is not None:
        options["latency"] = args.latency
    if args.segmentation is not None:
        from speakerlab.inference.segmentation import Segmentation

        options["segmentation"] = Segmentation(args.segmentation, device=args.device)
    return model.stream(
        sample_rate,
        max_speakers=args.max_speakers,
        threshold=args.threshold,
        known=args.known is not None,
        far=args.far,
        recording=RECORDING,
        channels=args.channel,
        **options,
    )


def _print(turns: "list[Segment]") -> None:
    """Print turns, so that a reader gets them now."""
    for turn in turns:
        name = "_".join(turn.speaker.split())
        line = format_rttm({RECORDING: [Turn(turn.start, turn.end, name)]})
        sys.stdout.write(line)
    if turns:
        sys.stdout.flush()


@dataclass
class AudioInput:
    """16-bit PCM on the standard input."""

    file: BinaryIO
    sample_rate: int
    num_channels: int
    num_bytes: int | None  # that the header states
    first_bytes: bytes  # read already
    fault: str = ""  # found at its end
    is_stopped: bool = False  # by Ctrl-C
    is_waiting: bool = False  # for the next bytes

    def stop(self, *_signal: object) -> None:
        """Stop at the end of what was read: the usual end of a live stream."""
        self.is_stopped = True
        # Only here, because nothing is lost by it.
        if self.is_waiting:
            raise KeyboardInterrupt

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield wave_SC, int16, as soon as it can be read; warn of an incomplete end."""
        frame_bytes = SAMPLE_BYTES * self.num_channels
        num_read = 0
        rest = self.first_bytes
        while True:
            if self.num_bytes is not None:
                # Behind the samples of a WAV file may be other data.
                rest = rest[: self.num_bytes - num_read]
            num_whole = len(rest) // frame_bytes * frame_bytes
            wave_S = np.frombuffer(rest[:num_whole], dtype="<i2")
            yield wave_S.astype(np.int16).reshape(-1, self.num_channels)
            num_read += num_whole
            rest = rest[num_whole:]
            if num_read == self.num_bytes:
                return
            data = b"" if self.is_stopped else self._read()
            if not data:
                break
            rest += data
        if self.is_stopped:
            return
        if self.num_bytes is not None:
            self.fault = (
                f"{STDIN}: ends after {num_read + len(rest)} of the {self.num_bytes}"
                " bytes that its header states; the turns are of these"
            )
        elif rest:
            log.warning(
                "%s: ends with a part of a sample, which is left out; check that it is"
                " 16-bit PCM",
                STDIN,
            )

    def _read(self) -> bytes:
        """Wait for bytes; return them, or b"" at the end and after Ctrl-C."""
        try:
            self.is_waiting = True
            return _read_some(self.file, MAX_READ_BYTES)
        except KeyboardInterrupt:
            return b""
        finally:
            self.is_waiting = False


@contextmanager
def _stopped_by_ctrl_c(audio_input: AudioInput) -> Iterator[None]:
    """Let Ctrl-C end the input instead of the command, so that what was heard is not lost."""
    before = signal.signal(signal.SIGINT, audio_input.stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _open_input(sample_rate: int | None) -> AudioInput:
    """Return the standard input behind the header of a WAV file, if it has one.

    sample_rate: of raw samples; None: there must be a header. Raises ValueError with one line.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise ValueError(f"{STDIN}: is closed; {FIX}")
    if sys.stdin.isatty():
        raise ValueError(f"{STDIN}: is a terminal; {FIX} | speakerlab diarize --live")
    file = sys.stdin.buffer
    start = _read_all(file, 12)
    if not start:
        raise ValueError(f"{STDIN}: is empty (0 bytes); {FIX}")
    for magic, name in OTHER_FORMATS.items():
        if start.startswith(magic):
            raise ValueError(f"{STDIN}: is {name}, not 16-bit PCM; {FIX}")
    if start[4:8] == b"ftyp":
        raise ValueError(f"{STDIN}: is MP4, not 16-bit PCM; {FIX}")
    if start[:4] in (b"RIFF", b"RF64") and start[8:] == b"WAVE":
        return _open_wav(file, sample_rate)
    if sample_rate is None:
        raise ValueError(
            f"{STDIN}: has no header of a WAV file; add --sample-rate HZ for raw 16-bit"
            " PCM of one channel"
        )
    return AudioInput(
        file=file,
        sample_rate=sample_rate,
        num_channels=1,
        num_bytes=None,
        first_bytes=start,
    )


def _open_wav(file: BinaryIO, sample_rate: int | None) -> AudioInput:
    """Read the header of a WAV file up to its samples."""
    num_channels = rate = 0
    while True:
        head = _read_all(file, 8)
        # Chunks have an even number of bytes.
        num_bytes = int.from_bytes(head[4:], "little")
        padded_bytes = num_bytes + num_bytes % 2
        is_data = head[:4] == b"data"
        content = b"" if is_data else _read_all(file, padded_bytes)
        if len(head) < 8 or (not is_data and len(content) < padded_bytes):
            raise ValueError(f"{STDIN}: ends within the header of a WAV file; {FIX}")
        if is_data:
            break
        if head[:4] == b"fmt ":
            num_channels, rate = _read_format(content)
    if not rate:
        raise ValueError(f"{STDIN}: has no format before the samples of a WAV file")
    if sample_rate not in (None, rate):
        raise ValueError(
            f"--sample-rate: the header says {rate} Hz, got {sample_rate}; leave it out"
        )
    is_known = 0 < num_bytes < UNKNOWN_BYTES
    # Only whole samples of all channels.
    num_bytes -= num_bytes % (SAMPLE_BYTES * num_channels)
    return AudioInput(
        file=file,
        sample_rate=rate,
        num_channels=num_channels,
        num_bytes=num_bytes if is_known else None,
        first_bytes=b"",
    )


def _read_format(content: bytes) -> tuple[int, int]:
    """Return the number of channels and the sample rate; refuse other samples than 16-bit PCM."""
    kind = bits = num_channels = rate = 0
    if len(content) >= 16:
        kind, num_channels, rate, _, _, bits = struct.unpack("<HHIIHH", content[:16])
    # The format follows in the first bytes of an identifier.
    if kind == EXTENSIBLE and len(content) >= 26:
        (kind,) = struct.unpack("<H", content[24:26])
    if kind != PCM or bits != 8 * SAMPLE_BYTES or not num_channels:
        raise ValueError(
            f"{STDIN}: has a WAV file of format {kind} with {bits} bits and"
            f" {count_of(num_channels, 'channel')}; {FIX}"
        )
    return num_channels, rate


def _read_some(file: BinaryIO, num_bytes: int) -> bytes:
    """Return up to so many bytes as soon as there are some; b"" at the end."""
    return os.read(file.fileno(), num_bytes)


def _read_all(file: BinaryIO, num_bytes: int) -> bytes:
    """Return so many bytes, fewer at the end."""
    parts: list[bytes] = []
    while num_bytes > 0:
        part = _read_some(file, min(num_bytes, MAX_READ_BYTES))
        if not part:
            break
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
