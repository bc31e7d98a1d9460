"""Run all benchmark cases, one after the other, and compare with the peers.

    make bench PEERS="3dspeaker=DIR wespeaker=DIR speechbrain=DIR" [ARGS="--quick --gate ..."]
    python benchmarks/suite.py --peers 3dspeaker=DIR --only models data --json FILE --markdown FILE

In: checkouts of the peers; without them, or where one has no such case, rows of ours alone. Out: a
table of all rows and, with --json, {"facts": ..., "parts": ..., "rows": ...}.

Each case is a script that runs alone, too (sides.py). A case that fails does not stop the others;
the exit status is then 1.

--store keeps each row in baseline.json, for this kind of machine, and rewrites the table in
RESULTS.md, unless a case failed or the gate found a loss (stored.py). --gate compares with what is
stored and exits with 1 where a row lost more than 15 %, or more launches are counted: a row whose
quartiles reach the limit is measured once more first (gate.py). --quick takes some 20 minutes:
fewer rows and seconds, of the same sizes, so it can be gated against a whole run; it cannot be
stored. --read joins rows that were measured in pieces on one machine, also another than this if the
suite or gpu.py wrote the files; each row keeps its date and commit. learning.py, which takes hours
and a corpus, only runs alone; its rows are stored and gated with --read.

The only setting for speed that the suite makes is GOMP_SPINCOUNT=2000, for both sides, if it is not
set. Others in the environment (an allocator, huge pages) apply to both sides and are among the
facts.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gate
import stored
import torch
from sides import HERE, MARKS, ROOT, TOOLKITS, URLS, environment, say
from suite_facts import command, facts_of, kind_of_machine
from suite_table import table

CASES = (
    *("roofline", "data", "frontend", "models", "self_supervised", "end_to_end", "extract"),
    *("diarization", "scoring", "scoring_large", "startup", "launches"),
)
ON_AUDIO = ("data.", "end_to_end.", "extract.", "diarize.")  # rows that depend on the recordings


@dataclass
class Result:
    """How a case ended."""

    part: str
    exit: int
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)


def run_case(name: str, options: argparse.Namespace, rows: Sequence[str] = ()) -> Result:
    """Run a case's script, its lines going to the terminal; `rows`: only these."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        words = [str(HERE / f"{name}.py"), f"--json={path}", *words_of(name, options, rows)]
        say(f"\n{name}: {' '.join(words)}")
        env = environment(ROOT, options.threads)
        code = subprocess.run([sys.executable, *words], env=env, check=False).returncode
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    if code or not found:
        code = code or 1
        say(f"suite: {name}: exited with {code} and {len(found)} rows; see above")
    return Result(name, code, time.perf_counter() - start, found)


def words_of(name: str, options: argparse.Namespace, rows: Sequence[str] = ()) -> list[str]:
    """Return the options of a case's script."""
    case = importlib.import_module(name)
    words = list(case.QUICK) if options.quick else []
    words += [f"--device={options.device}"]
    words += [f"--threads={options.threads}"] if options.threads else []
    words += ["--rows", *rows] if rows else []
    peers = [str(options.checkouts[peer]) for peer in case.PEERS if peer in options.checkouts]
    return words + (["--peer", *peers] if peers else [])


def measure_again(
    results: Sequence[Result], doubtful: Sequence[str], options: argparse.Namespace
) -> Iterator[Result]:
    """Measure the rows in doubt once more; only these rows are replaced."""
    for result in results:
        names = [row["name"] for row in result.rows if row["name"] in doubtful]
        if not names or result.part not in CASES:
            yield result
            continue
        say(f"suite: measured again: {', '.join(names)}")
        again = run_case(result.part, options, names)
        new = {row["name"]: row for row in again.rows if row["name"] in names}
        rows = [new.get(row["name"], row) for row in result.rows]
        code, seconds = result.exit or again.exit, result.seconds + again.seconds
        yield Result(result.part, code, seconds, rows)


def check(
    results: list[Result], facts: Mapping[str, Any], options: argparse.Namespace
) -> tuple[list[Result], bool]:
    """Compare the rows with what is stored; return (results, whether all of them pass)."""
    kept = kept_rows(rows_of(results), facts, options.baseline)
    doubtful = [loss.name for loss in gate.losses(rows_of(results), kept) if not loss.is_certain]
    if doubtful:
        results = list(measure_again(results, doubtful, options))
    rows = rows_of(results)
    lost, judged = gate.losses(rows, kept), gate.num_judged(rows, kept)
    for loss in lost:
        say(f"gate: {loss}")
    say(f"gate: {judged} rows compared with what is stored, {len(lost)} worse")
    if not judged:
        say("gate: no rows to compare; give the peers, or --store first")
    return results, not lost and judged > 0


def kept_rows(
    rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], baseline: Path
) -> dict[str, Any]:
    """Return by name what is stored for the machine of these rows."""
    kinds, kept = stored.read_all(baseline), dict[str, Any]()
    for kind in dict.fromkeys(stored.kind_of(row, facts) for row in rows):
        kept |= stored.read(kind, baseline) if kind in kinds else {}
    audio = kinds.get(facts["machine"], {"facts": facts})["facts"].get("audio")
    if audio != facts["audio"]:
        say(f"gate: {', '.join(ON_AUDIO)} not compared: from {facts['audio']}, not {audio}")
        kept = {name: row for name, row in kept.items() if not name.startswith(ON_AUDIO)}
    return kept


def read(paths: Sequence[Path], *, kind: str) -> tuple[list[Result], dict[str, Any]]:
    """Read rows that cases or the suite wrote, and the facts that suites wrote.

    Of two rows of one name the later file's counts, likewise of facts; peers are joined. kind: the
    machine of files that do not name theirs. Raises ValueError for a file without such rows, or of
    another machine than the first.
    """
    results: list[Result] = []
    facts: dict[str, Any] = {}
    for path in paths:
        own, rows = read_file(path)
        machine = own.get("machine", kind)
        if machine != (first := facts.setdefault("machine", machine)):
            raise ValueError(f"{path}: measured on '{machine}', not on '{first}'; read it alone")
        joined = {"peers": {**facts.get("peers", {}), **own.get("peers", {})}}
        joined["quick"] = facts.get("quick", False) or own.get("quick", False)
        facts |= {**{key: value for key, value in own.items() if value is not None}, **joined}
        new = {row["name"] for row in rows}
        for result in results:
            result.rows = [row for row in result.rows if row["name"] not in new]
        results.append(Result(path.name, 0, 0.0, rows))
    return results, facts


def read_file(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (facts, {} of a case; rows, each with its date and commit)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        own, rows = (found["facts"], found["rows"]) if isinstance(found, dict) else ({}, found)
        known = {key: own[key] for key in ("date", "commit") if key in own}
        rows = [{**known, **row} for row in rows]
        return own, [row for row in rows if row["name"] and row["date"] and row["commit"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        fault = f"{type(error).__name__} {error}"
        raise ValueError(
            f"{path}: no rows that --json wrote ({fault}); give another file"
        ) from None


def rows_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [row for result in results for row in result.rows]


def store(
    rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], options: argparse.Namespace
) -> None:
    """Store each row for its kind of machine."""
    where = {"path": options.baseline, "results": options.results}
    for kind in dict.fromkeys(stored.kind_of(row, facts) for row in rows):
        own = [row for row in rows if stored.kind_of(row, facts) == kind]
        reads = any(row["name"].startswith(ON_AUDIO) for row in own)
        known = {**facts, "machine": kind, "audio": facts["audio"] if reads else None}
        count = stored.store(kind, own, facts=known, **where)
        say(f"{options.baseline}: {count} of {len(own)} rows stored for '{kind}'")


def write(path: Path | None, facts: Mapping[str, Any], results: Sequence[Result]) -> None:
    if path is None:
        return
    parts = [{k: v for k, v in asdict(result).items() if k != "rows"} for result in results]
    text = json.dumps({"facts": facts, "parts": parts, "rows": rows_of(results)}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add, known = parser.add_argument, ", ".join(TOOLKITS)
    add("--peers", nargs="*", default=[], metavar="NAME=DIR", help=f"checkouts of {known}")
    cases = f"only these of {', '.join(CASES)}"
    add("--only", nargs="+", default=CASES, choices=CASES, metavar="CASE", help=cases)
    add("--quick", action="store_true", help="fewer rows and seconds (20 minutes)")
    gated = "exit with 1 where a row lost 15 %% of what --store kept"
    add("--gate", action="store_true", help=gated)
    add("--store", action="store_true", help="keep this run for --gate, and in RESULTS.md")
    files = "run nothing: take rows that cases or the suite wrote with --json"
    add("--read", type=Path, nargs="+", default=[], metavar="FILE", help=files)
    add("--json", type=Path, metavar="FILE", help="write facts, parts and rows")
    add("--markdown", type=Path, metavar="FILE", help="write the table")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, help="of each side (what torch takes)")
    add("--baseline", type=Path, default=stored.BASELINE, help=argparse.SUPPRESS)
    add("--results", type=Path, default=stored.RESULTS, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.checkouts, options.num_cases = find_checkouts(parser, options.peers), len(CASES)
    return options


def find_checkouts(parser: argparse.ArgumentParser, peers: Sequence[str]) -> dict[str, Path]:
    """Return toolkit -> checkout of the values of --peers; the parser rejects others."""
    found: dict[str, Path] = {}
    for peer in peers:
        name, _, folder = peer.partition("=")
        if name not in TOOLKITS or not folder:
            known = ", ".join(TOOLKITS)
            parser.error(f"--peers: {peer}: not NAME=DIR with a NAME of {known}")
        if not (Path(folder) / MARKS[name]).exists():
            parser.error(f"--peers: {folder}: not a checkout of {name}; git clone {URLS[name]}")
        found[name] = Path(folder)
    return {name: found[name] for name in TOOLKITS if name in found}


def main(words: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 where a case failed or the gate found a loss."""
    options = parse(words)
    threads = options.threads or torch.get_num_threads()
    kind = kind_of_machine(options.device, threads)
    facts = facts_of(options, kind=kind, threads=threads, command=command(options))
    results: list[Result] = []
    if options.read:
        results, known = read(options.read, kind=kind)
        facts |= {"settings": None, "command": None, **known}
        facts["command"] = facts["command"] if len(options.read) == 1 else None
    if options.gate and not options.read and options.only != ["launches"]:
        stored.read(facts["machine"], options.baseline)  # before an hour is spent
    if options.store and facts["quick"]:
        raise ValueError("--store: a --quick run cannot be stored; drop one of the two")
    for name in [] if options.read else [name for name in CASES if name in options.only]:
        results.append(run_case(name, options))
        write(options.json, facts, results)  # an interrupted run keeps what it had
    passed = True
    if options.gate:
        results, passed = check(results, facts, options)
    rows = rows_of(results)
    text = table(facts, rows)
    say(f"\n{text}")
    write(options.json, facts, results)
    if options.markdown is not None:
        options.markdown.write_text(text, encoding="utf-8")
    failed = [result.part for result in results if result.exit]
    if options.store and passed and not failed:
        store(rows, facts, options)
    elif options.store:
        say("suite: nothing stored: a row is worse, or a case failed")
    if failed:
        say(f"suite: {', '.join(failed)} failed; see above")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (ValueError, OSError) as error:
        raise SystemExit(f"suite: {error}") from None
