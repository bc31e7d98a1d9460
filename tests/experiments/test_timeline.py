"""The page of a diarized recording: hostile names are text, segments are in their place."""

import re

import numpy as np

from speakerlab.experiments.timeline import clock, ticks, write_timeline_page
from speakerlab.inference.diarize import Diarization, Segment
from speakerlab.inference.known_speakers import Match

HOSTILE = """"><script>alert('x')</script><b onclick="y">&amp;"""


def page_of(
    tmp_path,
    diarization: Diarization,
    channel_audio: dict[int, str] | None = None,
) -> str:
    path = tmp_path / "page.html"
    facts = {"Recording": {"file": HOSTILE}}
    write_timeline_page(
        path,
        diarization,
        audio="a%20b.wav",
        note=HOSTILE,
        facts=facts,
        channel_audio=channel_audio,
    )
    return path.read_text()


def test_hostile_names_are_text(tmp_path):
    match = Match(HOSTILE, 0.7, 0.5, is_known=False)
    diarization = Diarization(
        HOSTILE,
        10.0,
        [
            Segment(1.0, 3.5, HOSTILE, 0.81),
            Segment(5.0, 6.0, "speaker2", 1.0),
        ],
        {HOSTILE: np.ones(2), "speaker2": np.ones(2)},
        {HOSTILE: match, "speaker2": match},
    )
    page = page_of(tmp_path, diarization)
    assert "alert" in page
    assert "<script>alert" not in page
    assert 'onclick="y"' not in page
    assert page.count("<script") == 1
    assert "http:" not in page  # the page's own
    assert not re.search(r"<link|@import|url\(", page)
    escaped = "&#34;&gt;&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;"
    title = f'title="00:01.0 – 00:03.5, {escaped}'
    assert f"<title>Who spoke when: {escaped}" in page
    assert title in page
    places = re.findall(r"<button style=\"left:([\d.]+)%;width:([\d.]+)%\"", page)
    first = ("10.000", "25.000")
    second = ("50.000", "10.000")
    assert places == [first, second]
    assert 'data-start="1.000" data-end="3.500"' in page
    assert 'src="a%20b.wav"' in page


def test_a_recording_without_speech(tmp_path):
    diarization = Diarization("quiet", 2.0, [], {})
    page = page_of(tmp_path, diarization)
    assert "No speech was found." in page
    assert "<button" not in page


def test_times():
    assert clock(0) == "00:00.0"
    assert clock(59.96) == "01:00.0"
    assert clock(61.24) == "01:01.2"
    assert clock(3661.0) == "1:01:01.0"
    assert list(ticks(11.9)) == list(range(12))
    assert list(ticks(25.0)) == [0, 5, 10, 15, 20, 25]
    # ten hours
    assert len(ticks(36000.0)) == 61


def test_rows_are_grouped_by_channel(tmp_path):
    names = {"channel1": 1, "Bob": 2, "channel1-speaker2": 1}
    segments = [
        Segment(float(start), start + 1.0, name, 1.0)
        for start, name in enumerate(names)
    ]
    speakers = dict.fromkeys(names, np.ones(2))
    diarization = Diarization("call", 10.0, segments, speakers, channel_of=names)
    page = page_of(tmp_path, diarization, channel_audio={1: "one.wav", 2: "two.wav"})
    shown = re.findall(r"Channel \d|<bdi>[^<]*|data-audio=\"\w+\"", page)
    assert shown == [
        "Channel 1",
        "<bdi>channel1",
        'data-audio="audio1"',
        "<bdi>channel1-speaker2",
        'data-audio="audio1"',
        "Channel 2",
        "<bdi>Bob",
        'data-audio="audio2"',
    ]
    players = re.findall(r"<audio [^>]*id=\"(\w+)\"[^>]*src=\"([^\"]+)\"", page)
    expected = [("audio", "a%20b.wav"), ("audio1", "one.wav"), ("audio2", "two.wav")]
    assert players == expected

    # A linked recording is played as a whole.
    linked = page_of(tmp_path, diarization)
    assert "Channel 2" in linked
    assert "data-audio=" not in linked
    assert linked.count("<audio") == 1
