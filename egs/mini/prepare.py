"""Synthesize the mini corpus, voices of espeak-ng in small noisy rooms, and prepare it.

--corpus DIR gets the corpus (see making.py) if it does not exist; --data DIR gets `train/`, `test/`
with trials, `noise/` and `rirs/`. --download (stage 0) installs espeak-ng.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from egs.common.corpus.prepare import make_parser, run, write_noise_and_rooms, write_set
from egs.common.corpus.trials import draw_nontargets, draw_targets, group_by_speaker
from egs.mini.making import Size, install_espeak, plan, provide_corpus
from speakerlab.data.tables import Trial

HERE = Path(__file__).resolve().parent
ABOUT = {"corpus": "synthetic voices of espeak-ng", "languages": "English"}
MAX_TARGETS_PER_SPEAKER = 63  # about 1,500 with 24 speakers
MAX_NONTARGETS = 6_000


def make_trials(
    speakers: dict[str, str], sexes: dict[str, str], *, seed: int
) -> list[Trial]:
    """Draw targets and nontargets, half of them same-sex; `sexes` maps speaker -> sex."""
    groups = group_by_speaker(speakers)
    trials = draw_targets(groups, seed=seed, max_per_speaker=MAX_TARGETS_PER_SPEAKER)
    pairs = list(combinations(groups, 2))
    for one_sex in (True, False):
        some = [(a, b) for a, b in pairs if (sexes[a] == sexes[b]) == one_sex]
        trials += draw_nontargets(
            groups, speaker_pairs=some, seed=seed, max_trials=MAX_NONTARGETS // 2
        )
    return sorted(trials)


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
    sexes = {name: voice.sex for name, voice in voices.items()}
    for split in ("train", "test"):
        rows = [utterance for utterance in utterances if utterance.split == split]
        speakers = {row.id: row.speaker for row in rows}
        trials = None
        if split == "test":
            trials = {"trials": make_trials(speakers, sexes, seed=size.seed)}
        wavs = {row.id: corpus / row.path for row in rows}
        about = ABOUT if split == "train" else None
        write_set(
            data / split, wavs=wavs, speakers=speakers, trials=trials, about=about
        )
    write_noise_and_rooms(
        data, noise=noise or corpus / "noise", rirs=rirs or corpus / "rirs"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare` or `install_espeak`."""
    description = "Synthesize and prepare the mini corpus."
    parser = make_parser(description, corpus=HERE / "corpus", makes_corpus=True)
    default = Size()
    parser.add_argument(
        "--train-voices", type=int, default=default.num_train_voices, metavar="N"
    )
    parser.add_argument(
        "--test-voices", type=int, default=default.num_test_voices, metavar="N"
    )
    parser.add_argument(
        "--utterances", type=int, default=default.num_utterances, metavar="N"
    )
    args = parser.parse_args(argv)
    return run(
        args,
        download=install_espeak,
        prepare=lambda: prepare(
            args.corpus,
            args.data,
            size=Size(args.seed, args.train_voices, args.test_voices, args.utterances),
            noise=args.noise,
            rirs=args.rirs,
            num_jobs=args.num_jobs,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
