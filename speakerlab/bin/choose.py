"""Compare models on your labelled recordings, and recommend one."""

import logging
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speakerlab.bin import extract
from speakerlab.bin.command import choose_gpus, parser
from speakerlab.checkpoints.hub import local
from speakerlab.checkpoints.model_files import find_model, read_classes, read_settings
from speakerlab.core import process
from speakerlab.core.atomic import check_writable, write_json
from speakerlab.core.counting import count_of
from speakerlab.core.reading import read_json
from speakerlab.data.banks import find_recordings
from speakerlab.data.treatments import UNTREATED, Treatment, read_treatments

if TYPE_CHECKING:  # these import torch, which is slow: only for valid options
    from speakerlab.checkpoints.published import Published
    from speakerlab.data.manifest import Manifest
    from speakerlab.experiments.choosing import Candidate, Condition

log = logging.getLogger(__name__)
# Small published models of several languages.
USUAL_MODELS = (
    "hub:campplus-zh-en",
    "hub:campplus-voxceleb",
    "hub:eres2netv2-zh-200k",
)
RESULTS = "choice.json"
EMBEDDINGS = "embeddings"
MAX_UTTERANCES = 5000  # of which all pairs are compared, 12 million
TIMED_SECONDS = 5.0  # of audio
SECONDS_PER_TIMING = 2.0


@dataclass(frozen=True)
class ModelFolder:
    """Folder of a model, and the name by which it was given."""

    name: str
    folder: Path
    sample_rate: int


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    check_writable(args.out / RESULTS)
    refuse_other_data(args)
    failed: dict[str, str] = {}
    folders = find_models(args.models, failed)
    candidates = measure(args, folders, failed)
    if not candidates:
        raise ValueError("--models: none of them could be measured; see above")
    report(args, candidates, failed)
    if failed:
        log.error(
            "%d of %s could not be measured",
            len(failed),
            count_of(len(args.models), "model"),
        )
        raise SystemExit(process.EXIT_INPUT)


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("choose", __doc__)
    options.add(
        "--data DIR",
        "checked data directory with labels, or a folder with a folder of recordings for"
        " each speaker",
        required=True,
    )
    options.add(
        "--models MODEL",
        f"experiments, model folders or hub:NAME (default: {' '.join(USUAL_MODELS)})",
        nargs="+",
        default=list(USUAL_MODELS),
    )
    options.add(
        "--out DIR",
        "folder for embeddings, which are kept, and results",
        default=Path("choice"),
    )
    options.add("--far RATE", "false-accept rate of the thresholds", default=0.01)
    options.add_treatments("also measure with test sides")
    options.set_defaults(durations=["2"], codecs=["gsm"])
    options.add(
        "--snr DB",
        "also measure with noise at so many dB on the test sides, or none",
        nargs="+",
        default=["10"],
    )
    options.add(
        "--noise DIR", "data directory of noise recordings (default: pink noise)"
    )
    options.add(
        "--utterances N",
        "use so many utterances, of as many speakers as possible",
        least=4,
        default=1000,
    )
    options.add(
        "--per-speaker K",
        "use at most so many utterances of each speaker",
        least=2,
        default=20,
    )
    options.add(
        "--seconds S",
        "cut longer utterances to so many seconds (default: whole)",
        least=0.1,
    )
    options.add_gpus("to embed with; times are those of the CPU")
    args = options.parse_args(arguments)
    if args.utterances > MAX_UTTERANCES:
        raise ValueError(
            f"--utterances: all pairs are compared, of at most {MAX_UTTERANCES}, got"
            f" {args.utterances}; lower it"
        )
    choose_gpus(args.gpus)
    args.snrs = read_snrs(args.snr)
    args.treatments = read_treatments(args.durations, args.codecs)
    return args


def read_snrs(texts: Sequence[str]) -> list[float]:
    """Read the values of --snr: numbers, or none."""
    ratios: list[float] = []
    for text in texts:
        if text == "none":
            continue
        try:
            ratio = float(text)
        except ValueError:
            ratio = np.nan
        if not abs(ratio) <= 100:  # NaN is not
            raise ValueError(
                f"--snr: {text} is no ratio in dB; give -100 to 100, or none"
            )
        ratios.append(ratio)
    return ratios


def refuse_other_data(args: Namespace) -> None:
    """Raise ValueError if --out has the results of another directory."""
    path = args.out / RESULTS
    if not path.exists():
        return
    before = read_json(path).get("data")
    if before != str(args.data.absolute()):
        raise ValueError(
            f"--out: {args.out} has the results of {before}; choose another folder"
        )


def find_models(names: Sequence[Path], failed: dict[str, str]) -> list[ModelFolder]:
    """Return the models that exist, each once; add the others to `failed` with the reason."""
    models: list[ModelFolder] = []
    places: set[Path] = set()
    for path in names:
        name = str(path)
        try:
            folder = local(path)
            place = find_model(folder).resolve()
            sample_rate = read_settings(folder)["frontend"]["sample_rate"]
        except (ValueError, OSError) as error:
            note_failure(name, error, failed)
            continue
        if place in places:
            log.warning("%s: is given twice, and is measured once", name)
            continue
        places.add(place)
        models.append(ModelFolder(name, folder, sample_rate))
    if not models:
        raise ValueError("--models: none of them could be opened; see above")
    return models


def note_failure(name: str, error: Exception, failed: dict[str, str]) -> None:
    """Warn of a model that is left out, and note the reason."""
    reason = str(error).partition("\n")[0].removeprefix(f"{name}: ")
    log.warning("%s: is left out: %s", name, reason)
    failed[name] = reason


def measure(
    args: Namespace, models: Sequence[ModelFolder], failed: dict[str, str]
) -> "list[Candidate]":
    """Measure each model; those that fail are left out."""
    from speakerlab.experiments.choosing_data import (
        Limits,
        read_utterances,
        resampled,
    )

    limits = Limits(args.utterances, args.per_speaker)
    # Of a folder, whose recordings may have any rate.
    highest_rate = max(model.sample_rate for model in models)
    base = read_utterances(args.data, args.out, limits, sample_rate=highest_rate)
    # Before the work: a wrong --noise is no fault of a model.
    treatments = [*args.treatments, *noise_of(args, base)]
    log.info(
        "%s: %s of %s",
        args.data,
        count_of(len(base), "utterance"),
        count_of(len(np.unique(base.speaker_N)), "speaker"),
    )
    candidates: list[Candidate] = []
    for model in models:
        try:
            manifest = resampled(base, args.out, sample_rate=model.sample_rate)
            candidates.append(measure_model(args, model, manifest, treatments))
        except (ValueError, OSError, ImportError) as error:
            note_failure(model.name, error, failed)
    return candidates


def measure_model(
    args: Namespace,
    model: ModelFolder,
    manifest: "Manifest",
    treatments: Sequence[Treatment],
) -> "Candidate":
    """Load a model, time it, embed the utterances in each condition, and score all pairs."""
    from speakerlab.checkpoints.published import load_published
    from speakerlab.experiments.choosing import (
        RECORDED,
        Candidate,
        TrialPairs,
        find_threshold,
    )
    from speakerlab.experiments.model_card import describe
    from speakerlab.inference.workers import share_threads

    log.info("%s: measuring", model.name)
    # One thread for each forward pass, also of the timing.
    num_threads = share_threads(1)
    published = load_published(model.folder)
    weights = published.folder / "embedder.safetensors"
    ms_per_second = time_model(published)
    trained = training_speakers(published)
    if trained is None:
        log.warning("%s: training speakers unknown", model.name)
    present = {manifest.speakers[number] for number in manifest.speaker_N.tolist()}
    card = dict(describe(published.folder))

    tables = embed_conditions(
        args, treatments, published, manifest, num_threads=num_threads
    )
    pairs = TrialPairs.of_speakers(manifest.speaker_N.astype(np.int64))
    enrol_ID = tables[RECORDED]
    ids = list(manifest.ids)
    scores_of = {
        condition: pairs.scores(enrol_ID, test_ID, ids)
        for condition, test_ID in tables.items()
    }
    threshold, p_miss = find_threshold(
        scores_of[RECORDED], pairs.is_target_N, far=args.far
    )
    return Candidate(
        name=model.name,
        sha256=published.sha256,
        sample_rate=model.sample_rate,
        megabytes=weights.stat().st_size / 1e6,
        ms_per_second=ms_per_second,
        num_trained=None if trained is None else len(trained & present),
        training_data="; ".join(card["training data"]),
        estimates={
            condition: pairs.estimate(scores_N)
            for condition, scores_N in scores_of.items()
        },
        threshold=threshold,
        p_miss=p_miss,
        num_others=int(np.count_nonzero(~pairs.is_target_N)),
    )


def training_speakers(published: "Published") -> set[str] | None:
    """Return the names of the speakers that a model was trained on; None if it has none."""
    names = read_classes(published.folder)
    # The classes may also be languages, for example.
    if not names or not published.config.data.has_speaker_labels:
        return None
    return set(names)


def time_model(published: "Published") -> float:
    """Return the milliseconds per second of audio on the CPU, with one thread of torch."""
    import torch

    from speakerlab.bench.stopwatch import block_seconds
    from speakerlab.inference.workers import precision_here

    embedder = published.embedder.for_inference(precision_here("fp32"))
    generator = torch.Generator().manual_seed(0)
    num_samples = round(TIMED_SECONDS * embedder.sample_rate)
    wave_BS = 0.1 * torch.randn(1, num_samples, generator=generator)
    with torch.inference_mode():
        blocks = block_seconds(
            lambda: embedder(wave_BS),
            device=torch.device("cpu"),
            seconds=SECONDS_PER_TIMING,
        )
    return 1000 * statistics.median(blocks) / TIMED_SECONDS


def embed_conditions(
    args: Namespace,
    treatments: Sequence[Treatment],
    published: "Published",
    manifest: "Manifest",
    *,
    num_threads: int,
) -> "dict[Condition, np.ndarray]":
    """Return emb_ID of the utterances as recorded, and of each treatment; computed once."""
    from speakerlab.experiments.choosing import RECORDED
    from speakerlab.experiments.choosing_data import cut_to
    from speakerlab.inference.extraction import plan_extraction
    from speakerlab.inference.workers import precision_here

    embedder = published.embedder.for_inference(precision_here("fp32"), in_place=True)
    facts: dict[str, Any] = {"precision": "fp32", "vad": published.config.vad}
    if args.seconds is not None:
        facts["cut_seconds"] = args.seconds
    treatment_of: dict[Condition, Treatment] = {RECORDED: UNTREATED}
    for treatment in treatments:
        if treatment.name:  # else as recorded
            treatment_of[treatment.condition, treatment.value] = treatment

    folder = args.out / EMBEDDINGS / published.sha256[:16]
    tables: dict[Condition, np.ndarray] = {}
    for condition, treatment in treatment_of.items():
        if args.seconds is not None:
            treatment = cut_to(treatment, args.seconds)
        table = plan_extraction(
            folder / (treatment.name or "recorded"),
            manifest,
            embedder,
            model_sha256=published.sha256,
            facts=facts,
            treatment=treatment,
        )
        extract.compute(
            table,
            embedder,
            job=(1, 1),
            nproc=1,
            num_threads=num_threads,
            wait_minutes=None,
        )
        embedded = table.read()
        assert embedded is not None
        tables[condition] = embedded.emb_ND
    return tables


def noise_of(args: Namespace, base: "Manifest") -> list[Treatment]:
    """Return the treatments of --snr; base: the utterances before their conversion."""
    from speakerlab.experiments.choosing_data import Noisy

    noises = ()
    if args.noise is not None:
        noises = find_recordings(args.noise, sample_rate=base.sample_rate)
        if not noises:
            raise ValueError(
                f"--noise: {args.noise} has no wav.scp with recordings; give a data"
                " directory of noise"
            )
    treatments = [Noisy(base=base, snr_db=ratio, noises=noises) for ratio in args.snrs]
    if treatments:
        treatments[0].read(base.ids[0])  # raises ValueError if all noise is silent
    return [*treatments]


def report(
    args: Namespace, candidates: "Sequence[Candidate]", failed: dict[str, str]
) -> None:
    """Write the results, and print the table and the recommendation."""
    from speakerlab.experiments import choosing
    from speakerlab.experiments.results import terminal_width

    comparisons = choosing.compare_all(candidates)
    lines = choosing.describe(candidates, comparisons, far=args.far)
    for name, reason in failed.items():
        lines.append(f"left out: {name}: {reason}")
    values = {
        "data": str(args.data.absolute()),
        "far": args.far,
        "noise": None if args.noise is None else str(args.noise),
        **choosing.json_values(candidates, comparisons),
        "failed": failed,
        "text": lines,
    }
    write_json(args.out / RESULTS, values)
    table = choosing.format_candidates(candidates, far=args.far, width=terminal_width())
    text = "\n".join(lines)
    sys.stdout.write(f"{table}\n\n{text}\n")
    log.info("%s: written", args.out / RESULTS)
