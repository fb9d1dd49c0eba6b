"""What tells a job to stop: signals, a file, a deadline; and how all ranks stop at the same call."""
