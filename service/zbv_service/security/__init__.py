"""Who may do what: tokens and their scopes, signing in with a browser, and what every answer says to one."""
