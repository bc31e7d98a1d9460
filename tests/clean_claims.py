"""How much `speakerlab clean` finds of faults that are planted in a corpus.

    python tests/clean_claims.py --model MODEL --data DIR
    python tests/clean_claims.py --model MODEL --data DIR --plantings 100 --wrong 0.02 0.1 0.2

MODEL: anything that `speakerlab.load` takes. DIR: a checked data directory, whose labels are taken
as right. Its utterances are embedded once. Each planting, which depends on its seed alone, divides
five speakers into two, gives a share of the utterances (`--wrong`) the label of a random other
speaker, and adds copies of 1 % of the other utterances, every second one with the label of another
speaker. The faults are looked for by the code of the command.

Prints the findings in the corpus as it is, and for each share of wrong labels a table of sums over
the plantings, with 95 % intervals (Wilson's, wider by the differences between plantings) and the
lowest and highest share in a single planting. The exit code is 1 if less than 80 % of the wrong
labels, of the copies or of the divided speakers are found, or if more than 2 % of the good
utterances are dropped.
Letters: N utterances of the corpus, M of a planting, D dimensions.
"""

import argparse
import math
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.stats import norm

import speakerlab
from speakerlab.bin.clean import check_data
from speakerlab.core.system import available_cpus
from speakerlab.data.manifest import read_manifest
from speakerlab.experiments import cleaning

COPIED_SHARE = 0.01
NUM_DIVIDED = 5  # speakers
# Utterances of a divided speaker: one with a single utterance is never listed as the same person.
MIN_DIVIDED = 4
MIN_FOUND = 0.8  # of the faults of each kind
MAX_DROPPED = 0.02  # of the good utterances
Z = float(norm.ppf(0.975))


@dataclass(frozen=True, eq=False)
class Corpus:
    """Utterances as they are, and which would have the same samples if each had a copy."""

    ids: Sequence[str]
    speakers: Sequence[str]
    emb_ND: np.ndarray
    # Row N + i is the copy of row i.
    copies: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.ids)

    def without_faults(self) -> "Planting":
        rows = list(range(len(self)))
        return Planting(
            corpus=self,
            ids=list(self.ids),
            speakers=list(self.speakers),
            right=list(self.speakers),
            rows=rows,
            persons={speaker: speaker for speaker in self.speakers},
        )


@dataclass(eq=False)
class Planting:
    """Utterances with faults, (M): those of the corpus in its order, then the copies."""

    corpus: Corpus
    ids: list[str]
    speakers: list[str]  # labels, some of which are wrong
    right: list[str]  # labels without a fault, but those of divided speakers
    rows: list[int]  # row of the corpus, or N + row of a copy
    persons: dict[str, str]  # speaker -> speaker of the corpus
    wrong: list[int] = field(default_factory=list)  # rows
    divided: list[tuple[str, str]] = field(default_factory=list)  # pairs of speakers

    def divide(self, speaker: str, rng: np.random.Generator) -> None:
        """Give a random half of the utterances of a speaker the label of a new one."""
        new = f"{speaker}-divided"
        rows = [row for row, label in enumerate(self.speakers) if label == speaker]
        for row in rng.permutation(rows)[len(rows) // 2 :].tolist():
            self.speakers[row] = new
            self.right[row] = new
        self.persons[new] = speaker
        self.divided.append((speaker, new))

    def another_speaker(self, row: int, rng: np.random.Generator) -> str:
        """Draw a speaker who is another person than the one of this row."""
        person = self.persons[self.right[row]]
        others = [name for name in self.persons if self.persons[name] != person]
        return others[rng.integers(len(others))]

    def mislabel(self, row: int, rng: np.random.Generator) -> None:
        self.speakers[row] = self.another_speaker(row, rng)
        self.wrong.append(row)

    def copy(self, row: int, speaker: str) -> None:
        self.ids.append(f"{self.ids[row]}-again")
        self.speakers.append(speaker)
        self.right.append(self.right[row])
        self.rows.append(len(self.corpus) + row)

    def copies(self) -> list[list[int]]:
        """Return which rows have the same samples, as `find_copies` does."""
        number_of = {row: number for number, row in enumerate(self.rows)}
        copies: list[list[int]] = []
        for rows in self.corpus.copies:
            present = [number_of[row] for row in rows if row in number_of]
            if len(present) > 1:
                copies.append(sorted(present, key=lambda row: self.ids[row]))
        return copies

    def clean(self, far: float) -> cleaning.Cleaning:
        emb_MD = self.corpus.emb_ND[np.array(self.rows) % len(self.corpus)]
        return cleaning.look_through(
            self.ids,
            self.speakers,
            emb_MD,
            self.copies(),
            far=far,
        )


def plant(corpus: Corpus, wrong_share: float, seed: int) -> Planting:
    """Divide speakers, mislabel utterances, and copy some of those with the right label."""
    count = Counter(corpus.speakers)
    large = sorted(name for name in count if count[name] >= MIN_DIVIDED)
    if len(large) < NUM_DIVIDED:
        raise ValueError(
            f"--data: {len(large)} speakers have {MIN_DIVIDED} utterances or more, and"
            f" {NUM_DIVIDED} are divided; give more"
        )
    num_wrong = round(wrong_share * len(corpus))
    rng = np.random.default_rng([seed, num_wrong])
    planting = corpus.without_faults()
    for speaker in rng.choice(large, NUM_DIVIDED, replace=False).tolist():
        planting.divide(speaker, rng)

    drawn = rng.permutation(len(corpus)).tolist()
    for row in drawn[:num_wrong]:
        planting.mislabel(row, rng)
    num_copied = round(COPIED_SHARE * len(corpus))
    for number, row in enumerate(drawn[num_wrong : num_wrong + num_copied]):
        speaker = planting.right[row]
        if number % 2:
            speaker = planting.another_speaker(row, rng)
        planting.copy(row, speaker)
    return planting


@dataclass
class Tally:
    """Number of cases, and in how many of them something happened, in each planting."""

    counts: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Begin another planting."""
        self.counts.append(0)
        self.totals.append(0)

    def add(self, happened: bool) -> None:
        self.counts[-1] += happened
        self.totals[-1] += 1

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def total(self) -> int:
        return sum(self.totals)

    @property
    def share(self) -> float:
        """Return the share in all plantings; NaN without a case."""
        return self.count / self.total if self.total else math.nan

    def design_effect(self) -> float:
        """Return by how much the variance of the share is above that of independent cases.

        Cases in one planting are not independent: they have one threshold. The share is a ratio
        estimator, whose variance follows from the differences between the plantings (Kish, "Survey
        Sampling", 1965).
        """
        num_plantings = len(self.counts)
        independent = self.share * (1 - self.share) * self.total
        if num_plantings == 1 or not independent:
            return 1.0
        residuals = np.array(self.counts) - self.share * np.array(self.totals)
        variance = float((residuals**2).sum()) * num_plantings / (num_plantings - 1)
        return max(1.0, variance / independent)

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the share.

        It is Wilson's for the number of independent cases whose share would be as exact.
        """
        num_cases = self.total / self.design_effect()
        correction = Z**2 / num_cases
        centre = self.share + correction / 2
        root = math.sqrt(self.share * (1 - self.share) * correction + correction**2 / 4)
        low = (centre - root) / (1 + correction)
        high = (centre + root) / (1 + correction)
        return max(0.0, low), min(1.0, high)

    def cells(self) -> str:
        """Return the count, its share, the interval and the extremes as cells of a table."""
        if not self.total:
            return "none | - | -"
        low, high = map(percent, self.interval())
        shares: list[float] = []
        for count, total in zip(self.counts, self.totals):
            if total:
                shares.append(count / total)
        return (
            f"{self.count:,} of {self.total:,}, {percent(self.share)} %"
            f" | {low} to {high} % | {percent(min(shares))} to {percent(max(shares))} %"
        )


def percent(share: float) -> str:
    """Return a share in percent with one decimal, a small one with two digits."""
    value = 100 * share
    return f"{value:.1f}" if value == 0 or value >= 1 else f"{value:.2g}"


@dataclass
class Claims:
    """What is found of the planted faults, in all plantings."""

    wrong: Tally = field(default_factory=Tally)
    suggested: Tally = field(default_factory=Tally)  # right, of the wrong labels found
    copies: Tally = field(default_factory=Tally)
    right_copies: Tally = field(default_factory=Tally)  # the right label is kept
    divided: Tally = field(default_factory=Tally)
    dropped: Tally = field(default_factory=Tally)  # good utterances
    num_other_pairs: int = 0  # of speakers, which were not planted

    def add(self, planting: Planting, result: cleaning.Cleaning) -> None:
        """Compare the result for one planting with its faults."""
        for tally in self.tallies().values():
            tally.begin()
        dropped: dict[str, cleaning.Finding] = {}
        for finding in result.findings:
            if finding.action == "drop":
                dropped[finding.id] = finding
        for row in planting.wrong:
            finding = dropped.get(planting.ids[row])
            self.wrong.add(finding is not None)
            if finding is not None:
                person = planting.persons[planting.right[row]]
                suggested = planting.persons.get(finding.suggested)
                self.suggested.add(suggested == person)
        self.add_good_utterances(planting, result)
        self.add_copies(planting, result)

        listed: set[frozenset[str]] = set()
        for finding in result.findings:
            if finding.kind == cleaning.SAME_PERSON:
                listed.add(frozenset((finding.id, finding.match)))
        planted = {frozenset(pair) for pair in planting.divided}
        for pair in planted:
            self.divided.add(pair in listed)
        self.num_other_pairs += len(listed - planted)

    def add_copies(self, planting: Planting, result: cleaning.Cleaning) -> None:
        """Count the copies that no longer occur twice, and those with the right label."""
        num_utterances = len(planting.corpus)
        for row in range(num_utterances, len(planting.ids)):
            original = planting.rows[row] - num_utterances
            labels: list[str] = []
            for utterance in (planting.ids[original], planting.ids[row]):
                if utterance in result.speakers:
                    labels.append(result.speakers[utterance])
            self.copies.add(len(labels) < 2)
            self.right_copies.add(labels == [planting.right[row]])

    def add_good_utterances(
        self, planting: Planting, result: cleaning.Cleaning
    ) -> None:
        """Count the utterances of the corpus with the right label, and those that are lost.

        One that is dropped is not lost if a copy of it remains with the right label.
        """
        same_samples: dict[int, list[int]] = {}
        for rows in planting.copies():
            same_samples.update(dict.fromkeys(rows, rows))
        for row in range(len(planting.corpus)):
            right = planting.right[row]
            if planting.speakers[row] != right:
                continue
            ids = [planting.ids[equal] for equal in same_samples.get(row, [row])]
            remains = any(result.speakers.get(utterance) == right for utterance in ids)
            self.dropped.add(not remains)

    def lines(self, num_plantings: int) -> list[str]:
        """Return the results as a table, and what does not fit in it."""
        other_pairs = self.num_other_pairs / num_plantings
        lines = [
            "| | found | interval | single plantings |",
            "|---|---|---|---|",
        ]
        for name, tally in self.tallies().items():
            lines.append(f"| {name} | {tally.cells()} |")
        return [
            *lines,
            "",
            f"other pairs of speakers listed, mean of the plantings: {other_pairs:.1f}",
        ]

    def tallies(self) -> dict[str, Tally]:
        """Return the rows of the table."""
        return {
            "wrong labels": self.wrong,
            "right speaker suggested for them": self.suggested,
            "copies": self.copies,
            "copies of which the right label is kept": self.right_copies,
            "speakers divided into two": self.divided,
            "good utterances dropped": self.dropped,
        }

    def failures(self) -> list[str]:
        """Return a line for each share that is too low or too high."""
        found = {
            "wrong labels": self.wrong,
            "copies": self.copies,
            "divided speakers": self.divided,
        }
        failures: list[str] = []
        for name, tally in found.items():
            # NaN, of no case, compares as false.
            if tally.share < MIN_FOUND:
                failures.append(f"{name}: less than {MIN_FOUND:.0%} found")
        if self.dropped.share > MAX_DROPPED:
            failures.append(f"good utterances: more than {MAX_DROPPED:.0%} dropped")
        return failures


def test_claims(
    corpus: Corpus, wrong_share: float, *, num_plantings: int, far: float
) -> Claims:
    """Plant faults, look for them as the command does, and count what is found."""
    claims = Claims()
    for seed in range(num_plantings):
        planting = plant(corpus, wrong_share, seed)
        claims.add(planting, planting.clean(far))
    return claims


test_claims.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]  # it is no test


def embed_corpus(model_name: str, data: Path) -> Corpus:
    """Embed a checked data directory, and find what has the same samples if all are copied."""
    check_data(data)
    model = speakerlab.load(model_name)
    manifest = read_manifest([data], sample_rate=model.sample_rate)
    waves = [piece.read for piece in manifest.pieces()]
    emb_ND = model.embed_many(waves, check_levels=False, progress=True)
    # Each copy is read and compared, as if the tables had a second id for the same audio.
    rows = np.arange(len(manifest))
    twice = manifest.of_rows(np.concatenate([rows, rows]))
    return Corpus(
        ids=list(manifest.ids),
        speakers=[manifest.speakers[number] for number in manifest.speaker_N.tolist()],
        emb_ND=emb_ND,
        copies=cleaning.find_copies(twice, num_threads=available_cpus()),
    )


def describe_corpus(corpus: Corpus, far: float) -> list[str]:
    """Return a line about the findings in the corpus as it is, and one for each of them."""
    findings = corpus.without_faults().clean(far).findings
    lines = [
        f"{len(corpus):,} utterances of {len(set(corpus.speakers))} speakers;"
        f" findings in the corpus as it is: {len(findings)}"
    ]
    for finding in findings:
        match = f" {finding.match}" if finding.match else ""
        lines.append(f"  {finding.kind}: {finding.id}{match}")
    return lines


def wrong_share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 0.5:
        raise argparse.ArgumentTypeError(f"must be from 0 to 0.5, got {text}")
    return value


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--plantings", type=int, default=100, metavar="N")
    parser.add_argument(
        "--wrong",
        type=wrong_share,
        nargs="+",
        default=[0.02],
        metavar="SHARE",
        help="of the utterances that get a wrong label",
    )
    parser.add_argument("--far", type=float, default=0.01, help="as of the command")
    args = parser.parse_args(arguments)
    if args.plantings < 1:
        parser.error(f"--plantings: must be at least 1, got {args.plantings}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 if too little is found or too much is dropped."""
    args = parse(arguments)
    corpus = embed_corpus(args.model, args.data)
    print("\n".join(describe_corpus(corpus, args.far)), flush=True)
    exit_code = 0
    for share in args.wrong:
        claims = test_claims(
            corpus,
            share,
            num_plantings=args.plantings,
            far=args.far,
        )
        print(f"\n{percent(share)} % wrong labels, {args.plantings} plantings")
        print("\n".join(claims.lines(args.plantings)), flush=True)
        for failure in claims.failures():
            print(failure, file=sys.stderr)
            exit_code = 1
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
