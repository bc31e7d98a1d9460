"""Systems that are compared: experiments or score files, their names, scores and metrics.

In: `[NAME=]PATH` of systems and of trial lists. Out: `Scored`, a system on a trial list.
Metrics have the names of the bootstrap: "eer", "min_dcf_0.01"; rates are fractions. A metric of an
experiment is that of its results.json, so that it is the same everywhere.
Letters: N trials.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from speakerlab.core.counting import count_of
from speakerlab.core.faults import nearest
from speakerlab.experiments.results import Row
from speakerlab.experiments.stored_scores import (
    ENROLLED_BY,
    OtherTrialsError,
    find_list,
    primary_rows,
    read_stored,
)
from speakerlab.experiments.trial_list import TrialList, read_trial_list
from speakerlab.scoring.bootstrap import Replicates, bootstrap
from speakerlab.scoring.metrics import P_TARGETS, eer, min_dcf
from speakerlab.scoring.score_files import read_scores

log = logging.getLogger(__name__)
MIN_DCF = "min_dcf_"  # followed by a prior
LIST_PREFIX = "trials_"  # of the file names of lists


@dataclass(frozen=True)
class NamedSystem:
    """An experiment, or the score files of a system, one for each trial list."""

    name: str
    exp_dir: Path | None = None
    rows: Mapping[str, Row] = field(default_factory=dict)  # trial list -> primary row
    score_files: Sequence[Path] = ()


@dataclass(frozen=True)
class NamedList:
    """A trial list by its name in a table, and by its name in results.json."""

    name: str
    key: str
    listed: TrialList | None = None
    not_found: str = ""  # the reason


@dataclass(frozen=True, eq=False)
class Scored:
    """A system on a trial list; without scores, only the metrics of its results are known."""

    system: NamedSystem
    trial_list: NamedList
    row: Row | None = None  # of results.json
    known_scores: np.ndarray | None = None  # (N)
    no_scores: str = ""  # the reason
    p_targets: Sequence[float] = P_TARGETS

    @property
    def has_scores(self) -> bool:
        return self.known_scores is not None

    @property
    def scores_N(self) -> np.ndarray:
        assert self.known_scores is not None
        return self.known_scores

    @property
    def listed(self) -> TrialList:
        """Return the trial list, which is known if there are scores."""
        assert self.trial_list.listed is not None
        return self.trial_list.listed

    @property
    def is_target_N(self) -> np.ndarray:
        return self.listed.trials.is_target_N

    def metric(self, name: str) -> float:
        """Return a metric of a system with scores."""
        value = self.find_metric(name)
        assert value is not None
        return value

    def find_metric(self, name: str) -> float | None:
        """Return a metric; None without scores, if the results do not have it."""
        # The metrics of an experiment's results come first, so that they are the same everywhere.
        if self.row is not None:
            if name == "eer":
                return self.row["eer"]
            prior = name.removeprefix(MIN_DCF)
            if prior in self.row["min_dcf"]:
                return self.row["min_dcf"][prior]
        if not self.has_scores:
            return None
        if name == "eer":
            return eer(self.scores_N, self.is_target_N)
        p_target = float(name.removeprefix(MIN_DCF))
        return min_dcf(self.scores_N, self.is_target_N, p_target=p_target)

    def interval(self, name: str) -> list[float] | None:
        """Return the 95 % interval of a metric; None with too few speakers, or if unknown."""
        if self.row is not None:
            intervals = {"eer": self.row["eer_ci95"], **self.row.get("intervals", {})}
            if name in intervals:
                return intervals[name]
        return self.replicates.interval(name) if self.has_scores else None

    @cached_property
    def replicates(self) -> Replicates:
        """Return the bootstrap replicates of the metrics.

        All systems of a list have the same draws of speakers, so that they can be compared.
        """
        return bootstrap(
            self.scores_N,
            self.is_target_N,
            *self.listed.speakers,
            p_targets=self.p_targets,
        )


def split_name(text: str) -> tuple[str | None, Path]:
    """Split `NAME=PATH`; (None, path) for a path alone.

    Paths and names may have a `=` themselves, so a part that is an existing path decides.
    """
    whole = Path(text)
    if whole.exists():
        return None, whole
    # Try each `=` as the separator.
    parts = text.split("=")
    for number in range(1, len(parts)):
        name = "=".join(parts[:number])
        path = Path("=".join(parts[number:]))
        if name and path.exists():
            return name, path
    # The path does not exist: the name ends at the first `=`.
    name, equals, path_text = text.partition("=")
    if equals and name and path_text:
        return name, Path(path_text)
    return None, whole


def read_systems(
    texts: Sequence[str],
    *,
    num_lists: int,
    short_names: bool = True,
) -> list[NamedSystem]:
    """Read systems `[NAME=]PATH`, where PATH is an experiment or a score file.

    num_lists: number of the trial lists that were given. A system of score files has one for each,
    in the same order, all with the same name. short_names: without a name, a system has the name of
    its folder or file, with the folders above it that tell it from others; else its whole path.
    Raises ValueError for a path that is neither, for a system that is given twice, for a name that
    two systems have, and for score files that do not fit the lists.
    """
    systems: list[NamedSystem] = []
    for name, paths in named_paths(texts, short_names=short_names).items():
        # A score file may be a pipe.
        if not any(path.is_dir() for path in paths):
            _check_files(name, paths, num_lists)
            systems.append(NamedSystem(name, score_files=paths))
            continue
        systems.append(_read_experiment(name, only_path(name, paths)))
    return systems


def only_path(name: str, paths: Sequence[Path]) -> Path:
    """Return the path of an experiment; ValueError if its name has several."""
    if len(paths) > 1:
        raise ValueError(
            f"{name}: names {len(paths)} systems, {paths[0]} and {paths[1]}; give"
            f" other names, as NAME={paths[1]}"
        )
    return paths[0]


def named_paths(
    texts: Sequence[str], *, short_names: bool = True
) -> dict[str, list[Path]]:
    """Return name -> paths of systems, in the order in which the names are first given.

    Arguments and errors as in `read_systems`.
    """
    _check_blanks(texts)
    _check_given_once(texts)
    pairs = [split_name(text) for text in texts]
    default_names = [str(path) for _, path in pairs]
    if short_names:
        default_names = _short_names([path for _, path in pairs])
    paths_of: dict[str, list[Path]] = {}
    for (name, path), default_name in zip(pairs, default_names):
        if not path.exists():
            similar = _similar_path(path)
            raise FileNotFoundError(
                f"{path}: no such experiment or score file{similar}"
            )
        paths_of.setdefault(name or default_name, []).append(path)
    return paths_of


def _check_blanks(texts: Sequence[str]) -> None:
    """Raise ValueError for `NAME = PATH`, which is three arguments."""
    for text in texts:
        is_torn = text.startswith("=") or text.endswith("=")
        if is_torn and not Path(text).exists():
            raise ValueError(
                f"{text}: is no system; write NAME=PATH without blanks about the ="
            )


def _check_given_once(texts: Sequence[str]) -> None:
    """Raise ValueError for a path that is given twice without names; log it with two names."""
    name_of: dict[Path, str | None] = {}
    for text in texts:
        name, path = split_name(text)
        place = path.resolve()
        if place in name_of and path.exists():
            if name == name_of[place]:
                raise ValueError(f"{path}: is given twice; leave one out")
            log.warning(
                "%s: is given twice, as %s and as %s",
                path,
                name_of[place] or path.name,
                name or path.name,
            )
        name_of.setdefault(place, name)


def _similar_path(path: Path) -> str:
    """Return the hint that ends an error line on a path that does not exist."""
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}"
    names = [entry.name for entry in path.parent.iterdir()]
    folder = "" if path.parent == Path() else f"{path.parent}/"
    return nearest(
        path.name, names, otherwise="correct the path", prefix=folder, cutoff=0.6
    )


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of folders and files, without the ending .txt.

    Equal names are preceded by as many of their folders as it takes to make them distinct.
    """
    all_parts: list[tuple[str, ...]] = []
    for path in paths:
        # "." and ".." have names too; a link keeps its own.
        full_path = path.resolve() if path.name in ("", "..") else path.absolute()
        all_parts.append(full_path.parts)
    names: list[str] = []
    for parts in all_parts:
        namesakes = {other for other in all_parts if other[-1:] == parts[-1:]}
        # As few parts, counted from the end, as make all paths of this name distinct.
        num_parts = 1
        while len({other[-num_parts:] for other in namesakes}) < len(namesakes):
            num_parts += 1
        name = str(Path(*parts[-num_parts:]))
        names.append(name.removesuffix(".txt") or name)
    # Without their endings, two names may be equal again: x and x.txt.
    counts = Counter(names)
    for number, path in enumerate(paths):
        if counts[names[number]] > 1:
            names[number] = str(path)
    return names


def _read_experiment(name: str, exp_dir: Path) -> NamedSystem:
    rows = primary_rows(exp_dir)
    if not rows:
        raise ValueError(
            f"{exp_dir}: has no results of trial lists; run `speakerlab score --exp"
            f" {exp_dir}`, or give a score file"
        )
    return NamedSystem(name, exp_dir, rows)


def _check_files(name: str, files: Sequence[Path], num_lists: int) -> None:
    if num_lists == 0:
        raise ValueError(
            f"{files[0]}: a score file needs its trial list; give --trials"
        )
    if len(files) != num_lists:
        raise ValueError(
            f"{name}: {count_of(len(files), 'score file')} for"
            f" {count_of(num_lists, 'trial list')}; give one for each --trials, in the"
            f" same order, as {name}=FILE {name}=FILE"
        )


def read_lists(
    texts: Sequence[str],
    systems: Sequence[NamedSystem],
    *,
    short_names: bool = True,
) -> list[NamedList]:
    """Read the lists `[NAME=]FILE`; by default, those of all experiments' results.

    Instead of a file, a list may have its name in results.json. Lists that another model enrols are
    only read if they are asked for, or are the only ones. short_names: of several lists, names are
    shown without what they have in common at the start.
    """
    lists = _read_lists(texts, systems)
    if not short_names:
        return lists
    # A list with its own name was given none.
    unnamed = [
        trial_list.key for trial_list in lists if trial_list.name == trial_list.key
    ]
    short_name_of = _short_list_names(unnamed)
    shown: list[NamedList] = []
    for trial_list in lists:
        name = short_name_of.get(trial_list.key, trial_list.name)
        shown.append(replace(trial_list, name=name))
    # Not if a list was given the name that another one would get.
    names = {trial_list.name for trial_list in shown}
    return shown if len(names) == len(shown) else lists


def _short_list_names(keys: Sequence[str]) -> dict[str, str]:
    """Return key -> name without the folder, and without `trials_`, if all keys have them."""
    names = list(keys)
    if len(keys) < 2:
        return dict(zip(keys, names))
    folders = {key.partition("/")[0] for key in keys}
    if len(folders) == 1:
        names = [key.partition("/")[2] for key in keys]
    if all(name.startswith(LIST_PREFIX) for name in names):
        names = [name.removeprefix(LIST_PREFIX) for name in names]
    return dict(zip(keys, names))


def _default_keys(keys: Sequence[str]) -> Sequence[str]:
    """Return the lists whose enrolment is of the same model; all lists if there are none."""
    usual = [key for key in keys if ENROLLED_BY not in key]
    if not usual:
        return keys
    left_out = [f"'{key}'" for key in keys if key not in usual]
    if left_out:
        log.info(
            "left out %s, whose enrolment is of another model; ask for it with --trials",
            " and ".join(left_out),
        )
    return usual


def _read_lists(
    texts: Sequence[str], systems: Sequence[NamedSystem]
) -> list[NamedList]:
    """Read lists with the names that are given, or their names in results.json."""
    keys = list(dict.fromkeys(key for system in systems for key in system.rows))
    exp_dirs = [system.exp_dir for system in systems if system.exp_dir is not None]
    if not texts:
        return [_find_named(key, key, exp_dirs) for key in _default_keys(keys)]

    lists: list[NamedList] = []
    for text in texts:
        name, path = split_name(text)
        if not path.is_file():
            key = str(path) if name is not None else text
            if key in keys:
                lists.append(_find_named(name or key, key, exp_dirs))
                continue
            hint = nearest(key, keys, otherwise="correct the path")
            raise FileNotFoundError(f"--trials: {key}: no such trial list{hint}")
        listed = read_trial_list(path)
        lists.append(NamedList(name or listed.name, listed.name, listed))
    _refuse_repeats(lists)
    return lists


def _refuse_repeats(lists: Sequence[NamedList]) -> None:
    """Raise ValueError for a list that is given twice, and for two lists with one name."""
    paths_of: dict[str, list[Path | None]] = {}
    for trial_list in lists:
        listed = trial_list.listed
        path = None if listed is None else listed.path.resolve()
        paths_of.setdefault(trial_list.key, []).append(path)
    for key, paths in paths_of.items():
        # Lists of different folders may have the same key.
        if len(paths) > 1 and len(set(paths)) == 1:
            raise ValueError(f"--trials: {key} is given twice; leave one out")
    counts = Counter(trial_list.name for trial_list in lists)
    for name, times in counts.items():
        if times > 1:
            raise ValueError(
                f"--trials: {name} names {times} lists; give other names, as NAME=FILE"
            )


def _find_named(name: str, key: str, exp_dirs: Iterable[Path]) -> NamedList:
    try:
        return NamedList(name, key, find_list(key, exp_dirs))
    except (ValueError, OSError) as error:
        return NamedList(name, key, not_found=str(error))


def score_systems(
    systems: Sequence[NamedSystem],
    lists: Sequence[NamedList],
    p_targets: Sequence[float] = P_TARGETS,
) -> list[list[Scored | None]]:
    """Return the systems on each list; None where an experiment was not scored on it.

    Raises ValueError if systems have other trials on a list of the same name: their metrics must
    not be compared.
    """
    scored: list[list[Scored | None]] = []
    for number, trial_list in enumerate(lists):
        systems_on_list: list[Scored | None] = []
        for system in systems:
            systems_on_list.append(_score_system(system, trial_list, number, p_targets))
        _check_same_trials(trial_list, systems_on_list)
        scored.append(systems_on_list)
    return scored


def require_scores(
    trial_list: NamedList,
    systems: Sequence[NamedSystem],
    results: Sequence[Scored | None],
) -> list[Scored]:
    """Return the systems on a list, as from `score_systems`; ValueError if one has no scores."""
    scored: list[Scored] = []
    for system, result in zip(systems, results):
        if result is None:
            raise ValueError(
                f"{system.name}: was not scored on {trial_list.name}; run `speakerlab"
                " score`, or choose other lists with --trials"
            )
        if not result.has_scores:
            raise ValueError(f"{trial_list.name}: {result.no_scores}")
        scored.append(result)
    return scored


def _score_system(
    system: NamedSystem,
    trial_list: NamedList,
    number: int,
    p_targets: Sequence[float],
) -> Scored | None:
    """Return a system on a list; number: index of the list, and of its score file."""
    listed = trial_list.listed
    if system.exp_dir is None:
        if listed is None:
            raise ValueError(f"{trial_list.name}: {trial_list.not_found}")
        scores_N = read_scores(system.score_files[number], listed.trials)
        return Scored(
            system=system,
            trial_list=trial_list,
            known_scores=scores_N,
            p_targets=p_targets,
        )

    row = system.rows.get(trial_list.key)
    if row is None:
        return None
    scores_N = None
    reason = trial_list.not_found
    if listed is not None:
        try:
            scores_N = read_stored(system.exp_dir, system.name, row, listed)
        except OtherTrialsError as error:
            # Their metrics must not stand in one column, nor in one plot.
            raise ValueError(f"{trial_list.name}: {error}") from None
        except (ValueError, OSError) as error:
            reason = str(error)
    return Scored(
        system=system,
        trial_list=trial_list,
        row=row,
        known_scores=scores_N,
        no_scores=reason,
        p_targets=p_targets,
    )


def _check_same_trials(trial_list: NamedList, scored: Sequence[Scored | None]) -> None:
    """Raise ValueError unless all systems have equally many targets and non-targets."""
    sizes: dict[tuple[int, int], str] = {}
    if trial_list.listed is not None:
        is_target_N = trial_list.listed.trials.is_target_N
        num_target = int(np.count_nonzero(is_target_N))
        size = (num_target, len(is_target_N) - num_target)
        sizes[size] = str(trial_list.listed.path)
    for result in scored:
        if result is not None and result.row is not None:
            size = (result.row["num_target"], result.row["num_nontarget"])
            sizes.setdefault(size, result.system.name)
    if len(sizes) > 1:
        (first, first_name), (other, other_name), *_ = sizes.items()
        raise ValueError(
            f"{trial_list.name}: {other_name} has {other[0]:,} targets and"
            f" {other[1]:,} non-targets, {first_name} has {first[0]:,} and"
            f" {first[1]:,}; compare systems on the same trials"
        )
