"""What `prepare` decides before it starts: options, splits, sizes, disk space.

It imports everything below Beam's stages, but no Beam. Begin with `options`, then `plan`.
"""
