"""The test set of CN-Celeb, as the lists of `eval/` give it.

In: `CN-Celeb_flac/`, whose lists say .wav where the files are .flac. Out: its recordings, models,
trials and genres in our ids, which are the paths of the lists without their ending:
`enroll/<speaker>-enroll`, `test/<speaker>-<genre>-...` and, for the utterances that a model is made
of, `<speaker>/<genre>-...`. A model is called `<speaker>-enroll`. Sources are those of prepare.py.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from egs.cnceleb.joining import genre_of
from egs.common.official import compare, read_official
from speakerlab.core.faults import Faults
from speakerlab.data.tables import Trial, read_table

LISTS = "eval/lists"  # enroll.map [W]:119, trials.lst [W]:128, enroll.lst [F]:21
NUM_EVALUATED = (196, 17_777)  # enrolments and test utterances, [C]
NUM_TRIALS = (17_755, 3_466_537)  # target, nontarget, [C]: all 196 x 17,777 pairs
UNITS = ("enrolments", "test utterances")
COUNTED = "github.com/Evildoersudo/camplusplus at ebe57e6"
UNPACK = "unpack cn-celeb_v2.tar.gz again"


@dataclass
class TestSet:
    """What is tested on."""

    wavs: dict[str, Path]
    recordings: dict[str, str]  # model -> the recording that its utterances were joined into
    enroll: dict[str, list[str]]  # model -> its utterances
    trials: list[Trial]  # a model, a test utterance

    @property
    def speakers(self) -> dict[str, str]:
        """Utterance -> speaker."""
        return {name: speaker_of(name) for name in self.wavs}

    @property
    def genres(self) -> dict[str, str]:
        """Utterance -> its genre; that of a joined recording only where it is of one genre."""
        found = {name: genre for name in self.wavs if (genre := _genre_of(name))}
        for model, utterances in self.enroll.items():
            genres = {found[name] for name in utterances}
            if len(genres) == 1:
                found[self.recordings[model]] = genres.pop()
        return found

    @property
    def concatenated(self) -> list[Trial]:
        """The trials with the joined recording in place of the model ([F]:32, [P]:112)."""
        return [(self.recordings[model], test, same) for model, test, same in self.trials]


def speaker_of(name: str) -> str:
    """The speaker of an utterance: both sides of a trial name it alike.

    Both sources have `<speaker>-enroll` for the utterances of enroll.map ([W]:122, [P]:107).
    """
    folder, _, file = name.partition("/")
    return file.partition("-")[0] if folder in ("enroll", "test") else folder


def _genre_of(name: str) -> str | None:
    """What stands after the speaker; names of joined recordings do not tell."""
    folder, _, file = name.partition("/")
    if folder == "enroll":
        return None
    return genre_of(Path(file.partition("-")[2] if folder == "test" else file))


@cache  # one string for an id, however many of the trials name it
def _without_ending(name: str) -> str:
    """A path of the lists without .wav; the name of a model as it is."""
    return PurePosixPath(name).with_suffix("").as_posix()


def read_words(path: Path, faults: Faults) -> list[str]:
    """The last word of each line of a list."""
    words = [line.split()[-1] for line in path.read_text("utf-8").splitlines() if line.strip()]
    for word, times in Counter(words).items():
        if times > 1:
            faults.add("duplicates", f"{path}: {times} lines name the same, got {word}; keep one")
    return words


def read_test(corpus: Path, faults: Faults) -> TestSet:
    """The test set below `corpus`, CN-Celeb_flac; what is wrong with it goes to `faults`."""
    lists = corpus / LISTS
    listed = read_table(lists / "enroll.lst", faults)
    recordings = {model: _without_ending(name) for model, name in listed.items()}
    enroll = {
        model: [_without_ending(name) for name in text.split()]
        for model, text in read_table(lists / "enroll.map", faults).items()
    }
    tests = [_without_ending(name) for name in read_words(lists / "test.lst", faults)]
    for model in sorted(recordings.keys() ^ enroll.keys()):
        text = f"{lists}: enroll.lst and enroll.map must name the same models, got {model} in one"
        faults.add("models of one list", f"{text}; {UNPACK}")
    wavs = {name: corpus / f"eval/{name}.flac" for name in (*recordings.values(), *tests)}
    for name in (name for utterances in enroll.values() for name in utterances):
        wavs[name] = corpus / f"data/{name}.flac"
    _check_there(wavs, corpus / "eval", faults)
    print(compare("test", (len(recordings), len(tests)), NUM_EVALUATED, UNITS, COUNTED))
    trials = read_official(
        lists / "trials.lst",
        faults,
        known=set(tests),
        models=recordings.keys() & enroll.keys(),
        rename=_without_ending,
        published=NUM_TRIALS,
        source=COUNTED,
    )
    _check_labels(lists / "trials.lst", trials, recordings, faults)
    return TestSet(wavs=wavs, recordings=recordings, enroll=enroll, trials=trials)


def _check_there(wavs: Mapping[str, Path], place: Path, faults: Faults) -> None:
    """Every recording that a list names must be there; others in `place` are left out."""
    for path in wavs.values():
        if not path.is_file():
            text = f"{path}: is in {LISTS} and is missing, got no such file; {UNPACK}"
            faults.add("recordings that are missing", text)
    for folder in ("enroll", "test"):
        names = sorted(path.name for path in (place / folder).iterdir())
        report_extra(place / folder, [n for n in names if f"{folder}/{Path(n).stem}" not in wavs])


def report_extra(folder: Path, names: Sequence[str]) -> None:
    """One line about what is left out because no list of the corpus, or no rule, names it."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"{folder}: not in the lists of the corpus and left out, got {names[0]}{more}")


def _check_labels(
    path: Path, trials: Iterable[Trial], recordings: Mapping[str, str], faults: Faults
) -> None:
    """A trial is a target if, and only if, the ids of both sides name the same speaker."""
    enrolled = {model: speaker_of(name) for model, name in recordings.items()}
    tested = {test: speaker_of(test) for test in {test for _, test, _ in trials}}
    for model, test, same in trials:
        if model in enrolled and (enrolled[model] == tested[test]) != same:
            got = f"{'target' if same else 'nontarget'} for {model} {test}"
            text = f"{path}: a label must follow from the speakers, got {got}; {UNPACK}"
            faults.add("wrong labels", text)
