"""Prepare AISHELL-4 for diarization: one microphone of its array, and its turns.

--corpus DIR holds the unpacked archives in any layout, with the folders of their names; --download
gets and unpacks them. --data DIR gets `dev/` (the archive train_L, because the corpus has no part
for development) and `test/` with `ref.rttm` and `ref.uem`, and --train also `train/` (train_M and
train_S). The turns are those of `<meeting>.rttm`, or of its TextGrid if there is none. --channel N:
the microphone, whose recordings are copied to `audio/channelN`. The corpus has no UEM: whole
recordings are scored.

Sources: openslr.org/111 (archives, sizes, licence); layout: lhotse/recipes/aishell4.py of
github.com/lhotse-speech/lhotse at 12baffe; numbers of recordings: aishell4/README.md of
github.com/FrenchKrab/datasets-pyannote at 8d7ae66.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from egs.common.corpus.archives import unpack
from egs.common.corpus.fetch import download_all
from egs.common.corpus.prepare import make_parser, run, walk
from egs.common.corpus.textgrid import read_textgrid, turns_of_tiers
from egs.common.corpus.turns import (
    find_recordings,
    take_channel,
    whole_recordings,
    write_turns,
)
from speakerlab.diarization.regions import Turn, read_rttm

ARCHIVES = "https://www.openslr.org/resources/111"
# Split -> the archives of its recordings.
PARTS = {"dev": ("train_L",), "test": ("test",), "train": ("train_M", "train_S")}
NUM_CHANNELS = 8


def splits(*, train: bool) -> list[str]:
    """Return the splits to prepare."""
    return [split for split in PARTS if train or split != "train"]


def download_corpus(corpus: Path, *, train: bool) -> None:
    """Download and unpack the archives that are missing."""
    missing: dict[str, Path] = {}
    for split in splits(train=train):
        for part in PARTS[split]:
            if not (corpus / part).is_dir():
                missing[part] = corpus / f"{part}.tar.gz"
    download_all({path: (f"{ARCHIVES}/{path.name}", None) for path in missing.values()})
    for archive in missing.values():
        # It holds the folder of its name.
        unpack([archive], corpus)


def find_turns(corpus: Path, part: str) -> dict[str, list[Turn]]:
    """Return the turns of the meetings of an archive, in order of the names."""
    files: dict[str, Path] = {}
    # The RTTM file is read where there are both.
    for ending in (".textgrid", ".rttm"):
        for path in walk(corpus, (ending,))[0]:
            if part in path.relative_to(corpus).parts:
                files[path.stem] = path
    if not files:
        raise FileNotFoundError(
            f"{corpus}: has no .rttm or .TextGrid in a folder {part}; run stage 0, or"
            " complete the corpus"
        )
    turns: dict[str, list[Turn]] = {}
    for name, path in sorted(files.items()):
        if path.suffix == ".rttm":
            turns[name] = read_turns(path)
        else:
            print(f"{name}: has no .rttm, the turns are those of {path.name}")
            turns[name] = turns_of_tiers(read_textgrid(path))
    return turns


def read_turns(path: Path) -> list[Turn]:
    """Return the turns of an RTTM file of one recording, of any name."""
    turns_of = read_rttm(path)
    if len(turns_of) != 1:
        raise ValueError(
            f"{path}: has {len(turns_of)} recordings, must have one; get the file again"
        )
    (turns,) = turns_of.values()
    return turns


def prepare(
    corpus: Path, data: Path, *, train: bool, channel: int, num_jobs: int
) -> None:
    """Write the data directories."""
    for split in splits(train=train):
        turns: dict[str, list[Turn]] = {}
        for part in PARTS[split]:
            turns |= find_turns(corpus, part)
        wavs = find_recordings(corpus, turns, ending=".flac")
        wavs = take_channel(wavs, data / "audio", channel=channel, num_jobs=num_jobs)
        write_turns(
            data / split, wavs=wavs, turns=turns, regions=whole_recordings(wavs)
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare` or `download_corpus`."""
    corpus = Path(__file__).resolve().parents[1] / "corpus"
    parser = make_parser("Prepare AISHELL-4 for diarization.", corpus=corpus)
    numbers = range(1, NUM_CHANNELS + 1)
    parser.add_argument("--channel", type=int, choices=numbers, default=1)
    parser.add_argument("--train", action="store_true", help="also train_M and train_S")
    args = parser.parse_args(argv)
    return run(
        args,
        download=lambda: download_corpus(args.corpus, train=args.train),
        prepare=lambda: prepare(
            args.corpus,
            args.data,
            train=args.train,
            channel=args.channel,
            num_jobs=args.num_jobs,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
