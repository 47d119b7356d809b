"""An owner's traffic: rounds of reads and writes, and what goes on while servers fail."""
