"""One page per finding code and alert: PD####-SLUG.md, with front matter."""
