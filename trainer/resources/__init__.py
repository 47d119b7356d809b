"""Predict the resources of a job, and plan with them.

Uses the counts that a schedule states for its steps, and models of time and memory fitted to
profiles of runs.
"""
