"""Tell errors of the segmentation model from errors of the embeddings and the clustering.

    python tests/diarization/true_speakers.py DIR --model MODEL --segmentation MODEL

DIR: `wav/NAME.*` and `ref.rttm`, as simulate.py writes them. Prints the DER of `diarize` with the
number of speakers given, and the DER where the truth decides which speaker each local speaker of
the segmentation model is. No embedding and no clustering can be expected to do much better than
the latter. The errors that remain are speech that the segmentation model missed, invented or mixed.
No collar, overlap scored.
Letters: M local speakers of all windows, T frames of the recording, K true speakers, N windows
with an embedding, D dimensions, L local speakers of a window.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment

import speakerlab
from speakerlab.diarization.clustering import unit_rows
from speakerlab.diarization.local_speakers import (
    FIRST_SECONDS,
    FRAME_SECONDS,
    OVERLAP_WEIGHT,
    SPEAKERS_CL,
    LocalSpeakers,
    Tracks,
    find_activity,
    find_tracks,
)
from speakerlab.diarization.regions import Turn, read_rttm
from speakerlab.diarization.resegmentation import find_segments
from speakerlab.diarization.scoring import Errors, score_recordings, total
from speakerlab.inference.speech_windows import (
    SpeechWindows,
    embed_windows,
    open_segmentation,
)


def find_true_speakers(speech: SpeechWindows, reference: Sequence[Turn]) -> list[Turn]:
    """Return the turns of a recording whose local speakers are matched by the true turns.

    Speakers are "speaker1", ...; a true speaker whom no local speaker matches is left out.
    """
    local = speech.local
    assert local is not None  # a segmentation model was used
    if not speech.windows or not reference:
        return []
    tracks = find_tracks(local, speech.windows, speech.emb_ND)
    true_M = _match_by_time(tracks, local, _frames_of(reference, local))
    # Numbers without gaps.
    matched_speakers, speaker_M = np.unique(true_M, return_inverse=True)
    num_speakers = len(matched_speakers)

    activity = find_activity(local, tracks, speaker_M, num_speakers)
    # As in `diarize`, embeddings decide together with the segmentation model.
    centre_KD = _centres(tracks, speaker_M, num_speakers)
    cosine_NK = unit_rows(speech.emb_ND) @ unit_rows(centre_KD).T
    segments = find_segments(speech.regions, speech.windows, cosine_NK, activity)
    return [Turn(segment.start, segment.end, segment.speaker) for segment in segments]


def _centres(tracks: Tracks, speaker_M: np.ndarray, num_speakers: int) -> np.ndarray:
    """Return the sum of the tracks of each speaker, weighted by how clearly each is heard."""
    weight_M = tracks.alone_M + OVERLAP_WEIGHT * tracks.spoken_M
    centre_KD = np.zeros((num_speakers, tracks.unit_MD.shape[1]))
    for speaker in range(num_speakers):
        is_of_speaker_M = speaker_M == speaker
        weights = weight_M[is_of_speaker_M]
        centre_KD[speaker] = weights @ tracks.unit_MD[is_of_speaker_M]
    return centre_KD


def _frames_of(reference: Sequence[Turn], local: LocalSpeakers) -> np.ndarray:
    """Return 1 in each frame in which a speaker truly speaks, and else 0, (T, K)."""
    names = sorted({turn.speaker for turn in reference})
    num_frames = local.windows()[-1].stop
    true_TK = np.zeros((num_frames, len(names)))
    for turn in reference:
        bounds = np.array([turn.start, turn.end])
        frames = np.round((bounds - FIRST_SECONDS) / FRAME_SECONDS).astype(int)
        first, end = np.maximum(frames, 0)
        true_TK[first:end, names.index(turn.speaker)] = 1
    return true_TK


def _match_by_time(
    tracks: Tracks, local: LocalSpeakers, true_TK: np.ndarray
) -> np.ndarray:
    """Return the true speaker of each track, (M,): in a window, the largest shared time."""
    speaker_M = np.zeros(len(tracks.window_M), dtype=np.int64)
    frames_of_windows = local.windows()
    for rows in tracks.rows_by_window():
        window = int(tracks.window_M[rows[0]])
        spoken_FL = local.prob_WFC[window].astype(np.float64) @ SPEAKERS_CL
        true_FK = true_TK[frames_of_windows[window]]
        shared_LK = spoken_FL[:, tracks.local_M[rows]].T @ true_FK
        speaker_M[rows] = shared_LK.argmax(axis=1)
        matched, speakers = linear_sum_assignment(shared_LK, maximize=True)
        speaker_M[rows[matched]] = speakers
    return speaker_M


def describe(errors: Errors) -> str:
    """Return the DER and its parts, in % of the true speech."""
    der = errors.der
    assert der is not None  # there is true speech
    percent = 100 / errors.scored
    return (
        f"DER {100 * der:.1f} %: missed {percent * errors.missed:.1f},"
        f" false alarm {percent * errors.false_alarm:.1f},"
        f" confusion {percent * errors.confusion:.1f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--model", required=True)
    parser.add_argument("--segmentation", required=True)
    args = parser.parse_args(argv)

    model = speakerlab.load(args.model)
    segmentation = open_segmentation(args.segmentation)
    reference = read_rttm(args.folder / "ref.rttm")
    clustered: dict[str, list[Turn]] = {}
    matched: dict[str, list[Turn]] = {}
    for wav in sorted((args.folder / "wav").iterdir()):
        if wav.stem not in reference:
            raise SystemExit(f"{wav}: has no turns in ref.rttm")
        turns = reference[wav.stem]
        num_speakers = len({turn.speaker for turn in turns})
        diarization = model.diarize(
            wav,
            num_speakers=num_speakers,
            segmentation=segmentation,
            method="spectral",
        )
        clustered[wav.stem] = [
            Turn(segment.start, segment.end, segment.speaker)
            for segment in diarization.segments
        ]
        speech = embed_windows(model, wav, segmentation=segmentation)
        matched[wav.stem] = find_true_speakers(speech, turns)

    for title, turns_of in [("clustering", clustered), ("truth", matched)]:
        errors = score_recordings(reference, turns_of)
        print(f"speakers by {title}: {describe(total(errors.values()))}")


if __name__ == "__main__":
    main()
