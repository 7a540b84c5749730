"""What ranks keep between steps, and whether their replicas are the same."""
