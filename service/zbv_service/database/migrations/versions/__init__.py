"""One module per version; each names the one before it."""
