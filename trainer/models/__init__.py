"""The built-in models, and the requirements that every model must meet."""
