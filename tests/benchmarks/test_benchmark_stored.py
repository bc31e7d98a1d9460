"""What the suite stores: rows by machine, their tables, targets, and what the README quotes."""

import sys
from pathlib import Path

import pytest
from refusals import refuses

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gate
import stored
import suite_table
from suite_table import table

ROOT = Path(__file__).parents[2]
FACTS = {"date": "2026-01-02 03:04 UTC", "commit": "abcdef012345", "machine": "m", "cores": 2}
FACTS |= {"device": "cpu", "python": "3", "torch": "2", "numpy": "2", "command": "make"}
FACTS |= {"settings": {"THP_MEM_ALLOC_ENABLE": "1"}, "peers": {}}


def row(name: str, ratio: float | None, unit: str = "utt/s", **more) -> dict:
    """A row whose peer does one a second."""
    return {"name": name, "ours": ratio or 5.0, "peer": 1.0, "ratio": ratio, "unit": unit, **more}


def test_what_is_stored_is_read_by_machine(tmp_path):
    """Rows of an earlier run stay, each with its own date and commit."""
    path = tmp_path / "baseline.json"
    with refuses(str(path), "'old'"):
        stored.read("old", path)
    first = [row("a", 2.0), row("b", 3.0, share=0.5), row("c", None)]
    facts = {**FACTS, "peers": {"wespeaker": "1"}}
    stored.store("old", first, facts=facts, path=path, results=None)
    stored.store("new", [row("a", 1.0)], facts=FACTS, path=path, results=None)
    later = row("a", 2.512345678, date="2026-02-03 04:05 UTC", commit="fedcba9876")
    facts = {**FACTS, "peers": {"speechbrain": "2"}, "settings": {}}
    lone = row("b", None)  # ran without its peer: what is known of that stays
    assert stored.store("old", [later, lone], facts=facts, path=path, results=None) == 1
    facts = stored.read_all(path)["old"]["facts"]
    assert facts["peers"] == {"wespeaker": "1", "speechbrain": "2"}
    assert facts["settings"] == {} and facts["command"] is None  # one command did not make all
    old = stored.read("old", path)
    assert {name: found["ratio"] for name, found in old.items()} == {
        "a": 2.5123,
        "b": 3.0,
        "c": None,
    }
    assert [old[name]["commit"] for name in "ab"] == ["fedcba9876", "abcdef012345"]
    assert stored.read("new", path)["a"]["ratio"] == 1.0
    assert gate.num_judged(first, old) == 2


def test_the_table_is_replaced_in_its_place(tmp_path):
    path, results = tmp_path / "baseline.json", tmp_path / "RESULTS.md"
    results.write_text("# Results\n\nbefore\n\nafter\n")
    for kind, ratio in (("one", 2.0), ("two", 3.0), ("one", 4.0)):
        stored.store(kind, [row("x", ratio)], facts=FACTS, path=path, results=results)
    text = results.read_text()
    assert text.startswith("# Results") and text.count(stored.ENDS) == 2
    with refuses(str(stored.RESULTS), "'one'", stored.ENDS):
        stored.with_tables(text.replace(stored.ENDS, ""), stored.read_all(path))
    assert [line for line in text.splitlines() if line.startswith("| x |")] == [
        f"| x | {ratio} | 1 | utt/s | **{ratio}.00** |  |  |  |  | abcdef0 |" for ratio in (4, 3)
    ]


def test_results_show_what_is_stored():
    """The tables that a reader sees are those of baseline.json."""
    text = stored.RESULTS.read_text()
    kinds = stored.read_all()
    assert kinds and "command" in next(iter(kinds.values()))["facts"]
    assert stored.with_tables(text, kinds) == text  # python benchmarks/stored.py


def test_readme_shows_what_is_stored():
    """A ratio that is stored again must be quoted again."""
    ratios = {row["name"]: row["ratio"] for row in next(iter(stored.read_all().values()))["rows"]}
    section = (ROOT / "README.md").read_text().partition("## Speed")[2].partition("\n## ")[0]
    lines = [line.split("|")[2:5] for line in section.splitlines() if "| `" in line]
    assert len(lines) >= 8
    for quoted, shown, beside_bf16 in lines:
        name = quoted.strip(" `")
        assert shown.strip() == short(ratios[name]), name
        name = f"{name}.peer_bf16"
        assert beside_bf16.strip() == (short(ratios[name]) if name in ratios else ""), name


def short(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}"


@pytest.mark.parametrize(
    ("found", "aim", "reached"),
    [
        (row("data.to_device", 10.0), ">= 10", "yes"),
        (row("train.campplus.bf16", 2.4), ">= 2.5", "NO"),
        (row("train.campplus.bf16", 2.4, share=0.8), ">= 2.5", "yes"),  # whichever is lower
        ({**row("startup.help", None, "s"), "ours": 1.1}, "<= 1 s", "NO"),
        ({**row("startup.help", None, "s"), "ours": 0.9}, "<= 1 s", "yes"),
    ],
)
def test_targets(found, aim, reached):
    line = next(line for line in table(FACTS, [found]).splitlines() if found["name"] in line)
    assert f"| {aim} | {reached} |" in line


@pytest.mark.parametrize(("rate", "reached"), [(4400.0, "NO"), (4600.0, "yes")])
def test_targets_of_a_gpu(rate, reached):
    found = {**row("end_to_end.campplus.training.global_batch=256", None), "ours": rate}
    facts = {**FACTS, "device": "cuda", "machine": "NVIDIA H100 80GB HBM3"}
    text = table({**facts, "cuda": "13.0", "driver": "580"}, [found])
    assert "Targets on an H100:" in text and f"| >= 4,500 utt/s | {reached} |" in text
    assert "Targets" not in table(FACTS, [found])


def test_every_target_is_of_a_row_that_is_stored():
    kept = {found["name"] for kind in stored.read_all().values() for found in kind["rows"]}
    assert {*suite_table.RATIOS, *suite_table.AT_MOST} <= kept


def test_a_row_in_the_table():
    found = row("train.y.bf16", 2.5, quartiles=[2.0, 3.0], share=0.8, peak_mib=1234.5)
    text = table(FACTS, [{**found, "commit": "abcdef012345-dirty"}])
    line = "| train.y.bf16 | 2.5 | 1 | utt/s | **2.50** | 2.00 - 3.00 | 80% | 1,234 |  |"
    assert f"{line} abcdef0-dirty |" in text.splitlines()
    assert "Set for both sides: THP_MEM_ALLOC_ENABLE=1. Peers: none." in text


def test_launches_in_the_table():
    """A line for each model and precision; commas where there are thousands."""
    names = ("x.bf16.forward", "x.bf16.all", "y.fp32.all")
    found = [
        {**row(f"launches.{name}", None, "launches"), "ours": count}
        for name, count in zip(names, (999, 2345, 7))
    ]
    lines = table(FACTS, found).splitlines()
    assert "| name | forward | all |" in lines and "| launches.x.bf16 | 999 | 2,345 |" in lines
    assert "| launches.y.fp32 |  | 7 |" in lines
    assert sum("launches.x" in line for line in lines) == 1
