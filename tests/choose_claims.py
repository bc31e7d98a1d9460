"""How often the statements of `speakerlab choose` hold, in many small corpora of known truth.

    python tests/choose_claims.py --pool DATA --models EXP EXP ... [--corpora 200]
    python tests/choose_claims.py --synthetic
    python tests/choose_claims.py --counts

`--pool`: a checked data directory of many speakers. The pool is the population: its EER, over all
pairs, is the truth. A corpus has speakers that are drawn from it with replacement, so that it is an
independent sample although the pool is finite; trials between two copies of one speaker are left
out. Beside each model there are copies of known order, whose embeddings have noise added.
`--synthetic`: speakers and utterances are drawn anew for each corpus from a population of Gaussian
embeddings, whose true EER is that of thousands of other speakers.

Prints, for each number of speakers, the shares of 95 % intervals that hold the truth, of corpora
with a wrong statement "better than", and the regret: the true EER of the recommended model minus
that of the best. `--bootstrap` adds the intervals of the bootstrap over speakers.
`--counts`: the least share in which an interval of a difference can hold the truth, if two equal
models differ in the misses of few speakers (see `most_wrong`).
Letters: U utterances of a population, I of a corpus, N trials, S speakers, D dimensions, M models,
O outcomes of a test.
"""

import argparse
import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Protocol

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.stats import binom, poisson

from speakerlab.experiments import choosing
from speakerlab.experiments.choosing import RECORDED, Candidate, TrialPairs
from speakerlab.scoring.bootstrap import bootstrap
from speakerlab.scoring.eer_intervals import LEVEL
from speakerlab.scoring.metrics import eer

SIZES = (6, 10, 20, 40, 80)
NOISES = (0.3, 0.6)  # lengths of the noise of copies, relative to the embeddings
MAX_PER_SPEAKER = 5
NAMED_FROM = 20
MAX_NAMED = 200  # speakers, in the test of the numbers of speakers
# Of the synthetic population.
DIM = 16
SPREADS = {"a": 0.70, "b": 0.72, "c": 0.80, "d": 0.80, "e": 1.10}
SHARE = 0.8  # of the noise that all models have in common
NEARLY_EQUAL = {"a": 0.70, "b": 0.70, "c": 0.71}
SHARE_OF_NEARLY_EQUAL = 0.98
TRUTH_SPEAKERS = 1500
TRUTH_ROUNDS = 4
# Of the test of two counts.
SHOWN_MEANS = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
MAX_MEAN = 12.0
NUM_MEANS = 200
MAX_COUNT = 20
Interval = Sequence[float] | None


@dataclass(frozen=True)
class Corpus:
    """Trials of a corpus, and the embeddings of its utterances by each model."""

    pairs: TrialPairs
    emb: Mapping[str, np.ndarray]  # model -> emb_ID, unit vectors

    def estimates(self) -> dict[str, choosing.EerEstimate]:
        return {name: self.pairs.estimate(self.scores(name)) for name in self.emb}

    def scores(self, name: str) -> np.ndarray:
        emb_ID = self.emb[name]
        return (emb_ID @ emb_ID.T)[self.pairs.enrol_N, self.pairs.test_N]

    def misses(self, name: str, estimate: choosing.EerEstimate) -> np.ndarray:
        """Return the number of missed target trials of each speaker, at the EER's threshold."""
        is_missed_N = self.pairs.is_target_N & (self.scores(name) <= estimate.threshold)
        if estimate.eer == 0:
            is_missed_N[:] = False  # the threshold is the lowest target
        num_speakers = 1 + int(self.pairs.enrol_speaker_N.max())
        return np.bincount(self.pairs.enrol_speaker_N[is_missed_N], None, num_speakers)


class Population(Protocol):
    """Speakers to draw corpora of, and the true EER of each model."""

    @property
    def truth(self) -> Mapping[str, float]: ...

    def draw(self, rng: np.random.Generator, num_speakers: int) -> Corpus: ...


class Pool:
    """Real recordings, by their embeddings."""

    def __init__(
        self,
        emb: Mapping[str, np.ndarray],
        speaker_U: np.ndarray,
    ) -> None:
        self.emb = {name: unit(emb_UD) for name, emb_UD in emb.items()}
        self.rows_of: list[np.ndarray] = []
        for speaker in np.unique(speaker_U):
            rows = np.flatnonzero(speaker_U == speaker)[:MAX_PER_SPEAKER]
            if len(rows) > 1:
                self.rows_of.append(rows)
        everyone = self.corpus_of(np.arange(len(self.rows_of)))
        self.truth = truth_of(everyone)

    def draw(self, rng: np.random.Generator, num_speakers: int) -> Corpus:
        return self.corpus_of(rng.integers(len(self.rows_of), size=num_speakers))

    def corpus_of(self, drawn: np.ndarray) -> Corpus:
        """Return the corpus of the drawn speakers, one of which may be drawn several times."""
        rows = [self.rows_of[speaker] for speaker in drawn]
        sizes = [len(rows_of_speaker) for rows_of_speaker in rows]
        row_I = np.concatenate(rows)
        pairs = TrialPairs.of_speakers(np.repeat(np.arange(len(drawn)), sizes))
        origin_I = np.repeat(drawn, sizes)
        has_copies = origin_I[pairs.enrol_N] == origin_I[pairs.test_N]
        is_kept_N = pairs.is_target_N | ~has_copies
        kept_pairs = TrialPairs(
            enrol_N=pairs.enrol_N[is_kept_N],
            test_N=pairs.test_N[is_kept_N],
            enrol_speaker_N=pairs.enrol_speaker_N[is_kept_N],
            test_speaker_N=pairs.test_speaker_N[is_kept_N],
            num_repeats=pairs.num_repeats,
        )
        return Corpus(
            kept_pairs, {name: emb_UD[row_I] for name, emb_UD in self.emb.items()}
        )


class Synthetic:
    """Gaussian speakers. Models share most of what separates utterances of one speaker."""

    def __init__(
        self,
        spreads: Mapping[str, float] = SPREADS,
        *,
        share: float = SHARE,
        per_speaker: int = 4,
        truth_speakers: int = TRUTH_SPEAKERS,
    ) -> None:
        self.spreads = spreads
        self.share = share
        self.per_speaker = per_speaker
        sums = dict.fromkeys(spreads, 0.0)
        for seed in range(TRUTH_ROUNDS):
            rng = np.random.default_rng([seed, 1 << 20])
            eers = truth_of(self.draw(rng, truth_speakers))
            for name in spreads:
                sums[name] += eers[name]
        self.truth = {name: total / TRUTH_ROUNDS for name, total in sums.items()}

    def draw(self, rng: np.random.Generator, num_speakers: int) -> Corpus:
        shape = (num_speakers, self.per_speaker, DIM)
        centre = rng.standard_normal((num_speakers, 1, DIM))
        # Utterances of some speakers scatter more: such speakers have most of the errors.
        scatter = np.exp(0.3 * rng.standard_normal((num_speakers, 1, 1)))
        shared = rng.standard_normal(shape)
        emb: dict[str, np.ndarray] = {}
        for name, spread in self.spreads.items():
            rest = rng.standard_normal(shape)
            noise = self.share * shared + math.sqrt(1 - self.share**2) * rest
            emb_ID = (centre + spread * scatter * noise).reshape(-1, DIM)
            emb[name] = unit(emb_ID)
        speaker_I = np.arange(num_speakers).repeat(self.per_speaker)
        return Corpus(TrialPairs.of_speakers(speaker_I), emb)


def unit(emb_UD: np.ndarray) -> np.ndarray:
    """Return rows of length 1, in float32."""
    lengths = np.linalg.norm(emb_UD, axis=1, keepdims=True)
    return (emb_UD / lengths).astype(np.float32)


def truth_of(everyone: Corpus) -> dict[str, float]:
    """Return the EER of each model, over all trials of a population."""
    is_target_N = everyone.pairs.is_target_N
    return {name: eer(everyone.scores(name), is_target_N) for name in everyone.emb}


@dataclass
class Claims:
    """Statements about corpora of one size, and how many of them are true."""

    num_speakers: int
    # Of each model and pair of models: whether an interval holds the truth.
    intervals: dict[str, list[bool]] = field(default_factory=dict)
    differences: dict[str, list[bool]] = field(default_factory=dict)
    bootstrapped: dict[str, list[bool]] = field(default_factory=dict)
    wrong: list[bool] = field(
        default_factory=list
    )  # corpora with a wrong "better than"
    decided: list[bool] = field(default_factory=list)  # pairs of models
    regrets: list[float] = field(default_factory=list)
    regrets_of_chance: list[float] = field(default_factory=list)
    best_excluded: list[bool] = field(default_factory=list)
    # Speakers of whom two models miss different numbers of target trials.
    num_differing: list[int] = field(default_factory=list)

    def line(self) -> str:
        """Return the results as a row of a table."""
        cells = [
            str(self.num_speakers),
            coverage(self.intervals),
            coverage(self.differences),
            share(self.wrong),
            share(self.best_excluded),
            share(self.decided),
            f"{100 * np.mean(self.regrets):.2f} ({100 * np.quantile(self.regrets, 0.95):.2f})",
            f"{100 * np.mean(self.regrets_of_chance):.2f}",
            f"{np.mean(self.num_differing):.1f}",
        ]
        if self.bootstrapped:
            cells.append(coverage(self.bootstrapped))
        return f"| {' | '.join(cells)} |"


HEADER = (
    "| speakers | EER in interval % | difference in interval % | a wrong statement % |"
    " best model beaten % | pairs decided % | regret, mean (95th percentile) % |"
    " regret of a random model % | speakers with other misses, mean of pairs |"
)


def share(values: Sequence[bool]) -> str:
    return f"{100 * np.mean(values):.1f}"


def coverage(held_by: Mapping[str, Sequence[bool]]) -> str:
    """Return the share of intervals that hold the truth, and the lowest and highest of a model."""
    shares = [100 * float(np.mean(held)) for held in held_by.values()]
    return f"{np.mean(shares):.1f} ({min(shares):.1f}-{max(shares):.1f})"


def holds(interval: Interval, value: float) -> bool:
    """Return whether an interval holds a value, up to rounding."""
    assert interval is not None
    low, high = interval
    return low - 1e-9 <= value <= high + 1e-9


def test_claims(
    population: Population,
    num_speakers: int,
    *,
    num_corpora: int,
    with_bootstrap: bool = False,
) -> Claims:
    """Draw corpora, state what `choose` states, and compare it with the truth."""
    truth = population.truth
    claims = Claims(num_speakers)
    for seed in range(num_corpora):
        rng = np.random.default_rng([seed, num_speakers])
        corpus = population.draw(rng, num_speakers)
        estimates = corpus.estimates()
        candidates = [made_up(name, found) for name, found in estimates.items()]
        misses = [corpus.misses(name, found) for name, found in estimates.items()]
        for first_S, second_S in combinations(misses, 2):
            claims.num_differing.append(int(np.count_nonzero(first_S != second_S)))
        for candidate in candidates:
            interval = candidate.estimates[RECORDED].interval()
            held = claims.intervals.setdefault(candidate.name, [])
            held.append(holds(interval, truth[candidate.name]))
            if with_bootstrap:
                interval = bootstrap_interval(corpus, candidate.name)
                held = claims.bootstrapped.setdefault(candidate.name, [])
                held.append(holds(interval, truth[candidate.name]))
        add_comparisons(claims, candidates, truth)
    return claims


test_claims.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]  # it is no test


def add_comparisons(
    claims: Claims, candidates: Sequence[Candidate], truth: Mapping[str, float]
) -> None:
    """Add the differences, the statements and the recommendation of one corpus."""
    lowest = min(truth.values())
    is_wrong = False
    is_excluded = False
    for comparison in choosing.compare_all(candidates):
        first = truth[comparison.first.name]
        second = truth[comparison.second.name]
        names = f"{comparison.first.name} {comparison.second.name}"
        held = claims.differences.setdefault(names, [])
        held.append(holds(comparison.result.ci95, first - second))
        better = comparison.better
        claims.decided.append(better is not None)
        if better is not None:
            worse = comparison.other(better)
            # Equal models are not better than one another.
            is_wrong |= truth[better.name] >= truth[worse.name]
            is_excluded |= truth[worse.name] == lowest
    claims.wrong.append(is_wrong)
    claims.best_excluded.append(is_excluded)
    best = choosing.recommend(candidates)
    claims.regrets.append(truth[best.name] - lowest)
    claims.regrets_of_chance.append(float(np.mean(list(truth.values()))) - lowest)


def test_numbers_of_speakers(
    population: Population,
    num_speakers: int,
    *,
    num_corpora: int,
) -> tuple[int, float]:
    """Return how often a number of speakers is named for two models, and how often it decides.

    The models are the best and the third best, because the two best are often too much alike.

    For each corpus that does not decide between them, another one of the named size is drawn.
    Sizes above MAX_NAMED are left out.
    """
    ranking = sorted(population.truth, key=lambda name: population.truth[name])
    best = ranking[0]
    second = ranking[2]
    decided: list[bool] = []
    for seed in range(num_corpora):
        rng = np.random.default_rng([seed, num_speakers, 1])
        estimates = population.draw(rng, num_speakers).estimates()
        (comparison,) = choosing.compare_all(
            [made_up(best, estimates[best]), made_up(second, estimates[second])]
        )
        num_missing = comparison.more_speakers
        if num_missing is None or num_speakers + num_missing > MAX_NAMED:
            continue
        estimates = population.draw(rng, num_speakers + num_missing).estimates()
        (comparison,) = choosing.compare_all(
            [made_up(best, estimates[best]), made_up(second, estimates[second])]
        )
        better = comparison.better
        decided.append(better is not None and better.name == best)
    return len(decided), float(np.mean(decided)) if decided else math.nan


test_numbers_of_speakers.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]


def most_wrong(mean: float) -> float:
    """Return how often the best sound test finds a difference between two equal models.

    Of n speakers with different misses, each model has more misses for x or n - x. In the simplest
    case, n has a Poisson distribution, and each model is the better one for half of them. A test is
    a set of pairs (n, x) in which it finds a difference; it is sound if it does so in at most 5 %
    at every mean of n. Of all such sets, the one is found that does so most often at this mean.
    """
    outcomes = [(n, x) for n in range(MAX_COUNT + 1) for x in range(n // 2 + 1)]
    n_O, x_O = np.array(outcomes).T
    # Of x and of n - x, which are one outcome.
    share_O = binom.pmf(x_O, n_O, 0.5) * np.where(2 * x_O < n_O, 2, 1)
    means = np.linspace(0, MAX_MEAN, NUM_MEANS + 1)[1:, None]
    result = milp(
        -share_O * poisson.pmf(n_O, mean),
        constraints=LinearConstraint(share_O * poisson.pmf(n_O, means), ub=LEVEL),
        integrality=np.ones(len(n_O)),
        bounds=Bounds(0, 1),
    )
    return -float(result.fun)


def print_counts() -> None:
    print(
        "| speakers with other misses, mean | an interval holds the truth in at least % |"
    )
    print("|---|---|")
    for mean in SHOWN_MEANS:
        print(f"| {mean:g} | {100 * (1 - most_wrong(mean)):.1f} |", flush=True)


def made_up(name: str, estimate: choosing.EerEstimate) -> Candidate:
    return Candidate(
        name=name,
        sha256=name,
        sample_rate=16000,
        megabytes=1.0,
        ms_per_second=1.0,
        num_trained=0,
        training_data="",
        estimates={RECORDED: estimate},
        threshold=None,
        p_miss=None,
        num_others=0,
    )


def bootstrap_interval(corpus: Corpus, name: str) -> Interval:
    pairs = corpus.pairs
    replicates = bootstrap(
        corpus.scores(name),
        pairs.is_target_N,
        pairs.enrol_speaker_N,
        pairs.test_speaker_N,
        p_targets=(),
    )
    return replicates.interval("eer")


def embed_pool(args: Namespace) -> Pool:
    """Embed the pool as `speakerlab choose` does, and add copies with noise."""
    from speakerlab.bin import choose
    from speakerlab.checkpoints.published import load_published
    from speakerlab.data.manifest import read_manifest
    from speakerlab.inference.workers import share_threads

    options = Namespace(out=args.out, seconds=None)
    emb: dict[str, np.ndarray] = {}
    speaker_U = np.zeros(0)
    failed: dict[str, str] = {}
    for model in choose.find_models(args.models, failed):
        manifest = read_manifest([args.pool], sample_rate=model.sample_rate)
        speaker_U = manifest.speaker_N
        tables = choose.embed_conditions(
            options,
            [],
            load_published(model.folder),
            manifest,
            num_threads=share_threads(1),
        )
        emb_UD = unit(tables[RECORDED])
        emb[model.name] = emb_UD
    if failed:
        raise ValueError(f"--models: {', '.join(failed)}: could not be opened")
    for number, (name, emb_UD) in enumerate(list(emb.items())):
        for noise in args.noise:
            rng = np.random.default_rng([number, round(1000 * noise)])
            noise_UD = rng.standard_normal(emb_UD.shape) / math.sqrt(emb_UD.shape[1])
            emb[f"{name} + noise {noise:g}"] = emb_UD + noise * noise_UD
    return Pool(emb, speaker_U)


def populations(args: Namespace) -> Iterator[tuple[str, Population]]:
    if args.pool is not None:
        pool = embed_pool(args)
        yield f"{args.pool}, {len(pool.rows_of)} speakers", pool
    if args.synthetic:
        yield "synthetic", Synthetic()
        nearly_equal = Synthetic(NEARLY_EQUAL, share=SHARE_OF_NEARLY_EQUAL)
        yield "synthetic, nearly equal models", nearly_equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", type=Path)
    parser.add_argument("--models", type=Path, nargs="+", default=[])
    parser.add_argument("--noise", type=float, nargs="*", default=list(NOISES))
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--corpora", type=int, default=200)
    parser.add_argument("--speakers", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--bootstrap", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of embeddings, kept")
    args = parser.parse_args()
    if args.counts:
        print_counts()
    # Of the share of a single model; that of a mean over models is smaller.
    error = 100 * math.sqrt(LEVEL * (1 - LEVEL) / args.corpora)
    with tempfile.TemporaryDirectory() as scratch:
        args.out = args.out or Path(scratch)
        for name, population in populations(args):
            print(
                f"\n{name}, {args.corpora} corpora of each size (standard error of a"
                f" coverage of 95 %: {error:.1f} %); true EERs:"
            )
            for model, true_eer in population.truth.items():
                print(f"  {100 * true_eer:6.2f} %  {model}")
            header = HEADER
            if args.bootstrap:
                header += " EER in interval of the bootstrap % |"
            print(header)
            print("|---" * (header.count("|") - 1) + "|")
            for num_speakers in args.speakers:
                claims = test_claims(
                    population,
                    num_speakers,
                    num_corpora=args.corpora,
                    with_bootstrap=args.bootstrap,
                )
                print(claims.line(), flush=True)
            named, share_decided = test_numbers_of_speakers(
                population, NAMED_FROM, num_corpora=args.corpora
            )
            print(
                f"best and third best model, {NAMED_FROM} speakers: {named} corpora name at"
                f" most {MAX_NAMED} in all, and of these numbers {share_decided:.0%} decide"
            )


if __name__ == "__main__":
    sys.exit(main())
