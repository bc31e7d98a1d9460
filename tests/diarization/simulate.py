"""Simulate conversations of real speakers, with rooms and noise, and write their true turns.

    python tests/diarization/simulate.py --data DIR --rirs DIR --noise DIR --out DIR

--data: checked data directories (`speakerlab check`) of single speakers, who are in no training;
--rirs, --noise: folders of wav or flac files. --out gets `wav/NAME.flac`, `wav.scp` and `ref.rttm`:
conversations of 2, 3, 4, 5, 2, ... speakers, with 20 s for each of them. Who speaks when is drawn
as in the training of segmentation networks (data/conversations.py); about 16 % of the speech has
two or more speakers. A turn is true where the clean utterance has energy. All speakers of a
conversation are in one room. Every draw follows from --seed and the number of the conversation.
Shape suffix: S samples, R samples of a room impulse response.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
from scipy.signal import oaconvolve

from speakerlab.data.conversations import ConversationCrops, FrameGrid, Style
from speakerlab.data.manifest import Manifest, read_manifest
from speakerlab.diarization.regions import Turn, merge_regions, write_rttm
from speakerlab.inference.speech import find_speech

RATE = 16000
NUM_SPEAKERS = (2, 3, 4, 5)  # in turn
SECONDS_EACH = 20.0  # of a conversation, for each of its speakers
SNR_DB = (10.0, 25.0)  # range
LEAD_SECONDS = 0.0025  # of a response, before its direct sound
PEAK = 0.9


def converse(
    manifest: Manifest, number: int, *, seed: int
) -> tuple[np.ndarray, list[Turn]]:
    """Return wave_S, without a room and noise, and the true turns of a conversation."""
    num_speakers = NUM_SPEAKERS[number % len(NUM_SPEAKERS)]
    find = partial(find_speech, sample_rate=RATE)
    crops = ConversationCrops(
        manifest,
        {},
        crop_samples=round(num_speakers * SECONDS_EACH * RATE),
        grid=FrameGrid(num_frames=1, first=0, hop=1),
        references=[None] * len(manifest.parts),
        style=Style(speakers=(num_speakers, num_speakers)),
        find_speech=find,
        seed=seed,
    )
    row = int(np.random.default_rng([seed, number]).integers(len(manifest)))
    crop = crops.draw((0, number, row))
    wave_S = crops.read(crop).wave_S
    assert wave_S is not None

    regions_of: dict[str, list[tuple[float, float]]] = {}
    for turn in crop.turns:
        speaker = manifest.speakers[int(manifest.speaker_N[turn.row])]
        utterance_S = manifest.read(turn.row, 0, int(manifest.num_samples_N[turn.row]))
        # The part of the utterance that is spoken, in the time of the conversation.
        offset = (turn.start - turn.first) / RATE
        first = max(turn.start / RATE, 0.0)
        last = min((turn.start + turn.num_samples) / RATE, crops.crop_samples / RATE)
        for start, end in find(utterance_S):
            start = max(start + offset, first)
            end = min(end + offset, last)
            if start < end:
                regions_of.setdefault(speaker, []).append((start, end))
    turns: list[Turn] = []
    for speaker, regions in regions_of.items():
        for start, end in merge_regions(regions):
            turns.append(Turn(round(start, 3), round(end, 3), speaker))
    return wave_S / 32768, sorted(turns)


def add_room_and_noise(
    wave_S: np.ndarray,
    rooms: Sequence[np.ndarray],
    noises: Sequence[np.ndarray],
    rng: np.random.Generator,
) -> np.ndarray:
    """Return a wave in one of the rooms, with one of the noises, which is repeated."""
    num_samples = len(wave_S)
    room_R = rooms[int(rng.integers(len(rooms)))]
    # The direct sound stays where it is, so that the turns remain true.
    direct = int(np.abs(room_R).argmax())
    first = max(direct - round(LEAD_SECONDS * RATE), 0)
    room_R = room_R[first:]
    lead = direct - first
    reverberant_S = oaconvolve(wave_S, room_R)[lead:][:num_samples]

    noise_S = noises[int(rng.integers(len(noises)))]
    shift = int(rng.integers(len(noise_S)))
    shifted_S = np.roll(noise_S, shift)
    noise_S = np.resize(shifted_S, num_samples)
    # Relative to the mean power of speech, without digital silence between turns.
    is_speech_S = wave_S != 0
    speech_power = np.mean(reverberant_S[is_speech_S] ** 2)
    noise_power = max(np.mean(noise_S**2), 1e-12)
    snr_db = rng.uniform(*SNR_DB)
    gain = 10 ** (-snr_db / 20) * np.sqrt(speech_power / noise_power)
    mixed_S = reverberant_S + gain * noise_S
    return PEAK * mixed_S / np.abs(mixed_S).max()


def read_sounds(folder: Path) -> list[np.ndarray]:
    """Read the first channel of the wav and flac files of a folder."""
    sounds: list[np.ndarray] = []
    for path in sorted(folder.iterdir()):
        if path.suffix in (".wav", ".flac"):
            sound_SC, rate = soundfile.read(path, always_2d=True)
            if rate != RATE:
                raise ValueError(f"{path}: has {rate} Hz; convert it to {RATE} Hz")
            sounds.append(sound_SC[:, 0])
    return sounds


def simulate(
    data: Sequence[Path], rirs: Path, noise: Path, out: Path, *, count: int, seed: int
) -> None:
    """Write the conversations into a folder."""
    manifest = read_manifest(data, sample_rate=RATE)
    rooms, noises = read_sounds(rirs), read_sounds(noise)
    (out / "wav").mkdir(parents=True, exist_ok=True)
    reference: dict[str, list[Turn]] = {}
    lines: list[str] = []
    for number in range(count):
        name = f"conversation{number:03d}"
        wave_S, reference[name] = converse(manifest, number, seed=seed)
        rng = np.random.default_rng([seed, number, 1])
        path = out / "wav" / f"{name}.flac"
        soundfile.write(path, add_room_and_noise(wave_S, rooms, noises, rng), RATE)
        lines.append(f"{name} {path.resolve()}\n")
    write_rttm(out / "ref.rttm", reference)
    (out / "wav.scp").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Parse the options and simulate."""
    parser = argparse.ArgumentParser(description="Simulate conversations.")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--rirs", type=Path, required=True)
    parser.add_argument("--noise", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    simulate(
        args.data,
        args.rirs,
        args.noise,
        args.out,
        count=args.count,
        seed=args.seed,
    )


if __name__ == "__main__":
    main()
