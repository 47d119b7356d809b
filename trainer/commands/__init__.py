"""The commands of `foreload`: what they do, apart from their command lines.

They return dataclasses and print nothing, so that Python calls them too. Begin with `train`.
"""
