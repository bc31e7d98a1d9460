"""Prepare VoxConverse 0.3: development and test part, scored over the whole recordings.

--corpus DIR holds the unpacked archives in any layout; --download gets and unpacks them. --data DIR
gets `dev/` and `test/` with `ref.rttm` and `ref.uem`.

Source of addresses and splits: README.md of github.com/joonson/voxconverse at COMMIT; it publishes
no checksums and no UEM.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from egs.common.corpus.archives import unpack
from egs.common.corpus.fetch import download_all
from egs.common.corpus.official import compare
from egs.common.corpus.prepare import make_parser, run, walk
from egs.common.corpus.turns import find_recordings, whole_recordings, write_turns
from speakerlab.diarization.regions import Turn, read_rttm

COMMIT = "24bf60be297701cd7e4ef18550c6d390c1b87365"
AUDIO = "https://www.robots.ox.ac.uk/~vgg/data/voxconverse/data/voxconverse_{}_wav.zip"
TURNS = f"https://github.com/joonson/voxconverse/archive/{COMMIT}.zip"
PUBLISHED = {
    "dev": (216, 8_268),
    "test": (232, 19_479),
}  # recordings, turns of version 0.3
UNITS = ("recordings", "turns")


def download_corpus(corpus: Path) -> None:
    """Download and unpack what is missing."""
    wanted = {corpus / f"audio/{part}": AUDIO.format(part) for part in PUBLISHED}
    wanted[corpus / "turns"] = TURNS
    absent = {folder: url for folder, url in wanted.items() if not folder.is_dir()}
    archives = {
        folder: corpus / url.rpartition("/")[2] for folder, url in absent.items()
    }
    download_all({archives[folder]: (url, None) for folder, url in absent.items()})
    for folder, archive in archives.items():
        unpack([archive], folder)


def find_turns(corpus: Path, part: str) -> dict[str, list[Turn]]:
    """Return the turns of a part: `<part>/*.rttm` anywhere below the corpus."""
    folders = {
        path.parent for path in walk(corpus, (".rttm",))[0] if path.parent.name == part
    }
    if len(folders) != 1:
        raise FileNotFoundError(
            f"{corpus}: {len(folders)} folders {part}/ with .rttm files, needs one; run"
            " stage 0"
        )
    return read_rttm(folders.pop())


def prepare(corpus: Path, data: Path) -> None:
    """Write the data directories."""
    for part, published in PUBLISHED.items():
        turns = find_turns(corpus, part)
        wavs = find_recordings(corpus, turns)
        counted = len(turns), sum(map(len, turns.values()))
        print(compare(f"voxconverse {part}", counted, published, UNITS, "version 0.3"))
        write_turns(data / part, wavs=wavs, turns=turns, regions=whole_recordings(wavs))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare` or `download_corpus`."""
    corpus = Path(__file__).resolve().parents[1] / "corpus"
    args = make_parser(
        "Prepare VoxConverse for diarization.", corpus=corpus
    ).parse_args(argv)
    return run(
        args,
        download=lambda: download_corpus(args.corpus),
        prepare=lambda: prepare(args.corpus, args.data),
    )


if __name__ == "__main__":
    sys.exit(main())
