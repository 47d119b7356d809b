"""The commands of `foreload`: what they do, apart from their command lines."""
