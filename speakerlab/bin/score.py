"""Score trial lists with an experiment's embeddings; write results.json and report.html."""

import logging
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin import extract
from speakerlab.bin.command import parser
from speakerlab.checkpoints import model_files
from speakerlab.core.atomic import alone, check_writable
from speakerlab.data.treatments import Treatment, read_treatments
from speakerlab.experiments import results
from speakerlab.experiments.embedded import are_embedded, read_development, read_embedded
from speakerlab.experiments.evaluate import LEARN_FROM, System, evaluate
from speakerlab.experiments.report import write_report
from speakerlab.experiments.trial_list import ListScores, TrialList, read_trial_list
from speakerlab.scoring.chain import USUAL_TOP_N, Chain, build_chain
from speakerlab.scoring.metrics import P_TARGETS
from speakerlab.scoring.minima import TooFewError
from speakerlab.scoring.score_files import write_scores

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    args = parse(words)
    treatments = read_treatments(args.durations, args.codecs)
    system = open_system(args.exp, args.development)
    for name in ("results.json", "scores/list.txt"):
        check_writable(args.exp / name)
    with alone(args.exp / results.LOCK):
        score(args, system, treatments)


def score(args: Namespace, system: System, treatments: Sequence[Treatment]) -> None:
    """Score every list, and write the report of all rows of results.json."""
    back_ends, notes = build_back_ends(args, system)
    rows: list[results.Row] = []
    scores: list[ListScores] = []
    for folder in dict.fromkeys(path.parent for path in args.trials):
        if not are_embedded(args.exp, folder, untrained=True):
            log.info("%s: no untrained embeddings (extract --untrained), left out", folder)
        if any(treatment.name for treatment in treatments):
            extract_treated(args, folder)
    for path in args.trials:
        listed = read_trial_list(path)
        notes += notes_of_short_ones(listed, treatments)
        found, own, left_out = evaluate(
            system,
            listed,
            back_ends,
            learn_from=args.calibration,
            p_targets=args.p_target,
            treatments=treatments,
        )
        notes += left_out
        rows = results.update_results(args.exp / "results.json", found, asked=args.backend)
        for one in own:
            # plain cosine scores: scores/<set>_<list>.txt; others carry the back end's name
            end = "" if one.backend == "cosine" else f"_{one.backend}"
            name = f"{path.parent.name}_{path.name}{end}.txt"
            write_scores(args.exp / "scores" / name, listed.trials, one.scores_N)
        scores += own
    for line in notes:
        log.warning("%s", line)
    write_report(args.exp, scores, rows, notes=notes, reference=args.reference)
    fresh = [row for row in rows if row["model_sha256"] == system.card["sha256"]]
    sys.stdout.write(results.format_table(fresh) + "\n")
    conditions = {treatment.condition for treatment in treatments}
    if conditions:
        sys.stdout.write("\n" + results.format_conditions(fresh, conditions) + "\n")
    log.info("%s: wrote results.json and report.html", args.exp)


def parse(words: Sequence[str]) -> Namespace:
    options = parser("score", __doc__)
    options.add("--exp DIR", "experiment with embeddings of the trials", required=True)
    options.add("--trials FILE", "lists, each in its data directory", nargs="+", required=True)
    back_end = (
        "any of mean lda whiten length, then cosine or plda, then optionally snorm or asnorm, then "
        "optionally qmf, joined by +; the first back end is the primary one (default cosine)"
    )
    options.add("--backend NAME", back_end, nargs="+", default=["cosine"])
    options.add("--development DIR", "data to learn back ends from (default: first training set)")
    calibration = (
        "trials that calibration learns from: validation speakers, or the list itself by "
        "cross-validation (default auto: the model's calibration for cosine, else one of the two)"
    )
    options.add("--calibration", calibration, choices=LEARN_FROM, default="auto")
    options.add("--top-n N", "cohort speakers that asnorm uses", type=int, default=USUAL_TOP_N)
    options.add("--lda-dim D", "dimensions that lda keeps (default: as many as possible)", type=int)
    options.add("--adapt DIR", "data whose embeddings plda adapts to; needs no speaker labels")
    priors = "target priors of minDCF (default 0.01 0.05)"
    options.add("--p-target P", priors, nargs="+", default=P_TARGETS)
    options.add_treatments("condition of the results: test side")
    options.add("--reference FILE", "the recipe's reference curves, drawn behind those of training")
    args = options.parse_args(words)
    for prior in args.p_target:
        if not 0 < prior < 1:
            raise ValueError(f"--p-target: {prior:g} is not between 0 and 1; use e.g. 0.01")
    return args


def build_back_ends(args: Namespace, system: System) -> tuple[list[Chain], list[str]]:
    """Learn the back ends; a line for each that has too little to learn from.

    Raises TooFewError if that is the first, the primary one.
    """
    cohort = None if system.development is None else system.development.cohort
    adapt = args.adapt and (args.adapt.name, read_embedded(args.exp, args.adapt))
    back_ends: list[Chain] = []
    notes: list[str] = []
    for spec in args.backend:
        options = {"top_n": args.top_n, "lda_dim": args.lda_dim, "adapt": adapt}
        try:
            back_ends.append(build_chain(spec, cohort, **options))
        except TooFewError as error:
            if not back_ends:
                raise
            notes.append(f"skipped {spec}: {error}")
    return back_ends, notes


def extract_treated(args: Namespace, folder: Path) -> None:
    """Extract what stage 5 has not, in the precision of the embeddings that are there."""
    precision = read_embedded(args.exp, folder).facts.get("precision", "fp32")
    chosen = ["--exp", args.exp, "--data", folder, "--precision", precision]
    for name in ("durations", "codecs"):
        if values := getattr(args, name):
            chosen += [f"--{name}", *values]
    extract.main(list(map(str, chosen)))


def notes_of_short_ones(listed: TrialList, treatments: Sequence[Treatment]) -> list[str]:
    """Return a line for each duration that some test utterances do not exceed."""
    notes: list[str] = []
    seconds = [listed.seconds[name] for name in listed.trials.test_ids if name in listed.seconds]
    for longest in (one.seconds for one in treatments if math.isfinite(one.seconds)):
        if short := sum(size <= longest for size in seconds):
            counts = f"{short:,} of {len(listed.trials.test_ids):,} test utterances"
            notes.append(f"{listed.name}: {counts} last at most {longest:g} s and were not cut.")
    return notes


def open_system(exp_dir: Path, development: Path | None) -> System:
    """Open the experiment's model and its development set, by default the first training set."""
    model, data = model_files.find_model(exp_dir), model_files.read_settings(exp_dir)["data"]
    found = None
    try:
        found = read_development(exp_dir, development or Path(data["dir"], data["train"][0]))
    except (ValueError, FileNotFoundError) as error:
        if development is not None:
            raise
        log.warning("%s; nothing is learned from it", error)  # cosine needs nothing
    if development is not None and found is None:
        raise ValueError(
            f"--development: no embeddings of {development} in {exp_dir}/embeddings; run "
            f"`speakerlab extract --exp {exp_dir} --data {development} --per-speaker 10`"
        )
    return System(exp_dir, model_files.read_card(model), model_files.read_calibration(model), found)
