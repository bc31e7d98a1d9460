"""Find which speakers of diarized recordings are the same person: one name over all recordings."""

import logging
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speakerlab.bin.command import check_threshold, parser, plain_text
from speakerlab.core import done, process
from speakerlab.core.atomic import check_writable, locked
from speakerlab.core.counting import count_of
from speakerlab.core.leftovers import is_leftover
from speakerlab.data.tables import one_line

if TYPE_CHECKING:  # each imports its runtime
    from speakerlab.inference.link import Linked, LocalSpeaker, Result
    from speakerlab.inference.speaker_model import SpeakerModel
    from speakerlab.scoring.calibration import Calibration

log = logging.getLogger(__name__)
RECORD = ".linked"  # of a finished linking, in the folder of --out
LOCK = ".lock"  # beside the folder of --out, after its name
OF_WORDS = ".words.json"  # transcripts that `diarize --words` writes beside its results


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    # The imports load scipy, which `--help` does not need.
    from speakerlab.experiments import linking
    from speakerlab.inference.known_speakers import check_enrolled
    from speakerlab.inference.speaker_model import load_model

    linking.refuse_other_folder(args.out, args.folders)
    places = find_results(args.folders, args.out)
    check_writable(args.out / linking.IDENTITIES)
    model = load_model(args.model, device="cpu")
    if args.known is not None:
        model.load_speakers(args.known)
        check_enrolled(model)

    inputs = inputs_of(args, places.values(), model)
    # If nothing will be written, no lock is needed.
    if is_linked(args, inputs):
        return
    # Beside the folder, which is replaced with all that is in it.
    target = args.out.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(f".{target.name}{LOCK}")):
        # Another process may have written the folder while this process waited.
        if is_linked(args, inputs):
            return
        num_failed = link_into(args, places, model, inputs)
    if num_failed:
        log.error(
            "%d of %s could not be linked",
            num_failed,
            count_of(len(places), "recording"),
        )
        process.leave(process.EXIT_INPUT)


def is_linked(args: Namespace, inputs: Mapping[str, Any]) -> bool:
    """Return whether the folder is from the same inputs, and log it."""
    is_kept = not args.force and done.is_done(args.out / RECORD, inputs)
    if is_kept:
        log.info(
            "%s: already linked with these inputs, kept (--force links again)", args.out
        )
    return is_kept


def link_into(
    args: Namespace,
    places: Mapping[Path, Path],
    model: "SpeakerModel",
    inputs: Mapping[str, Any],
) -> int:
    """Link the results and replace the folder; return the number of those not readable."""
    from speakerlab.experiments import linking

    results, num_failed = read_results(places, model)
    speakers = [speaker for result in results.values() for speaker in result.speakers]
    linked = link_all(speakers, args, model)
    num_people = sum(not identity.is_unknown for identity in linked)
    facts = {
        "model_sha256": model.sha256,
        "threshold_from": describe_threshold(linked, num_people),
        "number_given": args.speakers,
    }
    linking.write_linked(args.out, linked, results, facts)
    describe(linked, args, num_recordings=len(results))
    # Without a record, the next run tries again.
    if not num_failed:
        done.record(args.out / RECORD, inputs, outputs=[linking.IDENTITIES])
    return num_failed


def find_results(folders: Sequence[Path], out: Path) -> dict[Path, Path]:
    """Return relative path of an RTTM file -> its JSON file, of all recordings below folders.

    `diarize` writes into subfolders if two recordings have one name. What is in `out` is left out.
    Raises ValueError, one line, for a folder without results, or two files of one name.
    """
    json_of: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise ValueError(
                f"{folder}: {problem}; give a folder that `speakerlab diarize --out` has"
                " written"
            )
        paths: list[Path] = []
        for path in sorted(folder.rglob("*.json")):
            if is_result(path, folder, out):
                paths.append(path)
        if not paths:
            raise ValueError(
                f"{folder}: has no results of recordings (NAME.json, NAME.rttm); run"
                " `speakerlab diarize RECORDINGS --model MODEL --out DIR` first"
            )
        for path in paths:
            place = path.relative_to(folder).with_suffix(".rttm")
            first = json_of.setdefault(place, path)
            if first != path:
                raise ValueError(
                    f"{path}: has the name of {first}; rename one of the recordings and"
                    " diarize it again, or remove one of the results"
                )
    return dict(sorted(json_of.items()))


def is_result(path: Path, folder: Path, out: Path) -> bool:
    """Return whether a JSON file below `folder` is one that `diarize` has written, by its name."""
    from speakerlab.experiments.linking import IDENTITIES

    # Hidden folders are of file systems, or of a `link` that was killed.
    parents = path.relative_to(folder).parent.parts
    is_hidden = any(name.startswith(".") for name in parents)
    if is_hidden or is_leftover(path.name):
        return False
    # Transcripts, and the tables of `link`, have no turns of their own.
    has_turns = path.with_suffix(".rttm").exists()
    is_other_kind = path.name == IDENTITIES or path.name.endswith(OF_WORDS)
    if is_other_kind and not has_turns:
        return False
    return not path.resolve().is_relative_to(out.resolve())


def inputs_of(
    args: Namespace, paths: Iterable[Path], model: "SpeakerModel"
) -> dict[str, Any]:
    """Return what the identities depend on, for the record."""
    files: list[tuple[str, str, str]] = []
    for path in paths:
        try:
            content = done.file_digest(path)
            turns = done.file_digest(path.with_suffix(".rttm"))
        # It is reported when it is read, and there is no record then.
        except OSError:
            content = turns = ""
        files.append((str(path.absolute()), content, turns))
    calibration = None
    if model.calibration is not None:
        calibration = asdict(model.calibration)
    return {
        "results": done.digest(files),
        "model": model.sha256,
        "calibration": done.digest(calibration),
        "far": args.far,
        "threshold": args.threshold,
        "speakers": args.speakers,
        "same_recording": args.allow_same_recording,
        "known": None if args.known is None else done.file_digest(args.known),
        "code": done.code_digest(),
    }


def read_results(
    places: Mapping[Path, Path], model: "SpeakerModel"
) -> tuple[dict[Path, "Result"], int]:
    """Read the results that are not damaged; return the number of the others, too.

    places: relative path of an RTTM file -> its JSON file; the results have the same keys.

    Raises ValueError, one line, if a result is of another model, or a recording has two.
    """
    from speakerlab.inference.link import read_result

    results: dict[Path, Result] = {}
    path_of: dict[str, Path] = {}
    num_failed = 0
    for place, path in places.items():
        try:
            result = read_result(path)
        # One file is damaged: continue with the others.
        except (ValueError, OSError) as error:
            sys.stderr.write(f"{plain_text(error)}\n")
            num_failed += 1
            continue
        if result.model_sha256 != model.sha256:
            raise ValueError(
                f"{path}: was made with model {result.model_sha256[:12]}, not with"
                f" {model.sha256[:12]} (sha256) of --model; give that model, or diarize"
                " all recordings with one"
            )
        first = path_of.setdefault(result.recording, path)
        if first != path:
            raise ValueError(
                f"{path}: recording {result.recording} is also in {first}; rename one of"
                " the recordings and diarize it again, or remove one of the results"
            )
        results[place] = result
    if not results:
        first = next(iter(places.values()))
        raise ValueError(
            f"{first.parent}: no result could be read, see above; diarize the"
            " recordings again"
        )
    return results, num_failed


def link_all(
    speakers: Sequence["LocalSpeaker"], args: Namespace, model: "SpeakerModel"
) -> "Linked":
    """Return the identities, with the names of an earlier run."""
    from speakerlab.experiments.linking import IDENTITIES, read_names
    from speakerlab.inference.link import link

    if args.far is not None or (args.threshold is None and args.speakers is None):
        calibration_of(args, model)
    earlier, last_numbers = read_names(args.out / IDENTITIES, model_sha256=model.sha256)
    return link(
        speakers,
        threshold=args.threshold,
        calibration=model.calibration,
        far=args.far,
        num_people=args.speakers,
        allow_same_recording=args.allow_same_recording,
        earlier=earlier,
        last_numbers=last_numbers,
        model=None if args.known is None else model,
    )


def calibration_of(args: Namespace, model: "SpeakerModel") -> "Calibration":
    """Return the calibration of the model; ValueError without one."""
    if model.calibration is None:
        raise ValueError(
            f"{args.model}: has no calibration to decide who is the same person; run"
            " `speakerlab calibrate --model MODEL --data DIR`, or give --threshold or"
            " --speakers"
        )
    return model.calibration


def describe_threshold(linked: "Linked", num_people: int) -> str:
    """Return where the threshold is from, and log it; warn if no lower rate is stored."""
    from speakerlab.inference.link import FALSE_ALARMS_PER_PERSON

    if linked.threshold is None:
        return "none, the number of people was given"
    source = "given"
    if linked.far is not None:
        source = f"calibrated, {100 * linked.far:.3g} % false alarms"
        # At the lowest rate that is stored, this may be more than what was wanted.
        num_expected = linked.far * (num_people - 1)
        if num_expected > 1.01 * FALSE_ALARMS_PER_PERSON:
            log.warning(
                "threshold: the calibration has none below %g %% false alarms, at which"
                " each of %d people may be taken for %.2g others; calibrate with more"
                " speakers, e.g. `speakerlab calibrate --far 0.0001`",
                100 * linked.far,
                num_people,
                num_expected,
            )
    log.info("threshold %.4f, %s", linked.threshold, source)
    return source


def describe(linked: "Linked", args: Namespace, *, num_recordings: int) -> None:
    """Print a line for each identity, and log what is doubtful."""
    num_unknown = 0
    for identity in linked:
        num_unknown += identity.is_unknown
        recordings = {member.recording for member in identity.members}
        sys.stdout.write(
            f"{one_line(identity.name)}: {count_of(len(recordings), 'recording')},"
            f" {identity.seconds:.1f} s\n"
        )
    num_people = len(linked) - num_unknown
    log.info(
        "%s: %d people in %s",
        args.out,
        num_people,
        count_of(num_recordings, "recording"),
    )
    if num_unknown:
        log.warning(
            "%s: %s with too little speech to say who it is, named unknown",
            args.out,
            count_of(num_unknown, "speaker"),
        )
    if args.speakers is not None and num_people != args.speakers:
        log.warning(
            "--speakers: %d requested, %d found; there are too few speakers, or those of"
            " one recording would have to be one person",
            args.speakers,
            num_people,
        )
    if linked.doubtful:
        log.info(
            "%s: %s near the threshold, see identities.html",
            args.out,
            count_of(len(linked.doubtful), "pair"),
        )


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("link", __doc__)
    options.add(
        "folders DIR", "folders that `speakerlab diarize --out` has written", nargs="+"
    )
    options.add(
        "--model MODEL",
        "the model that the recordings were diarized with, whose calibration decides",
        required=True,
    )
    options.add(
        "--out DIR",
        "folder to write: RTTM, identities.json, .tsv and .html; names in an earlier"
        " one are kept",
        required=True,
    )
    point = options.add_mutually_exclusive_group()
    options.add(
        "--far RATE",
        "decide at this false-alarm rate of a pair (default: a rate for the number of"
        " people)",
        group=point,
    )
    options.add_threshold(point)
    options.add("--speakers N", "number of people, if it is known", least=1)
    options.add(
        "--known FILE", "file of `speakerlab enroll`, whose speakers keep their names"
    )
    options.add(
        "--allow-same-recording",
        "let speakers of one recording be one person, if diarization has divided people",
    )
    options.add("--force", "link again what was linked with the same inputs")
    args = options.parse_args(arguments)
    check_threshold(args.threshold)
    return args
