"""Explain any log: `rules` is the catalogue, `logs` reads and ranks."""
