"""What a run found, as text, Markdown, HTML, PNG, JSON and CSV."""
