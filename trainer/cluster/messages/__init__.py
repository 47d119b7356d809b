"""What the processes of a run tell each other, and how."""
