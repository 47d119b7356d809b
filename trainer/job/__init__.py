"""What to train and how: the settings of a run, and what follows from them alone."""
