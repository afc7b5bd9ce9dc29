"""What is wrong with a deployment: checks over evidence, live or from a bundle."""
