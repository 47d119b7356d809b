"""How a run's processes are started, on this host and on other hosts."""
