"""Decoders of recordings: libsndfile, and PyAV for what libsndfile cannot read.

The length in a header may be exact, an estimate, a placeholder, or missing. It never limits what is
read: a recording ends where its decoder finds no more sound. An exact length shows which files were
cut, and which continue behind it; PyAV reads these.
Letters: S samples, C channels.
"""

import io
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any

import numpy as np
import soundfile

from speakerlab.core.counting import count_of
from speakerlab.data.pyav import MAX_REST_SHARE, AvDecoder
from speakerlab.data.sources import (
    BinaryFile,
    count_rest,
    peek,
    refuse_cut,
    refuse_cut_ogg,
    size_of,
)

FULL_SCALE = 32768  # int16 value of amplitude 1.0
# libsndfile does not rescale floating-point files when asked for integers.
INTEGER_SUBTYPES = ("PCM_", "ULAW", "ALAW", "GSM", "IMA_ADPCM", "MS_ADPCM")
BLOCK_SAMPLES = 1 << 18  # decoded at a time
# A peak above 1 in floating-point samples is an overshoot, and is clipped. Above this value, the
# samples have another scale.
MAX_PEAK = 2.0
# Codes of libsndfile. The second is its answer to noise that looks like MP3.
UNKNOWN_FORMAT, NO_REGULAR_FILE = 1, 7
UNKNOWN_SAMPLES = 1 << 40  # libsndfile means that the header has no length
# Formats of samplers, pocket computers and MATLAB in which libsndfile does not notice a cut; some
# state no length.
UNCHECKED = ("AVR", "IRCAM", "MAT4", "MAT5", "MPC2K", "PAF", "PVF", "WVE", "XI")
# Formats whose samples depend on the decoder, so that a range must be read with the same one.
LOSSY = ("MP3", "OGG")
# Formats whose sound can be read without their header -> the order of its bytes.
BYTE_ORDERS = {"AIFF": "BIG", "AU": "BIG", "RF64": "LITTLE"}
# Formats without a header, which libsndfile recognises by the ending.
HEADERLESS = {".gsm": "GSM610", ".vox": "VOX_ADPCM"}
HEADERLESS_RATE = 8000  # Hz

# libsndfile silently shortens a file whose header states more bytes than there are; its log has
# both numbers. It ignores the number of samples of a SPHERE file.
STATED_BYTES = re.compile(
    r"^\s*(?:data|SSND|BODY|Data Size|riff|Riff size)\s*: (\d+) \(should be (\d+)\)",
    re.MULTILINE,
)
TRUNCATED = "Seems to be a truncated file."  # of VOC files
STATED_SAMPLES = re.compile(rb"^sample_count -i (\d+)", re.MULTILINE)
SPHERE_HEADER_BYTES = 1024
# Bytes behind the stated length: a few are padding.
MAX_PADDING_BYTES = 4096
MAX_PADDING_SHARE = 0.01

# The first frame of an MP3 file may hold flags and the numbers of frames and bytes.
XING = re.compile(rb"(?:Xing|Info)\0\0\0(.)(.{4})(.{4})", re.DOTALL)
HAS_FRAMES, HAS_BYTES = 1, 2
FIRST_FRAME_BYTES = 4096
ID3_HEADER_BYTES = 10
FAR = 1 << 40  # bytes
MPEG_1_RATE = 32000  # Hz; lower rates are of MPEG 2
MPEG_1_SAMPLES = 1152  # in a frame
MPEG_2_SAMPLES = 576
MAX_FRAMES = 64  # decoded at a time
MAX_FRAME_BYTES = 2000


class SndDecoder:
    """Recording that libsndfile decodes.

    stated_samples: the length in the header; None if it has none, or only an estimate.
    """

    def __init__(self, file: BinaryFile, where: str) -> None:
        self.file = file
        self.where = where
        self.sound = _open_sound(file, where)
        self.sample_rate: int = self.sound.samplerate
        self.num_channels: int = self.sound.channels
        self.stated_samples: int | None = self.sound.frames
        self.has_index = self.sound.has_index()
        # Of an MP3 file that is decoded frame by frame; else 0.
        self.frame_samples = 0
        self.position = 0  # sample that is decoded next
        # Whether an MP3 file is as long as its header states, in bytes.
        self.is_whole = False
        if self.sound.format == "MP3":
            self._measure_mp3()
        elif self.sound.frames >= UNKNOWN_SAMPLES:
            self.stated_samples = None
            self.has_index = False

    def can_seek(self, end: int) -> bool:
        """Return whether samples up to `end` can be read without those before them."""
        return self.has_index and end <= self.sound.frames

    def check_end(self) -> int:
        """Return the number of bytes behind the stated length that may be sound.

        Raises ValueError if the recording ends before.
        """
        self._refuse_shortened()
        if self.sound.format == "OGG":
            refuse_cut_ogg(self.file, self.where)
        num_samples = self.stated_samples
        if num_samples is None:
            return 0
        # Without samples, the file is at the beginning of its sound.
        if num_samples and not self.has_index:
            return 0
        if num_samples and not self._has_sample(num_samples - 1):
            if not self.is_whole:
                raise ValueError(
                    f"{self.where}: ends before the {num_samples} samples that its header"
                    " states; copy it again"
                )
            self._open_again(_handle(self.file))
            return 0
        return count_rest(self.file, self.file.tell())

    def blocks(
        self, start: int = 0, num_samples: int | None = None
    ) -> Iterator[np.ndarray]:
        """Yield blocks of int16, wave_SC: all, or a range that `can_seek` allows.

        Raises ValueError with one line if there are fewer samples.
        """
        wanted = self.stated_samples if num_samples is None else num_samples
        num_decoded = 0
        while wanted is None or num_decoded < wanted:
            block_samples = self._block_samples()
            if wanted is not None:
                block_samples = min(wanted - num_decoded, block_samples)
            try:
                # Seek also to sample 0: behind a damaged header of FLAC, a seek finds the sound,
                # and decoding without one stops. Whether a file can be read must not depend on
                # an earlier seek, such as that of `check_end`.
                if not num_decoded and (self.has_index or start != self.position):
                    self.sound.seek(start)
                wave_SC = self._read_int16(block_samples)
            except soundfile.LibsndfileError as error:
                # The last frame of an MP3 file is often incomplete.
                if block_samples == self.frame_samples:
                    break
                sample = start + num_decoded
                raise ValueError(
                    f"{self.where}: cannot be decoded after sample {sample}: '{error}';"
                    " copy it again"
                ) from error
            if not len(wave_SC):
                break
            num_decoded += len(wave_SC)
            yield wave_SC
        if wanted is None:
            self._refuse_rest(num_decoded)
        elif num_decoded < wanted:
            progress = f"after {num_decoded} of {wanted} samples"
            raise ValueError(f"{self.where}: ends early, {progress}; copy it again")

    def close(self) -> None:
        self.sound.close()

    def read_behind_header(self) -> None:
        """Take all bytes behind a header that states no samples for sound."""
        sound = self.sound
        order = sound.endian
        if order == "FILE":
            order = BYTE_ORDERS[sound.format]
        content = peek(self.file, self.file.tell(), size_of(self.file))
        self.file = io.BytesIO(content)
        self.sound = _Sound(
            self.file,
            format="RAW",
            subtype=sound.subtype,
            endian=order,
            samplerate=sound.samplerate,
            channels=sound.channels,
        )
        sound.close()
        self.stated_samples = self.sound.frames
        self.has_index = self.sound.has_index()
        self.position = 0

    def _measure_mp3(self) -> None:
        """Use the length of an MP3 file only if it is no estimate."""
        first_byte = _skip_id3(self.file)
        head = peek(self.file, first_byte, FIRST_FRAME_BYTES)
        match = XING.search(head)
        if match is not None:
            flags = match[1][0]
            num_frames = int.from_bytes(match[2], "big")
            num_bytes = int.from_bytes(match[3], "big")
            if flags & HAS_FRAMES and num_frames:
                present_bytes = size_of(self.file) - first_byte
                self.is_whole = bool(flags & HAS_BYTES) and num_bytes <= present_bytes
                return
        # libsndfile would read as far as an estimate from the first frames and the file's size.
        self._open_again(_Endless(self.file))

    def _open_again(self, file: Any) -> None:
        """Decode an MP3 file until its end."""
        self.sound.close()
        self.file.seek(0)
        self.sound = _Sound(file, closefd=False)
        self.position = 0
        self.stated_samples = None
        # Without the length, libsndfile seeks to about the right place.
        self.has_index = False
        is_mpeg_1 = self.sample_rate >= MPEG_1_RATE
        self.frame_samples = MPEG_1_SAMPLES if is_mpeg_1 else MPEG_2_SAMPLES

    def _block_samples(self) -> int:
        """Return the number of samples to decode next."""
        if not self.frame_samples:
            return BLOCK_SAMPLES
        # An incomplete frame loses its block, so blocks near the end are single frames.
        num_left = size_of(self.file) - self.file.tell()
        is_near_end = num_left < 2 * MAX_FRAMES * MAX_FRAME_BYTES
        return self.frame_samples * (1 if is_near_end else MAX_FRAMES)

    def _refuse_shortened(self) -> None:
        """Refuse a file that ends before the length in its header."""
        match = STATED_BYTES.search(self.sound.extra_info)
        if match is not None:
            stated = int(match[1])
            present = int(match[2])
            # Fewer bytes than a sample has are no sound.
            if (stated - present) * self.sound.frames >= present:
                refuse_cut(stated, present, "bytes", self.where)
        elif self.sound.format == "VOC" and TRUNCATED in self.sound.extra_info:
            raise ValueError(
                f"{self.where}: is cut short, after"
                f" {count_of(self.sound.frames, 'sample')}; copy it"
                " again"
            )
        elif self.sound.format == "NIST":
            header = peek(self.file, 0, SPHERE_HEADER_BYTES)
            match = STATED_SAMPLES.search(header)
            if match is not None:
                refuse_cut(int(match[1]), self.sound.frames, "samples", self.where)

    def _has_sample(self, sample: int) -> bool:
        self.position = sample + 1
        try:
            self.sound.seek(sample)
            return len(self.sound.read(1)) == 1
        except soundfile.LibsndfileError:
            return False

    def _refuse_rest(self, num_decoded: int) -> None:
        """Refuse a file without a stated length that libsndfile does not decode to its end."""
        num_rest = count_rest(self.file, self.file.tell())
        if num_rest > MAX_REST_SHARE * size_of(self.file):
            raise ValueError(
                f"{self.where}: cannot be decoded after sample {num_decoded}: {num_rest}"
                " bytes are no sound; copy it again"
            )

    def _read_int16(self, num_samples: int) -> np.ndarray:
        if self.sound.subtype.startswith(INTEGER_SUBTYPES):
            return self.sound.read(num_samples, dtype="int16", always_2d=True)
        wave_SC = self.sound.read(num_samples, dtype="float32", always_2d=True)
        magnitude_SC = np.abs(wave_SC)
        peak = float(magnitude_SC.max(initial=0.0))
        if not peak < np.inf:  # NaN is not
            raise ValueError(
                f"{self.where}: must hold finite samples, got NaN or infinity; make the"
                " recording again"
            )
        if peak > MAX_PEAK:
            raise ValueError(
                f"{self.where}: floating-point samples must be in [-1, 1], got {peak:g};"
                " divide them by their full scale"
            )
        return to_int16(wave_SC)


Decoder = SndDecoder | AvDecoder


@contextmanager
def open_decoder(
    file: BinaryFile, where: str, *, checks_end: bool = True
) -> Iterator[Decoder]:
    """Open a recording with libsndfile, or with PyAV where libsndfile does not read all of it.

    checks_end: look at the end of the file, too, and refuse it if it was cut.
    Raises ValueError with one line.
    """
    decoder = _choose(file, where, checks_end=checks_end)
    with closing(decoder):
        yield decoder


def to_int16(wave: np.ndarray) -> np.ndarray:
    """Convert amplitudes of any shape to 16-bit samples; values outside [-1, 1] are clipped."""
    rounded = np.rint(wave * FULL_SCALE)
    # An amplitude of 1.0 is 32768, one more than int16 holds.
    clipped = np.clip(rounded, -FULL_SCALE, FULL_SCALE - 1)
    return clipped.astype(np.int16)


def _choose(file: BinaryFile, where: str, *, checks_end: bool) -> Decoder:
    """Return the decoder that reads all of a recording; raise ValueError if there is none."""
    try:
        decoder = SndDecoder(file, where)
    except soundfile.LibsndfileError as error:
        # soundfile begins its messages with "Error opening <file>: ".
        reason = str(error).split(": ", 1)[-1]
        problem = f"is not readable audio: '{reason}'"
        # If libsndfile does not know the format, the message of PyAV says more.
        is_unknown = error.code in (UNKNOWN_FORMAT, NO_REGULAR_FILE)
        return AvDecoder(file, where, unreadable=None if is_unknown else problem)
    try:
        unread = _find_unread(decoder, checks_end=checks_end)
    except ValueError:
        decoder.close()
        raise
    if unread is None:
        return decoder
    decoder.close()
    problem, min_samples = unread
    return AvDecoder(file, where, unreadable=problem, min_samples=min_samples)


def _find_unread(decoder: SndDecoder, *, checks_end: bool) -> tuple[str, int] | None:
    """Return why libsndfile may not read all of a recording; None if it does.

    Beside the reason, return the number of samples that are sound in any case. Raises ValueError
    for a recording that no decoder shall read.
    """
    sound = decoder.sound
    if sound.format in UNCHECKED:
        raise ValueError(
            f"{decoder.where}: is a file of the format {sound.format_info}, in which a cut"
            " is not noticed; convert it to wav or flac"
        )
    if sound.subtype.startswith("MPEG") and sound.format != "MP3":
        return "holds MP3 in a wav file, whose length libsndfile only estimates", 0
    if not checks_end and sound.format not in LOSSY:
        return None

    num_rest = decoder.check_end()
    # A program that writes into a pipe cannot know the length, and states 0.
    states_nothing = decoder.stated_samples == 0
    if num_rest and states_nothing and decoder.sound.format in BYTE_ORDERS:
        decoder.read_behind_header()
        return None
    file_bytes = size_of(decoder.file)
    max_padding = max(MAX_PADDING_BYTES, MAX_PADDING_SHARE * file_bytes)
    # All sound is behind such a header, however short it is.
    if states_nothing:
        max_padding = 0
    if num_rest <= max_padding:
        return None
    # Without PyAV, a small rest is taken for no sound.
    is_small_rest = num_rest / file_bytes <= MAX_REST_SHARE
    if is_small_rest and find_spec("av") is None:
        return None
    num_stated = decoder.stated_samples or 0
    problem = f"has {num_rest} more bytes behind the {num_stated} samples of its header"
    return problem, num_stated


class _Sound(soundfile.SoundFile):
    """File of libsndfile, which is read forward from where `seek` went."""

    def seekable(self) -> bool:
        # soundfile reads no more than the stated length of files that it can seek in, and seeks
        # after every block.
        return False

    def has_index(self) -> bool:
        """Return whether `seek` works; it does not in GSM and some ADPCM."""
        return super().seekable()


class _Endless:
    """View of an MP3 file that seems to be very long.

    libsndfile estimates the length from the size, and reads no further.
    """

    def __init__(self, file: BinaryFile) -> None:
        self.file = file
        self.is_far = False

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.is_far = whence == os.SEEK_END and not offset
        if self.is_far:
            return FAR
        # Tags are read from the real end.
        if whence == os.SEEK_END:
            offset = max(0, size_of(self.file) + offset)
            whence = os.SEEK_SET
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return FAR if self.is_far else self.file.tell()

    def readinto(self, buffer: Any) -> int:
        return 0 if self.is_far else self.file.readinto(buffer)


def _open_sound(file: BinaryFile, where: str) -> _Sound:
    file.seek(0)
    handle = _handle(file)
    try:
        return _Sound(handle, closefd=False)
    except soundfile.LibsndfileError as error:
        subtype = HEADERLESS.get(PurePath(where).suffix.lower())
        if subtype is None or error.code != UNKNOWN_FORMAT:
            raise
    file.seek(0)
    return _Sound(
        handle,
        closefd=False,
        format="RAW",
        subtype=subtype,
        samplerate=HEADERLESS_RATE,
        channels=1,
    )


def _handle(file: BinaryFile) -> Any:
    """Return what libsndfile opens, without a name: it would look for ._NAME beside the file."""
    if isinstance(file, io.FileIO):
        return file.fileno()
    return file


def _skip_id3(file: BinaryFile) -> int:
    """Return the byte behind the ID3 tags at the start of a file."""
    position = 0
    while True:
        header = peek(file, position, ID3_HEADER_BYTES)
        if len(header) < ID3_HEADER_BYTES or not header.startswith(b"ID3"):
            return position
        num_bytes = 0
        for byte in header[6:]:
            num_bytes = (num_bytes << 7) + (byte & 0x7F)
        position += ID3_HEADER_BYTES + num_bytes
