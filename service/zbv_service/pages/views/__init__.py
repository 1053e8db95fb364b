"""What each page shows, as plain values for its template. Views read documents and never answer requests."""
