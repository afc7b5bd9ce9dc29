"""What checks read: how it is collected, how it is kept in a bundle, how it is parsed."""
