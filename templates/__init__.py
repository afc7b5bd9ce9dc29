"""Jinja2 templates of everything that is rendered."""
