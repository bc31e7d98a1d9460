"""Extract the embeddings of a data directory with an experiment's model.

Computes the missing chunks, and joins all chunks once they are complete.
"""

import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speakerlab.bin.command import choose_gpus, parser
from speakerlab.core.atomic import check_writable
from speakerlab.core.counting import count_of
from speakerlab.data.tables import require_checked
from speakerlab.data.treatments import UNTREATED, Treatment, read_treatments

if TYPE_CHECKING:
    from speakerlab.data.manifest import Manifest
    from speakerlab.embedder import Embedder
    from speakerlab.inference.extraction import Extraction

log = logging.getLogger(__name__)
USUAL_MAX_SECONDS = 120.0  # tables of embeddings record other window lengths


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    extract(
        args.exp,
        args.data,
        untrained=args.untrained,
        per_speaker=args.per_speaker,
        nproc=args.nproc,
        max_seconds=args.max_seconds,
        treatments=read_treatments(args.durations, args.codecs),
        precision=args.precision,
        job=args.job,
        wait_minutes=args.wait_minutes,
    )


def extract(
    exp_dir: Path,
    data_dir: Path,
    *,
    untrained: bool = False,
    per_speaker: int | None = None,
    nproc: int = 1,
    max_seconds: float | None = None,
    treatments: Sequence[Treatment] = (),
    precision: str = "fp32",
    job: tuple[int, int] = (1, 1),
    wait_minutes: float | None = None,
) -> None:
    """Extract the embeddings of the untreated utterances and of each treatment.

    For each parameter, see the help of the option of the same name in `parse`. job: (I, N) for part
    I of N. wait_minutes: None for not waiting for other jobs.
    """
    from speakerlab.checkpoints.model_files import read_card, read_settings
    from speakerlab.checkpoints.published import load_initial, load_published
    from speakerlab.data.manifest import read_manifest
    from speakerlab.inference.workers import precision_here, share_threads

    require_model(exp_dir)
    require_checked(data_dir)
    # Models of older versions lack this setting.
    wanted_threads = read_settings(exp_dir)["runtime"].get("num_threads", "auto")
    num_threads = share_threads(nproc, wanted_threads)
    published = load_published(exp_dir)
    embedder = published.embedder
    if untrained:
        embedder = load_initial(exp_dir, published.config)
    # `auto` depends on the hardware, so log the choice.
    used_precision = precision_here(precision)
    if used_precision.name != "fp32" or precision == "auto":
        log.info("precision: %s, %s", used_precision.name, used_precision.reason)

    # No tensor contains the VAD, so it is not part of the model's hash.
    facts = {
        "precision": used_precision.name,
        "untrained": untrained,
        "vad": published.config.vad,
    }
    facts |= choose_windows(embedder, max_seconds)
    # Of a student, whose embeddings can be compared with its teacher's.
    space = read_card(exp_dir).get("space")
    if space and not untrained:
        facts["space"] = space

    # Plan all tables before computing the first, so that errors in any table show at once.
    manifest = read_manifest([data_dir], sample_rate=embedder.sample_rate)
    tables: list[Extraction] = []
    for treatment in each_once(treatments):
        table = plan_table(
            exp_dir,
            data_dir,
            manifest,
            embedder,
            treatment,
            model_sha256=published.sha256,
            facts=facts,
            per_speaker=per_speaker,
        )
        tables.append(table)

    embedder = embedder.for_inference(used_precision, in_place=True)
    for table in tables:
        compute(
            table,
            embedder,
            job=job,
            nproc=nproc,
            num_threads=num_threads,
            wait_minutes=wait_minutes,
        )


def each_once(treatments: Sequence[Treatment]) -> list[Treatment]:
    """Return the treatments with different tables; the untreated utterances come first.

    A treatment with full duration and no codec has the empty name and means untreated utterances.
    """
    by_name = {UNTREATED.name: UNTREATED}
    for treatment in treatments:
        by_name[treatment.name] = treatment
    return list(by_name.values())


def plan_table(
    exp_dir: Path,
    data_dir: Path,
    manifest: "Manifest",
    embedder: "Embedder",
    treatment: Treatment,
    *,
    model_sha256: str,
    facts: dict[str, Any],
    per_speaker: int | None,
) -> "Extraction":
    """Plan the table of one treatment; OSError if its files could not be written."""
    from speakerlab.checkpoints.model_files import embeddings_stem
    from speakerlab.inference.extraction import plan_extraction

    stem = embeddings_stem(
        exp_dir,
        data_dir.name,
        untrained=facts["untrained"],
        treatment=treatment.name,
    )
    table = plan_extraction(
        stem,
        manifest,
        embedder,
        model_sha256=model_sha256,
        facts=facts,
        per_speaker=per_speaker,
        treatment=treatment,
    )
    refuse_other_utterances(table, data_dir)
    # Check before the work: an error at the end would lose the results.
    try:
        check_writable(stem.with_name(f"{stem.name}.json"))
    except ValueError:
        # A finished table is only read, and may be in the folder of another user.
        if table.read() is None:
            raise
    return table


def refuse_other_utterances(table: "Extraction", data_dir: Path) -> None:
    """Raise ValueError if the table's place holds embeddings of another directory.

    Embeddings, scores and results are filed under the name of the directory alone, such as `test`.
    A directory that has changed still has some of its utterances.
    """
    from speakerlab.scoring.embeddings import EmbeddingTable

    try:
        present = EmbeddingTable.load(table.stem)
    except (ValueError, OSError, EOFError):  # missing, or damaged
        return
    if set(present.ids).isdisjoint(table.ids()):
        raise ValueError(
            f"{table.stem}: holds embeddings of another directory named"
            f" {data_dir.name}, without any utterance of {data_dir}; rename one of the"
            f" two directories, or remove {table.stem}.*"
        )


def choose_windows(embedder: "Embedder", seconds: float | None) -> dict[str, float]:
    """Set the window length of long recordings, if given; return it as a fact unless usual."""
    if seconds is not None:
        # Of a pretrained model with positions for some seconds, no more.
        seconds = min(seconds, embedder.frontend.max_seconds)
        embedder.max_samples = round(seconds * embedder.sample_rate)
    chosen = embedder.max_samples / embedder.sample_rate
    return {} if chosen == USUAL_MAX_SECONDS else {"max_seconds": chosen}


def require_model(exp_dir: Path) -> None:
    """Raise FileNotFoundError, one line, if an experiment has no model yet."""
    from speakerlab.checkpoints.hub import is_published
    from speakerlab.checkpoints.model_files import find_model

    try:
        find_model(exp_dir)
    except FileNotFoundError as error:
        # Another form of a model: the error says how to make a folder of it.
        if exp_dir.is_file() or is_published(exp_dir):
            raise
        problem = "has no model" if exp_dir.exists() else "does not exist"
        command = f"speakerlab train --exp {exp_dir} --config YAML"
        fix = f"train one with `{command}`, or correct --exp"
        raise FileNotFoundError(f"{exp_dir}: {problem}; {fix}") from error


def compute(
    table: "Extraction",
    embedder: "Embedder",
    *,
    job: tuple[int, int],
    nproc: int,
    num_threads: int,
    wait_minutes: float | None,
) -> None:
    """Compute this job's missing chunks of a table, and join the table.

    If chunks of other jobs are missing: with wait_minutes, wait for them; else the last job joins
    the table.
    """
    from speakerlab.inference.extraction import name_jobs
    from speakerlab.inference.workers import embed_chunks

    todo = table.todo(job)
    if todo is None:
        log.info("%s: already extracted with this model and data, kept", table.stem)
        return
    # Chunks of an earlier, interrupted call need not be computed again.
    num_chunks = len(table.of_job(job))
    num_finished = num_chunks - len(todo)
    if num_finished:
        log.info(
            "%s: %d of %d chunks are finished, kept",
            table.stem,
            num_finished,
            num_chunks,
        )
    num_doubtful = embed_chunks(
        table, embedder, todo, nproc=nproc, num_threads=num_threads
    )
    # Treated utterances are the same recordings.
    if num_doubtful and "treatment" not in table.facts:
        log.warning(
            "%s: may be no speech (silent, clipped, noise, tone): %s; `speakerlab check"
            " --decode --force` lists those of a data directory",
            table.stem,
            count_of(num_doubtful, "utterance"),
        )

    num_jobs = job[1]
    # The job that finishes last joins the chunks.
    missing = table.join()
    if missing:
        if wait_minutes is None:
            log.info(
                "%s: %d of %d chunks remain, of %s",
                table.stem,
                len(missing),
                len(table.chunks),
                name_jobs(missing, num_jobs),
            )
            return
        table.wait(num_jobs, minutes=wait_minutes)
    log.info(
        "%s: %s of %d dimensions",
        table.stem,
        count_of(len(table.pieces), "embedding"),
        embedder.embed_dim,
    )


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("extract", __doc__)
    options.add("--exp DIR", "experiment", required=True)
    options.add("--data DIR", "data directory", required=True)
    options.add("--untrained", "use the weights that the training started with")
    options.add(
        "--per-speaker K", "extract at most K utterances of each speaker", least=1
    )
    options.add_gpus("a process on each")
    options.add("--nproc N", "processes (default: one for each of --gpus)", least=1)
    windows = (
        "embed longer recordings in windows of S seconds (default: the model's"
        " max_seconds)"
    )
    options.add("--max-seconds S", windows, least=1.0)
    options.add_treatments("also extract with utterances")
    options.add_precision()
    options.add_job("compute part I of N; run the others elsewhere or later")
    wait = "wait for the other jobs; fail if none finishes a chunk for M minutes"
    options.add("--wait-minutes M", wait, least=0.0)
    args = options.parse_args(arguments)
    gpus = choose_gpus(args.gpus)
    if args.nproc is None:
        args.nproc = max(1, len(gpus))
    return args
