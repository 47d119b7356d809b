"""Training: models, optimizers, the step, the processes of a run, and the commands around them.

It imports cache and pipelines. Begin with `cluster/launcher` for processes or `step/step` for
arithmetic, then docs/internals/trainer.md.
"""
