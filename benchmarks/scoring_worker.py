"""One side of a comparison of scoring: waits on stdin, and does what it is told to.

In: lines of JSON, {"do": ...}, and what scoring_ours.py made. Out: a line of JSON for each.

Started by scoring.py with the peer's tree in PYTHONPATH. A peer's loop over the trials is its own
code, timed from its first trial to its last: its progress bar is what watches the clock. Reading
embeddings is not timed and is done here, with the array library alone.
"""

import argparse
import contextlib
import importlib.util
import logging
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sides import Answer, Order, import_from_root, serve

METRICS = {
    "3dspeaker": "speakerlab.utils.score_metrics",
    "wespeaker": "wespeaker.utils.score_metrics",
}
PACKAGES = {"3dspeaker": "speakerlab", "wespeaker": "wespeaker"}
LOOPS = {
    "3dspeaker": "speakerlab.bin.compute_score_metrics",
    "wespeaker": "wespeaker.bin.score",
}


class Clock:
    """In the place of tqdm: hands the lines on, and notes how long those who take them need."""

    seconds = 0.0

    def __call__(self, lines: Iterable[str], **_: Any) -> Iterator[str]:
        start = time.perf_counter()
        yield from lines
        self.seconds = time.perf_counter() - start


def read_vectors(stem: str) -> Iterator[tuple[str, np.ndarray]]:
    """(id, emb_D) of a table; in the place of kaldiio."""
    ids = Path(f"{stem}.ids").read_text(encoding="utf-8").split()
    yield from zip(ids, np.load(f"{stem}.npy"))


def cosine_similarity(a_ND: np.ndarray, b_MD: np.ndarray) -> np.ndarray:
    """In the place of scikit-learn's, where that is not installed: as little as can be done."""
    return (a_ND @ b_MD.T) / (np.linalg.norm(a_ND) * np.linalg.norm(b_MD))


def stand_in(clock: Clock) -> list[str]:
    """Put what the peers import, and what is not timed, in place; its names."""

    @contextlib.contextmanager
    def read_helper(source: str) -> Iterator[Iterator[tuple[str, np.ndarray]]]:
        yield read_vectors(source.removeprefix("ark:").removesuffix(".ark"))

    parts: dict[str, dict[str, Any]] = {
        "tqdm": {"tqdm": clock},
        "kaldiio": {"ReadHelper": read_helper, "load_scp_sequential": read_vectors},
        "fire": {"Fire": None},
    }
    if importlib.util.find_spec("sklearn") is None:
        parts["sklearn"] = {}
        parts["sklearn.metrics"] = {}
        parts["sklearn.metrics.pairwise"] = {"cosine_similarity": cosine_similarity}
    for name, members in parts.items():
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update(members)
    return sorted({name.partition(".")[0] for name in parts})


class Peer:
    """3D-Speaker or WeSpeaker."""

    def __init__(self, side: str, folder: Path) -> None:
        self.side, self.folder, self.clock = side, folder, Clock()
        self.replaced = stand_in(self.clock)
        logging.disable()  # its metrics of each turn
        self.metrics = import_from_root(METRICS[side], bare=[PACKAGES[side]])
        self.module = import_from_root(LOOPS[side], bare=[PACKAGES[side]])

    def loop(self) -> Answer:
        """Score the list of `head`; the seconds of the loop alone."""
        out, trials = self.folder / self.side, self.folder / "head"
        out.mkdir(exist_ok=True)
        if self.side == "wespeaker":
            self.module.trials_cosine_score(str(self.folder / "all"), str(out), None, [str(trials)])
        else:
            tables = [f"--{name}_data={self.folder / 'arks'}" for name in ("enrol", "test")]
            sys.argv = ["", *tables, f"--scores_dir={out}", f"--trials={trials}"]
            self.module.main()
        return {"seconds": self.clock.seconds}

    def rates(self, path: str, p_target: float) -> Answer:
        """EER and minDCF of scores in a file, or what its functions raise."""
        with np.load(path) as arrays:
            scores_N, labels_N = arrays["scores"], arrays["is_target"].astype(int)
        start = time.perf_counter()
        try:
            fnr, fpr = self.metrics.compute_pmiss_pfa_rbst(scores_N, labels_N)
            min_dcf = float(self.metrics.compute_c_norm(fnr, fpr, p_target))
            eer = float(self.metrics.compute_eer(fnr, fpr, scores_N)[0])
        except Exception as error:  # whatever it is: it is what a user would see
            return {"error": f"{type(error).__name__}: {error}"}
        return {"eer": eer, "min_dcf": min_dcf, "seconds": time.perf_counter() - start}

    def histogram(self, path: str) -> Answer:
        """What its other function for the same rates does."""
        with np.load(path) as arrays:
            scores_N, labels_N = arrays["scores"], arrays["is_target"].astype(int)
        try:
            self.metrics.compute_pmiss_pfa(scores_N, labels_N)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": None}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", required=True, choices=[*LOOPS])
    parser.add_argument("--folder", required=True, type=Path)

    def start() -> Callable[[Order], Answer]:
        options = parser.parse_args()
        peer = Peer(options.side, options.folder)

        def answer(order: Order) -> Answer:
            match order.pop("do"):
                case "facts":
                    return {"replaced": peer.replaced}
                case "loop":
                    return peer.loop()
                case "rates":
                    return peer.rates(**order)
                case what:
                    assert what == "histogram", what
                    return peer.histogram(**order)

        return answer

    serve(start)


if __name__ == "__main__":
    main()
