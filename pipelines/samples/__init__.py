"""From records to samples: features, parsing, encoding, vocabularies, and the external sort that orders them."""
