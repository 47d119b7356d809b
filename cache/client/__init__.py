"""The store client: URLs, connections, RESP for whole arrays of rows, and local servers.

It knows bytes and commands, not what a row means, and imports only base. Begin with `store`, then
`connections` and `frames`.
"""
