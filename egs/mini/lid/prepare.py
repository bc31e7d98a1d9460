"""Synthesize and prepare the language corpus of mini: five languages with their own voices.

--corpus DIR gets the corpus (see ../making.py) if it does not exist; --data DIR gets `train/` and
`test/` with `utt2lang`, `noise/` and `rirs/`. Training and test have different voices.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from egs.common.corpus.prepare import make_parser, run, write_noise_and_rooms, write_set
from egs.mini.lid.sentences import LANGUAGES, draw_sentence
from egs.mini.making import Utterance, install_espeak, provide_corpus
from egs.mini.voices import Voice, draw_voice

HERE = Path(__file__).resolve().parent
ABOUT = {"corpus": "synthetic voices of espeak-ng", "languages": ", ".join(LANGUAGES)}


@dataclass(frozen=True)
class Size:
    """Size per language; the corpus is synthesized again if this changes."""

    seed: int = 1
    num_train_voices: int = 20
    num_test_voices: int = 8
    num_utterances: int = 6  # of each voice

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "seed" and value < 1:
                raise ValueError(f"{name}: must be at least 1, not {value}")


def plan(size: Size) -> tuple[dict[str, Voice], list[Utterance]]:
    """Draw the voices, half of them female, and their sentences."""
    voices: dict[str, Voice] = {}
    utterances: list[Utterance] = []
    for language in LANGUAGES:
        for i in range(size.num_train_voices + size.num_test_voices):
            name = f"{language}{i:03d}"
            split = "train" if i < size.num_train_voices else "test"
            voice = draw_voice(name, seed=size.seed, sex=("female", "male")[i % 2])
            voices[name] = replace(voice, language=language)
            for k in range(size.num_utterances):
                id = f"{name}-{k:02d}"
                text = draw_sentence(language, id, seed=size.seed)
                utterances.append(Utterance(id, name, split, text))
    return voices, utterances


def prepare(
    corpus: Path,
    data: Path,
    *,
    size: Size,
    noise: Path | None = None,
    rirs: Path | None = None,
    num_jobs: int = 2,
) -> None:
    """Synthesize the corpus if needed and write the data directories."""
    voices, utterances = plan(size)
    provide_corpus(corpus, voices, utterances, size=asdict(size), num_jobs=num_jobs)
    for split in ("train", "test"):
        rows = [utterance for utterance in utterances if utterance.split == split]
        write_set(
            data / split,
            wavs={row.id: corpus / row.path for row in rows},
            speakers={row.id: row.speaker for row in rows},
            columns={
                "utt2lang": {row.id: voices[row.speaker].language for row in rows}
            },
            about=ABOUT if split == "train" else None,
        )
    write_noise_and_rooms(
        data, noise=noise or corpus / "noise", rirs=rirs or corpus / "rirs"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare` or `install_espeak`."""
    corpus = HERE.parent / "corpus_lid"
    description = "Synthesize and prepare the language corpus of mini."
    parser = make_parser(description, corpus=corpus, makes_corpus=True)
    args = parser.parse_args(argv)
    return run(
        args,
        download=install_espeak,
        prepare=lambda: prepare(
            args.corpus,
            args.data,
            size=Size(args.seed),
            noise=args.noise,
            rirs=args.rirs,
            num_jobs=args.num_jobs,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
