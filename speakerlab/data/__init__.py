"""From disk to batch: data directories, audio files, order, crops and their draws."""
