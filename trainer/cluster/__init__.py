"""The processes of a run: the launcher, the trainers, what they tell each other, and how they end."""
