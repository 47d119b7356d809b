"""The Python interface: what `import foreload` offers, thin and free of side effects.

`handles` has the objects that a caller holds, `results` the values that calls return, and
`settings` the types of their arguments. Nothing is computed in the caller's process. `client` sends
each call to a fork server, a process that has imported everything under the job's numerics. The
fork server forks a process for the call, and that process runs the call's function in `calls`.
"""
