"""Who spoke when: speech regions, windows, clustering, turns, and their scores."""
