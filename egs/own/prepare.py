"""Prepare your own recordings: one folder per speaker, in any common format.

--corpus DIR holds DIR/SPEAKER/**/*.{wav,flac,mp3,ogg,m4a,...}. --data DIR gets `train/` and `test/`
with trials; files other than 16 kHz wav or flac are converted into `wav/`. A corpus too small to
train on becomes `train/` alone, and the file `calibration_only` holds the reason.
"""

import shutil
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from egs.common.corpus.convert_audio import CONVERTED_ENDINGS, convert_all
from egs.common.corpus.prepare import (
    LeftOut,
    id_fault,
    make_id,
    make_parser,
    refuse_nothing,
    run,
    walk,
    write_noise_and_rooms,
    write_set,
)
from egs.common.corpus.trials import draw_nontargets, draw_targets, group_by_speaker
from speakerlab.core.faults import Faults
from speakerlab.data.arrays import stable_hash
from speakerlab.data.audio import ENDINGS
from speakerlab.data.tables import Trial, one_line

HERE = Path(__file__).resolve().parent
MIN_SPEAKERS, MIN_UTTERANCES = 20, 2  # needed for training
TEST_SHARE, MIN_TEST, MAX_TEST = 0.2, 5, 50  # of speakers with several utterances
MAX_TARGETS_PER_SPEAKER, MAX_NONTARGETS = 100, 20_000
MARKER = "calibration_only"


def find_recordings(corpus: Path) -> tuple[dict[str, Path], dict[str, str], LeftOut]:
    """Return (utterance -> file, utterance -> speaker, files left out).

    The speaker is the first folder below `corpus`.
    """
    faults = Faults()
    wavs: dict[str, Path] = {}
    speakers: dict[str, str] = {}
    folders: dict[str, str] = {}  # speaker -> the folder's name
    paths, left_out = walk(corpus, (*ENDINGS, *CONVERTED_ENDINGS))
    for path in paths:
        parts = path.relative_to(corpus).parts
        name, speaker = (
            make_id("/".join(parts).removesuffix(path.suffix)),
            make_id(parts[0]),
        )
        first = folders.setdefault(speaker, parts[0])
        if len(parts) == 1:
            text = f"{path}: not in the folder of a speaker; move it into one"
            faults.add("recordings without a speaker", text)
        elif first != parts[0]:
            line = (
                f"{one_line(path)}: speaker {speaker} is also that of folder"
                f" {one_line(first)}"
            )
            left_out[path] = f"{line}; rename one of the folders"
        elif fault := id_fault(name, path, wavs):
            left_out[path] = fault
        else:
            wavs[name], speakers[name] = path, speaker
    faults.raise_if_any(f"{corpus}: files outside the folders of speakers")
    return wavs, speakers, left_out


def reason_not_to_train(speakers: dict[str, str]) -> str | None:
    """Return why a corpus is too small to train on, or None."""
    groups = group_by_speaker(speakers)
    several = sum(len(utterances) >= MIN_UTTERANCES for utterances in groups.values())
    if several >= MIN_SPEAKERS:
        return None
    return (
        f"{several} of {len(groups)} speakers have {MIN_UTTERANCES} recordings or more,"
        f" training needs {MIN_SPEAKERS}: only the threshold is calibrated"
    )


def choose_test_speakers(speakers: dict[str, str]) -> set[str]:
    """Return a fifth of the speakers with several utterances, chosen by a hash of their names."""
    groups = group_by_speaker(speakers)
    several = [name for name, rows in groups.items() if len(rows) >= MIN_UTTERANCES]
    count = min(max(MIN_TEST, round(TEST_SHARE * len(several))), MAX_TEST)
    return set(sorted(several, key=stable_hash)[:count])


def make_trials(speakers: dict[str, str], *, seed: int) -> list[Trial]:
    """Draw trials: all pairs, or a sample."""
    groups = group_by_speaker(speakers)
    targets = draw_targets(groups, seed=seed, max_per_speaker=MAX_TARGETS_PER_SPEAKER)
    pairs = combinations(groups, 2)
    nontargets = draw_nontargets(
        groups, speaker_pairs=pairs, seed=seed, max_trials=MAX_NONTARGETS
    )
    return sorted(targets + nontargets)


def prepare(
    corpus: Path,
    data: Path,
    *,
    noise: Path | None = None,
    rirs: Path | None = None,
    seed: int = 1,
    num_jobs: int = 2,
) -> None:
    """Write the data directories."""
    paths, speakers, left_out = find_recordings(corpus)
    wavs, broken = convert_all(paths, data / "wav", num_jobs=num_jobs)
    left_out |= broken
    refuse_nothing(corpus, wavs, left_out, wanted="SPEAKER/*.wav")
    speakers = {name: speakers[name] for name in wavs}
    reason = reason_not_to_train(speakers)
    test = set() if reason else choose_test_speakers(speakers)
    for name in ("test", MARKER):  # of an earlier corpus
        if (data / name).is_dir():
            shutil.rmtree(data / name)
        else:
            (data / name).unlink(missing_ok=True)
    for name in ("train", "test"):
        owners = {
            row: who
            for row, who in speakers.items()
            if (who in test) == (name == "test")
        }
        if owners:
            trials = (
                {"trials": make_trials(owners, seed=seed)} if name == "test" else None
            )
            rows = {row: wavs[row] for row in owners}
            not_used = left_out if name == "train" else None
            write_set(
                data / name,
                wavs=rows,
                speakers=owners,
                trials=trials,
                left_out=not_used,
            )
    if reason:
        (data / MARKER).write_text(f"{reason}\n", encoding="utf-8")
        print(reason)
    write_noise_and_rooms(data, noise=noise, rirs=rirs)


def ask_for_corpus() -> None:
    """Raise ValueError: stage 0 needs --corpus."""
    raise ValueError("--corpus: no folder given; give one with DIR/SPEAKER/*.wav")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare`."""
    parser = make_parser(
        "Prepare one folder of recordings per speaker.", corpus=HERE / "corpus"
    )
    args = parser.parse_args(argv)
    return run(
        args,
        download=ask_for_corpus,
        prepare=lambda: prepare(
            args.corpus,
            args.data,
            noise=args.noise,
            rirs=args.rirs,
            seed=args.seed,
            num_jobs=args.num_jobs,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
