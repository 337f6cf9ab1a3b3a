"""Contestants of `train_dense.py`, each run by the Python of its own environment. None of them imports sennit."""
