"""A small CN-Celeb 1 and 2 in the true layout and file formats, with its traps.

The lists say .wav where the files are FLAC; most training utterances are short; a model is enrolled
with one to three utterances; one speaker of the test set is never enrolled; `data/` holds the
speakers of the test set too, and one of CN-Celeb 2 that its list leaves out.
"""

from itertools import product
from pathlib import Path

import numpy as np
from voices import RATE, make_wave

from speakerlab.data import audio

ONE = "CN-Celeb_flac"
TWO = "CN-Celeb2_flac"
DEV = [f"id{number:05d}" for number in range(7)]
SECOND = [f"id{number:05d}" for number in range(10000, 10005)]
NOT_LISTED = "id10005"
# Speaker -> number of enrolment utterances.
ENROLLED = {"id00800": 3, "id00801": 1, "id00802": 2, "id00803": 3, "id00804": 1}
NEVER_ENROLLED = "id00805"
# Of training utterances.
SECONDS = {"interview": (6.0, 2.5, 1.5, 3.0), "live_broadcast": (2.0, 5.5)}
NUM_TESTS = 3  # of each speaker


def make_cnceleb(folder: Path) -> None:
    """Write `folder`/{CN-Celeb_flac,CN-Celeb2_flac}."""
    for number, speaker in enumerate((*DEV, *SECOND, NOT_LISTED)):
        part = ONE if speaker in DEV else TWO
        place = folder / part / "data" / speaker
        for genre, seconds in SECONDS.items():
            for take, length in enumerate(seconds, 1):
                _write(place / f"{genre}-01-{take:03d}.flac", number, take, length)
    _write_lines(folder / ONE / "dev/dev.lst", DEV)
    _write_lines(folder / TWO / "spk.lst", SECOND)
    _make_test_set(folder / ONE)


def _make_test_set(folder: Path) -> None:
    recordings: list[str] = []
    enroll: list[str] = []
    tests: list[str] = []
    for number, speaker in enumerate((*ENROLLED, NEVER_ENROLLED), 20):
        place = folder / "data" / speaker
        num_enrolled = ENROLLED.get(speaker, 0)
        waves = []
        paths = []
        for take in range(1, num_enrolled + 1):
            # Only the second and third utterance of a model are sung.
            genre = "interview" if take == 1 else "singing"
            name = f"{genre}-01-{take:03d}"
            waves.append(_write(place / f"{name}.flac", number, take, 2.0))
            paths.append(f"{speaker}/{name}.wav")
        if waves:
            model = f"{speaker}-enroll"
            path = folder / f"eval/enroll/{model}.flac"
            _write_wave(path, np.concatenate(waves))
            recordings.append(f"{model} enroll/{model}.wav")
            enroll.append(f"{model} {' '.join(paths)}")
        for take in range(num_enrolled + 1, num_enrolled + 1 + NUM_TESTS):
            name = f"drama-02-{take:03d}"
            wave_S = _write(place / f"{name}.flac", number, take, 1.5)
            _write_wave(folder / f"eval/test/{speaker}-{name}.flac", wave_S)
            tests.append(f"test/{speaker}-{name}.wav")

    trials = []
    for speaker, test in product(ENROLLED, tests):
        is_target = test.startswith(f"test/{speaker}-")
        trials.append(f"{speaker}-enroll {test} {int(is_target)}")
    lists = folder / "eval/lists"
    _write_lines(lists / "enroll.lst", recordings)
    _write_lines(lists / "enroll.map", enroll)
    _write_lines(lists / "test.lst", tests)
    _write_lines(lists / "trials.lst", trials)


def _write(path: Path, number: int, take: int, seconds: float) -> np.ndarray:
    wave_S = make_wave(number, take, seconds)
    _write_wave(path, wave_S)
    return wave_S


def _write_wave(path: Path, wave_S: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    audio.write(path, wave_S, RATE)


def _write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
