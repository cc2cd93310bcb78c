"""Small kernels that try, one by one, what is said of bank conflicts and their remedies.

``python -m perf experiments`` runs them all: checked against PyTorch, predicted by the bank model, counted by
ncu and timed; without a GPU they are compiled, predicted and emulated.
"""
