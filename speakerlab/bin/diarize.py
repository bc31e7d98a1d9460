"""Find who spoke when in recordings: RTTM, JSON with the speakers' embeddings, and a page."""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from speakerlab.bin.command import Parser, choose_gpus, model_of, parser, plain_text
from speakerlab.bin.embed import find_recordings, name_files
from speakerlab.bin.live import check_options, diarize_live
from speakerlab.bin.words import pair, write_words
from speakerlab.core import done, process
from speakerlab.core.atomic import check_writable, locked, write_json, write_text
from speakerlab.core.counting import count_of
from speakerlab.core.reading import read_json
from speakerlab.core.registry import PLUGINS_VARIABLE
from speakerlab.core.tuning import Tuning
from speakerlab.data.listing import shorten
from speakerlab.data.tables import list_tables
from speakerlab.diarization.clustering import METHODS
from speakerlab.diarization.regions import Region, merge_regions, read_lab, read_rttm
from speakerlab.diarization.timed_words import Transcript
from speakerlab.diarization.transcripts import read_transcripts

if TYPE_CHECKING:  # each imports its runtime
    from speakerlab.data.convert import Channels
    from speakerlab.inference.diarize import Diarization
    from speakerlab.inference.segmentation import Segmentation
    from speakerlab.inference.speaker_model import SpeakerModel

log = logging.getLogger(__name__)
LOCK = ".lock"  # in the folder of --out
# Options that change the result; for options with a file, its digest is recorded instead.
INPUT_OPTIONS = (
    "speakers",
    "min_speakers",
    "max_speakers",
    "vad",
    "method",
    "threshold",
    "far",
    "channel",
)
EMBEDDED_SECONDS = 600  # audio in the pages of a command; further pages have a link


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    if args.live:
        diarize_live(args)
        return
    # All inputs are read before the long computation, so that an error in them comes at once.
    files = find_recordings(args.files, where="diarize")
    names = name_files(files)
    regions = read_regions(args.vad, names)
    if args.out is not None:
        check_writable(args.out / f"{shorten(names[0])}.rttm")
    transcripts: dict[str, Transcript] = {}
    if args.words is not None:
        given = read_transcripts(args.words)
        transcripts = pair(given, dict.fromkeys(names, ()), where=args.words)
    segmentation = segmentation_of(args)
    model = model_of(args)
    if args.known is not None:
        from speakerlab.inference.known_speakers import check_enrolled

        model.load_speakers(args.known)
        check_enrolled(model)

    sources: list[Source] = []
    for name, path in zip(names, files):
        source = Source(name, path, regions.get(name))
        sources.append(source)
    if args.out is None:
        num_failed = diarize_all(sources, args, model, segmentation)
    else:
        sources = add_inputs(sources, args, model, segmentation)
        num_failed = diarize_into(args.out, sources, args, model, segmentation)
        write_transcripts(args.out, sources, transcripts)
    if num_failed:
        total = count_of(len(names), "recording")
        log.error("%d of %s could not be diarized", num_failed, total)
        process.leave(process.EXIT_INPUT)


def segmentation_of(args: Namespace) -> "Segmentation | None":
    """Load the model of --segmentation; None without it."""
    if args.segmentation is None:
        return None
    # The import loads a runtime, which `--help` does not need.
    from speakerlab.inference.segmentation import Segmentation

    return Segmentation(args.segmentation, device=args.device)


def write_transcripts(
    out: Path,
    sources: Sequence["Source"],
    transcripts: Mapping[str, Transcript],
) -> None:
    """Write the transcripts with the speakers of the turns in the folder."""
    for source in sources:
        # A recording that failed may have the turns of an earlier run, from other inputs.
        if source.name not in transcripts or not is_diarized(out, source):
            continue
        # The file has the turns of one recording; without speech, it is empty.
        turns_of = read_rttm(source.place(out, ".rttm"))
        turns = [turn for recording in turns_of.values() for turn in recording]
        write_words(out, source.name, transcripts[source.name], turns)


@dataclass(frozen=True)
class Source:
    """Recording to diarize."""

    name: str
    path: Path
    regions: Sequence[Region] | None  # speech regions; None: detect them
    inputs: str = ""  # digest of the inputs of its files

    def place(self, out: Path, ending: str) -> Path:
        """Return the path of a file of this recording in a folder."""
        return out / f"{shorten(self.name)}{ending}"


def add_inputs(
    sources: Sequence[Source],
    args: Namespace,
    model: "SpeakerModel",
    segmentation: "Segmentation | None",
) -> list[Source]:
    """Return the recordings with the digests of the inputs of their files."""
    common = inputs_of(args, model, segmentation)
    with_inputs: list[Source] = []
    for source in sources:
        inputs = done.digest([common, source_inputs(source)])
        with_inputs.append(replace(source, inputs=inputs))
    return with_inputs


def diarize_into(
    out: Path,
    sources: Sequence[Source],
    args: Namespace,
    model: "SpeakerModel",
    segmentation: "Segmentation | None",
) -> int:
    """Diarize recordings without files from the same inputs; return the number of failures."""
    num_sources = len(sources)

    def is_kept(source: Source) -> bool:
        return not args.force and is_diarized(out, source)

    # If nothing will be written, no lock is needed.
    if all(is_kept(source) for source in sources):
        log_kept(out, num_sources, num_sources)
        return 0

    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK):
        # Another process may have written some of the files while this process waited.
        missing = [source for source in sources if not is_kept(source)]
        num_kept = num_sources - len(missing)
        if num_kept:
            log_kept(out, num_kept, num_sources)
        return diarize_all(missing, args, model, segmentation)


def log_kept(out: Path, num_kept: int, total: int) -> None:
    """Log the number of recordings that are not diarized again."""
    log.info(
        "%s: %d of %s diarized already with these inputs, kept (--force diarizes again)",
        out,
        num_kept,
        count_of(total, "recording"),
    )


def diarize_all(
    sources: Sequence[Source],
    args: Namespace,
    model: "SpeakerModel",
    segmentation: "Segmentation | None",
) -> int:
    """Diarize recordings, write or print the results; return the number of failures."""
    if not sources:
        return 0
    method = method_of(args, model)
    num_failed = 0
    seconds = 0.0  # of all recordings so far
    for source in sources:
        path = source.path
        try:
            result = model.diarize(
                path,
                num_speakers=args.speakers,
                min_speakers=args.min_speakers,
                max_speakers=args.max_speakers,
                vad=args.vad,
                segmentation=segmentation,
                regions=source.regions,
                method=method,
                known=args.known is not None,
                far=args.far,
                recording=source.name,
                channels=args.channel,
                progress=True,
            )
        # One recording is damaged: continue with the others.
        except (ValueError, OSError) as error:
            text = plain_text(error)
            if str(path) not in text:
                text = f"{path}: {text}"
            sys.stderr.write(f"{text}\n")
            num_failed += 1
            continue
        seconds += result.seconds
        embedded_rate = None
        if seconds <= EMBEDDED_SECONDS:
            embedded_rate = model.sample_rate
        report(result, source, args, model.sha256, embedded_rate)
    return num_failed


def inputs_of(
    args: Namespace, model: "SpeakerModel", segmentation: "Segmentation | None"
) -> dict[str, Any]:
    """Return the common inputs of the files of all recordings, for `is_diarized`."""
    options = {name: getattr(args, name) for name in INPUT_OPTIONS}
    development = None
    if args.development is not None:
        tables = [*list_tables(args.development), "utt2dur", "rejected.tsv"]
        development = done.files_digest(args.development, tables)
    calibration = None
    if model.calibration is not None:
        calibration = asdict(model.calibration)
    # For options with a file, compare the contents, not the name.
    enrolled = None
    if args.known is not None:
        enrolled = done.file_digest(args.known)
    return {
        "options": options,
        "model": model.sha256,
        "precision": model.precision,
        "tuning": asdict(model.tuning),
        "calibration": calibration,
        "overlap": None if segmentation is None else segmentation.sha256,
        "known": enrolled,
        "development": development,
        "plugins": plugins_digest(),
        "code": done.code_digest(),
    }


def plugins_digest() -> str | None:
    """Return the digest of the modules in the folder of `--plugins`, None without one."""
    plugins = os.environ.get(PLUGINS_VARIABLE)
    if not plugins:
        return None
    folder = Path(plugins)
    names = [path.name for path in folder.glob("*.py")]
    return done.files_digest(folder, sorted(names))


def source_inputs(source: Source) -> list[Any]:
    """Return the inputs of the files of one recording."""
    path = source.path.absolute()
    # Size and time of the audio file, because reading the audio would take long.
    stamp = done.stamp(path)
    return [source.name, path, stamp, source.regions]


def is_diarized(out: Path, source: Source) -> bool:
    """Return whether all files of a recording exist and are from the same inputs.

    Turns that were corrected by hand since then are kept.
    """
    json_file = source.place(out, ".json")
    rttm = source.place(out, ".rttm")
    page = source.place(out, ".html")
    if not (json_file.is_file() and rttm.is_file() and page.is_file()):
        return False
    try:
        facts = read_json(json_file)
    except ValueError:  # a damaged file is written again
        return False
    if facts.get("inputs") != source.inputs:
        return False
    # Nobody removes all turns by hand.
    is_emptied = facts.get("segments") and rttm.stat().st_size == 0
    if is_emptied:
        return False
    if has_other_turns(rttm, facts):
        log.warning("%s: was changed after the diarization, kept", rttm)
    return True


def has_other_turns(rttm: Path, facts: Mapping[str, Any]) -> bool:
    """Return whether an RTTM file has changed since its JSON file was written."""
    return facts.get("rttm_sha256") != done.file_digest(rttm)


def set_aside(rttm: Path, json_file: Path) -> None:
    """Rename turns that were changed after the diarization to NAME.rttm.bak.

    They may have been corrected by hand. After a killed run, they may be newer than the JSON file;
    then the copy is of no use.
    """
    try:
        facts = read_json(json_file)
    except (ValueError, FileNotFoundError):
        return
    if rttm.is_file() and has_other_turns(rttm, facts):
        backup = rttm.with_name(f"{rttm.name}.bak")
        rttm.replace(backup)
        log.warning(
            "%s: was changed after the diarization, kept as %s", rttm, backup.name
        )


def report(
    result: "Diarization",
    source: Source,
    args: Namespace,
    model_sha256: str,
    embedded_rate: int | None,
) -> None:
    """Write the files of a recording, or print its RTTM; log the known speakers.

    embedded_rate: sample rate of the audio in the page (None: a link).
    """
    name = result.recording
    for speaker, match in result.matches.items():
        verdict = f"is unknown, nearest {match.name}"
        if match.is_known:
            verdict = "is known"
        scores = f"score {match.score:.4f} (threshold {match.threshold:.4f})"
        log.info("%s: %s %s, %s", name, speaker, verdict, scores)
    if args.out is None:
        sys.stdout.write(result.to_rttm())
        return

    rttm = source.place(args.out, ".rttm")
    json_file = source.place(args.out, ".json")
    set_aside(rttm, json_file)
    write_text(rttm, result.to_rttm())
    page = source.place(args.out, ".html")
    write_page(page, result, source.path, args.channel, embedded_rate)
    facts = {
        "method": args.method,
        "model_sha256": model_sha256,
        "inputs": source.inputs,
        "rttm_sha256": done.file_digest(rttm),
    }
    # Write the JSON last: if it matches the inputs and the RTTM file, all files are complete.
    write_json(json_file, {**result.to_dict(), **facts})
    speakers = count_of(len(result.speakers), "speaker")
    segments = count_of(len(result), "segment")
    log.info("%s: %s in %s", name, speakers, segments)


def write_page(
    page: Path,
    result: "Diarization",
    path: Path,
    channel: "Channels | Literal['each']",
    embedded_rate: int | None,
) -> None:
    """Write the page of a recording, with its audio or a relative link to it."""
    from speakerlab.data.convert import spool_wave
    from speakerlab.experiments.hardest import data_uri
    from speakerlab.experiments.timeline import write_timeline_page

    channel_audio: dict[int, str] = {}
    if embedded_rate is not None:
        note = "The page holds the audio."
        # A listener hears what was diarized. The number avoids a second warning of the others.
        heard = "mix" if channel == "each" else channel or 1
        samples = spool_wave(path, sample_rate=embedded_rate, channels=heard)
        audio = data_uri(samples, embedded_rate)
        for number in sorted(set(result.channel_of.values())):
            samples = spool_wave(path, sample_rate=embedded_rate, channels=number)
            channel_audio[number] = data_uri(samples, embedded_rate)
    else:
        relative_path = os.path.relpath(path, page.parent)
        link = Path(relative_path).as_posix()
        note = (
            f"The audio is not in this page: it is played from {link}, beside the page."
        )
        audio = quote(os.fsencode(link))
    recording = {"file": path.name, "speakers": len(result.speakers)}
    write_timeline_page(
        page,
        result,
        audio=audio,
        note=note,
        facts={"Recording": recording},
        channel_audio=channel_audio,
    )


def method_of(args: Namespace, model: "SpeakerModel") -> Any:
    """Return the clustering given by the options; without --method, set it to the model's."""
    from speakerlab.diarization.ahc import Ahc  # scipy, not needed for `--help`
    from speakerlab.inference.tuning import learn_vbx

    if args.development is not None:
        return learn_vbx(model, args.development, progress=True)
    if args.threshold is not None:
        return Ahc(threshold=args.threshold)
    if args.method in (None, "ahc", "vbx"):
        args.method = args.method or model.tuning.method
        if args.method == "vbx":
            # Before the first recording: it raises an error if the model has no PLDA.
            model.read_plda()
        log.info("clustering: %s", describe_clustering(args.method, model.tuning))
    return args.method


def describe_clustering(method: str, tuning: Tuning) -> str:
    """Return the method with the parameters of the model's tuning, and their source."""
    clustering = method
    if method == "ahc":
        clustering += f", threshold {tuning.threshold:g}"
    if method == "vbx":
        clustering += f", Fb {tuning.fb:g}, PLDA of {tuning.plda_source}"
    source = f"calibrated on {tuning.source}"
    if tuning.source is None:
        source = (
            "the default; `speakerlab calibrate --for diarization` finds what fits the"
            " model"
        )
    return f"{clustering}, {source}"


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("diarize", __doc__)
    meaning = "recordings, in any format and of any length, or folders of them"
    options.add("files FILE", meaning, nargs="*")
    options.add(
        "--live",
        "print turns of 16-bit PCM on the standard input, WAV or raw, as they are final",
    )
    options.add("--latency SECONDS", "of --live, at least 1 (default 2)", least=1.0)
    options.add("--sample-rate HZ", "of raw samples for --live", least=2000)
    options.add_channel(each="the speakers of each channel apart, as for calls")
    options.add("--speakers N", "number of speakers, if it is known", least=1)
    options.add("--min-speakers N", "least number", least=1, default=1)
    options.add("--max-speakers N", "largest number (default 20)", least=1)
    vad = (
        "energy, silero, or the speech regions: FILE.rttm, FILE.lab of one recording,"
        " or a folder (default: energy, or the model of"
        " --segmentation)"
    )
    options.add("--vad energy|silero|FILE|DIR", vad)
    segmentation = (
        "model folder, experiment or hf:owner/name of the task segmentation, or"
        " pyannote/segmentation-3.0 in ONNX, to find who speaks at the same time"
    )
    options.add("--segmentation MODEL", segmentation)
    options.add(
        "--overlap FILE", "the earlier name of --segmentation", dest="segmentation"
    )
    calibrated = "that of `speakerlab calibrate --for diarization`, else"
    methods = (
        f"clustering, also module:Class of --plugins (default: {calibrated} spectral)"
    )
    options.add("--method", methods, choices=METHODS)
    threshold = (
        "cosine from which ahc merges speakers, and --live knows one again (default:"
        f" {calibrated} 0.4)"
    )
    options.add("--threshold COSINE", threshold)
    options.add(
        "--development DIR",
        "checked data of speakers that vbx learns its PLDA from (default: the PLDA that"
        " `speakerlab calibrate` stored with the model)",
    )
    options.add(
        "--known FILE", "file of `speakerlab enroll`, whose speakers keep their names"
    )
    options.add_far()
    options.add(
        "--out DIR", "folder of the RTTM, JSON and HTML files (default: print RTTM)"
    )
    options.add(
        "--words FILE",
        "transcript (whisper's JSON, SRT, CTM), or a folder of them, whose words get"
        " speakers in --out",
    )
    options.add("--force", "diarize again what was diarized with the same inputs")
    options.add_gpus("to embed with")
    options.add_model_options()
    args = options.parse_args(arguments)
    check_options(options, args)
    choose_gpus(args.gpus)
    check_combinations(options, args)
    return args


def check_combinations(options: Parser, args: Namespace) -> None:
    """Exit with an error for options that contradict each other, or need another option."""
    has_bounds = args.min_speakers != 1 or args.max_speakers is not None
    if args.speakers is not None and has_bounds:
        options.error(
            "--speakers: cannot be combined with --min-speakers or --max-speakers"
        )
    if args.max_speakers is not None and args.max_speakers < args.min_speakers:
        options.error(
            f"--max-speakers: must be at least --min-speakers, {args.min_speakers}, got"
            f" {args.max_speakers}"
        )
    has_development = args.development is not None
    if has_development and args.method != "vbx":
        options.error("--development: needs --method vbx")
    # The threshold of --live is that of the windows.
    if args.threshold is not None and args.method != "ahc" and not args.live:
        options.error("--threshold: needs --method ahc")
    if args.words is not None and args.out is None:
        options.error("--words: needs --out DIR, which the transcripts are written to")
    if args.far is not None and args.known is None:
        options.error("--far: decides who is known; add --known FILE")


def read_regions(
    vad: str | None, names: Sequence[str]
) -> Mapping[str, Sequence[Region]]:
    """Return the given speech regions of each recording; {} if they will be detected."""
    if vad in (None, "energy", "silero"):
        return {}
    path = Path(vad)
    regions: dict[str, Sequence[Region]] = {}
    if any(path.glob("*.lab")):
        for name in names:
            regions[name] = read_lab(path / f"{name}.lab")
        return regions
    if path.suffix == ".lab":
        # The lines of a .lab file have no recording name.
        if len(names) != 1:
            raise ValueError(
                f"--vad: {path} is of one recording, got {len(names)}; use an RTTM file"
            )
        return {names[0]: read_lab(path)}
    if path.suffix != ".rttm" and not path.is_dir():
        raise ValueError(
            f"--vad: must be energy, silero, FILE.rttm, FILE.lab or a folder, got {vad}"
        )
    turns = read_rttm(path)
    missing = [name for name in names if name not in turns]
    if missing:
        raise ValueError(
            f"--vad: {path} has no recording {missing[0]}; name the file like its"
            " recording"
        )
    for name in names:
        # Only the speech regions matter here, not the speakers.
        spoken = [(turn.start, turn.end) for turn in turns[name]]
        regions[name] = merge_regions(spoken)
    return regions
