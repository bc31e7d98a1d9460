"""Labels of any table instead of speakers, names of classes, and validation units."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.data.labels import hold_out, label
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import read_table, write_table
from speakerlab.losses.head import class_names


def language_of(utterance: str) -> str:
    speaker = int(utterance[3])
    return "de" if speaker < 2 else "th"


@pytest.fixture
def folder(make_data_dir):
    """Speakers 0 to 3, three utterances each; 0 and 1 speak German, 2 and 3 Thai."""
    folder = make_data_dir()
    languages = {}
    for utterance in read_table(folder / "wav.scp"):
        languages[utterance] = language_of(utterance)
    write_table(folder / "utt2lang", languages)
    return folder


def test_labels_replace_speakers(folder):
    whole = read_manifest([folder], sample_rate=16000)
    labelled = label(whole, [folder], tables=["utt2lang"])
    assert labelled.speakers == ("de", "th")
    for row, utterance in enumerate(labelled.ids):
        label_of_row = labelled.speaker_N[row]
        assert labelled.speakers[label_of_row] == language_of(utterance)
    assert labelled.speaker_N.dtype == np.int32
    # other classes: other data to every rank and resume
    assert labelled.sha256() != whole.sha256()


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("spk1-0 de\n", "", "spk1-0"),
        (" th\n", " de\n", "only de"),
    ],
)
def test_bad_labels_are_refused(folder, old, new, value):
    table = folder / "utt2lang"
    text = table.read_text()
    table.write_text(text.replace(old, new))
    manifest = read_manifest([folder], sample_rate=16000)
    with refuses(str(table), value):
        label(manifest, [folder], tables=["utt2lang"])


def held_out(classes: str, units: str, num_units: int) -> list[str]:
    """The units that are held out; one letter an utterance for its class, one for its unit."""
    names = sorted(set(units))
    class_names = sorted(set(classes))
    class_N = np.array([class_names.index(letter) for letter in classes])
    unit_N = np.array([names.index(letter) for letter in units])
    held_U = hold_out(class_N, unit_N, names, num_units=num_units)
    return [name for name, is_held in zip(names, held_U) if is_held]


def test_every_class_gives_in_proportion_and_keeps_one():
    # x has ten units, y four, z one: of three x gives 2, y 1 (and would at any number), z none
    classes = "x" * 10 + "y" * 4 + "z"
    units = "abcdefghij" + "klmn" + "o"
    held = held_out(classes, units, 3)
    num_x = sum(unit in "abcdefghij" for unit in held)
    num_y = sum(unit in "klmn" for unit in held)
    assert num_x == 2
    assert num_y == 1
    assert len(held) == 3
    assert held == held_out(classes, units, 3)
    many = held_out(classes, units, 100)
    # one of each class is left
    assert len(many) == 9 + 3
    assert "o" not in many


def test_other_units_change_nothing():
    first = held_out("xxxxyyyy", "abcdefgh", 2)
    with_others = held_out("xxxxxyyyy", "abcdZefgh", 2)
    additional = set(with_others) - {"Z"}
    assert additional <= set(first)


@pytest.mark.parametrize(
    "units",
    ["abbc", "defg", "hiij", "kllm", "noop", "qrrs", "tuuv", "wxxy"],
)
def test_a_unit_of_two_classes_is_held_out_of_both_and_leaves_none_empty(units):
    """The second speaks both languages, each of which has one speaker more."""
    first, both, _, last = units
    held = held_out("xxyy", first + both + both + last, 2)
    assert set(held) in ({both}, {first, last})


def test_a_speed_makes_a_block_of_new_speakers():
    names = class_names(["a", "b"], (1.0, 0.9, 1.1))
    assert names == ["a", "b", "a#0.9", "b#0.9", "a#1.1", "b#1.1"]
    assert class_names(["a", "b"], [1.0]) == ["a", "b"]
