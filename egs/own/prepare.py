"""Prepare your own recordings: one folder per speaker, in any common format.

--corpus DIR holds DIR/SPEAKER/**/*.{wav,flac,mp3,ogg,m4a,...}. --data DIR gets `train/` and `test/`
with trials; files other than wav or flac at the model's sample rate (--sample-rate) are converted
into `wav/`. Recordings that teach nothing about a speaker (see unfit.py) are left out. A corpus too
small to train on becomes `train/` alone, and the file `calibration_only` holds the reason.
"""

import logging
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from egs.common.corpus.convert_audio import SAMPLE_RATE, convert_all
from egs.common.corpus.prepare import (
    LeftOut,
    id_fault,
    make_id,
    make_parser,
    refuse_nothing,
    run,
    walk,
    write_noise_and_rooms,
    write_set,
)
from egs.common.corpus.trials import draw_nontargets, draw_targets, group_by_speaker
from egs.own.unfit import Facts, examine_all, find_unfit
from speakerlab.core.atomic import replacing
from speakerlab.core.counting import count_of
from speakerlab.core.faults import Faults
from speakerlab.core.leftovers import is_leftover
from speakerlab.core.reading import describe_case_twins, look_of
from speakerlab.data import audio, convert
from speakerlab.data.arrays import stable_hash
from speakerlab.data.convert import read_wave
from speakerlab.data.tables import Trial, one_line

HERE = Path(__file__).resolve().parent
MIN_SPEAKERS, MIN_UTTERANCES = 20, 2  # needed for training
TEST_SHARE, MIN_TEST, MAX_TEST = 0.2, 5, 50  # of speakers with several utterances
MAX_TARGETS_PER_SPEAKER, MAX_NONTARGETS = 100, 20_000
MARKER = "calibration_only"


def find_recordings(corpus: Path) -> tuple[dict[str, Path], dict[str, str], LeftOut]:
    """Return (utterance -> file, utterance -> speaker, files left out).

    The speaker is the first folder below `corpus`. An id has the ending of its file only if files
    of one folder differ in nothing else.
    """
    faults = Faults()
    wavs: dict[str, Path] = {}
    speakers: dict[str, str] = {}
    folder_of_look: dict[str, str] = {}  # look of a speaker's name -> the folder's name
    paths, left_out = walk(corpus, audio.ALL_ENDINGS)
    num_with_stem = Counter(path.with_suffix("") for path in paths)
    for path in paths:
        parts = path.relative_to(corpus).parts
        is_alone = num_with_stem[path.with_suffix("")] == 1
        relative = "/".join(parts)
        name = make_id(relative.removesuffix(path.suffix) if is_alone else relative)
        speaker = make_id(parts[0])
        first = folder_of_look.setdefault(look_of(speaker), parts[0])
        fault = id_fault(name, path, wavs)
        if len(parts) == 1:
            text = f"{one_line(path)}: not in the folder of a speaker; move it into one"
            faults.add("recordings without a speaker", text)
        elif first != parts[0]:
            left_out[path] = (
                f"{one_line(path)}: the speakers of the folders {ascii(first)} and"
                f" {ascii(parts[0])} look alike; rename one of the folders, or move the"
                " recordings into one"
            )
        elif fault:
            left_out[path] = fault
        else:
            wavs[name] = path
            speakers[name] = speaker
    faults.raise_if_any(f"{corpus}: files outside the folders of speakers")
    return wavs, speakers, left_out


def reason_not_to_train(speakers: dict[str, str]) -> str | None:
    """Return why a corpus is too small to train on, or None."""
    groups = group_by_speaker(speakers)
    several = sum(len(utterances) >= MIN_UTTERANCES for utterances in groups.values())
    if several >= MIN_SPEAKERS:
        return None
    return (
        f"{several} of {len(groups)} speakers have {MIN_UTTERANCES} recordings or more,"
        f" training needs {MIN_SPEAKERS}: the threshold of a model (--init) can be"
        " calibrated"
    )


def choose_test_speakers(speakers: dict[str, str]) -> set[str]:
    """Return a fifth of the speakers with several utterances, chosen by a hash of their names."""
    with_several: list[str] = []
    for name, utterances in group_by_speaker(speakers).items():
        if len(utterances) >= MIN_UTTERANCES:
            with_several.append(name)
    count = round(TEST_SHARE * len(with_several))
    count = max(count, MIN_TEST)
    count = min(count, MAX_TEST)
    in_random_order = sorted(with_several, key=stable_hash)
    return set(in_random_order[:count])


def make_trials(speakers: dict[str, str], *, seed: int) -> list[Trial]:
    """Draw trials: all pairs, or a sample."""
    groups = group_by_speaker(speakers)
    targets = draw_targets(groups, seed=seed, max_per_speaker=MAX_TARGETS_PER_SPEAKER)
    pairs = combinations(groups, 2)
    nontargets = draw_nontargets(
        groups, speaker_pairs=pairs, seed=seed, max_trials=MAX_NONTARGETS
    )
    return sorted(targets + nontargets)


def prepare(
    corpus: Path,
    data: Path,
    *,
    noise: Path | None = None,
    rirs: Path | None = None,
    seed: int = 1,
    num_jobs: int = 2,
    sample_rate: int = SAMPLE_RATE,
) -> None:
    """Write the data directories; sample_rate: of the model."""
    paths, speakers, left_out = find_recordings(corpus)
    report_case(speakers, corpus)
    report_depth(paths, corpus)
    num_unnamed = len(left_out)
    with without_warnings(convert.log):
        wavs, broken = convert_all(
            paths, data / "wav", num_jobs=num_jobs, sample_rate=sample_rate
        )
    facts_of = examine_recordings(paths, broken, num_jobs=num_jobs)
    take_channels(paths, wavs, facts_of, data / "wav/channels", sample_rate=sample_rate)
    unfit = find_unfit(facts_of, sources=paths, speakers=speakers)
    left_out |= broken
    not_used = {paths[name]: fault for name, fault in unfit.reasons.items()}
    used = facts_of.keys() - unfit.reasons.keys()
    wavs = {name: path for name, path in wavs.items() if name in used}
    speakers = {name: speakers[name] for name in wavs}
    refuse_nothing(corpus, wavs, left_out | not_used, wanted="SPEAKER/*.wav")

    counts = {"with bad names": num_unnamed, "broken": len(broken)}
    counts |= unfit.num_of_kind
    num_files = len(paths) + num_unnamed
    report_left_out(counts, num_files, corpus, listed=data / "train/rejected.tsv")
    if unfit.are_all_copies:
        print(
            f"{one_line(corpus)}: every recording is a copy of another, and all are kept;"
            " no model can learn from them, check the corpus"
        )
    report_unused_folders([paths[name] for name in wavs], corpus)
    report_doubts({name: facts_of[name] for name in wavs}, corpus)
    rates = {name: facts_of[name].sample_rate for name in wavs}
    report_low_rates(rates, speakers, corpus, sample_rate=sample_rate)
    report_converted(paths, wavs, data / "wav", sample_rate=sample_rate)

    reason = reason_not_to_train(speakers)
    test = set() if reason else choose_test_speakers(speakers)
    for name in ("test", MARKER):  # of an earlier corpus
        if (data / name).is_dir():
            shutil.rmtree(data / name)
        else:
            (data / name).unlink(missing_ok=True)
    for name in ("train", "test"):
        owners = {
            row: who
            for row, who in speakers.items()
            if (who in test) == (name == "test")
        }
        if owners:
            trials = (
                {"trials": make_trials(owners, seed=seed)} if name == "test" else None
            )
            rows = {row: wavs[row] for row in owners}
            is_training = name == "train"
            write_set(
                data / name,
                wavs=rows,
                speakers=owners,
                trials=trials,
                left_out=left_out if is_training else None,
                not_used=not_used if is_training else None,
            )
    if reason:
        (data / MARKER).write_text(f"{reason}\n", encoding="utf-8")
        print(reason)
    write_noise_and_rooms(data, noise=noise, rirs=rirs, sample_rate=sample_rate)


@contextmanager
def without_warnings(log: logging.Logger) -> Iterator[None]:
    """Leave out warnings about single recordings, which `report_doubts` counts."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def examine_recordings(
    paths: Mapping[str, Path], broken: LeftOut, *, num_jobs: int
) -> dict[str, Facts]:
    """Return utterance -> facts, without broken recordings, which are added to `broken`.

    A recording that could not be converted because it is silent or short is not broken: it is
    removed from `broken`.
    """
    # The sources, because converting smooths clipped peaks and takes one channel.
    facts_of, unreadable = examine_all(paths, num_jobs=num_jobs)
    for name, fault in unreadable.items():
        broken.setdefault(paths[name], fault)
    for name, facts in list(facts_of.items()):
        path = paths[name]
        if path in broken and (facts.fault or facts.channel):
            del broken[path]
        elif path in broken:
            del facts_of[name]
    return facts_of


def take_channels(
    paths: Mapping[str, Path],
    wavs: dict[str, Path],
    facts_of: Mapping[str, Facts],
    folder: Path,
    *,
    sample_rate: int,
) -> None:
    """Write the first channel with sound of recordings whose first channel is silent; to `wavs`."""
    repaired: list[str] = []
    for name, facts in facts_of.items():
        if facts.fault or not facts.channel:
            continue
        wave_S = read_wave(
            paths[name],
            sample_rate=sample_rate,
            channels=facts.channel + 1,
            check_levels=False,
        )
        target = folder / f"{stable_hash(name):016x}.flac"
        with replacing(target) as fresh:
            int16_S = audio.to_int16(wave_S)
            fresh.write_bytes(audio.encode(int16_S, sample_rate, "FLAC"))
        wavs[name] = target
        repaired.append(name)
    if repaired:
        print(
            f"{folder}: {count_of(len(repaired), 'recording')} whose first channel is"
            f" silent, such as {repaired[0]}: the next channel is used"
        )


def report_left_out(
    counts: Mapping[str, int], num_files: int, corpus: Path, *, listed: Path
) -> None:
    """Print one line about the files that are left out, by kind; none if there are none."""
    total = sum(counts.values())
    if not total:
        return
    kinds = [f"{count} {kind}" for kind, count in counts.items() if count]
    text = f"{total} of {num_files} recordings left out: {', '.join(kinds)}"
    print(f"{one_line(corpus)}: {text}; listed in {listed}")


def report_case(speakers: Mapping[str, str], corpus: Path) -> None:
    """Print a line if the names of speakers differ only in case."""
    lines = describe_case_twins(
        speakers.values(), where=one_line(corpus), kind="speakers"
    )
    for line in lines:
        print(line)


def report_depth(paths: Mapping[str, Path], corpus: Path) -> None:
    """Print a line if the folders of speakers may be one level deeper.

    Only a line, because DIR/SPEAKER/SESSION looks like DIR/SESSION/SPEAKER.
    """
    with_recordings: set[str] = set()  # folders that hold recordings directly
    subfolders: dict[str, set[str]] = {}
    for path in paths.values():
        folder, *deeper = path.relative_to(corpus).parts
        subfolders.setdefault(folder, set())
        if len(deeper) == 1:
            with_recordings.add(folder)
        else:
            subfolders[folder].add(deeper[0])
    nested: list[str] = []
    num_with_name: Counter[str] = Counter()
    for folder, names in sorted(subfolders.items()):
        if folder not in with_recordings and len(names) > 1:
            nested.append(folder)
            num_with_name.update(names)
    if 2 * len(nested) <= len(subfolders):
        return
    first = nested[0]
    example = f"{first}/{min(subfolders[first])}"
    text = (
        f"speakers are the folders directly in it, but {len(nested)} of"
        f" {len(subfolders)} hold only folders of recordings, such as {one_line(example)}"
    )
    name, count = min(num_with_name.items(), key=lambda item: (-item[1], item[0]))
    if count > 1:
        text += f"; {one_line(name)} is in {count} of them, as speakers are in sessions"
    print(
        f"{one_line(corpus)}: {text}; if the speakers are one level deeper, give a folder"
        " that holds them directly, with all recordings of a speaker in one folder"
    )


def report_unused_folders(used: Sequence[Path], corpus: Path) -> None:
    """Print a line if folders of speakers hold no recording that is used, or none at all."""
    used_names = {path.relative_to(corpus).parts[0] for path in used}
    folders: list[str] = []
    for path in sorted(corpus.iterdir()):
        # A link to a folder of the corpus is another name of it, which is read once.
        is_link = path.is_symlink() and corpus.resolve() in path.resolve().parents
        if path.is_dir() and not is_link and not is_leftover(path.name):
            folders.append(path.name)
    unused = [name for name in folders if name not in used_names]
    if unused:
        print(
            f"{one_line(corpus)}: {len(unused)} of {count_of(len(folders), 'folder')} hold"
            f" no recording that can be used, such as {one_line(unused[0])}"
        )


def report_doubts(facts_of: Mapping[str, Facts], corpus: Path) -> None:
    """Print a line about used recordings with several voices, and one about other sounds."""
    differing = [name for name, facts in facts_of.items() if facts.differs]
    doubts = {name: facts.doubt for name, facts in facts_of.items() if facts.doubt}
    where = one_line(corpus)
    if differing:
        print(
            f"{where}: {count_of(len(differing), 'recording')} with channels that"
            f" differ, such as {differing[0]}: only one of them is used"
        )
    if doubts:
        first = next(iter(doubts))
        print(
            f"{where}: {count_of(len(doubts), 'recording')} may be no speech, such as"
            f" {first}: {doubts[first]}"
        )


def report_low_rates(
    rates: Mapping[str, int],
    speakers: Mapping[str, str],
    corpus: Path,
    *,
    sample_rate: int,
) -> None:
    """Print a line if recordings have less than the model's rate.

    Such a recording has no sound above half its rate. If only some of the speakers have no others,
    a model would tell them from the rest by this, not by their voices. rates, speakers:
    utterance -> rate, and speaker.
    """
    highest: dict[str, int] = {}  # of each speaker
    for name, rate in rates.items():
        speaker = speakers[name]
        highest[speaker] = max(rate, highest.get(speaker, 0))
    low = [speaker for speaker, rate in highest.items() if rate < sample_rate]
    if low and len(low) < len(highest):
        first = low[0]
        print(
            f"{one_line(corpus)}: {len(low)} of {len(highest)} speakers have only recordings"
            f" below {sample_rate} Hz, such as {first} ({highest[first]} Hz): a model may"
            " learn the missing high frequencies instead of the voices; leave them out, or"
            " add recordings of other speakers like them"
        )
        return
    low_recordings = [name for name, rate in rates.items() if rate < sample_rate]
    if low_recordings:
        name = low_recordings[0]
        print(
            f"{one_line(corpus)}: {count_of(len(low_recordings), 'recording')} below"
            f" {sample_rate} Hz, such as {name} ({rates[name]} Hz), without sound above"
            " half of that"
        )


def report_converted(
    sources: Mapping[str, Path],
    wavs: Mapping[str, Path],
    folder: Path,
    *,
    sample_rate: int,
) -> None:
    """Print one line about the files that were converted, by ending; none if there are none."""
    endings: Counter[str] = Counter()
    for name, path in wavs.items():
        # A channel that was taken from a file has its own line.
        if path != sources[name] and path.parent.name != "channels":
            ending = sources[name].suffix.lower()
            endings[ending] += 1
    if endings:
        kinds = [f"{count} {ending}" for ending, count in endings.most_common()]
        number = count_of(endings.total(), "recording")
        text = f"{number} converted to {sample_rate} Hz, one channel"
        print(f"{folder}: {text}: {', '.join(kinds)}")


def ask_for_corpus() -> None:
    """Raise ValueError: stage 0 needs --corpus."""
    raise ValueError("--corpus: no folder given; give one with DIR/SPEAKER/*.wav")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and run `prepare`."""
    parser = make_parser(
        "Prepare one folder of recordings per speaker.", corpus=HERE / "corpus"
    )
    parser.add_argument(
        "--sample-rate",
        type=int,
        default=SAMPLE_RATE,
        metavar="HZ",
        help=f"of the model (default {SAMPLE_RATE})",
    )
    args = parser.parse_args(argv)
    return run(
        args,
        download=ask_for_corpus,
        prepare=lambda: prepare(
            args.corpus,
            args.data,
            noise=args.noise,
            rirs=args.rirs,
            seed=args.seed,
            num_jobs=args.num_jobs,
            sample_rate=args.sample_rate,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
