"""Workloads made from a seed: who asks what, when, and what it shares with what others ask."""
