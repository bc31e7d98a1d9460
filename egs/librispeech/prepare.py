"""Prepare a corpus in the LibriSpeech layout: SUBSET/SPEAKER/CHAPTER/SPEAKER-CHAPTER-UTT.flac.

--corpus DIR holds the subsets, or a folder LibriSpeech/ with them. --data DIR gets `train/` and
`test/` with trials.
"""

import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from egs.common.corpus.archives import unpack
from egs.common.corpus.fetch import download_all
from egs.common.corpus.prepare import (
    LeftOut,
    check_disjoint,
    make_parser,
    run,
    walk,
    write_noise_and_rooms,
    write_set,
)
from egs.common.corpus.trials import draw_nontargets, draw_targets, group_by_speaker
from speakerlab.core.faults import Faults
from speakerlab.data.tables import Trial, name_fault, one_line

HERE = Path(__file__).resolve().parent
URL = "https://www.openslr.org/resources/12"
# SHA-256 of the archives, as torchaudio 2.11 verifies them (torchaudio/datasets/librispeech.py).
CHECKSUMS = {
    "dev-clean": "76f87d090650617fca0cac8f88b9416e0ebf80350acb97b343a85fa903728ab3",
    "dev-other": "12661c48e8c3fe1de2c1caa4c3e135193bfb1811584f11f569dd12645aa84365",
    "test-clean": "39fde525e59672dc6d1551919b1478f724438a95aa55f874b576be21967e6c23",
    "test-other": "d09c181bba5cf717b3dee7d4d592af11a3ee3a09e08ae025c5506f6ebe961c29",
    "train-clean-100": (
        "d4ddd1d5a6ab303066f14971d768ee43278a5f2a0aa43dc716b0e64ecbbbf6e2"
    ),
    "train-clean-360": (
        "146a56496217e96c14334a160df97fffedd6e0a04e66b9c5af0d40be3c792ecf"
    ),
    "train-other-500": (
        "ddb22f27f96ec163645d53215559df6aa36515f26e01dd70798188350adcb6d2"
    ),
}
# The archives' LICENSE.TXT; not of another corpus in this layout.
ABOUT = {"corpus": "LibriSpeech", "licence": "CC BY 4.0", "languages": "English"}
ABOUT["page"] = "https://www.openslr.org/12"
DEFAULT_SUBSETS = ("train-clean-100", "test-clean")
MAX_TARGETS_PER_SPEAKER = 200
MAX_NONTARGETS = 40_000


def download_corpus(
    corpus: Path, *, subsets: Sequence[str] = DEFAULT_SUBSETS, url: str = URL
) -> None:
    """Download and unpack the official archives of the missing subsets."""
    for subset in subsets:
        if subset not in CHECKSUMS:
            raise ValueError(
                f"--subsets: unknown subset {subset}; choose from {' '.join(CHECKSUMS)}"
            )
    root = find_root(corpus)
    archives = {
        corpus / f"{subset}.tar.gz": (
            f"{url}/{subset}.tar.gz",
            f"sha256:{CHECKSUMS[subset]}",
        )
        for subset in subsets
        if not (root / subset).is_dir()
    }
    download_all(archives)
    for archive in archives:
        unpack([archive], corpus)


def find_root(corpus: Path) -> Path:
    """Return the folder of the subsets: the archives unpack to LibriSpeech/."""
    inner = corpus / "LibriSpeech"
    return inner if inner.is_dir() else corpus


def choose_subsets(
    root: Path, *, train: Sequence[str] | None, test: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """Return (training, test) subsets; by default train*, and test-* or else dev-*."""
    there = (
        sorted(path.name for path in root.iterdir() if path.is_dir())
        if root.is_dir()
        else []
    )

    def starting_with(prefix: str) -> list[str]:
        return [name for name in there if name.startswith(prefix)]

    chosen = (
        list(train or starting_with("train")),
        list(test or starting_with("test-") or starting_with("dev-")),
    )
    for kind, names in zip(("train", "test"), chosen):
        missing = [name for name in names if name not in there]
        if missing or not names:
            subsets = (
                f"no {' '.join(missing)}"
                if missing
                else f"only {' '.join(there) or 'nothing'}"
            )
            raise FileNotFoundError(
                f"{root}: no {kind} subset ({subsets}); put SUBSET/SPEAKER/CHAPTER/*.flac"
                " there, download them with --download, or name subsets with"
                f" --{kind}-subsets"
            )
    return chosen


def read_subset(
    folder: Path, faults: Faults
) -> tuple[dict[str, Path], dict[str, str], LeftOut]:
    """Return (utterance -> file, utterance -> speaker, files left out) of a subset."""
    wavs: dict[str, Path] = {}
    speakers: dict[str, str] = {}
    paths, left_out = walk(folder)
    for path in paths:
        speaker, chapter = path.parts[-3:-1]
        if len(path.relative_to(folder).parts) != 3:
            faults.add(
                "misplaced files", f"{one_line(path)}: not in a folder SPEAKER/CHAPTER"
            )
        elif not path.stem.startswith(f"{speaker}-{chapter}-"):
            faults.add(
                "misplaced files",
                f"{one_line(path)}: the file name does not match the folders; rename it"
                f" to {speaker}-{chapter}-UTT{path.suffix}",
            )
        elif fault := name_fault(path.stem, path) or name_fault(speaker, path):
            left_out[path] = fault
        elif path.stem in wavs:
            faults.add(
                "duplicate ids",
                f"{path}: second file of utterance {path.stem}; keep one",
            )
        else:
            wavs[path.stem], speakers[path.stem] = path, speaker
    if not wavs:
        faults.add("empty subsets", f"{folder}: no audio in SPEAKER/CHAPTER/*.flac")
    return wavs, speakers, left_out


def make_trials(speakers: dict[str, str], *, seed: int) -> list[Trial]:
    """Draw trials among utterance -> speaker; targets are across chapters if possible."""
    groups = group_by_speaker(speakers)
    chapters = {utterance: utterance.rpartition("-")[0] for utterance in speakers}
    targets = draw_targets(
        groups, seed=seed, max_per_speaker=MAX_TARGETS_PER_SPEAKER, sessions=chapters
    )
    nontargets = draw_nontargets(
        groups,
        speaker_pairs=combinations(groups, 2),
        seed=seed,
        max_trials=MAX_NONTARGETS,
    )
    return sorted(targets + nontargets)


def prepare(
    corpus: Path,
    data: Path,
    *,
    train_subsets: Sequence[str] | None = None,
    test_subsets: Sequence[str] | None = None,
    noise: Path | None = None,
    rirs: Path | None = None,
    seed: int = 1,
) -> None:
    """Write the data directories; several test subsets have a trial list each."""
    root = find_root(corpus)
    train, test = choose_subsets(root, train=train_subsets, test=test_subsets)
    faults = Faults()
    subsets = {name: read_subset(root / name, faults) for name in (*train, *test)}
    faults.raise_if_any(f"{root}: inconsistent corpus")
    (
        (train_wavs, train_speakers, train_left_out),
        (test_wavs, test_speakers, test_left_out),
    ) = (
        _join([subsets[name] for name in names], where=root) for names in (train, test)
    )
    check_disjoint(train_speakers.values(), test_speakers.values(), where=root)
    trials = {
        "trials" if len(test) == 1 else f"trials_{name}": make_trials(
            subsets[name][1], seed=seed
        )
        for name in test
    }
    write_set(
        data / "train",
        wavs=train_wavs,
        speakers=train_speakers,
        left_out=train_left_out,
        about=ABOUT if CHECKSUMS.keys() >= {*train} else None,
    )
    write_set(
        data / "test",
        wavs=test_wavs,
        speakers=test_speakers,
        trials=trials,
        left_out=test_left_out,
    )
    write_noise_and_rooms(data, noise=noise, rirs=rirs)


def _join(
    subsets: Sequence[tuple[dict[str, Path], dict[str, str], LeftOut]], *, where: Path
) -> tuple[dict[str, Path], dict[str, str], LeftOut]:
    """Merge subsets."""
    wavs: dict[str, Path] = {}
    speakers: dict[str, str] = {}
    left_out: LeftOut = {}
    for more_wavs, more_speakers, more_left_out in subsets:
        twice = sorted(wavs.keys() & more_wavs.keys())
        if twice:
            raise ValueError(
                f"{where}: utterance {twice[0]} is in two subsets; leave one out"
            )
        wavs |= more_wavs
        speakers |= more_speakers
        left_out |= more_left_out
    return wavs, speakers, left_out


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare` or `download_corpus`."""
    parser = make_parser(
        "Prepare a corpus in the LibriSpeech layout.", corpus=HERE / "corpus"
    )
    parser.add_argument(
        "--subsets", nargs="+", default=DEFAULT_SUBSETS, help="subsets to download"
    )
    parser.add_argument("--train-subsets", nargs="+", help="default: train*")
    parser.add_argument("--test-subsets", nargs="+", help="default: test-*, else dev-*")
    args = parser.parse_args(argv)
    return run(
        args,
        download=lambda: download_corpus(args.corpus, subsets=args.subsets),
        prepare=lambda: prepare(
            args.corpus,
            args.data,
            train_subsets=args.train_subsets,
            test_subsets=args.test_subsets,
            noise=args.noise,
            rirs=args.rirs,
            seed=args.seed,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
