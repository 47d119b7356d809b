"""From records to samples: features, parsing, encoding, vocabularies and the external sort.

The lowest layer of pipelines: it imports base only. Begin with `features`, then `encode`.
"""
