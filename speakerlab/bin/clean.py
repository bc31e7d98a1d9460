"""Find wrong labels and copies in a data directory; write a data directory without them."""

import logging
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speakerlab.bin import extract
from speakerlab.bin.command import parser
from speakerlab.checkpoints.hub import local
from speakerlab.checkpoints.model_files import find_model, read_card, read_settings
from speakerlab.core import done
from speakerlab.core.atomic import check_writable
from speakerlab.core.counting import count_of
from speakerlab.core.system import available_cpus
from speakerlab.data.manifest import Manifest, read_manifest
from speakerlab.data.tables import (
    ENROLL_MAP,
    list_tables,
    list_trials,
    require_checked,
)
from speakerlab.experiments import cleaning

log = logging.getLogger(__name__)
DOUBTFUL_SHARE = 0.1  # of wrong labels; a good corpus has a few percent


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    check_data(args.data)
    check_place(args.data, args.out)
    model = local(args.model)
    find_model(model)
    sample_rate = read_settings(model)["frontend"]["sample_rate"]
    manifest = read_manifest([args.data], sample_rate=sample_rate)
    if len(manifest.speakers) < 2:
        raise ValueError(
            f"{args.data}: has {count_of(len(manifest.speakers), 'speaker')}, cleaning"
            " compares speakers with others; give more"
        )

    inputs = inputs_of(args, model, manifest)
    if done.is_done(args.out / cleaning.RECORD, inputs):
        log.info(
            "%s: already cleaned with these inputs, kept (remove it to clean again)",
            args.out,
        )
        return
    clean(args, model, manifest, inputs)


def check_data(data: Path) -> None:
    """Raise FileNotFoundError, one line, unless a data directory is checked and has labels."""
    require_checked(data)
    labels = data / "utt2spk"
    if not labels.exists():
        raise FileNotFoundError(
            f"{labels}: does not exist; cleaning needs speaker labels, such as those of"
            " `speakerlab pseudo-label`"
        )


def check_place(data: Path, out: Path) -> None:
    """Raise ValueError, one line, unless the cleaned directory may be written at `out`."""
    data_path = data.resolve()
    out_path = out.resolve()
    if out_path.is_relative_to(data_path):
        place = "is" if out_path == data_path else "lies in"
        raise ValueError(
            f"--out: {out} {place} --data {data}, which is never changed; choose"
            " another path"
        )
    if data_path.is_relative_to(out_path):
        raise ValueError(
            f"--out: {out} holds --data {data} and would be replaced; choose another"
            " path"
        )
    record = out / cleaning.RECORD
    is_empty_folder = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty_folder and not record.exists():
        raise ValueError(
            f"--out: {out} already exists, and was not written by `speakerlab clean`;"
            " choose another path, or remove it"
        )
    check_writable(record if out.is_dir() else out)


def inputs_of(args: Namespace, model: Path, manifest: Manifest) -> dict[str, Any]:
    """Return what a cleaning depends on, for its record."""
    tables = [*list_tables(args.data), "about", "utt2dur", "rejected.tsv"]
    return {
        "data": args.data.absolute(),
        "tables": done.files_digest(args.data, tables),
        "utterances": manifest.sha256(),
        "audio": manifest.audio_digest(),
        "model": read_card(model)["sha256"],
        "precision": args.precision,
        "far": args.far,
        "join_speakers": args.join_speakers,
        "code": done.code_digest(),
    }


def clean(
    args: Namespace, model: Path, manifest: Manifest, inputs: dict[str, Any]
) -> None:
    """Extract embeddings, judge the labels, and write the cleaned directory."""
    from speakerlab.experiments.embedded import read_embedded

    # Faults of the audio show before the extraction.
    log.info("%s: looking for copies", args.data)
    copies = cleaning.find_copies(manifest, num_threads=available_cpus())
    # Existing embeddings are kept.
    extract.extract(model, args.data, nproc=args.nproc, precision=args.precision)
    table = read_embedded(model, args.data)
    assert table.ids == list(manifest.ids)
    speakers = [manifest.speakers[number] for number in manifest.speaker_N.tolist()]
    result = cleaning.look_through(
        table.ids,
        speakers,
        table.emb_ND,
        copies,
        far=args.far,
        joins_speakers=args.join_speakers,
    )
    cleaning.write_cleaned(args.data, args.out, result, inputs)

    left_out = [path.name for path in list_trials(args.data)]
    if (args.data / ENROLL_MAP).exists():
        left_out.append(ENROLL_MAP)
    if left_out:
        log.warning(
            "%s: %s of %s left out; results on a test set that a model has cleaned are"
            " too good",
            args.out,
            ", ".join(left_out),
            args.data,
        )
    num_wrong = sum(row.kind == cleaning.OTHER_SPEAKER for row in result.findings)
    if num_wrong > DOUBTFUL_SHARE * len(manifest):
        log.warning(
            "%s: %s of %d dropped; the model may not suit these recordings: listen to"
            " some of them",
            args.out,
            count_of(num_wrong, "utterance"),
            len(manifest),
        )
    for line in describe(result, manifest, args):
        sys.stdout.write(f"{line}\n")


def describe(
    result: cleaning.Cleaning, manifest: Manifest, args: Namespace
) -> list[str]:
    """Return lines about what was found and what remains."""
    judgement = result.judgement
    count = Counter(finding.kind for finding in result.findings)
    num_speakers = len(set(result.speakers.values()))
    lines = [
        (
            f"{args.out}: {len(result.speakers)} of"
            f" {count_of(len(manifest), 'utterance')}, {num_speakers} of"
            f" {count_of(len(manifest.speakers), 'speaker')}"
        ),
        (
            f"other speaker: {count_of(count[cleaning.OTHER_SPEAKER], 'utterance')}"
            f" dropped, with a score below {judgement.threshold:.1f}"
        ),
        f"duplicates: {count_of(count[cleaning.DUPLICATE], 'utterance')} dropped",
    ]
    pairs = count_of(count[cleaning.SAME_PERSON], "pair")
    if judgement.pair_threshold is None:
        lines.append(
            "same person: not looked for, too few speakers have four utterances"
        )
    else:
        action = "joined" if args.join_speakers else "listed (--join-speakers joins)"
        lines.append(
            f"same person: {pairs} of speakers with a score of at least"
            f" {judgement.pair_threshold:.1f}, {action}"
        )
    if count[cleaning.NOT_JUDGED]:
        lines.append(
            f"not judged: {count_of(count[cleaning.NOT_JUDGED], 'utterance')}, each the"
            " only one of its speaker, kept"
        )
    lines.append(f"each finding: {args.out / cleaning.FINDINGS}")
    return lines


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("clean", __doc__)
    options.add(
        "--model MODEL",
        "experiment, model folder, hub:NAME or hf:owner/name",
        required=True,
    )
    options.add("--data DIR", "checked data directory with labels", required=True)
    options.add("--out DIR", "data directory to write", required=True)
    options.add(
        "--far RATE", "share of the good utterances that may be dropped", default=0.01
    )
    options.add(
        "--join-speakers",
        "give speakers who are probably the same person one name",
    )
    options.add_nproc()
    options.add_precision()
    return options.parse_args(arguments)
