"""Prepare the 3D-Speaker corpus in its official layout.

--corpus DIR, or its `3dspeaker/` as in [P], holds `train/`, `test/` and `files/`. --data DIR
gets `train/`, `test/` and its three trial lists, without device 09 as in the official recipe; the
tables `utt2device`, `utt2distance` and `utt2dialect` hold the conditions of each utterance.

Sources: github.com/modelscope/3D-Speaker at 09e7806, there in egs/3dspeaker/sv-cam++/local/
[D] download_data.sh and [P] prepare_data.sh; [L] egs/3dspeaker/language-identification/local/
prepare_data.sh. [A] is arXiv:2306.15354v3.
"""

import csv
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from egs.common.corpus.archives import unpack
from egs.common.corpus.fetch import download_all
from egs.common.corpus.noises import write_published_choice
from egs.common.corpus.official import compare, read_official
from egs.common.corpus.prepare import (
    check_disjoint,
    make_parser,
    run,
    walk,
    write_set,
)
from speakerlab.core.counting import count_of
from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text
from speakerlab.data.tables import read_table

HERE = Path(__file__).resolve().parent
URL = (  # [D]:40,55,65
    "https://speech-lab-share-data.oss-cn-shanghai.aliyuncs.com/3D-Speaker"
)
# The page states a licence of the metadata only: that of the recordings is left out.
PAGE = "https://3dspeaker.github.io/"
ABOUT = {
    "corpus": "3D-Speaker",
    "languages": "Mandarin and Chinese dialects",
    "page": PAGE,
}
# Folder of the corpus -> its archives in order, with the published md5 ([D]:42 test, :48-53 the six
# parts of train; :63-66 has none for the lists). All unpack into one folder ([P]:51-57).
ARCHIVES: dict[str, dict[str, str | None]] = {
    "files": {"3dspeaker_files.tar.gz": None},
    "test": {"test.tar.gz": "md5:45972606dd10d3f7c1c31f27acdfbed7"},
    "train": {
        "train.tar.gz-part-a": "md5:4109addde41d88760947263f18117ac3",
        "train.tar.gz-part-b": "md5:5a17ef2fa28b1b9e340277edffb8b51c",
        "train.tar.gz-part-c": "md5:bd2ce08f5b51005b66afe484b01a4a59",
        "train.tar.gz-part-d": "md5:5cd31d961d2d5211aea38b8b95f7239a",
        "train.tar.gz-part-e": "md5:58f3fb7d28ae7f4b65ee35a1ed7ab106",
        "train.tar.gz-part-f": "md5:be64551c030e8087562a10df2c74ccb1",
    },
}
# The parts of train joined into one file, as [D]:58-60 does, with its md5.
WHOLE = {"train": ("train.tar.gz", "md5:c2cea55fd22a2b867d295fb35a2d3340")}
# [P]:80-81 and :91-92 drop every line with this word, in train and test.
LEFT_OUT = "Device09"
TRIALS = (
    "trials_cross_device",
    "trials_cross_distance",
    "trials_cross_dialect",
)  # [P]:97-99
# (speakers, utterances): [A] section 3 for train, table 5 for test.
PUBLISHED = {"train": (10_000, 579_013), "test": (240, 18_782)}
UNITS, SOURCE = ("speakers", "utterances"), "arXiv:2306.15354"
# Table -> column of utt2info.csv. Its first column is the utterance and its sixth the dialect
# ([L]:89-93), also if there is no header.
CONDITIONS = {
    "utt2device": "device",
    "utt2distance": "distance",
    "utt2dialect": "dialect",
}
GENDER = "gender"
DIALECT_COLUMN = 5


def download_corpus(corpus: Path, *, url: str = URL) -> None:
    """Download and unpack the official archives of the missing folders."""
    missing = {
        name: parts for name, parts in ARCHIVES.items() if not (corpus / name).is_dir()
    }
    joined = {name: WHOLE[name] for name in WHOLE if (corpus / WHOLE[name][0]).exists()}
    download_all(
        {
            corpus / part: (f"{url}/{part}", checksum)
            for name, parts in missing.items()
            for part, checksum in parts.items()
            if name not in joined
        }
    )
    for name, parts in missing.items():
        whole, checksum = joined.get(name, ("", None))
        unpack(
            [corpus / part for part in ([whole] if whole else parts)],
            corpus,
            checksum=checksum,
        )


def find_corpus(folder: Path) -> Path:
    """Return `folder`, or its `3dspeaker/` if the corpus is there ([P]:51-57)."""
    inner = folder / "3dspeaker"
    return inner if inner.is_dir() and not (folder / "files").is_dir() else folder


def check_layout(corpus: Path) -> None:
    """Raise FileNotFoundError naming all missing files and the archives that hold them."""
    lists = [f"files/{s}_{name}" for s in PUBLISHED for name in ("wav.scp", "utt2spk")]
    lists += [f"files/{split}_utt2info.csv" for split in PUBLISHED]
    lists += [f"files/{name}" for name in TRIALS]
    missing = [name for name in (*PUBLISHED, *lists) if not (corpus / name).exists()]
    if not missing:
        return
    needed = [
        a
        for key in ARCHIVES
        if any(m.split("/")[0] == key for m in missing)
        for a in ARCHIVES[key]
    ]
    raise FileNotFoundError(
        f"{corpus}: incomplete 3D-Speaker corpus, no {' '.join(missing)}; run stage 0,"
        f" or download {' '.join(needed)} from {URL} and unpack them there"
    )


def read_split(
    corpus: Path, split: str, faults: Faults
) -> tuple[dict[str, Path], dict[str, str], int]:
    """Return (utterance -> file, utterance -> speaker, number left out) of `train` or `test`."""
    # Paths in the list are relative to the corpus ([P]:77,88).
    listed = read_table(corpus / f"files/{split}_wav.scp", faults)
    spoken_by = read_table(corpus / f"files/{split}_utt2spk", faults)
    wavs = {
        u: corpus / path for u, path in listed.items() if LEFT_OUT not in f"{u} {path}"
    }
    for utterance in wavs.keys() - spoken_by.keys():
        faults.add(
            "utterances without a speaker",
            f"{corpus}/files/{split}_utt2spk: no line for utterance {utterance}",
        )
    check_files(
        corpus,
        split,
        used=wavs.values(),
        listed={corpus / p for p in listed.values()},
        faults=faults,
    )
    speakers = {utterance: spoken_by.get(utterance, "") for utterance in wavs}
    num_speakers = len(
        {spoken_by[utterance] for utterance in listed.keys() & spoken_by.keys()}
    )
    print(compare(split, (num_speakers, len(listed)), PUBLISHED[split], UNITS, SOURCE))
    return wavs, speakers, len(listed) - len(wavs)


def check_files(
    corpus: Path,
    split: str,
    *,
    used: Collection[Path],
    listed: set[Path],
    faults: Faults,
) -> None:
    """Compare the recordings of a set with its list; missing ones are errors."""
    paths, _ = walk(corpus / split)
    missing = sorted(path for path in set(used).difference(paths) if not path.is_file())
    if missing:
        faults.add(
            "incomplete sets",
            f"{corpus / split}: {len(missing)} of {len(used)} listed recordings are"
            f" missing, for example {missing[0].name}; unpack"
            f" {' '.join(ARCHIVES[split])} again",
        )
    if extra := sorted(set(paths) - listed):
        print(
            f"{split}: ignoring {count_of(len(extra), 'unlisted recording')}, for"
            f" example {extra[0]}"
        )


def read_info(path: Path, speakers: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the tables of conditions of the used utterances from utt2info.csv."""
    with open_text(path, newline="") as lines:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines)]
    names = [name.lower() for name in rows[0]] if rows else []
    place = {
        name: names.index(name)
        for name in (*CONDITIONS.values(), GENDER)
        if name in names
    }
    place.setdefault("dialect", DIALECT_COLUMN)
    speakers_known = [
        row
        for row in rows
        if row and row[0] in speakers and len(row) > max(place.values())
    ]
    tables = {
        table: {row[0]: row[place[name]] for row in speakers_known}
        for table, name in CONDITIONS.items()
        if name in place
    }
    if GENDER in place:
        tables["spk2gender"] = {
            speakers[row[0]]: gender
            for row in speakers_known
            if (gender := row[place[GENDER]][:1].lower()) in ("m", "f")
        }
    return {name: table for name, table in tables.items() if table}


def prepare(
    corpus: Path, data: Path, *, noise: Path | None = None, rirs: Path | None = None
) -> None:
    """Write the data directories and copy utt2info.csv."""
    corpus = find_corpus(corpus)
    check_layout(corpus)
    faults = Faults()
    sets = {split: read_split(corpus, split, faults) for split in PUBLISHED}
    # We know of no published number of trials per list.
    trials = {
        name: read_official(corpus / "files" / name, faults, recordings=sets["test"][1])
        for name in TRIALS
    }
    faults.raise_if_any(f"{corpus}: inconsistent corpus")
    check_disjoint(sets["train"][1].values(), sets["test"][1].values(), where=corpus)
    for split, (wavs, speakers, num_left_out) in sets.items():
        info = corpus / f"files/{split}_utt2info.csv"
        columns = read_info(info, speakers)
        write_set(
            data / split,
            wavs=wavs,
            speakers=speakers,
            trials=trials if split == "test" else None,
            columns=columns,
            about=ABOUT if split == "train" else None,
        )
        shutil.copyfile(info, data / split / "utt2info.csv")
        unknown = len(wavs.keys() - columns.get("utt2dialect", {}).keys())
        print(
            f"{data / split}: {count_of(num_left_out, 'utterance')} of {LEFT_OUT} left"
            " out"
            + (f", {unknown} others are missing in {info.name}" if unknown else "")
        )
    write_published_choice(data, noise=noise, rirs=rirs)  # [P]:68,70


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare` or `download_corpus`."""
    args = make_parser(
        "Prepare the 3D-Speaker corpus.", corpus=HERE / "corpus"
    ).parse_args(argv)
    return run(
        args,
        download=lambda: download_corpus(args.corpus),
        prepare=lambda: prepare(
            args.corpus, args.data, noise=args.noise, rirs=args.rirs
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
