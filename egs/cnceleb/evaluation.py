"""The test set of CN-Celeb according to the lists of `eval/`.

The lists name .wav files, but the corpus has .flac. Our ids are the paths of the lists without
suffix: `enroll/<speaker>-enroll`, `test/<speaker>-<genre>-...` and, for the parts of an enrolment,
`<speaker>/<genre>-...`. An enrolment model is called `<speaker>-enroll`. The sources [W], [F], [P]
and [C] are listed in prepare.py.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from egs.cnceleb.joining import genre_of
from egs.common.corpus.official import compare, read_official
from speakerlab.core.faults import Faults
from speakerlab.core.reading import read_text
from speakerlab.data.tables import Trial, read_table

LISTS = "eval/lists"  # enroll.map [W]:119, trials.lst [W]:128, enroll.lst [F]:21
NUM_EVALUATED = (196, 17_777)  # enrolments and test utterances, [C]
NUM_TRIALS = (17_755, 3_466_537)  # target, nontarget, [C]: all 196 x 17,777 pairs
UNITS = ("enrolments", "test utterances")
COUNTED = "github.com/Evildoersudo/camplusplus at ebe57e6"
UNPACK = "unpack cn-celeb_v2.tar.gz again"


@dataclass
class TestSet:
    """Recordings, enrolments and trials of the test set."""

    wavs: dict[str, Path]
    recordings: dict[str, str]  # model -> the recording joined from its utterances
    enroll: dict[str, list[str]]  # model -> its utterances
    trials: list[Trial]  # a model, a test utterance

    @property
    def speakers(self) -> dict[str, str]:
        """Map utterance -> speaker."""
        return {name: speaker_of(name) for name in self.wavs}

    @property
    def genres(self) -> dict[str, str]:
        """Map utterance -> genre; joined recordings of several genres have none."""
        genre_of = {name: _genre_of(name) for name in self.wavs}
        genres = {name: genre for name, genre in genre_of.items() if genre}
        for model, utterances in self.enroll.items():
            enrolled_genres = {genres[name] for name in utterances}
            if len(enrolled_genres) == 1:
                genres[self.recordings[model]] = enrolled_genres.pop()
        return genres

    @property
    def concatenated(self) -> list[Trial]:
        """Return trials with the joined recording instead of the model ([F]:32, [P]:112)."""
        return [
            (self.recordings[model], test, same) for model, test, same in self.trials
        ]


def speaker_of(name: str) -> str:
    """Return the speaker of an utterance.

    Both sources use `<speaker>-enroll` for the utterances of enroll.map ([W]:122, [P]:107).
    """
    folder, _, file = name.partition("/")
    return file.partition("-")[0] if folder in ("enroll", "test") else folder


def _genre_of(name: str) -> str | None:
    """Return the genre in the name; names of joined recordings have none."""
    folder, _, file = name.partition("/")
    if folder == "enroll":
        return None
    return genre_of(Path(file.partition("-")[2] if folder == "test" else file))


@cache  # one string object per id: lists have millions of lines
def _without_ending(name: str) -> str:
    """Return a path of the lists without .wav; names of models are unchanged."""
    return PurePosixPath(name).with_suffix("").as_posix()


def read_words(path: Path, faults: Faults) -> list[str]:
    """Return the last word of each line of a list."""
    last_words = [
        line.split()[-1] for line in read_text(path).splitlines() if line.strip()
    ]
    for word, times in Counter(last_words).items():
        if times > 1:
            faults.add("duplicates", f"{path}: {times} lines with {word}; keep one")
    return last_words


def read_test(corpus: Path, faults: Faults) -> TestSet:
    """Read the test set from the folder CN-Celeb_flac; add errors to `faults`."""
    lists = corpus / LISTS
    listed = read_table(lists / "enroll.lst", faults)
    recordings = {model: _without_ending(name) for model, name in listed.items()}
    enroll = {
        model: [_without_ending(name) for name in text.split()]
        for model, text in read_table(lists / "enroll.map", faults).items()
    }
    tests = [_without_ending(name) for name in read_words(lists / "test.lst", faults)]
    for model in sorted(recordings.keys() ^ enroll.keys()):
        text = f"{lists}: model {model} is in only one of enroll.lst and enroll.map"
        faults.add("models of one list", f"{text}; {UNPACK}")
    wavs = {
        name: corpus / f"eval/{name}.flac" for name in (*recordings.values(), *tests)
    }
    for name in (name for utterances in enroll.values() for name in utterances):
        wavs[name] = corpus / f"data/{name}.flac"
    _check_there(wavs, corpus / "eval", faults)
    print(compare("test", (len(recordings), len(tests)), NUM_EVALUATED, UNITS, COUNTED))
    trials = read_official(
        lists / "trials.lst",
        faults,
        recordings=set(tests),
        models=recordings.keys() & enroll.keys(),
        rename=_without_ending,
        published=NUM_TRIALS,
        source=COUNTED,
    )
    _check_labels(lists / "trials.lst", trials, recordings, faults)
    return TestSet(wavs=wavs, recordings=recordings, enroll=enroll, trials=trials)


def _check_there(wavs: Mapping[str, Path], place: Path, faults: Faults) -> None:
    """Check that all listed recordings exist; note unlisted ones in `place`."""
    for path in wavs.values():
        if not path.is_file():
            text = f"{path}: no such file, but it is in {LISTS}; {UNPACK}"
            faults.add("recordings that are missing", text)
    for folder in ("enroll", "test"):
        names = sorted(path.name for path in (place / folder).iterdir())
        report_extra(
            place / folder, [n for n in names if f"{folder}/{Path(n).stem}" not in wavs]
        )


def report_extra(folder: Path, names: Sequence[str]) -> None:
    """Print a line about files that are ignored because no list names them."""
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"{folder}: ignoring files that are in no list: {names[0]}{others}")


def _check_labels(
    path: Path, trials: Iterable[Trial], recordings: Mapping[str, str], faults: Faults
) -> None:
    """Check that exactly the trials with the same speaker on both sides are targets."""
    enrolled = {model: speaker_of(name) for model, name in recordings.items()}
    tested = {test: speaker_of(test) for test in {test for _, test, _ in trials}}
    for model, test, same in trials:
        if model in enrolled and (enrolled[model] == tested[test]) != same:
            label = (
                f"trial {model} {test} is labelled {'target' if same else 'nontarget'}"
            )
            faults.add(
                "wrong labels", f"{path}: {label}, contrary to its speakers; {UNPACK}"
            )
