"""Pieces of recordings and stretches of utterances that are embedded whole."""

import numpy as np

from speakerlab.data import audio
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pieces import Piece, Pieces, Stretch


def test_pieces_are_read_as_they_are(make_data_dir):
    manifest = read_manifest([make_data_dir(speakers=[0, 1])], sample_rate=16000)
    path = manifest.paths[0]
    wave_S = audio.read(path)
    pieces = Pieces([Piece(path, 0, len(wave_S)), Piece(path, 100, 50), Stretch(manifest, 0, 9, 5)])
    assert np.array_equal(pieces[0, 0, len(wave_S)], wave_S)
    assert np.array_equal(pieces[1, 0, 50], wave_S[100:150])
    assert np.array_equal(pieces[1, 10, 7], wave_S[110:117])
    assert np.array_equal(pieces[2, 0, 5], wave_S[9:14])
    assert np.array_equal(pieces[2, 3, 2], wave_S[12:14])
