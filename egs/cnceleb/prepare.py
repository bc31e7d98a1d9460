"""Prepare CN-Celeb 1 and 2 in their official layout.

--corpus DIR holds `CN-Celeb_flac/` and `CN-Celeb2_flac/`, as the archives unpack. --data DIR gets
`train/`, where short utterances are joined (`joined/` holds the new files and the table
`utt2utts`), and `test/` with one trial list for each way of enrolling a speaker.

Sources: github.com/wenet-e2e/wespeaker at dfa7419, examples/cnceleb/v2/local/, there [W]
prepare_data.sh, [U] combine_utt.sh, [F] format_trials_cnceleb.py and [G] download_data.sh;
github.com/modelscope/3D-Speaker at 09e7806, egs/cnceleb/sv-cam++/, there [P]
local/prepare_data_cncb.sh and [Y] conf/cam++.yaml. [C] counted the files and lists of the corpus:
github.com/Evildoersudo/camplusplus at ebe57e6, its notes on the experiments with CN-Celeb.
"""

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from egs.cnceleb.evaluation import LISTS, read_test, read_words, report_extra
from egs.cnceleb.joining import genre_of, join_all
from egs.common.corpus.archives import unpack
from egs.common.corpus.fetch import download_all
from egs.common.corpus.noises import write_published_choice
from egs.common.corpus.prepare import check_disjoint, make_parser, run, write_set
from speakerlab.core.faults import MAX_LINES_PER_KIND, Faults
from speakerlab.data.tables import write_table

HERE = Path(__file__).resolve().parent
URL = "https://www.openslr.org/resources/82"  # [G]:40,48
PAGE = "https://www.openslr.org/82/"  # states the licence
ABOUT = {"corpus": "CN-Celeb 1 and 2", "languages": "Chinese", "page": PAGE}
ABOUT["licence"] = "CC BY-SA 4.0"
ONE, TWO = "CN-Celeb_flac", "CN-Celeb2_flac"  # [W]:55-60
# Folder -> its archive in order ([G]:38-40,47-48) and the md5 of the whole ([G]:42,53).
ARCHIVES: dict[str, tuple[tuple[str, ...], str]] = {
    ONE: (("cn-celeb_v2.tar.gz",), "md5:7ab1b214028a7439e26608b2d5a0336c"),
    TWO: (
        ("cn-celeb2_v2.tar.gzaa", "cn-celeb2_v2.tar.gzab", "cn-celeb2_v2.tar.gzac"),
        "md5:55c47cf0b6d0bf793e88bf79d5dfc660",
    ),
}
# Training speakers ([W]:101,106); their recordings are data/<speaker>/*.flac ([W]:70,102,107).
SPEAKER_LISTS = {ONE: "dev/dev.lst", TWO: "spk.lst"}
PIECES = (
    *(
        f"{folder}/{name}"
        for folder in SPEAKER_LISTS
        for name in ("data", SPEAKER_LISTS[folder])
    ),
    *(f"{ONE}/eval/{name}" for name in ("enroll", "test")),
    *(
        f"{ONE}/{LISTS}/{name}"
        for name in ("enroll.lst", "enroll.map", "test.lst", "trials.lst")
    ),
)
NUM_TRAIN_SPEAKERS = 2793  # [Y]:30


def download_corpus(corpus: Path, *, url: str = URL) -> None:
    """Download and unpack the archives of the missing folders."""
    missing = [
        parts for name, parts in ARCHIVES.items() if not (corpus / name).is_dir()
    ]
    names = [name for archives, _ in missing for name in archives]
    download_all({corpus / name: (f"{url}/{name}", None) for name in names})
    for archives, checksum in missing:
        unpack([corpus / name for name in archives], corpus, checksum=checksum)


def check_layout(corpus: Path) -> None:
    """Raise FileNotFoundError naming all missing files and the archives that hold them."""
    missing = [piece for piece in PIECES if not (corpus / piece).exists()]
    if missing:
        folders = dict.fromkeys(piece.split("/")[0] for piece in missing)
        names = " ".join(name for folder in folders for name in ARCHIVES[folder][0])
        raise FileNotFoundError(
            f"{corpus}: incomplete CN-Celeb 1 and 2, no {' '.join(missing)}; run stage"
            f" 0, or download {names} from {URL} and unpack them there"
        )


def read_training(
    corpus: Path, faults: Faults, *, tested: Collection[str]
) -> dict[str, list[Path]]:
    """Return speaker -> recordings of the training speakers of both corpora."""
    recordings: dict[str, list[Path]] = {}
    for folder, listing in SPEAKER_LISTS.items():
        listed = read_words(corpus / folder / listing, faults)
        others = {path.name for path in (corpus / folder / "data").iterdir()} - {
            *listed,
            *tested,
        }
        report_extra(corpus / folder / "data", sorted(others))
        for speaker in listed:
            place = corpus / folder / "data" / speaker
            names = (
                sorted(path.name for path in place.iterdir()) if place.is_dir() else []
            )
            usable = [name for name in names if is_recording(name)]
            report_extra(place, [name for name in names if not is_recording(name)])
            recordings.setdefault(speaker, []).extend(place / name for name in usable)
            if not usable:
                text = f"{place}: no recordings of this speaker, who is in {listing}"
                archives = " ".join(ARCHIVES[folder][0])
                faults.add(
                    "speakers without recordings", f"{text}; unpack {archives} again"
                )
    print(_compare_speakers(len(recordings)))
    return recordings


def is_recording(name: str) -> bool:
    """Return whether a file name is <genre>-<session>-<number>.flac."""
    path = Path(name)
    return (
        path.suffix == ".flac"
        and "-" in name
        and genre_of(path).replace("_", "").isalpha()
    )


def _compare_speakers(num_speakers: int) -> str:
    verdict = "" if num_speakers == NUM_TRAIN_SPEAKERS else ": incomplete corpora"
    return (
        f"train: {num_speakers} speakers, published: {NUM_TRAIN_SPEAKERS} "
        f"(github.com/modelscope/3D-Speaker, egs/cnceleb){verdict}"
    )


def prepare(args: argparse.Namespace) -> None:
    """Join short training utterances and write the data directories."""
    check_layout(args.corpus)
    faults = Faults()
    test = read_test(args.corpus / ONE, faults)
    recordings = read_training(args.corpus, faults, tested=set(test.speakers.values()))
    faults.raise_if_any(f"{args.corpus}: inconsistent corpus")
    check_disjoint(recordings, test.speakers.values(), where=args.corpus)
    write_training(
        args.data, recordings, join_seconds=args.join_seconds, num_jobs=args.num_jobs
    )
    write_set(
        args.data / "test",
        wavs=test.wavs,
        speakers=test.speakers,
        trials={"trials_concat": test.concatenated, "trials_average": test.trials},
        columns={"utt2genre": test.genres},
        enroll=test.enroll,
    )
    write_published_choice(args.data, noise=args.noise, rirs=args.rirs)  # [P]:80,82


def write_training(
    data: Path,
    recordings: Mapping[str, Sequence[Path]],
    *,
    join_seconds: float,
    num_jobs: int,
) -> None:
    """Write `train/`, and in `joined/` the new files and the table of their parts."""
    folder, paths = data / "joined", list(recordings.values())
    joined = join_all(paths, folder, min_seconds=join_seconds, num_jobs=num_jobs)
    for line in joined.broken[:MAX_LINES_PER_KIND]:
        print(f"not joined: {line}")
    table = {name: " ".join(made_of) for name, made_of in joined.made_of.items()}
    write_table(folder / "utt2utts", table)
    print(
        f"{folder}: joined {sum(map(len, joined.made_of.values()))} utterances (shorter"
        f" than {join_seconds:g} s, and neighbours of the same genre) into"
        f" {len(table)}; {len(joined.wavs) - len(table)} unchanged"
    )
    write_set(
        data / "train",
        wavs=joined.wavs,
        speakers={name: name.partition("/")[0] for name in joined.wavs},
        columns={"utt2genre": {name: genre_of(Path(name)) for name in joined.wavs}},
        about=ABOUT,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare` or `download_corpus`."""
    parser = make_parser("Prepare CN-Celeb 1 and 2.", corpus=HERE / "corpus")
    description = (
        "join shorter training utterances of a speaker and genre (default 5; 0: do not"
        " join)"
    )
    parser.add_argument(
        "--join-seconds", type=float, default=5.0, metavar="S", help=description
    )  # [W]:72
    args = parser.parse_args(argv)
    return run(
        args,
        download=lambda: download_corpus(args.corpus),
        prepare=lambda: prepare(args),
    )


if __name__ == "__main__":
    sys.exit(main())
