"""Files of linked recordings: RTTM with the names of identities, tables and a page.

In: the results of `speakerlab diarize --out` and their identities. Out: a folder, replaced whole or
not at all, so that it never has names of two results.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from speakerlab.core.atomic import replacing_folder, write_json, write_text
from speakerlab.core.reading import keys, read_json
from speakerlab.data.tables import one_word
from speakerlab.diarization.regions import write_rttm
from speakerlab.experiments.report import render
from speakerlab.experiments.timeline import clock
from speakerlab.inference.link import Identity, Key, Linked, Result

log = logging.getLogger(__name__)
IDENTITIES = "identities.json"
TABLE = "identities.tsv"
PAGE = "identities.html"
COLUMNS = ("identity", "recording", "speaker", "seconds", "closeness")
MAX_SHOWN = 100  # doubtful pairs of the page

# What a later run reads.
MEMBER_KEYS = keys(recording=str, speaker=str)
IDENTITY_KEYS = keys(members=list[MEMBER_KEYS])
FILE_KEYS = keys(
    model_sha256=str,
    last_numbers=dict[str, int],
    identities=dict[str, IDENTITY_KEYS],
)


def read_names(
    path: Path, *, model_sha256: str
) -> tuple[dict[Key, str], dict[str, int]]:
    """Return (recording, speaker) -> identity of an earlier result, and its last numbers.

    Both are empty if there is none. Of a result of another model only the numbers are used, so that
    no new identity has the name of another person. Raises ValueError if it is damaged.
    """
    if not path.exists():
        return {}, {}
    fix = "remove the folder to name all identities again"
    facts = read_json(path, like=FILE_KEYS, fix=fix)
    if facts["model_sha256"] != model_sha256:
        log.warning(
            "%s: is of another model; its names are not kept, and new ones have higher"
            " numbers",
            path,
        )
        return {}, facts["last_numbers"]
    names: dict[Key, str] = {}
    for name, row in facts["identities"].items():
        for member in row["members"]:
            names[member["recording"], member["speaker"]] = name
    return names, facts["last_numbers"]


def write_linked(
    out: Path,
    linked: Linked,
    results: Mapping[Path, Result],
    facts: Mapping[str, Any],
) -> None:
    """Replace the folder `out`. results: relative path of the RTTM file -> diarization."""
    with replacing_folder(out) as fresh:
        for place, result in results.items():
            turns = linked.rename(result.recording, result.turns)
            write_rttm(fresh / place, {one_word(result.recording): turns})
        write_table(fresh / TABLE, linked)
        write_page(fresh / PAGE, linked, _links(results.values(), out), facts)
        write_json(fresh / IDENTITIES, {**to_dict(linked), **facts})


def to_dict(linked: Linked) -> dict[str, Any]:
    """Return plain values, for JSON; times are rounded to the millisecond as in RTTM."""
    identities: dict[str, Any] = {}
    for identity in linked:
        members: list[dict[str, Any]] = []
        for member in identity.members:
            row = {**asdict(member), "seconds": round(member.seconds, 3)}
            members.append(row)
        identities[identity.name] = {
            "is_unknown": identity.is_unknown,
            "seconds": round(identity.seconds, 3),
            "num_recordings": _num_recordings(identity),
            "members": members,
        }
    return {
        "threshold": linked.threshold,
        "far": linked.far,
        "identities": identities,
        "doubtful": [asdict(pair) for pair in linked.doubtful],
        "last_numbers": dict(linked.last_numbers),
    }


def write_table(path: Path, linked: Linked) -> None:
    """Write a line for each speaker of a recording, with tabs between the fields."""
    lines = ["\t".join(COLUMNS)]
    for identity in linked:
        for member in identity.members:
            fields = (
                identity.name,
                one_word(member.recording),
                member.speaker,
                f"{member.seconds:.3f}",
                _cosine(member.closeness),
            )
            lines.append("\t".join(fields))
    write_text(path, "\n".join(lines) + "\n")


def write_page(
    path: Path,
    linked: Linked,
    links: Mapping[str, str],
    facts: Mapping[str, Any],
) -> None:
    """Write the page. links: recording -> page of its diarization, seen from this page."""
    people: list[tuple[Identity, str, int]] = []
    unknown: list[Identity] = []
    for identity in linked:
        if identity.is_unknown:
            unknown.append(identity)
        else:
            seconds = clock(identity.seconds)
            people.append((identity, seconds, _num_recordings(identity)))
    # The people with the most speech come first.
    people.sort(key=lambda row: -row[0].seconds)
    page = render(
        "linking.html.j2",
        title="Who is the same person",
        people=people,
        unknown=unknown,
        doubtful=linked.doubtful[:MAX_SHOWN],
        num_doubtful=len(linked.doubtful),
        threshold=linked.threshold,
        links=links,
        clock=clock,
        cosine=_cosine,
        facts={"Linking": facts},
    )
    write_text(path, page)


def _links(results: Iterable[Result], out: Path) -> dict[str, str]:
    """Return recording -> relative link to the page of its diarization, if it has one."""
    links: dict[str, str] = {}
    for result in results:
        page = result.path.with_suffix(".html")
        if page.exists():
            relative_path = os.path.relpath(page.resolve(), out.resolve())
            link = Path(relative_path).as_posix()
            links[result.recording] = quote(os.fsencode(link))
    return links


def _num_recordings(identity: Identity) -> int:
    return len({member.recording for member in identity.members})


def _cosine(closeness: float | None) -> str:
    return "-" if closeness is None else f"{closeness:.3f}"


def refuse_other_folder(out: Path, folders: Sequence[Path]) -> None:
    """Raise ValueError, one line, unless the linked files may be written at `out`."""
    target = out.resolve()
    for folder in folders:
        source = folder.resolve()
        if source.is_relative_to(target):
            raise ValueError(
                f"--out: {out} holds the results in {folder}, and would be replaced;"
                " choose another path"
            )
    is_empty_folder = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty_folder and not (out / IDENTITIES).exists():
        raise ValueError(
            f"--out: {out} already exists, and was not written by `speakerlab link`;"
            " choose another path, or remove it"
        )
