"""What a job will take: what a schedule says of its steps, models of time and memory by profiles of runs, and what is planned with them."""
