"""The messages between the processes of a run, and how they are sent."""
