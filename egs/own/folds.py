"""Cross-validation over speakers: split a prepared corpus into folds, and pool their scores.

    folds.py split --data DIR --folds K
    folds.py pool --data DIR --folds K --exp EXP

`split` writes `DIR/fold1/train`, `DIR/fold1/test` and so on: the test set has the speakers of the
fold, the training set all others. `DIR/all/train` and `DIR/all/test` have all speakers, and the
trials of all test sets.
`pool` scores each test set with the model EXP-foldI, which was not trained on its speakers; it
writes the scores before and after fine-tuning into `EXP/folds`, and the calibration of the model in
EXP, which is trained on all speakers.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from egs.common.corpus.once import data_alone
from egs.common.corpus.prepare import write_set
from egs.common.corpus.sources import absolute
from egs.common.corpus.trials import group_by_speaker
from egs.own.prepare import MIN_UTTERANCES, make_trials
from speakerlab.checkpoints.model_files import (
    CALIBRATION,
    find_model,
    write_calibration,
)
from speakerlab.core import done
from speakerlab.data.arrays import stable_hash
from speakerlab.data.tables import Trial, read_rejected, read_table
from speakerlab.experiments.embedded import read_embedded
from speakerlab.experiments.trial_list import TrialList, read_trial_list
from speakerlab.scoring.calibration import fit_calibration
from speakerlab.scoring.chain import build_chain
from speakerlab.scoring.score_files import write_scores

MIN_SPEAKERS = 5  # with several utterances
SPEAKERS_PER_FOLD = 2  # a single speaker has no non-target trials
RECORD = ".folds"  # in DIR: the inputs of the last split
BANKS = ("noise", "rirs")  # for augmentation, shared by all folds


def split(data: Path, num_folds: int, *, seed: int = 1) -> None:
    """Write the data directories of each fold, unless they are there already."""
    wavs, speakers = read_prepared(data)
    inputs = {"wavs": done.digest(wavs), "speakers": done.digest(speakers)}
    inputs |= {"folds": num_folds, "seed": seed}
    record = data / RECORD
    folders = [data / f"fold{number}" for number in range(1, num_folds + 1)]
    everything = data / "all"
    with data_alone(data):
        for folder in [*folders, everything]:
            link_banks(data, folder)
        if done.is_done(record, inputs):
            print(f"{data}: already split into {num_folds} folds, kept")
            return
        done.forget(record)
        trials: list[Trial] = []
        for folder, fold in zip(folders, choose_folds(speakers, num_folds)):
            test = {name: who for name, who in speakers.items() if who in fold}
            train = {name: who for name, who in speakers.items() if who not in fold}
            fold_trials = make_trials(test, seed=seed)
            trials += fold_trials
            write_set(
                folder / "train",
                wavs={name: wavs[name] for name in train},
                speakers=train,
            )
            write_set(
                folder / "test",
                wavs={name: wavs[name] for name in test},
                speakers=test,
                trials={"trials": fold_trials},
            )
        write_set(everything / "train", wavs=wavs, speakers=speakers)
        write_set(
            everything / "test",
            wavs=wavs,
            speakers=speakers,
            trials={"trials": sorted(trials)},
        )
        done.record(record, inputs)


def link_banks(data: Path, folder: Path) -> None:
    """Let a fold use the noise and the room impulse responses of DIR."""
    folder.mkdir(exist_ok=True)
    for name in BANKS:
        link = folder / name
        if (data / name).is_dir() and not link.is_symlink():
            link.symlink_to(Path("..") / name)


def read_prepared(data: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Return (utterance -> file, utterance -> speaker) of stage 1, without rejected files."""
    wavs: dict[str, Path] = {}
    speakers: dict[str, str] = {}
    for name in ("train", "test"):
        folder = data / name
        # A small corpus has no test set.
        if not folder.is_dir():
            continue
        rejected = read_rejected(folder)
        owners = read_table(folder / "utt2spk")
        for utterance, path in read_table(folder / "wav.scp").items():
            if utterance not in rejected:
                wavs[utterance] = Path(path)
                speakers[utterance] = owners[utterance]
    return wavs, speakers


def choose_folds(speakers: dict[str, str], num_folds: int) -> list[set[str]]:
    """Return the speakers of each test set; ValueError if there are too few for so many.

    Speakers with a single utterance are in no test set.
    """
    groups = group_by_speaker(speakers)
    several = [name for name, rows in groups.items() if len(rows) >= MIN_UTTERANCES]
    count = f"{len(several)} of {len(groups)} speakers have {MIN_UTTERANCES} recordings"
    if len(several) < MIN_SPEAKERS:
        raise ValueError(
            f"{count} or more, cross-validation needs {MIN_SPEAKERS}; add recordings,"
            " or only calibrate the threshold with run.sh"
        )
    most = len(several) // SPEAKERS_PER_FOLD
    if num_folds > most:
        raise ValueError(
            f"--folds: {num_folds}, but {count} or more, and each fold needs"
            f" {SPEAKERS_PER_FOLD}; use --folds {most} or fewer"
        )
    order = sorted(several, key=stable_hash)
    return [set(order[first::num_folds]) for first in range(num_folds)]


def pool(data: Path, num_folds: int, exp: Path) -> None:
    """Write the scores of all folds, before and after, and the calibration of the model."""
    is_target: list[np.ndarray] = []
    after: list[np.ndarray] = []
    tested: set[str] = set()
    written = exp / "folds"
    lines: dict[str, list[str]] = {"before": [], "after": []}
    for number in range(1, num_folds + 1):
        fold_exp = exp.with_name(f"{exp.name}-fold{number}")
        listed = read_trial_list(data / f"fold{number}" / "test" / "trials")
        is_target.append(listed.trials.is_target_N)
        tested.update(read_table(listed.path.parent / "utt2spk").values())
        for name, texts in lines.items():
            scores_N = score(fold_exp, listed, untrained=name == "before")
            if name == "after":
                after.append(scores_N)
            file = written / f"fold{number}_{name}.txt"
            write_scores(file, listed.trials, scores_N)
            texts.append(file.read_text(encoding="utf-8"))
    for name, texts in lines.items():
        (written / f"{name}.txt").write_text("".join(texts), encoding="utf-8")

    learned = fit_calibration(
        np.concatenate(after),
        np.concatenate(is_target),
        source=f"cross-validation: {len(tested)} speakers in {num_folds} folds",
    )
    folder = find_model(exp)
    write_calibration(folder, learned)
    print(
        f"{folder / CALIBRATION}: threshold {learned.threshold:.4f}, from {learned.source}"
    )


def score(exp: Path, listed: TrialList, *, untrained: bool) -> np.ndarray:
    """Return cosine scores of a list, (N), by an experiment's model or its initial weights."""
    table = read_embedded(exp, listed.path.parent, untrained=untrained)
    enrol, test = listed.tables(table)
    return build_chain("cosine", None).score(enrol, test, listed.trials).scores_N


def main() -> int:
    """Parse the options; print an error in one line and return the exit code."""
    parser = argparse.ArgumentParser(description="Folds of speakers, and their scores.")
    parser.add_argument("action", choices=("split", "pool"))
    parser.add_argument("--data", type=absolute, required=True, metavar="DIR")
    parser.add_argument("--folds", type=int, required=True, metavar="K")
    parser.add_argument("--exp", type=absolute, metavar="EXP", help="for pool")
    args = parser.parse_args()
    try:
        if args.action == "split":
            split(args.data, args.folds)
        elif args.exp is None:
            raise ValueError("--exp: missing; pool needs an experiment")
        else:
            pool(args.data, args.folds, args.exp)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
