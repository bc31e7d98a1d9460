"""The whole benchmark: every part, one after the other, beside the peers.

    make bench PEERS="3dspeaker=DIR wespeaker=DIR speechbrain=DIR" [ARGS="--quick --gate ..."]
    python benchmarks/suite.py --peers 3dspeaker=DIR --only models data --json FILE --markdown FILE

In: checkouts of the peers; without them, or where one has no such part, rows of ours alone. Out: a
table of all rows and, with --json, {"facts": ..., "parts": ..., "rows": ...}: date, commit, device,
versions and threads, how each part ended, and what it measured.

Each part is a script that runs alone, too, with --peer and --json (suite_parts.py). A part that
fails is told and ends no other; the exit status is then 1.

--store keeps each row in baseline.json, for this kind of machine, and makes the table in RESULTS.md
anew, unless a part failed or the gate did not let pass (stored.py). --gate compares with what is
kept, and exits with 1 where a row lost more than 15 %: one whose quartiles reach the limit is
measured once more first (gate.py). --quick takes some 15 minutes: fewer rows and seconds, of the
same sizes, so that it can be gated by what a whole run has stored; it is not stored itself. --read
joins what was measured in pieces on the same machine; each row keeps its date and commit.

Of what makes a side faster the suite sets GOMP_SPINCOUNT=2000 alone, for both, where it is not set:
threads that wait must not spin on the other's cores. What else of the kind stands in the
environment (an allocator, huge pages) reaches both sides, and is among the facts.
"""

import argparse
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
from models_sides import MARKS
from sides import ROOT, TOOLKITS, environment, say
from suite_facts import facts_of, kind_of_machine
from suite_parts import PARTS, Part
from suite_table import table

HERE = Path(__file__).parent
URLS = {
    "3dspeaker": "https://github.com/modelscope/3D-Speaker",
    "wespeaker": "https://github.com/wenet-e2e/wespeaker",
    "speechbrain": "https://github.com/speechbrain/speechbrain",
}
ON_AUDIO = ("data.", "end_to_end.", "extract.")  # rows that depend on the recordings


@dataclass
class Result:
    """How a part ended."""

    part: str
    exit: int
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)


def run_part(part: Part, options: argparse.Namespace, rows: Sequence[str] = ()) -> Result:
    """Run a part's script, its lines going to the terminal; `rows`: only these, if it can."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / part.script), f"--json={path}"]
        command += part.words(options, rows)
        say(f"\n{part.name}: {' '.join(command[1:])}")
        code = subprocess.run(
            command, env=environment(ROOT, options.threads), check=False
        ).returncode
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    if code or not found:
        code = code or 1
        say(f"suite: {part.name}: must end with 0 and give rows, got {code} and {len(found)} rows")
    return Result(part.name, code, time.perf_counter() - start, found)


def remeasure(
    results: Sequence[Result],
    parts: Sequence[Part],
    doubtful: Sequence[str],
    options: argparse.Namespace,
) -> Iterator[Result]:
    """The parts whose rows are in doubt, run once more; only these rows are replaced."""
    by_name = {part.name: part for part in parts}
    for result in results:
        names = [row["name"] for row in result.rows if row["name"] in doubtful]
        if not names or result.part not in by_name:
            yield result
            continue
        say(f"suite: measured again: {', '.join(names)}")
        again = run_part(by_name[result.part], options, names)
        new = {row["name"]: row for row in again.rows if row["name"] in names}
        rows = [new.get(row["name"], row) for row in result.rows]
        code = result.exit or again.exit
        yield Result(result.part, code, result.seconds + again.seconds, rows)


def check(
    results: list[Result],
    parts: Sequence[Part],
    facts: Mapping[str, Any],
    options: argparse.Namespace,
) -> tuple[list[Result], bool]:
    """Hold the rows to what is stored: (the results, whether all of them pass)."""
    kind = facts["machine"]
    kept = stored.read(kind, options.baseline)
    audio = stored.read_all(options.baseline)[kind]["facts"].get("audio")
    if audio != facts["audio"]:
        say(f"gate: {', '.join(ON_AUDIO)} not compared: of {facts['audio']}, stored of {audio}")
        kept = {name: row for name, row in kept.items() if not name.startswith(ON_AUDIO)}
    doubtful = [loss.name for loss in gate.losses(rows_of(results), kept) if not loss.is_certain]
    if doubtful:
        results = list(remeasure(results, parts, doubtful, options))
    rows = rows_of(results)
    lost, judged = gate.losses(rows, kept), gate.num_judged(rows, kept)
    for loss in lost:
        say(f"gate: {loss}")
    say(f"gate: {judged} rows compared with what is stored for '{kind}', {len(lost)} lost speed")
    if not judged:
        say("gate: must have rows to compare, got none; give the peers, or --store first")
    return results, not lost and judged > 0


def read(paths: Sequence[Path], *, kind: str) -> tuple[list[Result], dict[str, Any]]:
    """What parts, run alone, or the suite have written, and the facts that suites tell.

    Of two rows of one name the one in the later file counts, and so do facts; peers are joined. A
    file of a part tells no facts. Raises ValueError for another file, or one of another machine.
    """
    results: list[Result] = []
    facts: dict[str, Any] = {}
    for path in paths:
        own, rows = read_file(path)
        machine = own.get("machine", kind)
        if machine != kind:
            raise ValueError(f"{path}: must be of this machine, '{kind}', got '{machine}'")
        peers = {**facts.get("peers", {}), **own.get("peers", {})}
        facts |= {key: value for key, value in own.items() if value is not None}
        facts["peers"] = peers
        new = {row["name"] for row in rows}
        for result in results:
            result.rows = [row for row in result.rows if row["name"] not in new]
        results.append(Result(path.name, 0, 0.0, rows))
    return results, facts


def read_file(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(facts, {} of a part; rows, each with its date and commit). ValueError if it is no such."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        own, rows = (found["facts"], found["rows"]) if isinstance(found, dict) else ({}, found)
        known = {key: own[key] for key in ("date", "commit") if key in own}
        rows = [{**known, **row} for row in rows]
        return own, [row for row in rows if row["name"] and row["date"] and row["commit"]]
    except (KeyError, TypeError, json.JSONDecodeError) as fault:
        raise ValueError(
            f"{path}: must hold rows that a part or the suite wrote with --json, got "
            f"{type(fault).__name__} {fault}; give another file"
        ) from None


def rows_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [row for result in results for row in result.rows]


def write(path: Path | None, facts: Mapping[str, Any], results: Sequence[Result]) -> None:
    if path is None:
        return
    parts = [{k: v for k, v in asdict(result).items() if k != "rows"} for result in results]
    text = json.dumps({"facts": facts, "parts": parts, "rows": rows_of(results)}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def parse(words: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names, known = [part.name for part in parts], ", ".join(TOOLKITS)
    parser.add_argument(
        "--peers", nargs="*", default=[], metavar="NAME=DIR", help=f"checkouts of {known}"
    )
    parser.add_argument(
        *("--only",),
        nargs="+",
        default=names,
        choices=names,
        metavar="PART",
        help=f"of {', '.join(names)}",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rows and seconds (15 minutes)")
    parser.add_argument(
        "--gate",
        action="store_true",
        help="exit with 1 where a row lost 15 %% of what --store kept",
    )
    parser.add_argument(
        "--store", action="store_true", help="keep this run for --gate, and in RESULTS.md"
    )
    parser.add_argument(
        *("--read",),
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="run nothing: take rows that parts, or the suite, have written (--json)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="facts, parts and rows")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of each side; default: what torch takes")
    parser.add_argument("--baseline", type=Path, default=stored.BASELINE, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=stored.RESULTS, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.checkouts, options.parts = {}, names
    for peer in options.peers:
        name, _, folder = peer.partition("=")
        if name not in TOOLKITS or not folder:
            parser.error(f"--peers: must be NAME=DIR, NAME one of {known}, got '{peer}'")
        if not (Path(folder) / MARKS[name]).exists():
            parser.error(
                f"--peers: {name} must be a checkout, got no {folder}/{MARKS[name]}; git clone "
                f"{URLS[name]}"
            )
        options.checkouts[name] = Path(folder)
    if options.store and options.quick:
        parser.error("--store: keeps whole measurements, got --quick; leave one of them out")
    return options


def main(words: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """The exit status: 1 where a part failed or the gate does not let pass."""
    options = parse(words, parts)
    threads = options.threads or torch.get_num_threads()
    kind = kind_of_machine(options.device, threads)
    if options.gate:
        stored.read(kind, options.baseline)  # before an hour is spent
    facts = facts_of(options, kind=kind, threads=threads)
    results: list[Result] = []
    if options.read:
        results, told = read(options.read, kind=kind)
        facts |= {"settings": None, "command": None, **told}
        facts["command"] = facts["command"] if len(options.read) == 1 else None
    for part in parts:
        if part.name in options.only and not options.read:
            results.append(run_part(part, options))
            write(options.json, facts, results)  # a run that is ended has told what it had
    passed = True
    if options.gate:
        results, passed = check(results, parts, facts, options)
    rows = rows_of(results)
    text = table(facts, rows)
    say(f"\n{text}")
    write(options.json, facts, results)
    if options.markdown is not None:
        options.markdown.write_text(text, encoding="utf-8")
    failed = [result.part for result in results if result.exit]
    if options.store and passed and not failed:
        where = {"path": options.baseline, "results": options.results}
        count = stored.store(kind, rows, facts=facts, **where)
        say(f"{options.baseline}: {count} of {len(rows)} rows stored for '{kind}'; table made anew")
    elif options.store:
        say("suite: nothing is stored: a row lost speed, or a part failed")
    if failed:
        say(f"suite: {', '.join(failed)} failed; see above")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (ValueError, OSError) as fault:
        raise SystemExit(f"suite: {fault}") from None
