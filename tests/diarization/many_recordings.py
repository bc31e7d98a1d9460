"""Simulate recordings in which the same speakers appear again, for `speakerlab link`.

    python tests/diarization/many_recordings.py --speech DIR... --out DIR [--seed N]
                                                [--rirs DIR --noise DIR]
                                                [--appearances N --min-seconds SECONDS]

--speech: folders in LibriSpeech's layout, SPEAKER/CHAPTER/ID.flac, of speakers who are in no
training. Every utterance is in one recording only, so two recordings share a speaker and no speech.
The speakers are drawn from those with the most speech. --out gets `wav/NAME.flac` and `ref.rttm`
with the true speakers. With --rirs and --noise, each recording is in a room of its own, with noise
of its own.
Shape suffix: S samples.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import soundfile
from simulate import add_room_and_noise, read_sounds

from speakerlab.diarization.regions import Turn, write_rttm
from speakerlab.inference.speech import find_speech

RATE = 16000
APPEARANCES = 6  # of a speaker
MIN_SECONDS = 43.0  # of speech of a speaker, for so many recordings
PAUSE_SECONDS = (0.2, 0.8)
CUT_SECONDS = 3.0  # of speech: an utterance that is longer than twice this is two turns
PEAK = 0.9

Utterances = Mapping[str, Sequence[Path]]  # speaker -> files


def read_speakers(
    folders: Sequence[Path], *, appearances: int, min_seconds: float
) -> dict[str, list[Path]]:
    """Return the files of the speakers with enough speech, and an utterance for each recording."""
    files: dict[str, list[Path]] = defaultdict(list)
    for folder in folders:
        for path in sorted(folder.rglob("*.flac")):
            files[path.relative_to(folder).parts[0]].append(path)
    speakers: dict[str, list[Path]] = {}
    for speaker, paths in sorted(files.items()):
        seconds = sum(soundfile.info(path).duration for path in paths)
        if len(paths) >= appearances and seconds >= min_seconds:
            speakers[speaker] = paths
    return speakers


def cast(
    speakers: Utterances,
    *,
    num_recordings: int,
    num_speakers: int,
    appearances: int,
    seed: int,
) -> list[dict[str, list[Path]]]:
    """Return speaker -> files of each recording, at least two speakers in each."""
    rng = np.random.default_rng([seed, num_recordings, num_speakers])
    chosen = rng.choice(sorted(speakers), num_speakers, replace=False).tolist()
    # Every utterance of a speaker goes to one of the speaker's recordings.
    recordings: list[dict[str, list[Path]]] = [{} for _ in range(num_recordings)]
    for speaker in chosen:
        # The recordings with the fewest speakers so far; of equal ones, any.
        order = rng.permutation(num_recordings).tolist()
        order.sort(key=lambda number: len(recordings[number]))
        places = order[:appearances]
        paths = rng.permutation(np.array(speakers[speaker], dtype=object)).tolist()
        for number, path in enumerate(paths):
            place = places[number % len(places)]
            recordings[place].setdefault(speaker, []).append(path)
    return recordings


def converse(
    files: Mapping[str, Sequence[Path]], rng: np.random.Generator
) -> tuple[np.ndarray, list[Turn]]:
    """Return wave_S, in -1 to 1, and the true turns of a recording."""
    pieces: list[tuple[str, np.ndarray]] = []
    for speaker, paths in files.items():
        for path in paths:
            wave_S, _ = soundfile.read(path, dtype="int16")
            regions = find_speech(wave_S, sample_rate=RATE)
            first = round(regions[0][0] * RATE)
            last = round(regions[-1][1] * RATE)
            spoken_S = wave_S[first:last] / 32768
            num_turns = 2 if len(spoken_S) > 2 * CUT_SECONDS * RATE else 1
            for piece_S in np.array_split(spoken_S, num_turns):
                pieces.append((speaker, piece_S))
    waves: list[np.ndarray] = []
    turns: list[Turn] = []
    now = 0
    for number in rng.permutation(len(pieces)).tolist():
        speaker, piece_S = pieces[number]
        pause_S = np.zeros(round(rng.uniform(*PAUSE_SECONDS) * RATE))
        waves += [pause_S, piece_S]
        start = now + len(pause_S)
        now = start + len(piece_S)
        turns.append(Turn(round(start / RATE, 3), round(now / RATE, 3), speaker))
    wave_S = np.concatenate(waves)
    return PEAK * wave_S / np.abs(wave_S).max(), turns


def simulate(
    speech: Sequence[Path],
    out: Path,
    *,
    num_recordings: int = 30,
    num_speakers: int = 12,
    appearances: int = APPEARANCES,
    min_seconds: float = MIN_SECONDS,
    seed: int = 0,
    rirs: Path | None = None,
    noise: Path | None = None,
) -> dict[str, list[Turn]]:
    """Write the recordings into a folder; return their true turns."""
    rooms = [] if rirs is None else read_sounds(rirs)
    noises = [] if noise is None else read_sounds(noise)
    speakers = read_speakers(speech, appearances=appearances, min_seconds=min_seconds)
    recordings = cast(
        speakers,
        num_recordings=num_recordings,
        num_speakers=num_speakers,
        appearances=appearances,
        seed=seed,
    )
    (out / "wav").mkdir(parents=True, exist_ok=True)
    reference: dict[str, list[Turn]] = {}
    for number, files in enumerate(recordings):
        rng = np.random.default_rng([seed, number])
        name = f"recording{number:02d}"
        wave_S, turns = converse(files, rng)
        if rooms and noises:
            wave_S = add_room_and_noise(wave_S, rooms, noises, rng)
        soundfile.write(out / "wav" / f"{name}.flac", wave_S, RATE)
        reference[name] = turns
    write_rttm(out / "ref.rttm", reference)
    return reference


def main() -> None:
    """Parse the options and simulate."""
    parser = argparse.ArgumentParser(description="Simulate recordings of few speakers.")
    parser.add_argument("--speech", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recordings", type=int, default=30)
    parser.add_argument("--speakers", type=int, default=12)
    parser.add_argument("--appearances", type=int, default=APPEARANCES)
    parser.add_argument("--min-seconds", type=float, default=MIN_SECONDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rirs", type=Path)
    parser.add_argument("--noise", type=Path)
    args = parser.parse_args()
    simulate(
        args.speech,
        args.out,
        num_recordings=args.recordings,
        num_speakers=args.speakers,
        appearances=args.appearances,
        min_seconds=args.min_seconds,
        seed=args.seed,
        rirs=args.rirs,
        noise=args.noise,
    )


if __name__ == "__main__":
    main()
