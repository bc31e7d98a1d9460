"""Prepare VoxBlink2 for training; the test set is VoxCeleb1, which egs/voxceleb prepares.

--corpus DIR is the folder that the cropping scripts of VoxBlink2 write (their --save_dir):
`<speaker>/<video>/<number>.wav`. --data DIR gets `train/`, and `noise/` and `rirs/` for
augmentation. With the published list `spk2videos` in DIR, the videos found are compared with it.

Sources: [S] github.com/VoxBlink2/ScriptsForVoxBlink2 at ea2d887: README.md, downloader.py and
cropper_audio.py; arXiv:2407.11510, which counts the corpus.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from egs.common.corpus.noises import write_published_choice
from egs.common.corpus.official import compare
from egs.common.corpus.prepare import (
    LeftOut,
    id_fault,
    make_parser,
    refuse_nothing,
    run,
    walk,
    write_set,
)
from speakerlab.core.reading import open_text
from speakerlab.data.tables import one_line

HERE = Path(__file__).resolve().parent
PAGE = "https://github.com/VoxBlink2/ScriptsForVoxBlink2"
ABOUT = {
    "corpus": "VoxBlink2",
    "licence": "CC BY-NC-SA 4.0; the videos belong to their owners",
    "languages": "multilingual",
    "page": PAGE,
}
SPEAKER = re.compile(r"id\d{6}")
PUBLISHED = (111_284, 9_904_382)
UNITS = ("speakers", "utterances")
SOURCE = "arXiv:2407.11510"
# [S] has the list in the second place, beside its scripts.
LIST_PLACES = ("spk2videos", "data/spk2videos")


def find_speakers(corpus: Path) -> list[Path]:
    """Return the folders of the speakers, sorted."""
    if not corpus.is_dir():
        return []
    with os.scandir(corpus) as entries:
        names = [entry.name for entry in entries if SPEAKER.fullmatch(entry.name)]
    return [corpus / name for name in sorted(names)]


def find_utterances(folders: Iterable[Path]) -> tuple[dict[str, Path], LeftOut]:
    """Return (utterance -> file, recordings outside the layout) of the folders of speakers."""
    wavs: dict[str, Path] = {}
    left_out: LeftOut = {}
    for folder in folders:
        paths, unusable = walk(folder)
        left_out |= unusable
        for path in paths:
            names = path.relative_to(folder).parts
            if len(names) != 2:
                fault = "not <video>/<number>.wav below the folder of its speaker"
                left_out[path] = f"{one_line(path)}: {fault}"
                continue
            utterance = f"{folder.name}/{names[0]}/{path.stem}"
            if fault := id_fault(utterance, path, wavs):
                left_out[path] = fault
            else:
                wavs[utterance] = path
    return wavs, left_out


def find_list(corpus: Path) -> Path | None:
    """Return the path of spk2videos, if it is in the corpus."""
    places = (corpus / place for place in LIST_PLACES)
    return next((path for path in places if path.is_file()), None)


def compare_videos(path: Path, utterances: Iterable[str]) -> str:
    """Return one line about the videos of spk2videos that have utterances.

    A line of the list is a speaker and its videos.
    """
    found = {utterance.rpartition("/")[0] for utterance in utterances}
    num_speakers = num_listed = num_found = 0
    with open_text(path) as lines:
        for line in lines:
            speaker, *videos = line.split() or [""]
            videos_found = [f"{speaker}/{video}" in found for video in videos]
            num_listed += len(videos)
            num_found += sum(videos_found)
            num_speakers += any(videos_found)
    return (
        f"{path.name}: {num_found} of {num_listed} videos, of {num_speakers} speakers;"
        f" {len(found) - num_found} videos are not in the list"
    )


def check_audio(corpus: Path) -> None:
    """Raise FileNotFoundError if there are no folders of speakers."""
    if not find_speakers(corpus):
        raise FileNotFoundError(
            f"{corpus}: no audio of VoxBlink2, no folders such as id000000; download"
            f" and crop it with the scripts of {PAGE}, and give the --save_dir of"
            " cropper_audio.py as --corpus"
        )
    print(f"{corpus}: audio of VoxBlink2 already exists")


def prepare(
    corpus: Path, data: Path, *, noise: Path | None = None, rirs: Path | None = None
) -> None:
    """Write the data directories."""
    check_audio(corpus)
    wavs, left_out = find_utterances(find_speakers(corpus))
    refuse_nothing(corpus, wavs, left_out)
    speakers = {utterance: utterance.partition("/")[0] for utterance in wavs}
    counted = len(set(speakers.values())), len(wavs)
    print(compare("train", counted, PUBLISHED, UNITS, SOURCE))
    listed = find_list(corpus)
    if listed is not None:
        print(compare_videos(listed, wavs))
    write_set(
        data / "train", wavs=wavs, speakers=speakers, left_out=left_out, about=ABOUT
    )
    write_published_choice(data, noise=noise, rirs=rirs)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare` or `check_audio`."""
    args = make_parser("Prepare VoxBlink2.", corpus=HERE / "corpus").parse_args(argv)
    return run(
        args,
        download=lambda: check_audio(args.corpus),
        prepare=lambda: prepare(
            args.corpus, args.data, noise=args.noise, rirs=args.rirs
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
