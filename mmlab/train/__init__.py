"""The training loop and all that happens at its step boundary."""
