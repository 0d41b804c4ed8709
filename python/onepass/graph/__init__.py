"""A captured graph, read: what its nodes compute, and what they do beside that."""
