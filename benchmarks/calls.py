"""Diarization of simulated calls whose turns are known.

    python benchmarks/calls.py --model MODEL --data DIR DIR    # --calls 10 --only usual --json FILE

DIR: a folder with a folder of recordings of each speaker, as in LibriSpeech. A call has a speaker
or more on each channel. Lines follow each other after a pause, or begin before the line of the
other side ends. Each channel has noise and cross-talk, a later, quieter and filtered copy of the
others. The true turns are the speech that the energy of the clean sentences shows. A row has the
DER in %, without a collar, overlap scored, with the number of speakers given and found, and the
calls in which each channel has the right number. The same seed gives the same calls.
Letters: S samples, C channels, R samples of a filter's response.
"""

import argparse
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.fft import next_fast_len
from scipy.signal import firwin, oaconvolve
from sides import say

import speakerlab
from speakerlab.core.atomic import write_json
from speakerlab.data.convert import spool_wave
from speakerlab.diarization.regions import Turn
from speakerlab.diarization.scoring import Errors, score, total
from speakerlab.frontend.augment.codec import LOWEST_OCTAVES, OFFSETS, through_g711
from speakerlab.frontend.vad import LOUDEST, NOISE
from speakerlab.inference.diarize import diarize
from speakerlab.inference.speech import energy_detector, find_speech

SEED = 1
SOURCE_RATE = 16000  # Hz, of the sentences
MAX_LINE_SECONDS = 7.0
MIN_SENTENCES = 4  # of a speaker
MIN_CLEAN_DB = 40.0  # from the pauses of a sentence to its loudest frames
OVERLAP_PROB = 0.6  # of the lines after one of the other side
OVERLAP_SECONDS = (0.5, 4.0)  # range
PAUSE_SECONDS = (0.3, 1.5)  # range
LINE_DBFS = -26.0  # level of the speech of a line
SPEAKER_DB = 3.0  # a speaker is up to so much louder or quieter
RESPONSE_SECONDS = 0.02  # of the filter of cross-talk
SIDE_SECONDS = 30.0  # of lines on each channel
AUDIO_ENDINGS = (".flac", ".wav")

Sentences = Mapping[str, Sequence[np.ndarray]]  # speaker -> wave_S, float32, of each


@dataclass(frozen=True)
class Setting:
    """How calls sound."""

    speakers: tuple[int, ...] = (1, 1)  # on each channel
    rate: int = SOURCE_RATE
    cross_talk_db: float | None = -25.0
    delay_seconds: float = 0.02  # of cross-talk
    snr_db: float = 30.0  # of the noise of each channel
    voice_db: tuple[float, ...] = (0.0, 0.0, 0.0)  # of the voices, before cross-talk
    line_db: tuple[float, ...] = (0.0, 0.0, 0.0)  # of the channels, after cross-talk
    law: int | None = None  # of G.711: 0 mu-law, 1 A-law
    is_copied: bool = False  # both channels have the sum
    silent: tuple[int, ...] = ()  # channels whose speakers say nothing
    music_db: float | None = None  # on the second channel, in its first half


# The rows of the table in docs/diarization.md.
SETTINGS: Mapping[str, Setting] = {
    "usual": Setting(),
    "no cross-talk": Setting(cross_talk_db=None),
    "cross-talk -15 dB": Setting(cross_talk_db=-15.0),
    "cross-talk -20 dB": Setting(cross_talk_db=-20.0),
    "cross-talk -30 dB": Setting(cross_talk_db=-30.0),
    "cross-talk -40 dB": Setting(cross_talk_db=-40.0),
    "delay 0 ms": Setting(delay_seconds=0.0),
    "delay 5 ms": Setting(delay_seconds=0.005),
    "delay 50 ms": Setting(delay_seconds=0.05),
    "noise at 20 dB": Setting(snr_db=20.0),
    "noise at 15 dB": Setting(snr_db=15.0),
    "8 kHz": Setting(rate=8000),
    "8 kHz, mu-law": Setting(rate=8000, law=0),
    "8 kHz, A-law": Setting(rate=8000, law=1),
    "second channel silent": Setting(silent=(1,)),
    "channel 2 10 dB quieter": Setting(line_db=(0.0, -10.0)),
    "channel 2 20 dB quieter": Setting(line_db=(0.0, -20.0)),
    "channel 2 30 dB quieter": Setting(line_db=(0.0, -30.0)),
    "voice 2 10 dB quieter": Setting(voice_db=(0.0, -10.0)),
    "voice 2 20 dB quieter": Setting(voice_db=(0.0, -20.0)),
    "copied channels": Setting(is_copied=True),
    "three channels": Setting(speakers=(1, 1, 1)),
    "two speakers on channel 1": Setting(speakers=(2, 1)),
    "music on channel 2": Setting(music_db=-5.0),
}


class Call(NamedTuple):
    """Simulated call and its turns."""

    wave_SC: np.ndarray  # int16
    rate: int
    turns: list[Turn]  # of speakers "channel1-a" and so on
    speakers: tuple[int, ...]  # on each channel


def read_sentences(folders: Sequence[Path]) -> dict[str, list[np.ndarray]]:
    """Return the clean sentences of each speaker, whose folder is directly in one of the folders.

    In pauses as loud as quiet speech, the true turns would be a matter of taste.
    """
    sentences: dict[str, list[np.ndarray]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix not in AUDIO_ENDINGS:
                continue
            wave_S = spool_wave(path, sample_rate=SOURCE_RATE)
            level_T = energy_detector(SOURCE_RATE).levels_dbfs(wave_S)
            noise, loudest = np.percentile(level_T, [NOISE, LOUDEST])
            if loudest - noise >= MIN_CLEAN_DB:
                speaker = path.relative_to(folder).parts[0]
                sentences.setdefault(speaker, []).append(trim(wave_S))
    return {
        name: waves for name, waves in sentences.items() if len(waves) >= MIN_SENTENCES
    }


def trim(wave_S: np.ndarray) -> np.ndarray:
    """Return a sentence without the silence at its ends, at most MAX_LINE_SECONDS, float32."""
    first = 0
    last = len(wave_S)
    regions = find_speech(wave_S, sample_rate=SOURCE_RATE)
    if regions:
        speech_start, _ = regions[0]
        _, speech_end = regions[-1]
        first = round(speech_start * SOURCE_RATE)
        last = round(speech_end * SOURCE_RATE)
    max_samples = round(MAX_LINE_SECONDS * SOURCE_RATE)
    last = min(last, first + max_samples)
    return np.array(wave_S[first:last], dtype=np.float32)


def make_call(sentences: Sentences, setting: Setting, key: Sequence[int]) -> Call:
    """Simulate a call; key: of its random numbers."""
    # The voices and the lines do not depend on the setting, so that rows can be compared.
    rng = np.random.default_rng(key)
    num_channels = len(setting.speakers)
    lines = _draw_lines(sentences, setting, rng)
    num_samples = max(start + len(wave_S) for start, wave_S, _, _ in lines)
    num_samples += SOURCE_RATE // 2

    voice_CS = np.zeros((num_channels, num_samples))
    clean_of: dict[str, np.ndarray] = {}
    for start, wave_S, channel, speaker in lines:
        if channel in setting.silent:
            continue
        clean_S = clean_of.setdefault(speaker, np.zeros(num_samples))
        clean_S[start : start + len(wave_S)] += wave_S
        gain = 10 ** (setting.voice_db[channel] / 20)
        voice_CS[channel, start : start + len(wave_S)] += gain * wave_S
    turns: list[Turn] = []
    for speaker, clean_S in clean_of.items():
        spoken = find_speech(clean_S.astype(np.int16), sample_rate=SOURCE_RATE)
        turns += [Turn(start, end, speaker) for start, end in spoken]

    rng = np.random.default_rng([*key, 1])
    if setting.music_db is not None:
        music_S = play_music(rng, num_samples // 2)
        level = 10 ** ((LINE_DBFS + setting.music_db) / 20) * 32768
        voice_CS[1, : len(music_S)] += level * music_S
    heard_CS = voice_CS.copy()
    for channel in range(num_channels):
        for other in range(num_channels):
            if other != channel and setting.cross_talk_db is not None:
                leak_S = leak(voice_CS[other], setting, rng)
                heard_CS[channel] += leak_S
    noise_db = LINE_DBFS - setting.snr_db
    for channel in range(num_channels):
        voice_db = setting.voice_db[channel]
        noise_S = pink_noise(rng, num_samples)
        heard_CS[channel] += 10 ** ((noise_db + voice_db) / 20) * 32768 * noise_S
        heard_CS[channel] *= 10 ** (setting.line_db[channel] / 20)
    if setting.is_copied:
        heard_CS[:] = heard_CS.sum(axis=0)
    waves = [transmit(heard_S, setting) for heard_S in heard_CS]
    return Call(np.stack(waves, axis=1), setting.rate, turns, setting.speakers)


Line = tuple[int, np.ndarray, int, str]  # first sample, samples, channel, speaker


def _draw_lines(
    sentences: Sentences, setting: Setting, rng: np.random.Generator
) -> list[Line]:
    """Draw who says what when."""
    names = rng.permutation(sorted(sentences)).tolist()
    voices: list[list[tuple[str, float, list[np.ndarray]]]] = []
    for channel, num_speakers in enumerate(setting.speakers, start=1):
        voices_here: list[tuple[str, float, list[np.ndarray]]] = []
        for letter in "abcdef"[:num_speakers]:
            name = names.pop()
            left = [sentences[name][k] for k in rng.permutation(len(sentences[name]))]
            level_db = LINE_DBFS + rng.uniform(-SPEAKER_DB, SPEAKER_DB)
            voices_here.append((f"channel{channel}-{letter}", level_db, left))
        voices.append(voices_here)

    lines: list[Line] = []
    seconds_C = np.zeros(len(voices))
    ends_C = np.zeros(len(voices))
    last = -1
    # Until each channel has its seconds, or its speakers have no sentence left.
    while True:
        open_channels: list[int] = []
        for channel, voices_here in enumerate(voices):
            has_line = any(left for _, _, left in voices_here)
            if has_line and seconds_C[channel] < SIDE_SECONDS:
                open_channels.append(channel)
        if not open_channels:
            return lines
        channel = int(rng.choice(open_channels))
        with_lines = [voice for voice in voices[channel] if voice[2]]
        name, level_db, left = with_lines[int(rng.integers(len(with_lines)))]
        wave_S = at_level(left.pop(), level_db)
        gap = rng.uniform(*PAUSE_SECONDS)
        if channel != last and rng.random() < OVERLAP_PROB:
            gap = -rng.uniform(*OVERLAP_SECONDS)
        start = max(ends_C.max() + gap, ends_C[channel] + PAUSE_SECONDS[0], 0.0)
        ends_C[channel] = start + len(wave_S) / SOURCE_RATE
        seconds_C[channel] += len(wave_S) / SOURCE_RATE
        lines.append((round(start * SOURCE_RATE), wave_S, channel, name))
        last = channel


def at_level(wave_S: np.ndarray, level_db: float) -> np.ndarray:
    """Return a sentence whose speech has a level in dB of full scale."""
    wave_S = wave_S - wave_S.mean()
    speech: list[np.ndarray] = []
    for start, end in find_speech(
        wave_S.astype(np.int16),
        sample_rate=SOURCE_RATE,
    ):
        speech.append(wave_S[round(start * SOURCE_RATE) : round(end * SOURCE_RATE)])
    speech_S = np.concatenate(speech) if speech else wave_S
    root_mean_square = np.sqrt(np.mean(speech_S**2))
    return 10 ** (level_db / 20) * 32768 / root_mean_square * wave_S


def leak(wave_S: np.ndarray, setting: Setting, rng: np.random.Generator) -> np.ndarray:
    """Return what another channel hears of a voice: later, quieter, filtered, reverberant."""
    num_samples = round(RESPONSE_SECONDS * SOURCE_RATE)
    decay_R = np.exp(-5.0 * np.arange(num_samples) / num_samples)
    response_R = 0.3 * decay_R * rng.standard_normal(num_samples)
    response_R[0] = 1.0
    band_R = np.asarray(firwin(129, [250, 3600], pass_zero=False, fs=SOURCE_RATE))
    response_R = np.convolve(response_R, band_R)
    heard_S = oaconvolve(wave_S, response_R)
    # The band filter has a delay of its own.
    delay = round(setting.delay_seconds * SOURCE_RATE)
    heard_S = np.pad(heard_S[len(band_R) // 2 :], (delay, 0))[: len(wave_S)]
    if setting.cross_talk_db is None or not heard_S.any():
        return 0 * wave_S
    gain = np.sqrt(np.mean(wave_S**2) / np.mean(heard_S**2))
    return 10 ** (setting.cross_talk_db / 20) * gain * heard_S


def pink_noise(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Return noise of power 1 whose power falls by 3 dB an octave."""
    # The transform of a prime length takes long.
    length = next_fast_len(num_samples, real=True) or num_samples
    spectrum_F = np.fft.rfft(rng.standard_normal(length))
    frequency_F = np.fft.rfftfreq(length, 1 / SOURCE_RATE)
    spectrum_F /= np.sqrt(np.maximum(frequency_F, 50.0))
    noise_S = np.fft.irfft(spectrum_F, length)[:num_samples]
    return noise_S / noise_S.std()


def play_music(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Return music on hold of power 1: three plucked notes at a time, of a major scale."""
    scale = np.array([0, 2, 4, 5, 7, 9, 11])
    beat = SOURCE_RATE * 2 // 5
    time_S = np.arange(3 * beat) / SOURCE_RATE
    music_S = np.zeros(num_samples + len(time_S))
    for start in range(0, num_samples, beat):
        root = int(rng.integers(7))
        for degree in (root, root + 2, root + 4):
            semitones = scale[degree % 7] + 12 * (degree // 7)
            pitch = 220 * 2 ** (semitones / 12)
            for harmonic in range(1, 6):
                note_S = np.sin(2 * np.pi * harmonic * pitch * time_S) / harmonic
                note_S *= np.exp(-3 * time_S)
                music_S[start : start + len(time_S)] += note_S
    music_S = music_S[:num_samples]
    return music_S / music_S.std()


def transmit(wave_S: np.ndarray, setting: Setting) -> np.ndarray:
    """Return a channel as recorded, int16: at its rate, after the codec of a telephone."""
    limited_S = np.clip(np.round(wave_S), -32768, 32767).astype(np.int16)
    if setting.rate != SOURCE_RATE:
        spooled_S = spool_wave(
            limited_S, sample_rate=setting.rate, source_rate=SOURCE_RATE
        )
        limited_S = np.array(spooled_S)
    if setting.law is None:
        return limited_S
    decoded_1S = through_g711(
        torch.from_numpy(limited_S[None] / np.float32(32768)),
        offset_R1=torch.tensor([[OFFSETS[setting.law]]]),
        lowest_R1=torch.tensor([[LOWEST_OCTAVES[setting.law]]]),
    )
    return (decoded_1S[0].numpy() * 32767).round().astype(np.int16)


class EmbeddedOnce:
    """Model that keeps the embeddings of windows, for runs with other numbers of speakers."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.emb_of: dict[bytes, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def embed_many(self, reads: Sequence[Any], **options: Any) -> np.ndarray:
        waves = [read() for read in reads]
        digest = hashlib.sha256(b"".join(wave_S.tobytes() for wave_S in waves)).digest()
        if digest not in self.emb_of:
            self.emb_of[digest] = self.model.embed_many(waves, **options)
        return self.emb_of[digest]


def measure(
    model: Any, sentences: Sentences, name: str, *, num_calls: int, **options: Any
) -> dict[str, Any]:
    """Diarize the calls of a setting; options: of `diarize`, such as `vad`."""
    setting = SETTINGS[name]
    given: list[Errors] = []
    found: list[Errors] = []
    num_right = 0
    for number in range(num_calls):
        call = make_call(sentences, setting, [SEED, number])
        once = EmbeddedOnce(model)
        true_counts = count_speakers(turn.speaker for turn in call.turns)
        if setting.is_copied:
            # Both channels have the sum: all speakers are on the first.
            true_counts = Counter({"channel1": sum(setting.speakers)})
        numbers: list[int | None] = [None]
        # The option holds for each channel.
        if len({*true_counts.values()}) == 1:
            numbers.append(max(true_counts.values()))
        for num_speakers in numbers:
            result = diarize(
                once,
                call.wave_SC,
                call.rate,
                channels="each",
                num_speakers=num_speakers,
                recording=f"call{number}",
                **options,
            )
            errors = score(call.turns, [Turn(*segment[:3]) for segment in result])
            if num_speakers is None:
                found.append(errors)
                num_right += count_speakers(result.speakers) == true_counts
            else:
                given.append(errors)
    return {
        "name": name,
        "calls": num_calls,
        "der_given": total(given).der if given else None,
        "der_found": total(found).der,
        "worst_found": max(errors.der or 0.0 for errors in found),
        "right": num_right,
    }


def count_speakers(names: Iterable[str]) -> Counter[str]:
    """Return the number of speakers on each channel, whose name begins theirs."""
    return Counter(name.partition("-")[0] for name in {*names})


def main() -> None:
    options = parse()
    for name in options.only:
        if name not in SETTINGS:
            raise SystemExit(f"--only: must be of {', '.join(SETTINGS)}, got {name}")
    sentences = read_sentences(options.data)
    model = speakerlab.load(options.model, device="cpu")
    # The warnings of telephone rates and of copied channels are of what is simulated.
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = []
    for name in options.only or SETTINGS:
        row = measure(model, sentences, name, num_calls=options.calls, vad=options.vad)
        rows.append(row)
        say(describe(row))
        if options.json is not None:
            write_json(options.json, {"rows": rows})


def describe(row: Mapping[str, Any]) -> str:
    """Return the line of a row."""
    given = "   -"
    if row["der_given"] is not None:
        given = f"{100 * row['der_given']:4.1f}"
    return (
        f"{row['name']:26} DER {given} % given, {100 * row['der_found']:4.1f} % found"
        f" (worst {100 * row['worst_found']:4.1f} %), right number in"
        f" {row['right']} of {row['calls']}"
    )


def parse() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", required=True, help="model folder or hub:NAME")
    options.add_argument("--data", required=True, nargs="+", type=Path)
    options.add_argument("--calls", default=10, type=int, help="of each row")
    options.add_argument("--only", default=[], nargs="+", help="rows")
    options.add_argument("--vad", default="energy", choices=("energy", "silero"))
    options.add_argument("--json", type=Path)
    return options.parse_args()


if __name__ == "__main__":
    main()
