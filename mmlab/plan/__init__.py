"""What to run: schema, checks, layout, schedule."""
