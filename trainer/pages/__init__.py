"""HTML pages about a run, two runs side by side, or a schedule; each loads nothing and has no script.

A tool: what trains does not import it. Begin with `report`, then `run_page`.
"""
