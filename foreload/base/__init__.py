"""What all packages share: files, typed JSON, settings, processes, sockets, memory, hashing, errors.

It knows nothing of samples or rows, imports none of the other packages, and no torch. Begin with
`codec` and `settings`.
"""
