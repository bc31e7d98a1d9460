"""Synthesize and prepare the conversations of mini, for diarization.

--corpus DIR gets the corpus (see conversations.py) if it does not exist; --data DIR gets `dev/` and
`test/` with the true turns in `ref.rttm`. Their voices differ, and are not in the main corpus.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from egs.common.corpus.prepare import make_parser, run, write_set
from egs.mini.diar.conversations import SPLITS, plan, record_conversations
from egs.mini.making import install_espeak, provide_corpus
from speakerlab.diarization.regions import Turn, read_rttm, write_rttm
from speakerlab.diarization.scoring import score_recordings, total

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Size:
    """Size per split; the corpus is synthesized again if this changes."""

    seed: int = 1
    num_voices: int = 24
    num_conversations: int = 25


def prepare(corpus: Path, data: Path, *, size: Size, num_jobs: int = 2) -> None:
    """Synthesize the corpus if needed and write the data directories."""
    voices, lines = plan(**asdict(size))
    provide_corpus(
        corpus,
        voices,
        lines,
        size=asdict(size),
        num_jobs=num_jobs,
        record=record_conversations,
    )
    for split in SPLITS:
        reference = read_rttm(corpus / split)
        write_set(
            data / split,
            wavs={name: corpus / split / f"{name}.wav" for name in reference},
        )
        write_rttm(data / split / "ref.rttm", reference)
        print(f"{data / split / 'ref.rttm'}: {describe(reference)}")


def describe(reference: Mapping[str, Sequence[Turn]]) -> str:
    """Return the length of the speech, and the DER if each moment gets one of its true speakers."""
    ideal = {name: one_at_a_time(turns) for name, turns in reference.items()}
    errors = total(score_recordings(reference, ideal).values())
    return (
        f"{errors.speech / 60:.1f} min of speech, {errors.overlap:.2%} of it"
        " overlapped; ideal with one speaker at a time: DER"
        f" {errors.wrong / errors.scored:.2%}"
    )


def one_at_a_time(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns without overlap: the one who began first is kept."""
    alone: list[Turn] = []
    free = 0.0
    for start, end, speaker in sorted(turns):
        if end > free:
            alone.append(Turn(max(start, free), end, speaker))
            free = end
    return alone


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare` or `install_espeak`."""
    corpus = HERE.parent / "corpus_diar"
    description = "Synthesize and prepare the conversations of mini."
    parser = make_parser(description, corpus=corpus, makes_corpus=True)
    args = parser.parse_args(argv)
    return run(
        args,
        download=install_espeak,
        prepare=lambda: prepare(
            args.corpus, args.data, size=Size(args.seed), num_jobs=args.num_jobs
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
