"""The compiler, from ordered samples to a schedule: serial pass, placement, oracles, segments.

It imports `schedule` and `samples`. Begin with `compile`, then `numbering` and `oracle`.
"""
