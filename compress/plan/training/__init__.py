"""What trainings take: other models that teach, and files for the time being."""
