"""Score trial lists with an experiment's embeddings; write results.json and report.html."""

import logging
import math
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from speakerlab.bin import extract
from speakerlab.bin.command import choose_gpus, json_line, parser
from speakerlab.checkpoints import model_files
from speakerlab.core import done
from speakerlab.core.atomic import check_writable, locked
from speakerlab.data.treatments import Treatment, read_treatments
from speakerlab.experiments import results
from speakerlab.experiments.embedded import (
    DevelopmentSet,
    are_embedded,
    embeddings_inputs,
    model_inputs,
    read_development,
    read_embedded,
    set_inputs,
)
from speakerlab.experiments.evaluate import LEARN_FROM, System, evaluate
from speakerlab.experiments.report import write_report
from speakerlab.experiments.trial_list import (
    ListScores,
    TrialList,
    list_name,
    read_trial_list,
)
from speakerlab.scoring.chain import USUAL_TOP_N, Chain, build_chain
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.metrics import P_TARGETS, error_rates
from speakerlab.scoring.minima import TooFewError
from speakerlab.scoring.score_files import read_scores, write_scores

log = logging.getLogger(__name__)
RECORD = "scores/.scored"  # in the experiment: the inputs of the last scoring
# Options outside the record: they change no result, or the record has the digests of their files.
NOT_RECORDED = (
    "exp",
    "force",
    "trials",
    "plugins",
    "gpus",
    "json",
    "far",
    "threshold",
)


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    check_far(args)
    treatments = read_treatments(args.durations, args.codecs)
    inputs = inputs_of(args)
    if not args.force and is_scored(args, inputs, treatments):
        return

    # A wrong list would give warnings about its folder before its error.
    lists = [read_trial_list(path) for path in args.trials]
    system = open_system(args.exp, args.development, args.enrol_exp)
    # Check before the work: an error at the end would lose the results.
    for name in ("results.json", "scores/list.txt"):
        check_writable(args.exp / name)
    with locked(args.exp / results.LOCK) as waited:
        # Another process may have scored the same lists while this process waited.
        if waited and not args.force and is_scored(args, inputs, treatments):
            return
        # The record describes the old results, so remove it before they change.
        done.forget(args.exp / RECORD)
        # The untreated utterances have the empty name: `speakerlab extract` embeds them.
        if any(treatment.name for treatment in treatments):
            for folder in data_dirs(args):
                extract_treated(args.exp, folder, treatments)
        # Only after the extraction, which changes these inputs.
        inputs |= treated_inputs(args, treatments)
        written = score(args, system, lists, treatments)
        inputs |= results_inputs(args)
        done.record(args.exp / RECORD, inputs, outputs=written)


def is_scored(
    args: Namespace,
    inputs: Mapping[str, Any],
    treatments: Sequence[Treatment],
) -> bool:
    """Return whether results.json has the results of these inputs; if so, print them."""
    current = dict(inputs)
    current |= treated_inputs(args, treatments)
    current |= results_inputs(args)
    if not done.is_done(args.exp / RECORD, current):
        return False
    rows = results.read_rows(args.exp / "results.json")
    # The file may also have identification rows of `speakerlab classify`.
    verification_rows = [row for row in rows if row.get("task") is None]
    print_results(args, verification_rows, treatments)
    log.info(
        "%s: already scored with these inputs, kept (--force scores again)", args.exp
    )
    return True


def inputs_of(args: Namespace) -> dict[str, Any]:
    """Return the inputs of the scores, the results and the report, for their record."""
    settings = model_files.read_settings(args.exp)
    development = args.development
    if development is None:
        development = model_files.first_training_folder(settings)
    folders = [*data_dirs(args), development]
    if args.adapt:
        folders.append(args.adapt)
    options: dict[str, Any] = {}
    for name, value in vars(args).items():
        if name not in NOT_RECORDED:
            options[name] = value
    # Absolute, so that a comparison finds them from another folder.
    trials: dict[str, str] = {}
    for path in args.trials:
        trials[str(path.absolute())] = done.file_digest(path)
    reference = None
    if args.reference:
        reference = done.file_digest(args.reference)
    enrolment: list[dict[str, str]] = []
    if args.enrol_exp is not None:
        for folder in data_dirs(args):
            enrolment.append(set_inputs(args.enrol_exp, folder))
    return {
        **model_inputs(args.exp),
        "options": options,
        "enrolment": enrolment,
        "trials": trials,
        "sets": [set_inputs(args.exp, folder) for folder in folders],
        "reference": reference,
    }


def treated_inputs(args: Namespace, treatments: Sequence[Treatment]) -> dict[str, Any]:
    """Return the inputs that scoring extracts if they are missing."""
    tables = [
        embeddings_inputs(args.exp, folder, treatment=treatment)
        for folder in data_dirs(args)
        for treatment in treatments
    ]
    return {"treated": done.digest(tables)}


def results_inputs(args: Namespace) -> dict[str, Any]:
    """Return the digest of the results, which another command may have changed."""
    return {"results": done.file_digest(args.exp / "results.json")}


def data_dirs(args: Namespace) -> list[Path]:
    """Return the data directories of the trial lists, each once."""
    folders = [path.parent for path in args.trials]
    return list(dict.fromkeys(folders))


def score(
    args: Namespace,
    system: System,
    lists: Sequence[TrialList],
    treatments: Sequence[Treatment],
) -> list[str]:
    """Score every list, and write the report of all rows of results.json.

    Return the written files, as paths relative to the folder of the scores.
    """
    back_ends, notes = build_back_ends(args, system)
    for folder in data_dirs(args):
        if not are_embedded(args.exp, folder, untrained=True):
            log.info(
                "%s: no untrained embeddings (extract --untrained), left out", folder
            )

    rows: list[results.Row] = []
    scores: list[ListScores] = []
    written = ["../report.html"]
    for listed in lists:
        path = listed.path
        # Under this name, it does not replace the result of the same list with one model.
        listed = replace(listed, name=name_of_result(listed.name, args.enrol_exp))
        notes += notes_of_short_utterances(listed, treatments)
        list_rows, list_scores, skipped = evaluate(
            system,
            listed,
            back_ends,
            learn_from=args.calibration,
            p_targets=args.p_target,
            treatments=treatments,
        )
        notes += skipped
        scores += list_scores
        # After each list, so that an error in a later list does not lose its results.
        rows = results.update_results(
            args.exp / "results.json", list_rows, asked=args.backend
        )
        for scored in list_scores:
            name = scores_file(path, scored.backend, args.enrol_exp)
            file = args.exp / "scores" / name
            write_scores(file, listed.trials, scored.scores_N)
            written.append(name)

    for line in notes:
        log.warning("%s", line)
    write_report(args.exp, scores, rows, notes=notes, reference=args.reference)
    print_results(args, rows, treatments)
    log.info("%s: wrote results.json and report.html", args.exp)
    return written


def check_one_space(exp_dir: Path, enrol_exp_dir: Path) -> None:
    """Raise ValueError unless the embeddings of two models can be compared."""
    spaces: list[str] = []
    for path in (exp_dir, enrol_exp_dir):
        card = model_files.read_card(path)
        spaces.append(model_files.space_of(card))
    if len(set(spaces)) > 1:
        raise ValueError(
            f"--enrol-exp: embeddings of {enrol_exp_dir} and {exp_dir} cannot be compared:"
            " neither was taught by the other with distil.projection=keep; leave it out"
        )


def scores_file(trials: Path, back_end: str, enrol_exp_dir: Path | None) -> str:
    """Return the file name of a list's scores; plain cosine is left out of the name."""
    name = list_name(trials).replace("/", "_")
    if enrol_exp_dir is not None:
        name += f"_enrolled_by_{enrol_exp_dir.name}"
    if back_end != "cosine":
        name += f"_{back_end}"
    return f"{name}.txt"


def name_of_result(name: str, enrol_exp_dir: Path | None) -> str:
    """Return the name under which results.json has the results of a list, given its own."""
    if enrol_exp_dir is None:
        return name
    return f"{name}, enrolled by {enrol_exp_dir.name}"


def print_results(
    args: Namespace,
    rows: Sequence[results.Row],
    treatments: Sequence[Treatment],
) -> None:
    """Print the results of the experiment's model; rates at a threshold if one was asked for."""
    # results.json keeps the rows of an earlier model of the experiment.
    sha256 = model_files.read_card(args.exp)["sha256"]
    model_rows = [row for row in rows if row["model_sha256"] == sha256]
    decides = args.far is not None or args.threshold is not None
    if not args.json:
        print_tables(model_rows, treatments)
        if decides:
            table = format_decisions(args, model_rows)
            sys.stdout.write(f"\n{table}\n")
        return
    for row, path in asked_rows(args, model_rows):
        fields = dict(row)
        if decides:
            fields["decision"] = decide(args, row, path)
        sys.stdout.write(json_line(fields))


def asked_rows(
    args: Namespace, rows: Sequence[results.Row]
) -> Iterator[tuple[results.Row, Path]]:
    """Yield the rows of the lists and back ends of the command, and the path of each list."""
    for path in args.trials:
        name = name_of_result(list_name(path), args.enrol_exp)
        for row in rows:
            # Behind a comma are the options of the back end.
            back_end, _, _ = row["backend"].partition(",")
            # A folder that was renamed or copied also has rows with its earlier name.
            is_of_experiment = row["system"] == args.exp.name
            is_of_list = row["trials"] == name
            if is_of_experiment and is_of_list and back_end in args.backend:
                yield row, path


def decide(
    args: Namespace, row: results.Row, trials: Path
) -> dict[str, float | None] | None:
    """Return the error rates of a row's scores at the threshold of --threshold or --far.

    None for --far if the scores are not plain cosine: the model's calibration is of those.
    """
    threshold = args.threshold
    if threshold is None:
        calibration = model_files.read_calibration(model_files.find_model(args.exp))
        if row["backend"] != "cosine" or calibration is None:
            return None
        threshold = calibration.threshold_at(args.far)
    listed = read_trial_list(trials).trials
    file = scores_file(trials, row["backend"], args.enrol_exp)
    scores_N = read_scores(args.exp / "scores" / file, listed)
    p_miss, p_fa = error_rates(scores_N, listed.is_target_N, threshold=threshold)
    return {"threshold": threshold, "far": args.far, "p_miss": p_miss, "p_fa": p_fa}


def format_decisions(args: Namespace, rows: Sequence[results.Row]) -> str:
    """Format the error rates at the threshold of --threshold or --far as text."""
    lines = [["trials", "back end", "threshold", "misses %", "false alarms %"]]
    for row, path in asked_rows(args, rows):
        rates = decide(args, row, path)
        if rates is not None:
            lines.append(
                [
                    row["trials"],
                    row["backend"],
                    f"{rates['threshold']:.6f}",
                    results.percent(rates["p_miss"]),
                    results.percent(rates["p_fa"]),
                ]
            )
    return results.aligned(lines, num_left=2, width=results.terminal_width())


def check_far(args: Namespace) -> None:
    """Raise ValueError if there is no threshold for the rate of --far."""
    if args.far is None:
        return
    calibration = model_files.read_calibration(model_files.find_model(args.exp))
    if calibration is None:
        reason = "the model has no calibration"
    elif args.enrol_exp is not None:
        reason = "the calibration is of scores of one model"
    elif "cosine" not in args.backend:
        reason = "the calibration is of the back end cosine"
    else:
        # Raises ValueError if the calibration has no threshold for this rate.
        calibration.threshold_at(args.far)
        return
    raise ValueError(
        f"--far: {reason}; give --threshold SCORE, or use `speakerlab compare --far`"
        " for the list's own threshold"
    )


def print_tables(rows: Sequence[results.Row], treatments: Sequence[Treatment]) -> None:
    """Print the results of lists, also by treatment of the test side."""
    # In a file or a pipe, every row is one line.
    width = results.terminal_width()
    table = results.format_table(rows, width)
    sys.stdout.write(f"{table}\n")
    conditions = {treatment.condition for treatment in treatments}
    if conditions:
        table = results.format_conditions(rows, conditions, width)
        sys.stdout.write(f"\n{table}\n")


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("score", __doc__)
    options.add("--exp DIR", "experiment with embeddings of the trials", required=True)
    options.add(
        "--trials FILE", "lists, each in its data directory", nargs="+", required=True
    )
    options.add(
        "--enrol-exp DIR",
        "experiment whose embeddings the enrolment side has: a student's teacher",
    )
    back_end = (
        "any of mean lda whiten length, then cosine or plda, then optionally snorm or"
        " asnorm, then optionally qmf, joined by +; the first back end is the primary"
        " one (default cosine)"
    )
    options.add("--backend NAME", back_end, nargs="+", default=["cosine"])
    options.add(
        "--development DIR",
        "data to learn back ends from (default: first training set)",
    )
    calibration = (
        "trials that calibration learns from: validation speakers, or the list itself"
        " by cross-validation (default auto: the model's calibration for cosine, else"
        " one of the two)"
    )
    options.add("--calibration", calibration, choices=LEARN_FROM, default="auto")
    options.add(
        "--top-n N",
        "cohort speakers that asnorm uses",
        value_type=int,
        default=USUAL_TOP_N,
    )
    options.add(
        "--lda-dim D",
        "dimensions that lda keeps (default: as many as possible)",
        value_type=int,
    )
    options.add(
        "--adapt DIR", "data whose embeddings plda adapts to; needs no speaker labels"
    )
    priors = "target priors of minDCF (default 0.01 0.05)"
    options.add("--p-target P", priors, nargs="+", default=P_TARGETS)
    point = options.add_mutually_exclusive_group()
    options.add(
        "--far RATE",
        "show the error rates at the model's threshold for this false-alarm rate",
        group=point,
    )
    options.add(
        "--threshold SCORE",
        "show the error rates at this score",
        value_type=float,
        group=point,
    )
    options.add_json("list and back end")
    options.add_treatments("condition of the results: test side")
    options.add("--force", "score again what was scored with the same inputs")
    options.add(
        "--reference FILE",
        "the recipe's reference curves, drawn behind those of training",
    )
    options.add_gpus("for embeddings of cut or encoded recordings that are missing")
    args = options.parse_args(arguments)
    choose_gpus(args.gpus)
    args.trials = each_once("--trials", args.trials)
    args.backend = each_once("--backend", args.backend)
    if args.threshold is not None and not math.isfinite(args.threshold):
        raise ValueError(
            f"--threshold: must be a finite score, got {args.threshold:g}; correct it"
        )
    return args


def each_once(option: str, values: Sequence[Any]) -> list[Any]:
    """Return each value of an option once; log the others."""
    for value, times in Counter(values).items():
        if times > 1:
            log.warning("%s: %s is given %d times, used once", option, value, times)
    return list(dict.fromkeys(values))


def build_back_ends(args: Namespace, system: System) -> tuple[list[Chain], list[str]]:
    """Learn the back ends; also return a line for each back end with too little data.

    Raises TooFewError if the first back end, the primary one, has too little data.
    """
    cohort = None
    if system.development is not None:
        cohort = system.development.cohort
    adapt: tuple[str, EmbeddingTable] | None = None
    if args.adapt:
        adapt_table = read_embedded(args.exp, args.adapt)
        adapt = (args.adapt.name, adapt_table)
    back_ends: list[Chain] = []
    notes: list[str] = []
    for spec in args.backend:
        try:
            chain = build_chain(
                spec,
                cohort,
                top_n=args.top_n,
                lda_dim=args.lda_dim,
                adapt=adapt,
            )
            back_ends.append(chain)
        # Skip a secondary back end, but never the primary one.
        except TooFewError as error:
            if not back_ends:
                raise
            notes.append(f"skipped {spec}: {error}")
    return back_ends, notes


def extract_treated(
    exp_dir: Path,
    folder: Path,
    treatments: Sequence[Treatment],
) -> None:
    """Extract the missing embeddings of treated utterances; keep the existing ones.

    They have the same precision as the embeddings of the untreated utterances.
    """
    untreated = read_embedded(exp_dir, folder)
    precision = untreated.facts.get("precision", "fp32")
    extract.extract(exp_dir, folder, precision=precision, treatments=treatments)


def notes_of_short_utterances(
    listed: TrialList, treatments: Sequence[Treatment]
) -> list[str]:
    """Return a line for each duration to which some test utterances cannot be cut."""
    test_ids = listed.trials.test_ids
    seconds = [listed.seconds[name] for name in test_ids if name in listed.seconds]
    notes: list[str] = []
    for treatment in treatments:
        duration = treatment.seconds
        # An infinite duration, `full` or that of a codec alone, does not cut utterances.
        if not math.isfinite(duration):
            continue
        num_short = sum(length <= duration for length in seconds)
        if num_short:
            counts = f"{num_short:,} of {len(test_ids):,} test utterances"
            notes.append(
                f"{listed.name}: {counts} last at most {duration:g} s and were not cut."
            )
    return notes


def open_system(
    exp_dir: Path,
    development: Path | None,
    enrol_exp_dir: Path | None = None,
) -> System:
    """Open the experiment's model and its development set, by default the first training set.

    enrol_exp_dir: the experiment of the enrolment side; ValueError if the two cannot be compared.
    """
    if enrol_exp_dir is not None:
        check_one_space(exp_dir, enrol_exp_dir)
    model = model_files.find_model(exp_dir)
    development_set = open_development(exp_dir, development)
    # A calibration is learned from trials whose sides are of one model.
    calibration = None
    if enrol_exp_dir is None:
        calibration = model_files.read_calibration(model)
    return System(
        exp_dir=exp_dir,
        card=model_files.read_card(model),
        calibration=calibration,
        development=development_set,
        enrol_exp_dir=enrol_exp_dir,
    )


def open_development(exp_dir: Path, development: Path | None) -> DevelopmentSet | None:
    """Open the data that back ends learn from: `development`, else the first training set.

    None if the default has no embeddings; for `development`, this is a ValueError.
    """
    folder = development
    if folder is None:
        settings = model_files.read_settings(exp_dir)
        folder = model_files.first_training_folder(settings)
    development_set = None
    try:
        development_set = read_development(exp_dir, folder)
    except (ValueError, FileNotFoundError) as error:
        # Plain cosine learns nothing, so the default development set may be missing.
        if development is not None:
            raise
        log.warning("%s; nothing is learned from it", error)
    if development is not None and development_set is None:
        raise ValueError(
            f"--development: no embeddings of {development} in {exp_dir}/embeddings;"
            f" run `speakerlab extract --exp {exp_dir} --data {development}"
            " --per-speaker 10`"
        )
    return development_set
