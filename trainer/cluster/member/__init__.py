"""A trainer of a run: its part in each term, and what it does by the coordinator's plan.

It knows the coordinator by its messages only. Begin with `trainer_process`, then `trainer_terms`.
"""
