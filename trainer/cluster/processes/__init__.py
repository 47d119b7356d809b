"""How a run's processes are started, on this host and on other hosts.

It imports `messages` only. Begin with `starting`.
"""
