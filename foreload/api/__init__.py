"""The Python interface: what `import foreload` offers, thin and free of side effects.

`handles` is what a caller holds, `results` what it gets, `settings` what it may say. Nothing is computed in the caller's process: `client` asks a
fork server, a process that has imported everything under the job's numerics and forks one for each call, which does what `calls` says.
"""
