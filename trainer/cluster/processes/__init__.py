"""Starting the processes of a run, here and on other hosts."""
