"""What to train and how: the settings of a run, and what follows from them alone.

It imports `compute` and `models`. Begin with `job`, where each setting is declared once.
"""
