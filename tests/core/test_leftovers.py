"""What systems, editors and file managers leave, and names that people give."""

import pytest

from speakerlab.core.leftovers import is_leftover, name_leftovers


@pytest.mark.parametrize(
    "name",
    [
        "._a.wav",
        ".DS_Store",
        ".Trash-1000",
        ".ipynb_checkpoints",
        "Thumbs.db",
        "Desktop.ini",
        "#recycle",
        "@Recycle",
        "@eaDir",
        "$RECYCLE.BIN",
        "__MACOSX",
        "System Volume Information",
        "lost+found",
        "FOUND.001",
        "@Transcode",
        "trials~",
        "utt2spk.~1~",
        "trials.bak",
        "trials.BAK",
        "utt2lang.orig",
        ".trials.swp",
        "#trials#",
        "~$trials.csv",
        "trials (conflicted copy)",
        "a (Anna's conflicted copy 2024-01-01).wav",
        "a (conflicted copy 2024-01-01 120000).wav",
        "a.sync-conflict-20240101-120000-ABCDEFG.wav",
        "a.wav.part",
        "a.wav.crdownload",
        "a.tmp",
        "utt2spk.bak2",
        "utt2spk.orig.1",
        "utt2spk.save",
        "trials.conflict1",
        "a (SFConflict ann@example.org 2024-01-01-12-00-00).wav",
        "a_conflict-20240101-120000.wav",
        "utt2spk.rpmsave",
    ],
)
def test_what_programs_leave(name):
    assert is_leftover(name)


@pytest.mark.parametrize(
    "name",
    [
        "s1",
        "a.wav",
        "~",
        "$5.wav",
        "trash",
        "_a",
        "#1",
        "@anna",
        "#a.wav",
        "part",
        "trials.2",
        "old1.wav",
        "conflict1.wav",
    ],
)
def test_names_that_people_give(name):
    assert not is_leftover(name)


def test_examples_are_shown_on_one_line():
    text = name_leftovers(["Icon\r", "@eaDir", "@eaDir", "#回收站#"])
    assert text.startswith("4 ")
    assert "@eaDir, Icon\\r" in text
    assert "回收站" in text
