"""The models: those that come with the project, and what is asked of any."""
