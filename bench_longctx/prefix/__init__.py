"""What a second question about a document costs."""
