"""What a job's state is: modules, optimizers, schedules, generators, loaders, containers, each saved and brought back."""
