"""From disk to batch: data directories, audio files, sampling order, crops and their draws."""
