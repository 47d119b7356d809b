"""Predict the resources of a job from a schedule's counts and profiles of runs, and plan with them.

A tool: what trains does not import it. Begin with `step_model` and `choices`.
"""
