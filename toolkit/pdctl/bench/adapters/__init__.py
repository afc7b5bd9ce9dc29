"""Other people's clients, run as they are, and what they report."""
