"""Who spoke when: speech regions and turns on disk, and their scores."""
