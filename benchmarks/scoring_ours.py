"""Our side of a comparison of scoring: waits on stdin, and does what it is told to.

In: lines of JSON, {"do": ...}. Out: a line of JSON for each; "make" fills the folder that the other
sides read.

Letters: N trials, E enrolment speakers, T test utterances, D dimensions, M development utterances.
"""

import argparse
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from sides import Answer, Order, serve

from speakerlab.scoring.backend import cosine_scores
from speakerlab.scoring.bootstrap import bootstrap, interval
from speakerlab.scoring.chain import Development, build_chain
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.metrics import cllr, eer_of_points, min_dcf_of_points, operating_points
from speakerlab.scoring.score_files import write_scores
from speakerlab.scoring.trials import Trials, read_trials, write_trials

SHA256 = "0" * 64  # of no model
OF_A_SPEAKER = 10  # development utterances
SPREAD = 5.0  # of a speaker's utterances, where speakers spread by 1: an EER of some per cent
LLR_SLOPE, LLR_OFFSET = 72.0, -5.0  # turns such cosines (512 dimensions) into likelihood ratios


class Ours:
    """Everything of the library that a trial list goes through."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, *, enrol: int, test: int, dim: int, head: int, cohort: int) -> Answer:
        """Speakers as points with utterances around them, every pair of an enrolment and a test."""
        rng = np.random.default_rng(0)
        speaker_ED = rng.standard_normal((enrol, dim), np.float32)
        spoken_by_T = [i % enrol for i in range(test)]
        test_TD = speaker_ED[spoken_by_T] + SPREAD * rng.standard_normal((test, dim), np.float32)
        enrol_ED = speaker_ED + rng.standard_normal((enrol, dim), np.float32)
        enrol_ids = [f"id{speaker:05d}-enroll" for speaker in range(enrol)]
        test_ids = [f"id{speaker:05d}-{i:07d}" for i, speaker in enumerate(spoken_by_T)]
        emb_ND = np.concatenate([enrol_ED, test_TD])
        EmbeddingTable(enrol_ids + test_ids, emb_ND, SHA256).save(self.folder / "all")
        (self.folder / "arks").mkdir()
        (self.folder / "arks/all.ark").touch()  # the name is looked for, and read as our table
        for ending in (".npy", ".ids"):
            (self.folder / f"arks/all{ending}").symlink_to(self.folder / f"all{ending}")
        rows = [
            (enrol_id, test_id, speaker == spoken_by)
            for speaker, enrol_id in enumerate(enrol_ids)
            for spoken_by, test_id in zip(spoken_by_T, test_ids)
        ]
        write_trials(self.folder / "trials", rows)
        write_trials(self.folder / "head", rows[:: max(1, len(rows) // head)][:head])
        made_MD = SPREAD * rng.standard_normal((cohort, OF_A_SPEAKER, dim), np.float32)
        made_MD += rng.standard_normal((cohort, 1, dim), np.float32)
        ids = [f"dev{i:06d}" for i in range(cohort * OF_A_SPEAKER)]
        table = EmbeddingTable(ids, made_MD.reshape(-1, dim), SHA256)
        table.save(self.folder / "development")
        return {"trials": len(rows)}

    @cached_property
    def table(self) -> EmbeddingTable:
        return EmbeddingTable.load(self.folder / "all")

    @cached_property
    def trials(self) -> Trials:
        return read_trials(self.folder / "trials")

    @cached_property
    def scores_N(self) -> np.ndarray:
        return cosine_scores(self.table, self.table, self.trials)

    def load(self) -> Answer:
        """What is not timed."""
        return {"trials": len(self.trials), "rows": len(self.table.ids)}

    def cosine(self) -> Answer:
        """From tables and trials in memory to scores in memory."""
        start = time.perf_counter()
        cosine_scores(self.table, self.table, self.trials)
        return {"seconds": time.perf_counter() - start}

    def cosine_with_files(self) -> Answer:
        """From a list on disk to scores on disk."""
        start = time.perf_counter()
        trials = read_trials(self.folder / "trials")
        scores_N = cosine_scores(self.table, self.table, trials)
        write_scores(self.folder / "scores", trials, scores_N)
        return {"seconds": time.perf_counter() - start}

    def head(self) -> Answer:
        """Scores of the short list, for comparison with the peers'."""
        trials = read_trials(self.folder / "head")
        write_scores(
            self.folder / "head.ours", trials, cosine_scores(self.table, self.table, trials)
        )
        return {}

    def rates(self, path: str, p_target: float) -> Answer:
        """EER and minDCF of scores in a file."""
        with np.load(path) as arrays:
            scores_N, is_target_N = arrays["scores"], arrays["is_target"]
        start = time.perf_counter()
        try:
            miss_K, fa_K, _ = operating_points(scores_N, is_target_N)
        except ValueError as error:
            return {"error": str(error)}
        found = eer_of_points(miss_K, fa_K), min_dcf_of_points(miss_K, fa_K, p_target=p_target)
        seconds = time.perf_counter() - start
        return {"eer": found[0], "min_dcf": found[1], "seconds": seconds}

    def metrics(self) -> Answer:
        """EER, minDCF and Cllr of all trials."""
        scores_N, is_target_N = self.scores_N, self.trials.is_target_N
        start = time.perf_counter()
        miss_K, fa_K, _ = operating_points(scores_N, is_target_N)
        found: dict[str, Any] = {"eer": eer_of_points(miss_K, fa_K)}
        found["min_dcf"] = min_dcf_of_points(miss_K, fa_K, p_target=0.01)
        found["cllr"] = cllr(LLR_SLOPE * scores_N + LLR_OFFSET, is_target_N)
        return {**found, "seconds": time.perf_counter() - start}

    def intervals(self) -> Answer:
        """Those of EER, minDCF, Cllr and actDCF, by speaker."""
        speaker_of = {name: name.partition("-")[0] for name in self.table.ids}
        scores_N, trials = self.scores_N, self.trials
        start = time.perf_counter()
        drawn = bootstrap(
            scores_N,
            trials.is_target_N,
            *trials.speakers(speaker_of),
            llr=LLR_SLOPE * scores_N + LLR_OFFSET,
        )
        found = {name: interval(values_R) for name, values_R in drawn.items()}
        return {"seconds": time.perf_counter() - start, "replicates": len(drawn["eer"]), **found}

    def asnorm(self) -> Answer:
        """Mean subtraction and AS-Norm, learning them included."""
        table, trials = self.table, self.trials
        development = EmbeddingTable.load(self.folder / "development")
        speaker_M = [f"s{i // OF_A_SPEAKER}" for i in range(len(development.ids))]
        start = time.perf_counter()
        chain = build_chain("mean+cosine+asnorm", Development(development, speaker_M))
        chain.score(table, table, trials)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "protocol": chain.protocol}

    def save(self, path: str) -> Answer:
        """The scores of all trials, as `rates` reads them."""
        np.savez(path, scores=self.scores_N, is_target=self.trials.is_target_N)
        return {}

    def peak(self) -> Answer:
        """Most memory that this process held (bytes); getrusage would count who started it."""
        lines = Path("/proc/self/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        return {"bytes": 1024 * int(status["VmHWM"].split()[0])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, type=Path)

    def start() -> Callable[[Order], Answer]:
        ours = Ours(parser.parse_args().folder)
        return lambda order: getattr(ours, order.pop("do"))(**order)

    serve(start)


if __name__ == "__main__":
    main()
