"""Labels of any table instead of speakers, names of classes, and validation units."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.data.labels import class_names, hold_out, label
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import write_table


@pytest.fixture
def folder(make_data_dir):
    """Speakers 0 to 3, three utterances each; 0 and 1 speak German, 2 and 3 Thai."""
    folder = make_data_dir()
    languages = {f"spk{s}-{k}": ("de", "th")[s // 2] for s in range(4) for k in range(3)}
    write_table(folder / "utt2lang", languages)
    return folder


def test_labels_replace_speakers(folder):
    whole = read_manifest([folder], sample_rate=16000)
    found = label(whole, [folder], table="utt2lang")
    assert found.speakers == ("de", "th")
    for row, utterance in enumerate(found.ids):
        assert found.speakers[found.speaker_N[row]] == ("de", "th")[int(utterance[3]) // 2]
    assert found.speaker_N.dtype == np.int32
    assert found.sha256() != whole.sha256()  # other classes: other data to every rank and resume


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("spk1-0 de\n", "", "spk1-0"),
        (" th\n", " de\n", "only de"),
    ],
)
def test_bad_labels_are_refused(folder, old, new, value):
    table = folder / "utt2lang"
    table.write_text(table.read_text().replace(old, new))
    with refuses(str(table), value):
        label(read_manifest([folder], sample_rate=16000), [folder], table="utt2lang")


def held_out(classes: str, units: str, num_units: int) -> list[str]:
    """The units that are held out; one letter an utterance for its class, one for its unit."""
    names = sorted(set(units))
    class_N = np.array([sorted(set(classes)).index(c) for c in classes])
    unit_N = np.array([names.index(u) for u in units])
    held_U = hold_out(class_N, unit_N, names, num_units=num_units)
    return [name for name, held in zip(names, held_U) if held]


def test_every_class_gives_in_proportion_and_keeps_one():
    # x has ten units, y four, z one: of three x gives 2, y 1 (and would at any number), z none
    classes, units = "x" * 10 + "y" * 4 + "z", "abcdefghij" + "klmn" + "o"
    held = held_out(classes, units, 3)
    assert [sum(u in "abcdefghij" for u in held), sum(u in "klmn" for u in held)] == [2, 1]
    assert len(held) == 3
    assert held == held_out(classes, units, 3)
    many = held_out(classes, units, 100)
    assert (len(many), "o" in many) == (9 + 3, False)  # one of each class is left


def test_other_units_change_nothing():
    first = held_out("xxxxyyyy", "abcdefgh", 2)
    more = held_out("xxxxxyyyy", "abcdZefgh", 2)
    assert set(more) - {"Z"} <= set(first)


@pytest.mark.parametrize("units", ["abbc", "defg", "hiij", "kllm", "noop", "qrrs", "tuuv", "wxxy"])
def test_a_unit_of_two_classes_is_held_out_of_both_and_leaves_none_empty(units):
    """The second speaks both languages, each of which has one speaker more."""
    both, others = units[1], {units[0], units[-1]}
    held = set(held_out("xxyy", f"{units[0]}{both}{both}{units[-1]}", 2))
    assert held in ({both}, others)


def test_a_speed_makes_a_block_of_new_speakers():
    names = class_names(["a", "b"], (1.0, 0.9, 1.1))
    assert names == ["a", "b", "a#0.9", "b#0.9", "a#1.1", "b#1.1"]
    assert class_names(["a", "b"], [1.0]) == ["a", "b"]
