"""The page of a call in a browser: a segment is played from its channel, up to its end."""

from pathlib import Path

import browser
import numpy as np
import pytest
from voices import RATE

from speakerlab.bin import diarize
from speakerlab.data import audio
from speakerlab.inference.diarize import Diarization, Segment

STATES = "[...document.querySelectorAll('audio')].map((e) => !e.paused)"


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_segment_is_played_from_its_channel(tmp_path: Path, width: int) -> None:
    if browser.FOUND is None:
        pytest.skip("needs Chromium (Debian: apt install chromium)")
    time_S = np.arange(4 * RATE) / RATE
    tones = [8000 * np.sin(2 * np.pi * pitch * time_S) for pitch in (300, 700)]
    recording = tmp_path / "call.wav"
    audio.write(recording, np.stack(tones, axis=1).astype(np.int16), RATE)
    channel_of = {"channel1": 1, "channel2": 2}
    segments = [Segment(0.5, 3.5, "channel1", 1.0), Segment(1.0, 1.3, "channel2", 1.0)]
    diarization = Diarization(
        "call",
        4.0,
        segments,
        dict.fromkeys(channel_of, np.ones(2)),
        channel_of=channel_of,
    )
    page = tmp_path / "call.html"
    diarize.write_page(page, diarization, recording, "each", embedded_rate=RATE)
    with browser.browsing(tmp_path / "profile") as tab:
        tab.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        tab.open(page.as_uri())
        assert tab.ask("document.documentElement.scrollWidth <= innerWidth")
        assert tab.ask(STATES) == [False, False, False]
        tab.ask("document.querySelectorAll('button')[0].click()")
        assert tab.ask(STATES) == [False, True, False]
        assert tab.ask("audio1.currentTime") >= 0.5
        # The other channel takes over, and stops where its segment ends.
        stopped = "new Promise((done) => { audio2.onpause = () => done(audio2.currentTime); })"
        tab.ask("document.querySelectorAll('button')[1].click()")
        assert 1.3 <= tab.ask(stopped) < 2.5
        assert tab.ask(STATES) == [False, False, False]
