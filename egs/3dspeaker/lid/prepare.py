"""Prepare 3D-Speaker for language identification: the class of an utterance is its dialect.

--corpus DIR is that of ../prepare.py. --data DIR gets `train/` and `test/` with `utt2lang`.

Source: [L] github.com/modelscope/3D-Speaker at 09e7806, egs/3dspeaker/language-identification/
local/prepare_data.sh. We know of no published number of utterances of its lists.
"""

import csv
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from egs.common.corpus.noises import write_published_choice
from egs.common.corpus.prepare import (
    check_disjoint,
    make_parser,
    run,
    write_set,
)
from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text
from speakerlab.data.tables import read_table

recipe = import_module(
    "egs.3dspeaker.prepare"
)  # not a valid name for an import statement
HERE = Path(__file__).resolve().parent
LISTS = {"train": "lid_train_wav.scp", "test": "lid_test_wav.scp"}  # [L]:77,101
LANGUAGE_COLUMN = (
    5  # of utt2info.csv, whose first column is the utterance ([L]:89-93, 113-117)
)


def check_layout(corpus: Path) -> None:
    """Raise FileNotFoundError naming all missing files."""
    lists = [f"files/{name}" for name in LISTS.values()]
    lists += [
        f"files/{split}_{name}"
        for split in LISTS
        for name in ("utt2info.csv", "utt2spk")
    ]
    missing = [name for name in (*LISTS, *lists) if not (corpus / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{corpus}: incomplete 3D-Speaker corpus, no {' '.join(missing)}; run stage"
            f" 0, or download the archives from {recipe.URL}"
        )


def read_languages(path: Path) -> dict[str, str]:
    """Return utterance -> dialect."""
    with open_text(path, newline="") as lines:
        rows = [row for row in csv.reader(lines) if len(row) > LANGUAGE_COLUMN]
    return {row[0].strip(): row[LANGUAGE_COLUMN].strip() for row in rows}


def read_split(
    corpus: Path, split: str, faults: Faults
) -> tuple[dict[str, Path], dict[str, str], dict[str, str]]:
    """Return (utterance -> file, -> speaker, -> language) of the listed utterances."""
    files = corpus / "files"
    listed = read_table(
        files / LISTS[split], faults
    )  # paths are relative to the corpus ([L]:77)
    speakers = read_table(files / f"{split}_utt2spk", faults)
    languages = read_languages(files / f"{split}_utt2info.csv")
    for name, table in (
        (f"{split}_utt2spk", speakers),
        (f"{split}_utt2info.csv", languages),
    ):
        for utterance in sorted(
            utterance for utterance in listed if not table.get(utterance)
        ):
            line = (
                f"{files / name}: no line for {utterance}, which is in {LISTS[split]}"
            )
            faults.add(
                f"utterances missing in {name}",
                f"{line}; use lists of the same release",
            )
    return (
        {utterance: corpus / path for utterance, path in listed.items()},
        {utterance: speakers.get(utterance, "") for utterance in listed},
        {utterance: languages.get(utterance, "") for utterance in listed},
    )


def prepare(
    corpus: Path, data: Path, *, noise: Path | None = None, rirs: Path | None = None
) -> None:
    """Write the data directories."""
    corpus = recipe.find_corpus(corpus)
    check_layout(corpus)
    faults = Faults()
    sets = {split: read_split(corpus, split, faults) for split in LISTS}
    faults.raise_if_any(f"{corpus}: inconsistent corpus")
    check_disjoint(sets["train"][1].values(), sets["test"][1].values(), where=corpus)
    for split, (wavs, speakers, languages) in sets.items():
        write_set(
            data / split,
            wavs=wavs,
            speakers=speakers,
            columns={"utt2lang": languages},
            about=recipe.ABOUT if split == "train" else None,
        )
        print(f"{data / split}: {len(set(languages.values()))} languages")
    write_published_choice(data, noise=noise, rirs=rirs)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and prepare or download the corpus."""
    parser = make_parser(
        "Prepare 3D-Speaker's languages.", corpus=HERE.parent / "corpus"
    )
    args = parser.parse_args(argv)
    return run(
        args,
        download=lambda: recipe.download_corpus(args.corpus),
        prepare=lambda: prepare(
            args.corpus, args.data, noise=args.noise, rirs=args.rirs
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
