"""Small worlds in which the loop is tried: each gives tools, tasks and a way to score."""
