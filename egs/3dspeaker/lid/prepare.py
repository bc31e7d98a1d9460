"""Prepares 3D-Speaker for language identification: the dialect of each utterance is its class.

In: --corpus DIR as in ../prepare.py. Out: --data DIR with `train/` and `test/`, each with
`utt2lang`. With --download (stage 0) the archives are fetched into --corpus instead.

Source: [L] github.com/modelscope/3D-Speaker at 09e7806, egs/3dspeaker/language-identification/
local/prepare_data.sh. How many utterances its lists have is published nowhere that we know of.
"""

import csv
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from egs.common.corpus import (
    check_disjoint,
    make_parser,
    run,
    write_set,
)
from egs.common.noises import write_published_choice
from speakerlab.core.faults import Faults
from speakerlab.data.tables import read_table

recipe = import_module("egs.3dspeaker.prepare")  # no name that a statement could import
HERE = Path(__file__).resolve().parent
LISTS = {"train": "lid_train_wav.scp", "test": "lid_test_wav.scp"}  # [L]:77,101
LANGUAGE_COLUMN = 5  # of utt2info.csv, whose first column is the utterance ([L]:89-93, 113-117)


def check_layout(corpus: Path) -> None:
    """Raise FileNotFoundError naming every missing piece."""
    lists = [f"files/{name}" for name in LISTS.values()]
    lists += [f"files/{split}_{name}" for split in LISTS for name in ("utt2info.csv", "utt2spk")]
    missing = [name for name in (*LISTS, *lists) if not (corpus / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{corpus}: not the 3D-Speaker corpus with its lists of languages, got no "
            f"{' '.join(missing)}; get its archives from {recipe.URL} (stage 0 does)"
        )


def read_languages(path: Path) -> dict[str, str]:
    """Utterance -> what its sixth column says."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.reader(lines) if len(row) > LANGUAGE_COLUMN]
    return {row[0].strip(): row[LANGUAGE_COLUMN].strip() for row in rows}


def read_split(
    corpus: Path, split: str, faults: Faults
) -> tuple[dict[str, Path], dict[str, str], dict[str, str]]:
    """(utterance -> file, -> speaker, -> language) of the utterances that are listed."""
    files = corpus / "files"
    listed = read_table(files / LISTS[split], faults)  # paths are relative to the corpus ([L]:77)
    speakers = read_table(files / f"{split}_utt2spk", faults)
    languages = read_languages(files / f"{split}_utt2info.csv")
    for name, table in ((f"{split}_utt2spk", speakers), (f"{split}_utt2info.csv", languages)):
        for utterance in sorted(utterance for utterance in listed if not table.get(utterance)):
            line = f"{files / name}: an utterance of {LISTS[split]} is not in it, got {utterance}"
            faults.add(f"utterances missing in {name}", f"{line}; take the lists of one release")
    return (
        {utterance: corpus / path for utterance, path in listed.items()},
        {utterance: speakers.get(utterance, "") for utterance in listed},
        {utterance: languages.get(utterance, "") for utterance in listed},
    )


def prepare(
    corpus: Path, data: Path, *, noise: Path | None = None, rirs: Path | None = None
) -> None:
    """Write the data directories."""
    check_layout(corpus)
    faults = Faults()
    sets = {split: read_split(corpus, split, faults) for split in LISTS}
    faults.raise_if_any(f"{corpus}: refused")
    check_disjoint(sets["train"][1].values(), sets["test"][1].values(), where=corpus)
    for split, (wavs, speakers, languages) in sets.items():
        columns = {"utt2lang": languages}
        write_set(data / split, wavs=wavs, speakers=speakers, columns=columns)
        print(f"{data / split}: {len(set(languages.values()))} languages")
    write_published_choice(data, noise=noise, rirs=rirs)


def main(argv: Sequence[str] | None = None) -> int:
    """The command around `prepare` and the download of the corpus."""
    parser = make_parser("Prepare 3D-Speaker's languages.", corpus=HERE.parent / "corpus")
    args = parser.parse_args(argv)
    return run(
        args,
        download=lambda: recipe.download_corpus(args.corpus),
        prepare=lambda: prepare(args.corpus, args.data, noise=args.noise, rirs=args.rirs),
    )


if __name__ == "__main__":
    sys.exit(main())
