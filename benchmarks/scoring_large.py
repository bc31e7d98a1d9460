"""The time and memory of metrics, intervals and AS-Norm on a list of CN-Celeb's size, ours alone.

    python benchmarks/scoring_large.py --json FILE

The list of scoring.py, in a separate process, whose peak memory is `score.peak_memory`.
`score.metrics` is EER, minDCF and Cllr; `score.intervals` the bootstrap intervals of all metrics by
speaker; `score.asnorm` `mean+cosine+asnorm` with a cohort of 3,000 speakers, learning included.

Letters: D dimensions, K thresholds, M development utterances, N trials, R replicates.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import scoring
from scoring import SHA256, SPREAD
from sides import Process, peak_mib, report, run_case, timed, wants

PEERS = ()
QUICK = ("--repeats=2",)
WORKS = ("metrics", "intervals", "asnorm")
GB = 1e9 / 2**20  # MiB
OF_A_SPEAKER = 10  # development utterances
LLR_SLOPE, LLR_OFFSET = 72.0, -5.0  # turns such cosines (512 dimensions) into likelihood ratios


class Ours(scoring.Ours):
    """What a large list costs in our package."""

    def make_development(self, *, cohort: int, dim: int) -> None:
        """Write the development set of the cohort."""
        from speakerlab.scoring.embeddings import EmbeddingTable

        rng = np.random.default_rng(1)
        made_MD = SPREAD * rng.standard_normal((cohort, OF_A_SPEAKER, dim), np.float32)
        made_MD += rng.standard_normal((cohort, 1, dim), np.float32)
        ids = [f"dev{i:06d}" for i in range(cohort * OF_A_SPEAKER)]
        EmbeddingTable(ids, made_MD.reshape(-1, dim), SHA256).save(self.folder / "development")

    def metrics(self) -> float:
        """Return the seconds of EER, minDCF and Cllr of all trials."""
        from speakerlab.scoring import metrics

        scores_N, is_target_N = self.scores_N, self.trials.is_target_N

        def work() -> None:
            miss_K, fa_K, _ = metrics.operating_points(scores_N, is_target_N)
            metrics.eer_of_points(miss_K, fa_K)
            metrics.min_dcf_of_points(miss_K, fa_K, p_target=0.01)
            metrics.cllr(LLR_SLOPE * scores_N + LLR_OFFSET, is_target_N)

        return timed(work)

    def intervals(self) -> float:
        """Return the seconds of the intervals of EER, minDCF, Cllr and actDCF, by speaker."""
        from speakerlab.scoring.bootstrap import bootstrap

        speaker_of = {name: name.partition("-")[0] for name in self.table.ids}
        scores_N, trials = self.scores_N, self.trials

        def work() -> None:
            speakers = trials.speakers(speaker_of)
            llr = LLR_SLOPE * scores_N + LLR_OFFSET
            drawn = bootstrap(scores_N, trials.is_target_N, *speakers, llr=llr)
            for metric in drawn.values:
                drawn.interval(metric)

        return timed(work)

    def asnorm(self) -> float:
        """Return the seconds of mean subtraction and AS-Norm, learning included."""
        from speakerlab.scoring.chain import build_chain
        from speakerlab.scoring.embeddings import EmbeddingTable
        from speakerlab.scoring.transforms import Development

        table, trials = self.table, self.trials
        development = EmbeddingTable.load(self.folder / "development")
        speaker_M = [f"s{i // OF_A_SPEAKER}" for i in range(len(development.ids))]

        def work() -> None:
            chain = build_chain("mean+cosine+asnorm", Development(development, speaker_M))
            chain.score(table, table, trials)

        return timed(work)

    def peak(self) -> float:
        return peak_mib()


SIDES = {"ours": Ours}


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the rows; lists are written by another process, whose memory does not count."""
    words = {"threads": options.threads, "folder": options.folder}
    maker = Process("scoring_large", "ours", **words)
    maker.ask("make", head=1, **{key: getattr(options, key) for key in ("enrol", "test", "dim")})
    maker.ask("make_development", cohort=options.cohort, dim=options.dim)
    maker.close()
    ours = Process("scoring_large", "ours", **words)
    ours.ask("load")
    for work in WORKS:
        if wants(options, f"score.{work}"):
            turns = [[ours.ask(work)] for _ in range(options.repeats)]
            yield report(f"score.{work}", turns, unit="s")
    if wants(options, "score.peak_memory"):
        yield report("score.peak_memory", [[ours.ask("peak") / GB]], unit="GB")
    ours.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    scoring.add_sizes(parser)
    parser.add_argument("--cohort", type=int, default=3000, help="speakers, ten utterances each")
    parser.add_argument("--repeats", type=scoring.at_least_two, default=3, help="of each row")


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
