"""HTTP, and nothing else: each router translates between addresses and the module it is named after."""
