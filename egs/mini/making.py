"""Synthesis of the mini corpus: sentences spoken by espeak-ng in simulated rooms with noise.

The corpus is a folder with `train/`, `test/`, `noise/`, `rirs/` (16-bit wavs at 16 kHz) and
`corpus.json` (size, voices, sentences). The same `Size` gives the same bytes. Conversations
(diar/) replace the first four by their own folders.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import soundfile

from egs.mini.sound import (
    SAMPLE_RATE,
    at_level,
    augment,
    babble,
    coloured_noise,
    hum,
    modulated_noise,
    room,
)
from egs.mini.voices import Voice, draw_sentence, draw_voice
from speakerlab.core.atomic import locked, write_text

HERE = Path(__file__).resolve().parent
TOOLS = HERE / "tools"
REQUIREMENT = "espeakng-loader==0.2.4"
NUM_NOISES = NUM_ROOMS = 12
NOISE_KINDS = ("coloured", "babble", "modulated", "babble", "hum", "babble")
NOISE_SECONDS = 10
MAX_VOICES_PER_PROCESS = (
    250  # espeak-ng reads at most 350 voice files, English ones included
)
Record = Callable[..., None]  # record_all, or another function with its arguments


@dataclass(frozen=True)
class Size:
    """Size of the corpus; it is synthesized again if this changes."""

    seed: int = 1
    num_train_voices: int = 80
    num_test_voices: int = 24
    num_utterances: int = 12  # of each voice

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "seed" and value < 2:
                raise ValueError(f"{name}: must be at least 2 for trials, not {value}")


@dataclass(frozen=True)
class Utterance:
    """One sentence of one voice."""

    id: str
    speaker: str
    split: str  # "train" or "test"
    text: str

    @property
    def path(self) -> Path:
        return Path(self.split) / self.speaker / f"{self.id}.wav"


def has_espeak() -> bool:
    """Return whether espeak-ng is in tools/ or in this environment."""
    return (TOOLS / "espeakng_loader").is_dir() or bool(
        importlib.util.find_spec("espeakng_loader")
    )


def install_espeak() -> None:
    """Install espeak-ng into tools/ unless it is installed (stage 0)."""
    if has_espeak():
        print("espeak-ng: already installed")
        return
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--target",
        str(TOOLS),
    ]
    result = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"{TOOLS}: pip cannot install {REQUIREMENT}: {last}; install it into this"
            " environment yourself"
        )


def plan(size: Size) -> tuple[dict[str, Voice], list[Utterance]]:
    """Draw the voices, half of them female, and their sentences."""
    voices: dict[str, Voice] = {}
    utterances: list[Utterance] = []
    for index in range(size.num_train_voices + size.num_test_voices):
        name = f"spk{index:03d}"
        split = "train" if index < size.num_train_voices else "test"
        sex = "female" if index % 2 == 0 else "male"
        voices[name] = draw_voice(name, seed=size.seed, sex=sex)
        for take in range(size.num_utterances):
            id = f"{name}-{take:02d}"
            sentence = draw_sentence(id, seed=size.seed)
            utterances.append(Utterance(id, name, split, sentence))
    return voices, utterances


def provide_corpus(
    corpus: Path,
    voices: dict[str, Voice],
    utterances: Sequence[Utterance],
    *,
    size: dict[str, int],
    num_jobs: int,
    record: Record | None = None,
) -> None:
    """Synthesize the corpus unless it exists with these voices, sentences and size.

    record: writes all audio into a folder; by default `record_all`, one file per utterance.
    """
    about = {
        "size": size,
        "voices": {name: asdict(voice) for name, voice in voices.items()},
        "utterances": [asdict(utterance) for utterance in utterances],
    }
    if is_made(corpus, about):
        return
    num_test = len(
        {utterance.speaker for utterance in utterances if utterance.split == "test"}
    )
    write = record or record_all
    corpus.parent.mkdir(parents=True, exist_ok=True)
    with locked(corpus.with_name(f".{corpus.name}.lock")):
        if is_made(corpus, about):  # by another process meanwhile
            return
        print(f"{corpus}: synthesizing {len(voices) - num_test} + {num_test} voices")
        make_corpus(
            corpus,
            about,
            lambda part: write(
                part, voices, utterances, seed=size["seed"], num_jobs=num_jobs
            ),
        )


def speak(
    folder: Path,
    voices: dict[str, Voice],
    utterances: Sequence[Utterance],
    *,
    seed: int,
    num_jobs: int,
) -> None:
    """Write all clean utterances below `folder` with processes that run espeak.py."""
    names = list(voices)
    num_parts = min(len(names), max(num_jobs, -(-len(names) // MAX_VOICES_PER_PROCESS)))
    processes: list[subprocess.Popen[str]] = []
    try:
        for part in range(num_parts):
            mine = {name: voices[name] for name in names[part::num_parts]}
            work = folder / f"jobs.{part}.json"
            work.write_text(json.dumps(list_jobs(folder, mine, utterances, seed=seed)))
            command = [sys.executable, str(HERE / "espeak.py"), str(work)]
            processes.append(
                subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            )
        errors = [process.communicate()[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, error in zip(processes, errors):
        if process.returncode != 0:
            last = (error.strip().splitlines() or ["no message"])[-1]
            raise ValueError(
                f"{HERE / 'espeak.py'}: exit code {process.returncode}: {last}; install"
                f" {REQUIREMENT} again"
            )


def list_jobs(
    folder: Path,
    voices: dict[str, Voice],
    utterances: Sequence[Utterance],
    *,
    seed: int,
) -> dict[str, object]:
    """Return the jobs of espeak.py for these voices."""
    jobs = [
        {
            "path": str((folder / utterance.path).resolve()),
            "voice": utterance.speaker,
            "text": utterance.text,
            "seed": crc32(f"{seed} {utterance.id}".encode()) >> 1,
        }
        for utterance in utterances
        if utterance.speaker in voices
    ]
    return {
        "voices": {name: asdict(voice) for name, voice in voices.items()},
        "jobs": jobs,
    }


def is_made(corpus: Path, about: dict) -> bool:
    """Return whether the corpus exists with these voices and sentences."""
    try:
        return json.loads((corpus / "corpus.json").read_text()) == about
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def make_corpus(corpus: Path, about: dict, record: Callable[[Path], None]) -> None:
    """Record the corpus in its folder `.part`, then replace the previous one.

    about: content of corpus.json, which is removed first and written last, so that a corpus with
    this file is complete.
    """
    part = corpus / ".part"
    if corpus.is_dir() and any(corpus.iterdir()):
        if not part.exists() and not (corpus / "corpus.json").exists():
            raise ValueError(
                f"{corpus}: not an earlier mini corpus (no corpus.json), so it is not"
                " replaced; give another --corpus"
            )
        shutil.rmtree(part, ignore_errors=True)
    if not has_espeak():
        raise FileNotFoundError(
            f"{TOOLS}: {REQUIREMENT} is not installed; run stage 0 first"
        )
    part.mkdir(parents=True)
    record(part)
    (corpus / "corpus.json").unlink(missing_ok=True)
    for folder in list(part.iterdir()):
        shutil.rmtree(corpus / folder.name, ignore_errors=True)
        folder.replace(corpus / folder.name)
    write_text(corpus / "corpus.json", json.dumps(about, indent=1))
    part.rmdir()


def record_all(
    folder: Path,
    voices: dict[str, Voice],
    utterances: Sequence[Utterance],
    *,
    seed: int,
    num_jobs: int,
) -> None:
    """Write all audio of the corpus below `folder`."""
    clean = folder / "clean"
    clean.mkdir()
    speak(clean, voices, utterances, seed=seed, num_jobs=num_jobs)
    with ThreadPoolExecutor(num_jobs) as pool:
        list(
            pool.map(
                lambda utterance: record(clean, folder, utterance, seed=seed),
                utterances,
            )
        )
    write_noises(folder / "noise", clean, utterances, seed=seed)
    write_rooms(folder / "rirs", seed=seed)
    shutil.rmtree(clean)


def record(clean: Path, corpus: Path, utterance: Utterance, *, seed: int) -> None:
    """Write the utterance in a room and with noise."""
    wave_S, _ = soundfile.read(clean / utterance.path)
    write_wave(corpus / utterance.path, augment(wave_S, keyed_rng(seed, utterance.id)))


def write_noises(
    folder: Path, clean: Path, utterances: Sequence[Utterance], *, seed: int
) -> None:
    """Write noises for augmentation; none of them is in the test set."""
    num_samples = NOISE_SECONDS * SAMPLE_RATE
    training = [utterance for utterance in utterances if utterance.split == "train"]
    for index in range(NUM_NOISES):
        kind = NOISE_KINDS[index % len(NOISE_KINDS)]
        name = f"{kind}-{index:02d}"
        rng = keyed_rng(seed, f"noise/{name}")
        if kind == "babble":
            num_voices = rng.integers(3, 8)
            voices: list[np.ndarray] = []
            for number in rng.integers(len(training), size=num_voices):
                voice_S, _ = soundfile.read(clean / training[number].path)
                voices.append(voice_S)
            wave_S = babble(rng, num_samples, voices=voices)
        elif kind == "coloured":
            slope_db = rng.uniform(-6.0, 1.0)
            wave_S = coloured_noise(rng, num_samples, slope_db=slope_db)
        elif kind == "hum":
            wave_S = hum(rng, num_samples)
        else:
            wave_S = modulated_noise(rng, num_samples)
        write_wave(folder / f"{name}.wav", at_level(wave_S, peak_db=-3.0))


def write_rooms(folder: Path, *, seed: int) -> None:
    """Write room impulse responses for augmentation, from dry rooms to a hall."""
    decay_times = np.geomspace(0.12, 0.9, NUM_ROOMS)
    for index, rt60_seconds in enumerate(decay_times):
        rng = keyed_rng(seed, f"rirs/{index:02d}")
        response_R = room(rng, rt60_seconds=float(rt60_seconds))
        path = folder / f"room-{index:02d}.wav"
        write_wave(path, at_level(response_R, peak_db=-1.0))


def write_wave(path: Path, wave_S: np.ndarray) -> None:
    """Write a mono 16-bit wav and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wave_S, SAMPLE_RATE, subtype="PCM_16")


def keyed_rng(seed: int, key: str) -> np.random.Generator:
    """Return a generator keyed by seed and name, independent of the order of draws."""
    return np.random.default_rng([seed, crc32(key.encode())])
