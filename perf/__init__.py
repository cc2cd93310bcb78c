"""Measurements: what each rung costs and gains, in one run with its peers, and the tables made from that."""
