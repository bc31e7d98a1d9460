"""Systems that are compared: experiments or score files, their names, scores and metrics.

In: `[NAME=]PATH` of systems and of trial lists. Out: `Scored`, a system on a trial list.
Metrics have the names of the bootstrap: "eer", "min_dcf_0.01"; rates are fractions. A metric of an
experiment is that of its results.json, so that it is the same everywhere.
Letters: N trials.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from speakerlab.core.counting import count_of
from speakerlab.core.faults import nearest
from speakerlab.experiments.results import Row
from speakerlab.experiments.stored_scores import (
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
        """Return the replicates of the metrics, equally drawn for all systems of a list."""
        return bootstrap(
            self.scores_N,
            self.is_target_N,
            *self.listed.speakers,
            p_targets=self.p_targets,
        )


def split_name(text: str) -> tuple[str | None, Path]:
    """Split `NAME=PATH`; (None, path) for a path alone.

    The names of paths and of systems may have a `=`: a text that is a path is one.
    """
    whole = Path(text)
    if whole.exists():
        return None, whole
    parts = text.split("=")
    for number in range(1, len(parts)):
        name = "=".join(parts[:number])
        path = Path("=".join(parts[number:]))
        if name and path.exists():
            return name, path
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
    its folder or file, unless others have it too; else its whole path. Raises ValueError for a path
    that is neither, for a name that two systems have, and for score files that do not fit the
    lists.
    """
    paths_of = _paths_by_name(texts, short_names=short_names)
    systems: list[NamedSystem] = []
    for name, paths in paths_of.items():
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(
                    f"{path}: no such experiment or score file; correct the path"
                )
        if all(path.is_file() for path in paths):
            _check_files(name, paths, num_lists)
            systems.append(NamedSystem(name, score_files=paths))
            continue
        if len(paths) > 1:
            raise ValueError(
                f"{name}: names {len(paths)} systems, {paths[0]} and {paths[1]}; give"
                f" other names, as NAME={paths[1]}"
            )
        systems.append(_read_experiment(name, paths[0]))
    return systems


def _paths_by_name(texts: Sequence[str], *, short_names: bool) -> dict[str, list[Path]]:
    """Return name -> paths, in the order in which the names are first given."""
    pairs = [split_name(text) for text in texts]
    default_names = [str(path) for _, path in pairs]
    if short_names:
        default_names = _short_names([path for _, path in pairs])
    paths_of: dict[str, list[Path]] = {}
    for (name, path), default_name in zip(pairs, default_names):
        paths_of.setdefault(name or default_name, []).append(path)
    return paths_of


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of folders and files without their endings; whole paths of equal names."""
    names: list[str] = []
    for path in paths:
        name = path.stem if path.suffix == ".txt" else path.name
        names.append(name or str(path))
    counts = Counter(names)
    return [
        name if counts[name] == 1 else str(path) for name, path in zip(names, paths)
    ]


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


def read_lists(texts: Sequence[str], systems: Sequence[NamedSystem]) -> list[NamedList]:
    """Read the lists `[NAME=]FILE`; by default, those of all experiments' results.

    Instead of a file, a list may have its name in results.json.
    """
    keys = list(dict.fromkeys(key for system in systems for key in system.rows))
    exp_dirs = [system.exp_dir for system in systems if system.exp_dir is not None]
    if not texts:
        return [_find_named(key, key, exp_dirs) for key in keys]

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
    for name, times in Counter(trial_list.name for trial_list in lists).items():
        if times > 1:
            raise ValueError(
                f"--trials: {name} names {times} lists; give other names, as NAME=FILE"
            )
    return lists


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
        of_list = [
            _score_system(system, trial_list, number, p_targets) for system in systems
        ]
        _check_same_trials(trial_list, of_list)
        scored.append(of_list)
    return scored


def _score_system(
    system: NamedSystem,
    trial_list: NamedList,
    number: int,
    p_targets: Sequence[float],
) -> Scored | None:
    """Return a system on a list. number: that of its score file."""
    listed = trial_list.listed
    if system.exp_dir is None:
        if listed is None:
            raise ValueError(f"{trial_list.name}: {trial_list.not_found}")
        scores_N = read_scores(system.score_files[number], listed.trials)
        return Scored(system, trial_list, None, scores_N, p_targets=p_targets)

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
    return Scored(system, trial_list, row, scores_N, reason, p_targets)


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
