"""Find who spoke when in recordings: RTTM, JSON with the speakers' embeddings, and a page."""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from speakerlab.bin.command import model_of, parser, plain_text
from speakerlab.bin.embed import name_files
from speakerlab.core import process
from speakerlab.core.atomic import check_writable, write_json, write_text
from speakerlab.diarization.clustering import METHODS
from speakerlab.diarization.regions import Region, merge_regions, read_lab, read_rttm

if TYPE_CHECKING:  # each imports its runtime
    from speakerlab.inference.diarize import Diarization
    from speakerlab.inference.speaker_model import SpeakerModel

log = logging.getLogger(__name__)
EMBEDDED_SECONDS = 600  # of audio in the pages of a command; others have a link


def main(words: Sequence[str]) -> None:
    args = parse(words)
    names = name_files(args.files)
    regions = read_regions(args.vad, names)
    if args.out is not None:
        check_writable(args.out / f"{names[0]}.rttm")
    overlap = None
    if args.overlap is not None:
        from speakerlab.inference.segmentation import Segmentation

        overlap = Segmentation(args.overlap)
    model = model_of(args)
    method = method_of(args, model)
    if args.known is not None:
        from speakerlab.inference.diarize import check_enrolled

        model.load_speakers(args.known)
        check_enrolled(model)
    num_failed, seconds = 0, 0.0
    for path, name in zip(args.files, names):
        try:
            found = model.diarize(
                path,
                num_speakers=args.speakers,
                min_speakers=args.min_speakers,
                max_speakers=args.max_speakers,
                vad=args.vad,
                overlap=overlap,
                regions=regions.get(name),
                method=method,
                known=args.known is not None,
                far=args.far,
                recording=name,
                progress=True,
            )
        except (ValueError, OSError) as error:
            text = plain_text(error)
            sys.stderr.write(f"{text if str(path) in text else f'{path}: {text}'}\n")
            num_failed += 1
            continue
        seconds += found.seconds
        embedded_rate = model.sample_rate if seconds <= EMBEDDED_SECONDS else None
        report(found, path, args, model.sha256, embedded_rate)
    if num_failed:
        log.error("%d of %d recordings could not be diarized", num_failed, len(names))
        process.leave(process.EXIT_INPUT)


def report(
    found: "Diarization",
    path: Path,
    args: Namespace,
    model_sha256: str,
    embedded_rate: int | None,
) -> None:
    """Write the files of a recording, or print its RTTM; log who is known.

    embedded_rate: sample rate of the audio in the page (None: a link).
    """
    name = found.recording
    for speaker, match in found.matches.items():
        verdict = "is known" if match.is_known else f"is unknown, nearest {match.name}"
        scores = f"score {match.score:.4f} (threshold {match.threshold:.4f})"
        log.info("%s: %s %s, %s", name, speaker, verdict, scores)
    if args.out is None:
        sys.stdout.write(found.to_rttm())
        return
    facts = {**found.to_dict(), "method": args.method, "model_sha256": model_sha256}
    write_json(args.out / f"{name}.json", facts)
    write_text(args.out / f"{name}.rttm", found.to_rttm())
    write_page(args.out / f"{name}.html", found, path, embedded_rate)
    log.info("%s: %d speakers in %d segments", name, len(found.speakers), len(found))


def write_page(page: Path, found: "Diarization", path: Path, embedded_rate: int | None) -> None:
    """Write the page of a recording, with its audio or a relative link to it."""
    from speakerlab.data.convert import spool_wave
    from speakerlab.experiments.hardest import data_uri
    from speakerlab.experiments.timeline import write_timeline_page

    if embedded_rate is not None:
        note = "The page holds the audio."
        audio = data_uri(spool_wave(path, sample_rate=embedded_rate), embedded_rate)
    else:
        link = Path(os.path.relpath(path, page.parent)).as_posix()
        note = f"The audio is not in this page: it is played from {link}, beside the page."
        audio = quote(os.fsencode(link))
    facts = {"Recording": {"file": path.name, "speakers": len(found.speakers)}}
    write_timeline_page(page, found, audio=audio, note=note, facts=facts)


def method_of(args: Namespace, model: "SpeakerModel") -> Any:
    """Build the clustering that the options name; set `method` to the one of the model."""
    from speakerlab.diarization.ahc import Ahc  # scipy: `--help` needs none
    from speakerlab.inference.tuning import learn_vbx

    if args.method == "vbx":
        return learn_vbx(model, args.development, progress=True)
    if args.threshold is not None:
        return Ahc(threshold=args.threshold)
    if args.method in (None, "ahc"):
        tuning, args.method = model.tuning, args.method or model.tuning.method
        shown = args.method + (f", threshold {tuning.threshold:g}" * (args.method == "ahc"))
        default = "the default; `speakerlab calibrate --for diarization` finds what fits the model"
        source = default if tuning.source is None else f"calibrated on {tuning.source}"
        log.info("clustering: %s, %s", shown, source)
    return args.method


def parse(words: Sequence[str]) -> Namespace:
    options = parser("diarize", __doc__)
    options.add("files FILE", "recordings, in any format and of any length", nargs="+")
    options.add("--speakers N", "number of speakers, if it is known", least=1)
    options.add("--min-speakers N", "least number", least=1, default=1)
    options.add("--max-speakers N", "largest number (default 20)", least=1)
    vad = "energy, silero, or the speech regions: FILE.rttm, FILE.lab of one recording, or a folder"
    vad += " (default: energy, or the model of --overlap)"
    options.add("--vad energy|silero|FILE|DIR", vad)
    segmentation = "pyannote/segmentation-3.0 in ONNX, to find who speaks at the same time"
    options.add("--overlap FILE", segmentation)
    calibrated = "that of `speakerlab calibrate --for diarization`, else"
    methods = f"clustering, also module:Class of --plugins (default: {calibrated} spectral)"
    options.add("--method", methods, choices=METHODS)
    threshold = f"cosine from which ahc merges speakers (default: {calibrated} 0.4)"
    options.add("--threshold COSINE", threshold)
    options.add("--development DIR", "checked data of speakers that vbx learns its PLDA from")
    options.add("--known FILE", "file of `speakerlab enroll`, whose speakers keep their names")
    options.add_far()
    options.add("--out DIR", "folder of the RTTM, JSON and HTML files (default: print RTTM)")
    options.add_model_options()
    args = options.parse_args(words)
    if args.speakers is not None and (args.min_speakers, args.max_speakers) != (1, None):
        options.error("--speakers: cannot be combined with --min-speakers or --max-speakers")
    if (args.method == "vbx") != (args.development is not None):
        options.error("--development: is needed for --method vbx, and for no other")
    if args.threshold is not None and args.method != "ahc":
        options.error("--threshold: needs --method ahc")
    if args.far is not None and args.known is None:
        options.error("--far: decides who is known; add --known FILE")
    return args


def read_regions(vad: str | None, names: Sequence[str]) -> Mapping[str, Sequence[Region]]:
    """Return the speech regions of each recording; nothing if they are to be found."""
    if vad in (None, "energy", "silero"):
        return {}
    path = Path(vad)
    if any(path.glob("*.lab")):
        return {name: read_lab(path / f"{name}.lab") for name in names}
    if path.suffix == ".lab" and len(names) == 1:
        return {names[0]: read_lab(path)}
    if path.suffix == ".lab":
        raise ValueError(f"--vad: {path} is of one recording, got {len(names)}; use an RTTM file")
    if path.suffix != ".rttm" and not path.is_dir():
        raise ValueError(
            f"--vad: must be energy, silero, FILE.rttm, FILE.lab or a folder, got {vad}"
        )
    turns = read_rttm(path)
    missing = [name for name in names if name not in turns]
    if missing:
        raise ValueError(
            f"--vad: {path} has no recording {missing[0]}; name the file like its recording"
        )
    return {name: merge_regions(turn[:2] for turn in turns[name]) for name in names}
