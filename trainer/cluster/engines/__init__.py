"""Engines, which place, start and end the processes of a run.

`foreload train --engine` names one: this machine, or a Ray cluster.
"""
