"""One module per version; each names its predecessor."""
