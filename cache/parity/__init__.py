"""Stripes of rows: where they are, the erasure code, decoding lost rows and finding wrong ones.

Pure functions on arrays; it imports `client` and `rows` only. Begin with `placement`, then
`erasure` and `stripes`.
"""
