"""Turning records into samples: features, parsing, encoding, vocabularies and the external sort."""
