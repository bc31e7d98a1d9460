"""How well classes are named: accuracy, its interval, the confusion table, rows of results.

In: true and found classes as numbers. Out: fractions, counts, text.
Letters: N utterances, C classes, G groups of utterances drawn together, R replicates.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.core.atomic import replacing, write_text

Row = dict[str, Any]
NUM_REPLICATES = 1000
MAX_CLASSES_SHOWN = 20  # in a confusion table; of more, only the commonest confusions
MAX_CONFUSIONS_SHOWN = 10


def confusion(true_N: np.ndarray, found_N: np.ndarray, num_classes: int) -> np.ndarray:
    """count_CC, int64: how many utterances of class (row) were found to be of class (column)."""
    assert len(true_N) == len(found_N), (len(true_N), len(found_N))
    cells_N = np.asarray(true_N, dtype=np.int64) * num_classes + found_N
    return np.bincount(cells_N, minlength=num_classes**2).reshape(num_classes, num_classes)


def accuracy(count_CC: np.ndarray) -> float:
    """The share of utterances whose class was found. Raises ValueError where there are none."""
    if not count_CC.sum():
        raise ValueError("utterances: at least one is needed, got none; give another test set")
    return float(np.trace(count_CC) / count_CC.sum())


def balanced_accuracy(count_CC: np.ndarray) -> float:
    """The mean over the classes that occur of the share found: guessing gives 1 / classes."""
    size_C = count_CC.sum(axis=1)
    occurs_C = size_C > 0
    return float((np.diag(count_CC)[occurs_C] / size_C[occurs_C]).mean())


def accuracy_interval(
    is_right_N: np.ndarray, group_N: np.ndarray | None = None, *, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile interval of the accuracy, 1,000 replicates of drawing with replacement.

    group_N: which utterances are drawn together, by number: those of a speaker, who is not made
    anew for each of them. None: each utterance alone. Where all are right, or all wrong, draws
    cannot differ: then the exact binomial bound is given for as many trials as there are groups
    (Clopper and Pearson, Biometrika 1934).
    """
    rng, num = np.random.default_rng(seed), len(is_right_N)
    if len(np.unique(is_right_N)) == 1:
        bound = 0.025 ** (1 / (num if group_N is None else int(group_N.max()) + 1))
        return (bound, 1.0) if is_right_N[0] else (0.0, 1 - bound)
    if group_N is None:  # a draw of N utterances has a binomial number of right ones
        drawn_R = rng.binomial(num, float(np.mean(is_right_N)), size=NUM_REPLICATES) / num
    else:
        num_groups = int(group_N.max()) + 1
        right_G = np.bincount(group_N, weights=is_right_N, minlength=num_groups)
        size_G = np.bincount(group_N, minlength=num_groups)
        draws = (rng.integers(num_groups, size=num_groups) for _ in range(NUM_REPLICATES))
        drawn_R = np.array([right_G[picked].sum() / size_G[picked].sum() for picked in draws])
    low, high = np.percentile(drawn_R, [2.5, 97.5])
    return float(low), float(high)


def result_row(
    *,
    data: str,
    system: str,
    count_CC: np.ndarray,
    classes: Sequence[str],
    interval: tuple[float, float],
    protocol: str,
    model_sha256: str,
    commit: str | None,
) -> Row:
    """One row of results.json; rates are fractions, `confusion` is true -> found -> utterances."""
    told: dict[str, dict[str, int]] = {}
    for true, found in np.argwhere(count_CC).tolist():
        told.setdefault(classes[true], {})[classes[found]] = int(count_CC[true, found])
    return {
        "data": data,
        "system": system,
        "task": "identification",
        "accuracy": accuracy(count_CC),
        "accuracy_ci95": list(interval),
        "balanced_accuracy": balanced_accuracy(count_CC),
        "error": 1 - accuracy(count_CC),
        "num": int(count_CC.sum()),
        "num_classes": len(classes),
        "confusion": told,
        "model_sha256": model_sha256,
        "commit": commit,
        "protocol": protocol,
    }


def update_results(path: Path, row: Row) -> list[Row]:
    """Put a row into results.json, in the place of one of the same data and system; all such rows.

    Rows of trial lists, should there be any, are left alone.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        names = [(one.get("data"), one.get("system")) for one in rows]
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a list of results, got {error!r}; move it away and classify again"
        ) from error
    if (row["data"], row["system"]) in names:
        rows[names.index((row["data"], row["system"]))] = row
    else:
        rows.append(row)
    write_text(path, json.dumps(rows, indent=1) + "\n")
    return [one for one in rows if one.get("task") == "identification"]


def write_decisions(
    path: Path,
    ids: Sequence[str],
    true_N: np.ndarray,
    found_N: np.ndarray,
    posterior_N: np.ndarray,
    classes: Sequence[str],
) -> None:
    """Write one line an utterance: its id, true class, found class, posterior of the found one."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as stream:
        stream.writelines(
            f"{utterance} {classes[true]} {classes[found]} {posterior:.6f}\n"
            for utterance, true, found, posterior in zip(ids, true_N, found_N, posterior_N)
        )


def format_rows(rows: Sequence[Row]) -> str:
    """The results as aligned text for a console."""
    header = ["data", "system", "accuracy %", "95 % interval", "balanced %", "classes", "number"]
    return aligned([header, *map(_cells, rows)], num_left=2)


def format_confusion(row: Row) -> str:
    """Who is taken for whom: a table, true classes in rows, or the commonest confusions alone."""
    table = confusion_table(row)
    if table is not None:
        return aligned([["true \\ found", *table[0]], *([n, *map(str, c)] for n, c in table[1])])
    worst = commonest_confusions(row)
    return aligned(
        [["true", "found", "number"], *([a, b, str(n)] for a, b, n in worst)], num_left=2
    )


def confusion_table(row: Row) -> tuple[list[str], list[tuple[str, list[int]]]] | None:
    """(names of the columns, (true class, counts) a row); None where it would be too large."""
    told: Mapping[str, Mapping[str, int]] = row["confusion"]
    names = sorted({*told, *(found for counts in told.values() for found in counts)})
    if len(names) > MAX_CLASSES_SHOWN:
        return None
    return names, [(true, [told[true].get(name, 0) for name in names]) for true in sorted(told)]


def commonest_confusions(row: Row) -> list[tuple[str, str, int]]:
    """(true, found, how often), the commonest first."""
    wrong = [
        (true, found, count)
        for true, counts in row["confusion"].items()
        for found, count in counts.items()
        if true != found
    ]
    return sorted(wrong, key=lambda one: (-one[2], one))[:MAX_CONFUSIONS_SHOWN]


def aligned(lines: Sequence[Sequence[str]], *, num_left: int = 1) -> str:
    """Columns of text: the first `num_left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines)]

    def line(texts: Sequence[str]) -> str:
        left = [text.ljust(width) for text, width in zip(texts[:num_left], widths)]
        right = [text.rjust(w) for text, w in zip(texts[num_left:], widths[num_left:])]
        return "  ".join(left + right).rstrip()

    return "\n".join([line(lines[0]), "  ".join("-" * w for w in widths), *map(line, lines[1:])])


def _cells(row: Row) -> list[str]:
    low, high = row["accuracy_ci95"]
    return [
        *(row["data"], row["system"], f"{100 * row['accuracy']:.2f}"),
        f"{100 * low:.2f} - {100 * high:.2f}",
        *(f"{100 * row['balanced_accuracy']:.2f}", str(row["num_classes"]), f"{row['num']:,}"),
    ]
