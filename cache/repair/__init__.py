"""Repairs beside the traffic: rebuilding lost shards, scrubbing stripes, counting rows.

It imports the protocol; the traffic calls it between rounds. Begin with `rebuild`, then `scrub`.
"""
