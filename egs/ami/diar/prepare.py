"""Prepare AMI for diarization: the setup of BUT (only words), its splits and UEM.

--corpus DIR holds the audio, `<meeting>.<microphone>.wav` anywhere, and the unpacked setup;
--download gets both. --data DIR gets `dev/` (18 meetings) and `test/` (16) of the Full-corpus-ASR
partition, with `ref.rttm` and `ref.uem`, and --train also `train/`. --microphone: Mix-Headset, or
Array1-01 (far field, SDM).

Sources: github.com/BUTSpeechFIT/AMI-diarization-setup at COMMIT (lists, only_words/rttms, uems);
addresses of the audio: pyannote/download_ami.sh of github.com/pyannote/AMI-diarization-setup at
5182c80.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from egs.common.corpus.archives import unpack
from egs.common.corpus.fetch import download_all
from egs.common.corpus.prepare import make_parser, run
from egs.common.corpus.turns import find_recordings, write_turns
from speakerlab.core.reading import read_text
from speakerlab.diarization.regions import read_rttm, read_uem

COMMIT = "2509d8933721023fab4def2618aabd5c28eb82e9"
SETUP = f"https://github.com/BUTSpeechFIT/AMI-diarization-setup/archive/{COMMIT}.zip"
FOLDER = f"AMI-diarization-setup-{COMMIT}"
AUDIO = "https://groups.inf.ed.ac.uk/ami/AMICorpusMirror/amicorpus"
SPLITS = ("dev", "test", "train")
MICROPHONES = ("Mix-Headset", "Array1-01")


def splits(*, train: bool) -> list[str]:
    """Return the splits to prepare."""
    return [split for split in SPLITS if train or split != "train"]


def meetings_of(corpus: Path, split: str) -> list[str]:
    """Return the meetings of a split."""
    path = corpus / FOLDER / "lists" / f"{split}.meetings.txt"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; run stage 0, or unpack {SETUP} there"
        )
    return read_text(path).split()


def download_corpus(corpus: Path, microphone: str, *, train: bool) -> None:
    """Download the setup and the audio that are missing."""
    if not (corpus / FOLDER).is_dir():
        archive = corpus / "AMI-diarization-setup.zip"
        download_all({archive: (SETUP, None)})
        unpack([archive], corpus)
    paths = [
        f"{name}/audio/{name}.{microphone}.wav"
        for split in splits(train=train)
        for name in meetings_of(corpus, split)
    ]
    download_all(
        {corpus / "amicorpus" / path: (f"{AUDIO}/{path}", None) for path in paths}
    )


def prepare(corpus: Path, data: Path, microphone: str, *, train: bool) -> None:
    """Write the data directories."""
    for split in splits(train=train):
        names = meetings_of(corpus, split)
        setup = corpus / FOLDER
        write_turns(
            data / split,
            wavs=find_recordings(corpus, names, ending=f".{microphone}.wav"),
            turns={
                name: read_rttm(setup / "only_words/rttms" / split / f"{name}.rttm")[
                    name
                ]
                for name in names
            },
            regions={
                name: read_uem(setup / "uems" / split / f"{name}.uem")[name]
                for name in names
            },
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare` or `download_corpus`."""
    corpus = Path(__file__).resolve().parents[1] / "corpus"
    parser = make_parser("Prepare AMI for diarization.", corpus=corpus)
    parser.add_argument("--microphone", choices=MICROPHONES, default=MICROPHONES[0])
    parser.add_argument("--train", action="store_true", help="also the training part")
    args = parser.parse_args(argv)
    return run(
        args,
        download=lambda: download_corpus(
            args.corpus, args.microphone, train=args.train
        ),
        prepare=lambda: prepare(
            args.corpus, args.data, args.microphone, train=args.train
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
