"""What a job takes: profiles of runs, what a schedule says of its steps, models of time and memory, and what is planned with them."""
