"""Prepare AliMeeting for diarization: its far-field recordings, and the turns of its TextGrids.

--corpus DIR holds the unpacked archives in any layout, with the folders `<part>_Ali_far`;
--download gets and unpacks them. --data DIR gets `dev/` (the part Eval) and `test/` with `ref.rttm`
and `ref.uem`, and --train also `train/`. --channel N: the microphone of the array, whose recordings
are copied to `audio/channelN`. The corpus has no UEM: whole recordings are scored.

Sources: openslr.org/119 (archives, sizes, licence), and the documentation of M2MeT 2.0 in
github.com/modelscope/FunASR, docs/m2met2/Dataset.md (sessions and participants). Layout and names
of tiers: lhotse/recipes/ali_meeting.py of github.com/lhotse-speech/lhotse at 058c91d.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from egs.common.corpus.archives import unpack
from egs.common.corpus.fetch import download_all
from egs.common.corpus.official import compare
from egs.common.corpus.prepare import make_parser, run, walk
from egs.common.corpus.textgrid import read_textgrid, turns_of_tiers
from egs.common.corpus.turns import take_channel, whole_recordings, write_turns
from speakerlab.core.faults import Faults
from speakerlab.diarization.regions import Turn

ARCHIVES = (
    "https://speech-lab-share-data.oss-cn-shanghai.aliyuncs.com/AliMeeting/openlr"
)
# Split -> part of the corpus, archive, and published sessions and participants.
PARTS = {
    "dev": ("Eval", "Eval_Ali.tar.gz", (8, 25)),
    "test": ("Test", "Test_Ali.tar.gz", (20, 60)),
    "train": ("Train", "Train_Ali_far.tar.gz", (212, 456)),
}
UNITS = ("recordings", "speakers")
NUM_CHANNELS = 8


def splits(*, train: bool) -> list[str]:
    """Return the splits to prepare."""
    return [split for split in PARTS if train or split != "train"]


def download_corpus(corpus: Path, *, train: bool) -> None:
    """Download and unpack the parts that are missing."""
    missing: dict[str, Path] = {}
    for split in splits(train=train):
        _, archive, _ = PARTS[split]
        if not (corpus / split).is_dir():
            missing[split] = corpus / archive
    download_all({path: (f"{ARCHIVES}/{path.name}", None) for path in missing.values()})
    for split, archive in missing.items():
        unpack([archive], corpus / split)


def find_meetings(corpus: Path, part: str) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return meeting -> TextGrid, and meeting -> far-field recording of a part.

    R8001_M8004.TextGrid is of the recording R8001_M8004_MS801.wav, with the array's name. Raises
    ValueError with a line for each meeting without one recording.
    """
    folder = f"{part}_Ali_far"
    grids: dict[str, Path] = {}
    for path in walk(corpus, (".textgrid",))[0]:
        if folder in path.relative_to(corpus).parts:
            grids[path.stem] = path
    if not grids:
        raise FileNotFoundError(
            f"{corpus}: has no .TextGrid in a folder {folder}; run stage 0, or complete"
            " the corpus"
        )
    recordings: list[Path] = []
    for path in walk(corpus)[0]:
        if folder in path.relative_to(corpus).parts:
            recordings.append(path)
    wavs: dict[str, Path] = {}
    faults = Faults()
    for name in grids:
        paths = [path for path in recordings if path.name.startswith(f"{name}_")]
        if len(paths) == 1:
            wavs[name] = paths[0]
        else:
            text = (
                f"{corpus}: {len(paths)} recordings {name}_*.wav in {folder}, not one"
            )
            faults.add("meetings", f"{text}; run stage 0, or complete the corpus")
    faults.raise_if_any(f"{corpus}: incomplete corpus")
    return grids, wavs


def prepare(
    corpus: Path, data: Path, *, train: bool, channel: int, num_jobs: int
) -> None:
    """Write the data directories."""
    for split in splits(train=train):
        part, _, published = PARTS[split]
        grids, wavs = find_meetings(corpus, part)
        turns: dict[str, list[Turn]] = {}
        for name, path in grids.items():
            turns[name] = turns_of_tiers(read_textgrid(path))
        speakers = {turn.speaker for meeting in turns.values() for turn in meeting}
        counted = len(turns), len(speakers)
        print(compare(f"alimeeting {split}", counted, published, UNITS, "M2MeT 2.0"))
        wavs = take_channel(wavs, data / "audio", channel=channel, num_jobs=num_jobs)
        write_turns(
            data / split, wavs=wavs, turns=turns, regions=whole_recordings(wavs)
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare` or `download_corpus`."""
    corpus = Path(__file__).resolve().parents[1] / "corpus"
    parser = make_parser("Prepare AliMeeting for diarization.", corpus=corpus)
    numbers = range(1, NUM_CHANNELS + 1)
    parser.add_argument("--channel", type=int, choices=numbers, default=1)
    parser.add_argument("--train", action="store_true", help="also the training part")
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
